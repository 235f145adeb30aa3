"""Saves of GPU tensors: bit-exact while kernels write to them behind save(), pinned, on several devices."""

from __future__ import annotations

import pathlib
import shutil
from typing import Any

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import SnapshotTornError
from asyncckpt.staging.device import CudaDevice
from asyncckpt.staging.pinned_memory import PIECE_NBYTES, Pin

SAVES = AT_A_TIME = 25
MODES: list[dict[str, Any]] = [
    {},
    {"staging": "blocking"},
    {"use_pinned_memory": False},
    {"use_non_blocking_copy": False},
    {"staging": "blocking", "use_non_blocking_copy": False},
    {"staging": "device"},
    {"staging": "device", "use_pinned_memory": False},
]


class Training:
    """A model on one or several GPUs whose every value is known from how often it was stepped.

    Args:
        devices: To spread the parameters over, in turn.
        large: Elements of the largest parameter.
    """

    def __init__(self, devices: list[str], large: int = 1 << 22) -> None:
        shapes = [(large,), *((n,) for n in range(1, 200)), (300, 400), (64, 1 << 12)]
        self.parameters = [
            torch.nn.Parameter(torch.zeros(shape, device=devices[n % len(devices)])) for n, shape in enumerate(shapes)
        ]
        self.statistics = torch.zeros(1000, device=devices[0])
        self.columns = torch.nn.Parameter(torch.zeros(500, 300, device=devices[-1]).t())
        self.parameters.append(self.columns)
        self.optimizer = torch.optim.SGD(self.parameters, lr=1.0)
        self.busy = torch.randn(2048, 2048, device=devices[0])
        self.steps = 0

    def keep_busy(self) -> None:
        """Some milliseconds of kernels, so that what is enqueued after them is late."""
        for _ in range(20):
            self.busy = (self.busy @ self.busy).clamp(-1, 1)

    def step(self) -> None:
        """Add one to everything, by an optimizer's step and by a kernel that no optimizer knows of."""
        for parameter in self.parameters:
            parameter.grad = -torch.ones_like(parameter)
        self.statistics += 1
        self.optimizer.step()
        self.steps += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        named = {f"p{n}": p.detach() for n, p in enumerate(self.parameters)}
        return {**named, "statistics": self.statistics, "host": torch.full((3,), float(self.steps))}

    def check(self, path: pathlib.Path, steps: int) -> None:
        """Assert that every element was saved as it was after so many steps."""
        for name, tensor in asyncckpt.load(path).items():
            assert torch.equal(tensor.cpu(), torch.full(tensor.shape, float(steps))), name


def save_and_check(checkpointer: AsyncCheckpointer, training: Training, directory: pathlib.Path, saves: int) -> None:
    """Save again and again between two steps, and assert that each checkpoint is as the state was at its `save()`.

    Every `AT_A_TIME` they are loaded and removed: all of 500 together would be 9 GB.
    """
    for first in range(0, saves, AT_A_TIME):
        expected = {}
        for n in range(first, min(first + AT_A_TIME, saves)):
            training.keep_busy()
            training.step()
            expected[directory / str(n)] = training.steps
            checkpointer.save(training.state(), directory / str(n))
            training.step()
        checkpointer.wait(DEADLINE_S)
        for path, steps in expected.items():
            training.check(path, steps)
            shutil.rmtree(path)


@pytest.mark.parametrize("fields", MODES)
def test_many_saves_are_exact_while_kernels_write_behind_them(
    worker: RealWorker, tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    training = Training(["cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint, **fields) as checkpointer:
        checkpointer.attach(training.optimizer)
        save_and_check(checkpointer, training, tmp_path, SAVES)


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("staging", ["overlap", "blocking"])
def test_five_hundred_saves_are_exact_while_kernels_write_behind_them(
    worker: RealWorker, tmp_path: pathlib.Path, staging: str
) -> None:
    training = Training(["cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint, staging=staging) as checkpointer:
        checkpointer.attach(training.optimizer)
        save_and_check(checkpointer, training, tmp_path, 500)


def test_a_producer_on_another_stream_that_is_current_comes_first(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:0"])
    torch.cuda.synchronize()
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer, torch.cuda.stream(torch.cuda.Stream()):
        checkpointer.attach(training.optimizer)
        for n in range(5):
            training.keep_busy()
            training.step()
            checkpointer.save(training.state(), tmp_path / str(n))
            training.step()
        checkpointer.wait(DEADLINE_S)
    torch.cuda.synchronize()
    for n in range(5):
        training.check(tmp_path / str(n), 2 * n + 1)


def test_save_and_step_do_not_wait_for_the_gpu(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.attach(training.optimizer)
        checkpointer.save(training.state(), tmp_path / "first").written.result(DEADLINE_S)
        torch.cuda._sleep(2_000_000_000)  # about a second of clock cycles
        handle = checkpointer.save(training.state(), tmp_path / "second")
        training.step()
        assert not torch.cuda.current_stream().query() and not handle.staged.done()
        handle.written.result(DEADLINE_S)
    training.check(tmp_path / "second", 0)


@pytest.mark.timeout(1200)
def test_from_a_copy_on_the_gpu_nothing_need_wait_and_everything_may_change_five_hundred_times(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    training = Training(["cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint, staging="device") as checkpointer:
        checkpointer.save(training.state(), tmp_path / "first").written.result(DEADLINE_S)
        save_and_check(checkpointer, training, tmp_path, 500)


def test_the_slot_is_pinned_and_across_its_pieces_too(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:0"], large=PIECE_NBYTES // 4 + 12345)
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.save(training.state(), tmp_path / "a").written.result(DEADLINE_S)
        (slot,) = checkpointer._process.pool._slots  # type: ignore[attr-defined]
        assert slot.pin is not None and slot.pin.held and slot.memory.nbytes > PIECE_NBYTES
        for at in (0, PIECE_NBYTES, slot.memory.nbytes - 4096):
            page = slot.memory.mapping.view()[at : at + 4096]
            assert torch.frombuffer(page, dtype=torch.uint8).is_pinned()
            page.release()
    training.check(tmp_path / "a", 0)


def test_a_write_past_the_hooks_tears(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.attach(training.optimizer)
        torch.cuda._sleep(1_000_000_000)
        handle = checkpointer.save(training.state(), tmp_path / "torn")
        with torch.no_grad():
            training.parameters[3].add_(1)
        assert isinstance(handle.written.exception(DEADLINE_S), SnapshotTornError)


def blank_like(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose bytes are all 0: no kernel fills some dtypes with zeros."""
    made = torch.empty_like(tensor)
    with torch.no_grad():
        torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage()).zero_()
    return made


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("staging", ["blocking", "overlap", "device"])
def test_every_leaf_comes_back_from_the_gpu(worker: RealWorker, tmp_path: pathlib.Path, staging: str) -> None:
    tensors = {str(k): t.to("cuda") for k, t in states.every_tensor().items() if isinstance(t, torch.Tensor)}
    with AsyncCheckpointer(endpoint=worker.endpoint, staging=staging) as checkpointer:
        checkpointer.save(tensors, tmp_path / "a").written.result(DEADLINE_S)
    found = asyncckpt.load(tmp_path / "a")
    into = asyncckpt.load(tmp_path / "a", {name: blank_like(tensor) for name, tensor in tensors.items()})
    for name, tensor in tensors.items():
        assert states.bits_of(found[name]) == states.bits_of(into[name]) == states.bits_of(tensor), name


def test_a_synchronous_save_is_exact(tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:0"])
    with SyncCheckpointer() as checkpointer:
        for n in range(5):
            training.keep_busy()
            training.step()
            checkpointer.save(training.state(), tmp_path / str(n))
            training.check(tmp_path / str(n), n + 1)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_several_gpus_of_one_process_are_saved_together(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    training = Training(["cuda:1", "cuda:0"])
    with AsyncCheckpointer(endpoint=worker.endpoint) as checkpointer:
        checkpointer.attach(training.optimizer)
        for n in range(10):
            training.keep_busy()
            training.step()
            checkpointer.save(training.state(), tmp_path / str(n))
            training.step()
        checkpointer.wait(DEADLINE_S)
    assert torch.cuda.current_device() == 0
    for n in range(10):
        training.check(tmp_path / str(n), 2 * n + 1)


def test_a_refused_registration_leaves_no_error_behind() -> None:
    pin = Pin(CudaDevice(), 0, 4096, 4096)  # nothing is mapped there
    pin.open()
    assert pin.failure is not None and not pin.held and pin.close()
    assert torch.ones(1, device="cuda").add_(1).item() == 2, "the next kernel of this thread raises nothing"

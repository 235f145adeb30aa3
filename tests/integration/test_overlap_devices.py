"""Tensors of devices, simulated ones, all the way: through a real worker to the disk and back."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Iterator
from typing import Any

import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, slots_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.staging import copy_engine
from tests.simulated_device import SimulatedDevice


@pytest.fixture
def device(rng: random.Random, monkeypatch: pytest.MonkeyPatch) -> Iterator[SimulatedDevice]:
    """Two devices in the place of CUDA's."""
    made = SimulatedDevice(rng)
    monkeypatch.setattr(copy_engine, "CudaDevice", lambda: made)
    yield made
    made.frozen = False
    made.drain()
    assert not made.violations and not made.registered


class Loop:
    """A training whose parameters lie on two devices, and whose kernels run when the device comes to them."""

    def __init__(self, device: SimulatedDevice) -> None:
        self.device = device
        self.parameters = [torch.nn.Parameter(device.put(torch.randn(n), n % 2)) for n in (40_000, 7, 130, 9_001)]
        self.statistics = device.put(torch.zeros(64), 0)
        self.steps_done = torch.zeros(())
        self.optimizer = torch.optim.SGD(self.parameters, lr=0.1)

    def step(self) -> None:
        """Change everything by kernels, and the counter at once."""
        self.device.launch(0, lambda: self.statistics.data.add_(1))
        self.optimizer.step()
        for parameter in self.parameters:
            index = self.device.device_of(parameter)
            assert index is not None
            self.device.launch(index, lambda p=parameter: p.data.mul_(1.01))
        self.steps_done += 1

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        named = {f"p{n}": p.detach() for n, p in enumerate(self.parameters)}
        return {**named, "statistics": self.statistics, "steps": self.steps_done, "lr": 0.1}

    def copy(self) -> dict[str, Any]:
        """Return what a save must hold: the values when everything enqueued has run."""
        self.device.drain()
        return {k: v.clone() if isinstance(v, torch.Tensor) else v for k, v in self.state().items()}


@pytest.mark.parametrize(
    "fields", [{}, {"use_pinned_memory": False}, {"use_non_blocking_copy": False}, {"staging": "device"}]
)
def test_a_training_that_goes_on_is_loaded_back_as_it_was(
    shared_worker: RealWorker, device: SimulatedDevice, tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    loop = Loop(device)
    saved = {}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, **fields) as checkpointer:
        checkpointer.attach(loop.optimizer)
        for n in range(8):
            device.drain()
            saved[n] = loop.copy()
            checkpointer.save(loop.state(), tmp_path / str(n), step=n)
            loop.step()
            device.some()
        checkpointer.wait(DEADLINE_S)
    for n, expected in saved.items():
        states.assert_same(asyncckpt.load(tmp_path / str(n)), expected)


@pytest.mark.parametrize("fields", [{}, {"use_pinned_memory": False}, {"use_non_blocking_copy": False}])
def test_a_synchronous_save_goes_the_same_way(
    device: SimulatedDevice, tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    loop = Loop(device)
    with SyncCheckpointer(**fields) as checkpointer:
        for n in range(2):
            loop.step()
            checkpointer.save(loop.state(), tmp_path / str(n))
            states.assert_same(asyncckpt.load(tmp_path / str(n)), loop.copy())
    assert any(call.name == "register" for call in device.calls) == fields.get("use_pinned_memory", True)
    over = {call.what[2] for call in device.calls if call.name == "copy" and call.what[0] == "to the host"}
    assert over == {not fields}, "blocking ones where either setting says so"


@pytest.mark.parametrize("on_worker_loss", ["fail", "resubmit"])
def test_the_worker_s_death_under_a_device_s_copies_unmaps_nothing_too_early(
    worker: RealWorker, device: SimulatedDevice, tmp_path: pathlib.Path, on_worker_loss: str
) -> None:
    state = {"w": device.put(torch.arange(50_000.0), 0)}
    expected = {"w": state["w"].clone()}
    with AsyncCheckpointer(endpoint=worker.endpoint, staging="overlap", on_worker_loss=on_worker_loss) as checkpointer:
        checkpointer.save(state, tmp_path / "a").written.result(DEADLINE_S)
        device.frozen = True
        handle = checkpointer.save(state, tmp_path / "b")
        (slot,) = slots_of(checkpointer)
        session = slot.session
        worker.kill()
        is_known = {"fail": lambda: slot.orphaned, "resubmit": lambda: slot.session != session}[on_worker_loss]
        wait_until(is_known, "the loss is known")
        assert device.registered, "it is still pinned, and mapped: copies are in flight"
        device.frozen = False
        if on_worker_loss == "fail":
            assert isinstance(handle.written.exception(DEADLINE_S), WorkerUnavailableError)
        else:
            handle.written.result(DEADLINE_S)
            states.assert_same(asyncckpt.load(tmp_path / "b"), expected)

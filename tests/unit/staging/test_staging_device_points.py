"""At every named instant of copies from devices: an error, a long wait, the process's end. The device is simulated."""

from __future__ import annotations

import os
import pathlib
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_saves import Saver, bits, note_seals, two_devices, use_small_pieces  # noqa: E402

from asyncckpt.basics.failpoints import observed  # noqa: E402
from asyncckpt.errors import AsyncCkptError  # noqa: E402
from asyncckpt.memory.slot import SlotControl  # noqa: E402
from tests.failing_process import ACTIONS, At, fail, kill  # noqa: E402
from tests.failpoint_groups import DEVICES, cases  # noqa: E402
from tests.simulated_device import SimulatedDevice  # noqa: E402


@pytest.fixture
def device(rng: random.Random) -> Iterator[SimulatedDevice]:
    with two_devices(rng) as made:
        yield made


@pytest.fixture
def saver(device: SimulatedDevice, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Saver]:
    copy_all_behind(monkeypatch.setattr)
    use_small_pieces(monkeypatch)
    note_seals(device, monkeypatch)
    made = Saver(device, staging=request.param, slots=1, slot_timeout_s=30)
    yield made
    device.drain()
    made.close()


@pytest.fixture
def state(device: SimulatedDevice) -> dict[str, Any]:
    tensors = {"large": torch.randn(12_000), **{f"small{n}": torch.randn(n + 1) for n in range(30)}}
    placed = {name: device.put(tensor, 0) for name, tensor in tensors.items()}
    return {**placed, "other": device.put(torch.randn(5_000), 1), "host": torch.randn(1000)}


def assert_saved(saver: Saver, state: dict[str, Any]) -> None:
    handle = saver.save(state)
    assert saver.ended(handle) is None
    saver.know(state)
    assert saver.content(handle) == {name: bits(tensor) for name, tensor in state.items()}


@pytest.mark.parametrize("action", ["raise", "refuse", "sleep"])
@pytest.mark.parametrize(("saver", "point"), cases(DEVICES), indirect=["saver"])
def test_an_error_or_a_wait_between_copies_costs_the_save_at_most(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], point: str, action: str
) -> None:
    def refuse() -> None:
        raise RuntimeError("CUDA error: simulated")

    do = {"raise": fail, "refuse": refuse, "sleep": ACTIONS["sleep"]}[action]
    for visit in (1, 1 if point == "device: copied" else 2):  # of the two devices
        observer = At(point, do, visit)
        with observed(observer):
            handle = saver.save(state)
            error = saver.ended(handle)
        assert observer.met
        assert isinstance(error, AsyncCkptError | OSError) if action != "sleep" else error is None, error
        assert not (error is not None and str(handle.save_id) in saver.process.written), "it is not sealed"
        assert_saved(saver, state)
    assert device.current == 0


@pytest.fixture
def _one_thread() -> Iterator[None]:
    """torch's own do not live on in a forked child, which would wait for them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def save_twice(staging: str, point: str, seals: pathlib.Path, rng: random.Random) -> None:
    """Be a trainer that is killed in its second save; notes each seal."""
    seal = SlotControl.seal

    def noted(control: SlotControl, *arguments: Any) -> None:
        with seals.open("a") as file:
            file.write("sealed\n")
        seal(control, *arguments)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SlotControl, "seal", noted)
        copy_all_behind(patch.setattr)
        device = SimulatedDevice(rng)
        saver = Saver(device, staging=staging, slots=1, slot_timeout_s=30)
        state = {"a": device.put(torch.randn(12_000), 0), "b": device.put(torch.randn(5_000), 1)}
        assert_saved(saver, state)
        with observed(At(point, kill)):
            saver.ended(saver.save(state))


@pytest.mark.parametrize(("staging", "point"), cases(DEVICES))
def test_a_process_that_ends_between_copies_has_sealed_nothing(
    tmp_path: pathlib.Path, rng: random.Random, staging: str, point: str, _one_thread: None
) -> None:
    pid = os.fork()
    if pid == 0:
        try:
            save_twice(staging, point, tmp_path / "seals", rng)
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
    assert (tmp_path / "seals").read_text() == "sealed\n", "the first one alone"

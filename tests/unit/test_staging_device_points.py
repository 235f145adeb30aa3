"""At every named instant of copies from devices: an error, a long wait, the process's end. The device is simulated."""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_saves import Saver, bits, note_seals, two_devices, use_small_pieces  # noqa: E402

from asyncckpt.errors import AsyncCkptError  # noqa: E402
from asyncckpt.failpoints import observed  # noqa: E402
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


@pytest.mark.parametrize(("saver", "point"), cases(DEVICES), indirect=["saver"])
def test_a_process_that_ends_between_copies_has_sealed_nothing(
    saver: Saver, state: dict[str, Any], point: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_saved(saver, state)  # the slot is there, which the child shares
    (slot,) = saver.process.made
    pid = os.fork()
    if pid == 0:
        try:
            with observed(At(point, kill)):
                saver.ended(saver.save(state))
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"
    assert not slot.memory.control.is_sealed(slot.generation + 1)

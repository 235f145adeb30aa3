"""`staging="device"`: a copy on the device first; everything there may change as soon as `save()` has returned."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from overlapping import copy_all_behind  # noqa: E402
from simulated_saves import Saver, bits, two_devices, use_small_pieces  # noqa: E402
from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from asyncckpt.staging.device import DeviceMemory  # noqa: E402
from asyncckpt.staging.device_copy import Transfer  # noqa: E402
from asyncckpt.staging.device_snapshot import RESERVE_NBYTES  # noqa: E402
from tests.simulated_device import SimulatedDevice  # noqa: E402

DEVICE = {"staging": "device"}


@pytest.fixture(autouse=True)
def all_behind() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:  # of its own: tests undo theirs
        copy_all_behind(patch.setattr)
        yield


@pytest.fixture
def device(rng: random.Random) -> Iterator[SimulatedDevice]:
    with two_devices(rng) as made:
        yield made


@pytest.fixture
def saver(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[Saver]:
    use_small_pieces(monkeypatch)
    made = Saver(device, **getattr(request, "param", DEVICE))
    yield made
    device.frozen = False
    device.drain()
    made.close()


@pytest.fixture
def state(device: SimulatedDevice) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    return {
        "large": device.put(torch.randn(12_000), 0),
        **{f"small{n}": device.put(torch.randn(n + 1), 0) for n in range(30)},
        "empty": device.put(torch.empty(0, 3), 0),
        "columns": device.put(torch.randn(40, 30), 1).t(),
        "half": device.put(torch.randn(5_000).to(torch.bfloat16), 1),
        "float8": device.put(torch.randn(300).to(torch.float8_e4m3fn), 1),
        "host": torch.randn(30_000),
    }


UNORDERED: list[dict[str, Any]] = [
    DEVICE,
    DEVICE | {"use_pinned_memory": False},
    DEVICE | {"use_non_blocking_copy": False},
    DEVICE | {"overlap_check": "hash"},
]


@pytest.mark.parametrize("saver", UNORDERED, indirect=True)
def test_everything_may_change_as_soon_as_save_has_returned(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    for _ in range(3):
        expected = {name: bits(tensor) for name, tensor in state.items()}
        saver.know(state)
        device.frozen = True
        handle = saver.save(state)
        assert not handle.staged.done() and device.busy, "nobody has waited for a kernel"
        for tensor in state.values():
            index = device.device_of(tensor)
            if index is None:
                tensor.fill_(7)
            elif tensor.numel():
                torch._C._autograd._unsafe_set_version_counter((tensor,), (tensor._version + 1,))  # as a kernel does
                device.launch(index, partial(tensor.data.fill_, 7))
        device.frozen = False
        device.some()
        assert saver.ended(handle) is None
        assert saver.content(handle) == expected
        device.drain()
    assert not device.violations


def test_a_step_of_an_attached_optimizer_waits_for_nothing_on_the_devices(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    parameter = torch.nn.Parameter(state["large"])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    saver.stager.overlap.attach(optimizer)
    saver.know(state)
    expected = bits(state["large"])
    device.frozen = True
    handle = saver.save(state)
    before = len(device.calls)
    optimizer.step()
    assert not [call for call in device.calls[before:] if call.name == "wait"]
    device.launch(0, partial(parameter.data.fill_, 7))
    device.frozen = False
    assert saver.ended(handle) is None and saver.content(handle)["large"] == expected


def test_the_copies_on_the_device_are_freed_when_those_to_the_host_have_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[StorageWeakRef] = []
    allocate = saver.stager._engine._allocator.allocate

    def noted(needs: Any) -> Any:
        found = allocate(needs)
        made.extend(StorageWeakRef(b.untyped_storage()) for buffers in found.values() for b in buffers.values())
        return found

    monkeypatch.setattr(saver.stager._engine._allocator, "allocate", noted)
    device.frozen = True
    handle = saver.save(state)
    assert len(made) >= 4 and not any(one.expired() for one in made)
    device.frozen = False
    assert saver.ended(handle) is None
    device.drain()
    assert all(one.expired() for one in made)


def test_without_room_on_a_device_the_save_is_staged_as_auto_does_it_and_that_is_said_once(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    device.memory_of = DeviceMemory(free=RESERVE_NBYTES + 1000, reserved=0, allocated=0, peak=0)
    expected = {name: bits(tensor) for name, tensor in state.items()}
    saver.know(state)
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        for _ in range(2):
            handle = saver.save(state)
            assert handle.staged.done(), "blocking, since no optimizer is attached"
            assert saver.ended(handle) is None and saver.content(handle) == expected
    said = [r.message for r in caplog.records if "no room" in r.message]
    assert len(said) == 1 and "device 0" in said[0]


def test_memory_that_refuses_is_no_room_either(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    device.fail("allocate", 1)
    expected = {name: bits(tensor) for name, tensor in state.items()}
    saver.know(state)
    handle = saver.save(state)
    assert handle.staged.done() and saver.ended(handle) is None and saver.content(handle) == expected


def test_what_a_step_takes_at_its_peak_is_no_room(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    total, small = 10 << 30, 1 << 20
    # The allocator holds everything, little is in use now, but a step has needed nearly all of it.
    device.memory_of = DeviceMemory(free=0, reserved=total, allocated=small, peak=total - RESERVE_NBYTES)
    assert saver.save(state).staged.done()
    device.memory_of = device.memory_of._replace(peak=total - RESERVE_NBYTES - small)
    other = Saver(device, **DEVICE)
    device.frozen = True
    first = other.save(state)
    assert not first.staged.done()
    device.frozen = False
    assert other.ended(first) is None
    # The peak has grown by our own copies, beside which a step ran: they are not the training's.
    device.memory_of = device.memory_of._replace(peak=device.memory_of.peak + 60_000)
    device.frozen = True
    second = other.save(state)
    assert not second.staged.done()
    device.frozen = False
    assert other.ended(second) is None
    device.drain()
    other.close()


def test_a_state_of_the_host_alone_is_staged_as_auto_does_it(saver: Saver) -> None:
    handle = saver.save({"w": torch.ones(5)})
    assert handle.staged.done() and saver.ended(handle) is None


def test_a_failing_copy_on_the_device_fails_that_save_and_no_other(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    device.fail("copy", 0)
    assert saver.ended(saver.save(state)) is not None
    saver.know(state)
    expected = {name: bits(tensor) for name, tensor in state.items()}
    handle = saver.save(state)
    assert saver.ended(handle) is None and saver.content(handle) == expected


def without_the_wait_for_the_snapshot(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.ignored = lambda stream, event: stream.name.startswith("side")


def without_the_wait_for_the_end(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "ended", lambda transfer: True)


@pytest.mark.parametrize("mutation", [without_the_wait_for_the_snapshot, without_the_wait_for_the_end])
def test_the_simulation_sees_every_wait_that_is_missing_here(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, mutation: Any
) -> None:
    for _ in range(60):
        device = SimulatedDevice(rng)
        mutation(device, monkeypatch)
        state = {"a": device.put(torch.randn(9_000), 0), "b": device.put(torch.randn(100), 0)}
        saver = Saver(device, **DEVICE)
        expected = {name: bits(tensor) for name, tensor in state.items()}
        saver.know(state)
        handle = saver.save(state)
        wrong = saver.ended(handle) is not None or saver.content(handle) != expected
        wrong = wrong or bool(device.violations)
        device.drain()
        saver.close()
        monkeypatch.undo()
        if wrong or device.violations:
            return
    pytest.fail("60 saves have not shown it")

"""Tensors of devices: what is in a checkpoint is what they were at save(), whenever the devices get to it."""

from __future__ import annotations

import logging
import random
import threading
from functools import partial
from typing import Any

import pytest
import states
import torch
from simulated_saves import PIECE_NBYTES, Saver, bits, note_seals
from torch.multiprocessing.reductions import StorageWeakRef

from asyncckpt.errors import SnapshotTornError
from asyncckpt.staging import copy_engine, device_copy
from asyncckpt.staging.device import CudaDevice, DeviceMemory
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.staging.device_snapshot import RESERVE_NBYTES
from tests.simulated_device import SimulatedDevice

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.bool, torch.complex64, torch.float64),
    *(torch.uint16, torch.uint32, torch.uint64, torch.float8_e5m2fnuz),
)

pytestmark = pytest.mark.usefixtures("all_behind", "small_pieces")


class Training:
    """A random state on two devices and the host, an optimizer that owns some of it, and kernels that write to it."""

    def __init__(self, device: SimulatedDevice, rng: random.Random) -> None:
        self.device, self.rng = device, rng
        self.tensors: dict[str, torch.Tensor] = {}
        self.places: dict[str, int | None] = {}
        owned = []
        for n in range(rng.randrange(2, 14)):
            place = rng.choice([None, 0, 0, 1])
            tensor = self._tensor(place)
            if tensor.is_floating_point() and rng.random() < 0.6:
                owned.append(torch.nn.Parameter(tensor))
            name = f"t{n}"
            self.tensors[name], self.places[name] = tensor, place
        if not owned:
            owned.append(torch.nn.Parameter(device.put(torch.zeros(3), 0)))
        self.optimizer = torch.optim.SGD(owned, lr=1.0)
        self.owned = {t.data_ptr() for t in owned}

    def _tensor(self, place: int | None) -> torch.Tensor:
        rng = self.rng
        dtype = rng.choice(DTYPES)
        elements = rng.choice([1, 3, 17, 100, 200, 1500, 9000])
        raw = torch.randint(0, 2 if dtype is torch.bool else 100, (elements * dtype.itemsize,), dtype=torch.uint8)
        tensor = raw.view(dtype)
        if rng.random() < 0.2:
            tensor = tensor[: elements // 2 * 2].view(-1, 2).t()
        return tensor if place is None else self.device.put(tensor, place)

    def state(self) -> dict[str, Any]:
        return dict(self.tensors)

    def write(self, names: list[str], *, in_kernels: bool = True) -> None:
        """Write new values: on devices by kernels in the current streams, on the host at once."""
        for name in names:
            tensor, place, value = self.tensors[name].detach(), self.places[name], self.rng.randrange(1, 100)

            def work(tensor: torch.Tensor = tensor, value: int = value) -> None:
                tensor.data.fill_(value)

            if place is None:
                work()
            else:
                self.device.launch(place, work)

    def values(self) -> dict[str, bytes]:
        """Return what everything is once all kernels have run."""
        self.device.drain()
        return {name: bits(tensor) for name, tensor in self.tensors.items()}

    def free(self) -> list[str]:
        """Return the names of what may be changed as soon as save() has returned."""
        return [n for n, t in self.tensors.items() if t.data_ptr() not in self.owned]

    def step(self) -> None:
        """Change everything, behind the hooks."""
        for parameter in self.optimizer.param_groups[0]["params"]:
            parameter.grad = None
        self.optimizer.step()
        self.write(list(self.tensors))


def values_at_save(training: Training, rng: random.Random) -> dict[str, bytes]:
    """Enqueue kernels that make the state, and return what they will make of it: without running them."""
    training.device.drain()
    before = rng.getstate()
    training.write(list(training.tensors))
    training.device.drain()
    expected = {name: bits(tensor) for name, tensor in training.tensors.items()}
    for name, tensor in training.tensors.items():  # old values again, and the kernels once more
        if training.places[name] is not None:
            tensor.detach().data.fill_(0)
    rng.setstate(before)
    training.write(list(training.tensors))
    return expected


def save_and_go_on(saver: Saver, training: Training, rng: random.Random) -> tuple[Any, dict[str, bytes]]:
    """Save behind kernels that are still to run, and go on as a training does; returns handle and expected values."""
    expected = values_at_save(training, rng)
    training.device.some()
    handle = saver.save(training.state())
    training.write(training.free())
    training.device.some()
    training.step()
    training.device.some()
    return handle, expected


@pytest.mark.parametrize("mode", ["auto", "blocking", "overlap", "device"])
@pytest.mark.parametrize("case", range(12))
def test_random_states_are_saved_as_they_were(
    device: SimulatedDevice, rng: random.Random, mode: str, case: int
) -> None:
    rng.seed(rng.random() + case)
    torch.manual_seed(case)
    training = Training(device, rng)
    pinned, non_blocking = rng.random() < 0.8, rng.random() < 0.8
    saver = Saver(device, staging=mode, use_pinned_memory=pinned, use_non_blocking_copy=non_blocking)
    saver.stager.overlap.attach(training.optimizer)
    for _ in range(3):
        handle, expected = save_and_go_on(saver, training, rng)
        assert saver.ended(handle) is None
        saver.know(training.state())
        assert saver.content(handle) == expected
        assert device.current == 0 and not device.violations
    device.drain()
    saver.close()


# ---- the simulation itself


def without_the_wait_for_producers(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    device.ignored = lambda stream, event: stream.name.startswith("side")


def without_the_wait_of_later_kernels(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    start = Transfer.start

    def started(transfer: Transfer) -> None:
        device.ignored = lambda stream, event: stream.name.startswith("default")
        start(transfer)
        device.ignored = lambda stream, event: False

    monkeypatch.setattr(Transfer, "start", started)


def without_the_wait_of_the_step(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "make_current_stream_wait", lambda transfer, timeout_s: None)


def without_the_wait_for_the_end(device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Transfer, "ended", lambda transfer: True)


@pytest.mark.parametrize(
    ("staging", "mutation"),
    [
        ("auto", without_the_wait_for_producers),
        ("auto", without_the_wait_of_later_kernels),
        ("auto", without_the_wait_of_the_step),
        ("auto", without_the_wait_for_the_end),
        ("device", without_the_wait_for_producers),
        ("device", without_the_wait_for_the_end),
    ],
)
def test_the_simulation_sees_every_wait_that_is_missing(
    rng: random.Random, monkeypatch: pytest.MonkeyPatch, staging: str, mutation: Any
) -> None:
    for case in range(60):
        device = SimulatedDevice(rng)
        torch.manual_seed(case)
        training = Training(device, rng)
        saver = Saver(device, staging=staging)
        saver.stager.overlap.attach(training.optimizer)
        with monkeypatch.context() as patch:
            mutation(device, patch)
            handle, expected = save_and_go_on(saver, training, rng)
            error = saver.ended(handle)
            saver.know(training.state())
            wrong = error is not None or saver.content(handle) != expected or bool(device.violations)
            device.drain()
            saver.close()
        if wrong or device.violations:
            return
    pytest.fail("60 random saves have not shown it")


# ---- order


OFF = {"staging": "overlap", "overlap_check": "off"}  # what a sample has read comes over after the copies
MODES = [{"staging": "blocking"}, OFF, {**OFF, "use_non_blocking_copy": False}]


@pytest.mark.parametrize("few_nbytes", [copy_engine.MAX_INLINE_NBYTES, 0], ids=["few at once", "all later"])
def test_save_and_fence_return_while_no_kernel_has_run(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, few_nbytes: int
) -> None:
    monkeypatch.setattr(copy_engine, "MAX_INLINE_NBYTES", few_nbytes)
    expected = saver.expect(state)
    device.frozen = True
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    state.pop("host").fill_(7.0)  # copied by `save()`, or waited for by the fence
    for tensor in state.values():
        index = device.device_of(tensor)
        if index is not None:
            device.launch(index, partial(tensor.data.fill_, 7.0))
    assert not handle.staged.done() and device.busy
    device.frozen = False
    saver.assert_holds(handle, expected)


def test_before_a_load_even_the_devices_copies_are_waited_for(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    saver.stager.overlap.fence.wait(ordered=False)
    assert handle.staged.done()


@pytest.mark.parametrize("saver", [{**OFF, "slots": 2}], indirect=True)
def test_a_step_does_not_wait_for_the_copies_of_an_earlier_save(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    assert saver.ended(saver.save(state)) is None
    device.frozen = True
    first = saver.save(state)
    expected = saver.expect(state)
    second = saver.save(state)  # its copies are enqueued by the fence: the copier's thread waits for those of `first`
    saver.stager.overlap.fence.wait()
    for name in ("large", "other"):
        index = device.device_of(state[name])
        assert index is not None
        device.launch(index, partial(state[name].data.fill_, 7.0))
    assert not first.staged.done() and not second.staged.done()
    device.frozen = False
    assert saver.ended(first) is None
    saver.assert_holds(second, expected)


def test_copies_are_enqueued_once_however_many_threads_come_to_it(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    threads = [threading.Thread(target=saver.stager.overlap.fence.wait) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert saver.ended(handle) is None
    once = sum(call.name == "copy" for call in device.calls)
    device.calls.clear()
    assert saver.ended(saver.save(state)) is None
    assert sum(call.name == "copy" for call in device.calls) == once


@pytest.mark.parametrize("staging", ["overlap", "device"])
def test_a_state_that_moves_to_another_device_is_copied_from_there(
    device: SimulatedDevice, rng: random.Random, staging: str
) -> None:
    saver = Saver(device, staging=staging)
    values = {f"t{n}": torch.randn(n + 1) for n in range(6)}
    for _ in range(6):
        placed = {name: rng.choice([None, 0, 1]) for name in values}
        state = {n: t.clone() if placed[n] is None else device.put(t, placed[n] or 0) for n, t in values.items()}
        handle = saver.save(state)
        saver.assert_holds(handle, saver.expect(state))
    device.drain()
    saver.close()


def test_two_checkpointers_copy_the_same_state_at_once(device: SimulatedDevice, state: dict[str, Any]) -> None:
    savers = [Saver(device, staging=staging) for staging in ("overlap", "device")]
    expected = [saver.expect(state) for saver in savers]
    device.frozen = True
    handles = [saver.save(state) for saver in savers]
    for saver in savers:
        saver.stager.overlap.fence.wait()
    device.frozen = False
    for saver, handle, values in zip(savers, handles, expected, strict=True):
        saver.assert_holds(handle, values)
    device.drain()
    for saver in savers:
        saver.close()


def test_a_graph_that_is_captured_is_left_alone(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    device.frozen, device.captured = True, True
    handle = saver.save(state)
    before = len([call for call in device.calls if call.name == "wait"])
    saver.stager.overlap.fence.wait()
    assert len([call for call in device.calls if call.name == "wait"]) == before
    device.frozen = False
    assert saver.ended(handle) is None


def test_a_state_that_is_not_contiguous_needs_no_room_for_another_one(
    device: SimulatedDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "BUFFER_NBYTES", 300_000)
    made: list[tuple[StorageWeakRef, int]] = []
    held, allocate = [0], device.allocate

    def noted(nbytes: int, index: int) -> torch.Tensor:
        tensor = allocate(nbytes, index)
        made.append((StorageWeakRef(tensor.untyped_storage()), nbytes))
        held.append(sum(n for storage, n in made if not storage.expired()))
        return tensor

    monkeypatch.setattr(device, "allocate", noted)
    state = {f"w{n}": device.put(torch.randn(200, 150), 0).t() for n in range(20)}
    saver = Saver(device, staging="blocking", use_pinned_memory=False)  # what is enqueued has run, so that it shows
    saver.know(state)
    handle = saver.save(state)
    assert saver.ended(handle) is None
    assert saver.content(handle) == {name: bits(tensor) for name, tensor in state.items()}
    assert len(made) == 20 and max(held) <= 300_000 + 2 * 120_000
    saver.close()


def test_sources_live_until_their_copies_have_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    expected = saver.expect(state)
    watched = [StorageWeakRef(state[name].untyped_storage()) for name in ("large", "small3", "other")]
    device.frozen = True
    handle = saver.save(state)
    state.clear()
    assert not any(storage.expired() for storage in watched)
    device.frozen = False
    saver.assert_holds(handle, expected)
    assert all(storage.expired() for storage in watched), "and no longer"


@pytest.mark.parametrize("owned", [True, False])
def test_data_that_is_replaced_lives_until_its_copy_has_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], owned: bool
) -> None:
    parameter = torch.nn.Parameter(state["other"])
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    saver.stager.overlap.attach(optimizer)
    state["replaced"] = parameter.detach() if owned else state["large"]
    expected = bits(state["replaced"])
    saver.know(state)
    device.frozen = True
    handle = saver.save(state)
    for tensor in (*state.values(), parameter):
        tensor.data = torch.empty(0)
    device.frozen = False
    assert saver.ended(handle) is None
    assert saver.content(handle)["other" if owned else "large"] == expected


# ---- torn snapshots


def test_a_write_past_the_fence_tears_and_one_behind_it_does_not(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    device.frozen = True
    torn = saver.save(state)
    state["large"].add_(0)
    saver.stager.overlap.fence.wait()
    device.frozen = False
    error = saver.ended(torn)
    assert isinstance(error, SnapshotTornError) and error.fqn == "large"
    device.frozen = True
    kept = saver.save(state)
    saver.stager.overlap.fence.wait()
    state["large"].add_(0)  # as a step does, whose kernels come after
    saver.stager.overlap.fence.wait()
    device.frozen = False
    assert saver.ended(kept) is None


WAITING: list[dict[str, Any]] = [{"overlap_check": "hash"}, {"use_pinned_memory": False}]


@pytest.mark.parametrize("saver", WAITING, indirect=True)
def test_the_fence_waits_for_digests_of_sources_and_for_copies_into_memory_that_is_not_pinned(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    saver.stager.overlap.fence.wait()
    assert handle.staged.done() and saver.ended(handle) is None
    assert any(call.name == "register" for call in device.calls) is saver.config.use_pinned_memory


# ---- settings


@pytest.mark.parametrize("saver", MODES, indirect=True)
def test_non_blocking_copies_are_those_that_were_asked_for(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    assert saver.ended(saver.save(state)) is None
    over = {c.what[2] for c in device.calls if c.name == "copy" and c.what[0] == "to the host"}
    assert over == {saver.config.use_non_blocking_copy}


def test_a_slot_is_pinned_once_and_unpinned_before_it_is_unmapped(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    note_seals(device, monkeypatch)
    for _ in range(4):
        assert saver.ended(saver.save(state)) is None
    pinned = [call.what[0] for call in device.calls if call.name == "register"]
    assert len(pinned) == len(set(pinned)) == -(-saver.process.made[0].memory.nbytes // PIECE_NBYTES) > 2
    saver.close()
    order = [call.name for call in device.calls if call.name in ("unregister", "unmap")]
    assert order == ["unregister"] * len(pinned) + ["unmap"]


def test_a_state_without_tensors_of_devices_touches_no_device(saver: Saver, device: SimulatedDevice) -> None:
    assert saver.ended(saver.save({"a": torch.ones(5)})) is None
    assert not device.calls


def test_prepare_pins(saver: Saver, device: SimulatedDevice, state: dict[str, Any]) -> None:
    saver.stager.prepare(state)
    assert device.registered
    before = len(device.calls)
    assert saver.ended(saver.save(state)) is None
    assert not any(call.name == "register" for call in device.calls[before:])


# ---- staging="device": a copy on the device first

DEVICE = {"staging": "device"}
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
    for _ in range(2):
        expected = saver.expect(state)
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
        saver.assert_holds(handle, expected)
        device.drain()
    assert not device.violations


@pytest.mark.parametrize("saver", [DEVICE], indirect=True)
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


@pytest.mark.parametrize("saver", [DEVICE], indirect=True)
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


@pytest.mark.parametrize("saver", [DEVICE], indirect=True)
@pytest.mark.parametrize("why", ["no memory is free", "memory refuses", "nothing lies on a device"])
def test_without_room_on_a_device_the_save_is_staged_as_auto_does_it_and_that_is_said_once(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], caplog: pytest.LogCaptureFixture, why: str
) -> None:
    if why == "no memory is free":
        device.memory_of = DeviceMemory(free=RESERVE_NBYTES + 1000, reserved=0, allocated=0, peak=0)
    elif why == "nothing lies on a device":
        state = {"w": torch.ones(5)}
    expected = saver.expect(state)
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        for _ in range(2):
            if why == "memory refuses":
                device.fail("allocate", 1)
            handle = saver.save(state)
            assert handle.staged.done(), "blocking, since no optimizer is attached"
            saver.assert_holds(handle, expected)
    said = [r.message for r in caplog.records if "no room" in r.message]
    assert len(said) == (why != "nothing lies on a device") and all("on the device (" in message for message in said)


@pytest.mark.parametrize("saver", [DEVICE], indirect=True)
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


@pytest.mark.parametrize("saver", [DEVICE], indirect=True)
def test_a_failing_copy_on_the_device_fails_that_save_and_no_other(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    device.fail("copy", 0)
    assert saver.ended(saver.save(state)) is not None
    expected = saver.expect(state)
    handle = saver.save(state)
    saver.assert_holds(handle, expected)


# ---- what CUDA is asked to do, as far as that can be seen without a GPU

KERNELS_KEEP = (
    *(torch.float32, torch.float64, torch.complex64, torch.complex128),
    *(torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64),
)
"""What `torch._foreach_copy_` leaves as it is on a GPU. It takes other floats through float32; other integers raise."""


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("dtype", states.ALL_DTYPES, ids=str)
def test_a_copy_on_a_device_keeps_every_bit(monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    seen = []
    copy = torch._foreach_copy_

    def on_a_gpu(targets: Any, sources: Any, non_blocking: bool) -> None:
        seen.extend(tensor.dtype for tensor in (*targets, *sources))
        copy(targets, sources, non_blocking)

    monkeypatch.setattr(torch, "_foreach_copy_", on_a_gpu)
    source = states.tensor_of(dtype, (7, 64), 1)  # NaNs with every payload among them
    targets = [torch.empty_like(source), states.tensor_of(dtype, (64, 7)).t()]
    CudaDevice().copy(targets, [source, source], non_blocking=True)
    assert seen and set(seen) <= set(KERNELS_KEEP)
    assert [states.bits_of(target) for target in targets] == [states.bits_of(source)] * 2

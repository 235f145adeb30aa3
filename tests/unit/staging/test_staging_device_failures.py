"""Devices and drivers that refuse: a typed error or a slower way, the next save works, no slot is reused early."""

from __future__ import annotations

import _thread
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from real_worker import wait_until
from simulated_saves import PIECE_NBYTES, Saver, bits, note_seals

from asyncckpt.errors import AsyncCkptError, SlotBusyError, SlotTimeoutError, StagingError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping
from asyncckpt.staging import device_copy
from asyncckpt.staging.device import UNLOADING
from asyncckpt.staging.pinned_memory import Pin
from tests.simulated_device import SimulatedDevice

REFUSED = 2  # cudaErrorMemoryAllocation
MODES: list[dict[str, Any]] = [{"staging": "blocking"}, {"staging": "overlap"}, {"staging": "device"}]


pytestmark = pytest.mark.usefixtures("all_behind")


@pytest.fixture
def saver(
    device: SimulatedDevice, small_pieces: None, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Saver]:
    note_seals(device, monkeypatch)
    monkeypatch.setattr(device_copy, "SETTLE_TIMEOUT_S", 0.2)
    fields = {"staging": "overlap", "slots": 1, "slot_timeout_s": 30, **getattr(request, "param", {})}
    made = Saver(device, **fields)
    yield made
    device.frozen = False
    device.failing.clear()
    device.drain()
    made.close()
    for slot in made.process.made:  # what a test has made the pool leave mapped
        slot.is_quiet()
        if not slot.memory.mapping.closed:
            slot.close()


def assert_saved(saver: Saver, state: dict[str, Any]) -> None:
    handle = saver.save(state)
    saver.assert_holds(handle, saver.expect(state))


CALLS = [
    (name, nth)
    for name, n in (("record", 6), ("wait", 4), ("copy", 8), ("done", 3), ("allocate", 3), ("register", 3))
    for nth in range(n)
]


@pytest.mark.parametrize("saver", MODES, indirect=True)
@pytest.mark.parametrize(("name", "nth"), CALLS)
def test_whatever_call_fails_ends_typed_and_the_next_save_works(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], name: str, nth: int
) -> None:
    for _ in range(2):  # the first save, and one whose slot and plan are there
        device.fail(name, nth)
        handle = saver.save(state)
        saver.stager.overlap.fence.wait()
        error = saver.ended(handle)
        if name == "register":
            assert error is None and not device.registered
        if error is None:
            saver.know(state)
            assert saver.content(handle) == {key: bits(tensor) for key, tensor in state.items()}
        else:
            assert type(error) is StagingError and "CUDA error: simulated" in str(error)
            assert SaveId.parse(list(saver.process.withdrawn)[-1]).sequence == handle.save_id.sequence
        device.failing.clear()
        assert_saved(saver, state)
        assert device.current == 0


@pytest.mark.parametrize("saver", MODES, indirect=True)
@pytest.mark.parametrize("nth", range(5))
def test_a_refused_piece_undoes_the_others_and_copies_go_on_unpinned(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], nth: int, caplog: pytest.LogCaptureFixture
) -> None:
    device.fail("register", nth, REFUSED)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            assert_saved(saver, state)
    assert not device.registered
    assert [r.message.split(":")[0] for r in caplog.records] == [
        f"cudaHostRegister failed with code {REFUSED} (simulated error {REFUSED}) for {PIECE_NBYTES} bytes at "
        f"{nth * PIECE_NBYTES}"
    ]
    assert len([call for call in device.calls if call.name == "register"]) == nth + 1, "tried once for a slot"


def test_codes_are_fetched_in_threads_that_launch_nothing(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = []
    register = device.register
    monkeypatch.setattr(device, "register", lambda *a: threads.append(threading.current_thread()) or register(*a))
    assert_saved(saver, state)
    assert threads and all(thread is not threading.main_thread() for thread in threads)


def test_an_interrupt_while_memory_is_pinned_leaves_nothing_pinned_when_it_is_unmapped(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    saver.know(state)
    interrupts, register = iter([_thread.interrupt_main]), device.register

    def interrupted(address: int, nbytes: int) -> int:
        for interrupt in interrupts:
            interrupt()
            time.sleep(0.1)  # for the main thread, which waits for this one
        return register(address, nbytes)

    monkeypatch.setattr(device, "register", interrupted)
    with pytest.raises(KeyboardInterrupt):
        saver.save(state)
    slot = saver.process.made[0]
    assert device.registered and slot.pin is not None and slot.pin.held
    if slot.user is not None:
        saver.process.withdraw(slot.user, "as save() does")
    assert_saved(saver, state)
    assert not [call for call in device.calls if call.name == "unmap"]
    saver.close()
    assert not device.registered and slot.memory.mapping.closed


@pytest.fixture
def pin(device: SimulatedDevice, small_pieces: None) -> Iterator[Pin]:
    """Four pinned pieces of memory."""
    with Mapping(-1, 4 * PIECE_NBYTES) as mapping:
        made = Pin(device, 0, mapping.address, mapping.nbytes)
        made.open()
        yield made


def test_a_runtime_that_unloads_is_no_error(
    device: SimulatedDevice, pin: Pin, caplog: pytest.LogCaptureFixture
) -> None:
    for nth in range(4):
        device.fail("unregister", nth, UNLOADING)
    assert pin.held and pin.close() and pin.close()
    assert not caplog.records
    device.registered.clear()


def test_what_cannot_be_unpinned_stays_mapped(device: SimulatedDevice, pin: Pin) -> None:
    device.fail("unregister", 1, REFUSED)
    assert not pin.close()
    assert len(device.registered) == 1
    assert pin.close(), "another time it works"


def test_a_forked_child_unpins_nothing(device: SimulatedDevice, pin: Pin, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        assert pin.close()
    assert len(device.registered) == 4
    assert pin.close()


def test_where_no_thread_can_be_started_the_caller_unpins(
    device: SimulatedDevice, pin: Pin, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    assert pin.close() and not device.registered


# ---- a slot that devices copy into is nobody else's


@pytest.mark.parametrize(
    ("saver", "refusal"),
    [({"slot_timeout_s": 0.3}, SlotTimeoutError), ({"on_busy": "error"}, SlotBusyError)],
    indirect=["saver"],
)
def test_a_save_that_is_given_up_keeps_its_slot_until_the_copies_have_ended(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], refusal: type[Exception]
) -> None:
    device.frozen = True
    handle = saver.save(state)
    saver.stager.overlap.copier.cancel_all(StagingError("enough"))
    assert type(saver.ended(handle)) is StagingError
    late = saver.save(state)
    assert isinstance(late.staged.exception(0), refusal)
    (slot,) = saver.process.made
    assert slot.user is None and not slot.free and not slot.memory.mapping.closed and device.registered
    device.frozen = False
    device.drain()
    assert slot.free
    assert_saved(saver, state)
    assert len(saver.process.made) == 1


def test_a_slot_is_not_unmapped_under_copies_when_the_checkpointer_is_closed(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    device.frozen = True
    handle = saver.save(state)
    saver.close()
    assert isinstance(handle.staged.exception(60), AsyncCkptError)
    (slot,) = saver.process.made
    assert not slot.memory.mapping.closed and device.registered
    assert "stay mapped" in caplog.text
    device.frozen = False
    device.drain()  # what was enqueued writes into memory that is still there
    slot.close()
    assert slot.memory.mapping.closed and not device.registered


@pytest.mark.parametrize("saver", [{"slot_timeout_s": 0.3}], indirect=True)
def test_a_save_that_was_never_handed_over_keeps_its_slot_as_well(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    saver.know(state)
    device.frozen = True
    save_id = SaveId(0, next(saver.sequence), "0123456789ab")
    result = saver.stager.stage(state, path="/x", step=1, save_id=save_id, metadata=None)
    # Here an interrupt comes, before the copier has it.
    saver.process.withdraw(result.save_id, "interrupted")
    assert isinstance(saver.save(state).staged.exception(0), SlotTimeoutError)
    device.frozen = False
    device.drain()
    assert_saved(saver, state)


@pytest.mark.parametrize("saver", [{"slots": 2}], indirect=True)
def test_a_driver_that_tells_nothing_costs_the_slot_and_not_the_next_save(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    device.frozen = True
    handle = saver.save(state)
    for nth in range(200):
        device.fail("done", nth)
    assert type(saver.ended(handle)) is StagingError
    (slot,) = saver.process.made
    assert slot.device_state_unknown and not slot.memory.mapping.closed
    assert "are not reused" in caplog.text
    device.failing.clear()
    device.frozen = False
    assert_saved(saver, state)
    assert len(saver.process.made) == 2, "another one"
    device.drain()
    slot.device_state_unknown = False


@pytest.mark.parametrize("saver", MODES, indirect=True)
def test_a_device_that_never_comes_to_it_ends_the_save(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_copy, "TRANSFER_TIMEOUT_S", 0.05)
    device.frozen = True
    error = saver.ended(saver.save(state))
    assert type(error) is StagingError and "have not copied the state" in str(error)
    monkeypatch.undo()
    device.frozen = False
    device.drain()
    assert_saved(saver, state)


def test_a_stream_that_cannot_wait_makes_the_cpu_wait(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    handle = saver.save(state)
    device.fail("wait", 0)
    saver.stager.overlap.fence.wait()
    assert handle.staged.done() and saver.ended(handle) is None


@pytest.mark.parametrize("saver", [{"use_pinned_memory": False}], indirect=True)
def test_an_unpinned_copy_in_the_background_that_fails_is_on_the_futures(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any]
) -> None:
    device.fail("copy", 0)
    assert type(saver.ended(saver.save(state))) is StagingError
    assert_saved(saver, state)


@pytest.mark.parametrize("saver", [{"slots": 2}], indirect=True)
@pytest.mark.parametrize("interrupts", [False, True])
def test_a_fence_that_cannot_enqueue_the_copies_fails_the_save_and_seals_nothing(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, interrupts: bool
) -> None:
    assert_saved(saver, state)
    device.frozen = True
    before = len(device.calls)
    saver.save(state)
    handle = saver.save(state)  # behind the other one, so that the fence comes first
    # The other one asks whether its copies have run: all of them are enqueued, and none of its calls can fail.
    wait_until(lambda: any(call.name == "done" for call in device.calls[before:]), "copies enqueued")
    if interrupts:
        copy = device.copy

        def interrupted(*arguments: Any, **options: Any) -> None:
            copy(*arguments, **options)
            monkeypatch.setattr(device, "copy", copy)
            raise KeyboardInterrupt

        monkeypatch.setattr(device, "copy", interrupted)
        with pytest.raises(KeyboardInterrupt):
            saver.stager.overlap.fence.wait()
        device.frozen = False
    else:
        device.fail("copy", 0)
        threading.Timer(0.2, lambda: setattr(device, "frozen", False)).start()
        saver.stager.overlap.fence.wait()
        assert handle.staged.done()
    assert type(saver.ended(handle)) is StagingError
    assert str(handle.save_id) not in saver.process.written
    device.failing.clear()
    device.drain()
    assert_saved(saver, state)


def started(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> tuple[device_copy.Transfer, str]:
    """Stage a state, and return its copies by devices, of which none is enqueued, and the ID of the save."""
    transfers: list[device_copy.Transfer] = []
    start = device_copy.Transfer.start
    monkeypatch.setattr(device_copy.Transfer, "start", lambda one: transfers.append(one) or start(one))
    saver.know(state)
    save_id = SaveId(0, next(saver.sequence), "0123456789ab")
    result = saver.stager.stage(state, path="/x", step=1, save_id=save_id, metadata=None)
    device.drain()
    return transfers[0], result.save_id


def test_after_a_save_was_given_up_no_thread_enqueues_its_copies(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, save_id = started(saver, device, state, monkeypatch)
    assert transfer.settle()
    before = len(device.calls)
    with pytest.raises(StagingError, match="were not enqueued"):
        transfer.make_current_stream_wait(1.0)
    assert not [call for call in device.calls[before:] if call.name == "copy"]
    saver.process.withdraw(save_id, "given up")
    assert_saved(saver, state)


@pytest.mark.parametrize("in_child", [False, True])
def test_a_thread_that_hangs_while_it_enqueues_costs_the_slot_and_no_more_than_the_deadline(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch, in_child: bool
) -> None:
    transfer, save_id = started(saver, device, state, monkeypatch)
    hanging, may_end = threading.Event(), threading.Event()

    def hang() -> bool:
        hanging.set()
        return may_end.wait(60)

    thread = threading.Thread(target=transfer.enqueue, args=(hang,))
    thread.start()
    assert hanging.wait(60)
    with monkeypatch.context() as patched:
        patched.setattr(device_copy, "SETTLE_TIMEOUT_S", 0.1)
        if in_child:
            patched.setattr(os, "getpid", lambda: -1)
        assert transfer.settle() is in_child  # a child of a fork has neither the thread nor the copies
        assert transfer.ended() is in_child
    may_end.set()
    thread.join()
    device.drain()
    assert transfer.ended()
    saver.process.withdraw(save_id, "given up")


def test_an_interrupt_while_the_lock_is_taken_leaves_it_free(
    saver: Saver, device: SimulatedDevice, state: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    transfer, save_id = started(saver, device, state, monkeypatch)

    class Interrupted:
        """A lock behind whose acquisition Ctrl-C comes."""

        lock = transfer._lock

        def acquire(self, *arguments: Any, **more: Any) -> bool:
            taken = self.lock.acquire(*arguments, **more)
            signal.raise_signal(signal.SIGINT)
            return taken

        def release(self) -> None:
            self.lock.release()

    monkeypatch.setattr(transfer, "_lock", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        transfer.enqueue()
    free = list[bool]()
    thread = threading.Thread(target=lambda: free.append(Interrupted.lock.acquire(blocking=False)))
    thread.start()
    thread.join()
    assert free == [True]
    saver.process.withdraw(save_id, "given up")

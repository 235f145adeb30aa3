"""The three futures of one save, and what becomes of their outcomes."""

from __future__ import annotations

import concurrent.futures
import gc
import sys
import threading
import weakref
from concurrent.futures import Future, InvalidStateError
from typing import Any

import pytest

from asyncckpt.client.pending_saves import WriteFuture
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.names import SaveId
from asyncckpt.save_handle import SaveHandle, SaveReport

REPORT = SaveReport(save_id="x", nbytes=3_000_000, seconds={"copy": 0.25, "total": 1.5}, details={"direct": True})


def a_handle() -> SaveHandle:
    return SaveHandle(step=3, path="/x", save_id=SaveId(0, 1, "0" * 12))


def an_error() -> SaveFailedError:
    return SaveFailedError("no space", code="ENOSPC")


def test_a_handle_unpacks_to_staged_and_written() -> None:
    handle = a_handle()
    staged, written = handle
    assert (staged, written) == (handle.staged, handle.written)


def test_phases_follow_the_futures() -> None:
    handle, write = a_handle(), WriteFuture()
    assert handle.phase == "staging"
    handle.staged.set_result(REPORT)
    handle.follow(write)
    assert handle.phase == "staged"
    write.durable.set_result(REPORT)
    assert handle.phase == "durable"
    write.set_result(REPORT)
    assert handle.phase == "written"
    assert "phase='written'" in repr(handle)
    assert "step=3" in repr(handle)


def test_failing_leaves_what_has_completed() -> None:
    handle, error = a_handle(), an_error()
    handle.staged.set_result(REPORT)
    handle.fail(error)
    handle.fail(ValueError("another"))
    assert handle.staged.result() is REPORT
    assert handle.durable.exception() is handle.written.exception() is error
    assert handle.phase == "failed"


def test_a_process_without_durable_completes_both_at_once() -> None:
    handle, future = a_handle(), Future[Any]()
    handle.follow(future)
    future.set_result(REPORT)
    assert handle.durable.result() is handle.written.result() is REPORT


def test_what_comes_after_a_failure_is_dropped() -> None:
    handle, write, error = a_handle(), WriteFuture(), an_error()
    handle.follow(write)
    handle.fail(error)
    write.durable.set_result(REPORT)
    write.set_result(REPORT)
    assert handle.written.exception() is error


def test_a_cancelled_future_of_an_own_process_fails_the_save() -> None:
    handle, future = a_handle(), Future[Any]()
    handle.follow(future)
    assert future.cancel()
    future.set_running_or_notify_cancel()
    assert handle.written.done()
    assert "cancelled" in str(handle.written.exception())


def test_a_save_cannot_be_cancelled() -> None:
    assert [f.cancel() for f in a_handle().futures()] == [False] * 3


def test_a_result_is_set_once() -> None:
    handle = a_handle()
    handle.staged.set_result(REPORT)
    with pytest.raises(InvalidStateError):
        handle.staged.set_result(REPORT)


@pytest.mark.parametrize("look", ["result", "exception"])
def test_looking_at_an_outcome_counts_as_fetching(look: str) -> None:
    handle = a_handle()
    with pytest.raises(concurrent.futures.TimeoutError):
        getattr(handle.written, look)(timeout=0)
    assert not handle.written.fetched
    handle.fail(an_error())
    handle.written.peek()
    assert not handle.written.fetched
    if look == "result":
        with pytest.raises(SaveFailedError):
            handle.written.result()
    else:
        assert handle.written.exception() is not None
    assert handle.written.fetched


def test_a_failed_handle_keeps_none_of_the_frames_that_it_passed() -> None:
    class State(dict[str, Any]):
        """A dict that can be watched."""

    def save(handle: SaveHandle) -> weakref.ref[State]:
        state = State(weights=1)

        def copy(part: Any) -> None:
            raise OSError("disk")

        def stage(part: Any) -> None:
            try:
                copy(part)
            except OSError as error:
                raise an_error() from error

        try:
            stage(state)
        except SaveFailedError as error:
            handle.fail(error)
        return weakref.ref(state)

    handle = a_handle()
    gc.disable()
    try:
        assert save(handle)() is None, "the state of a failed save is kept alive by its error"
    finally:
        gc.enable()
    assert isinstance(handle.written.exception(), SaveFailedError)
    assert isinstance(handle.written.exception().__cause__, OSError)  # type: ignore[union-attr]


def test_a_report_says_the_phases() -> None:
    assert str(REPORT) == "3.0 MB in 1.500 s (copy 0.250 s)"


def test_a_callback_that_exits_ends_neither_the_thread_nor_the_other_callbacks() -> None:
    handle, called = a_handle(), []
    handle.written.add_done_callback(lambda done: sys.exit(1))
    handle.written.add_done_callback(called.append)
    thread = threading.Thread(target=handle.fail, args=(an_error(),))
    thread.start()
    thread.join(60)
    assert called == [handle.written]


def test_a_report_without_a_total_adds_its_phases_up() -> None:
    report = SaveReport(save_id="x", nbytes=1200, seconds={"plan": 0.25, "copy": 0.5})
    assert str(report).startswith("1.2 kB in 0.750 s")

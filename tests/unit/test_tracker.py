"""Handles from save() to their ends: pending ones, waiting, and errors that nobody fetched."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

import pytest

from asyncckpt.errors import PendingSavesError, SaveFailedError, SaveSkippedError, WaitTimeoutError
from asyncckpt.format.names import SaveId
from asyncckpt.save_handle import SaveHandle, SaveReport
from asyncckpt.save_tracker import SaveTracker


def handles(tracker: SaveTracker, count: int) -> list[SaveHandle]:
    made = [SaveHandle(step=n, path=f"/x/{n}", save_id=SaveId(0, n, "0" * 12)) for n in range(count)]
    for handle in made:
        tracker.add(handle)
    return made


def finish(handle: SaveHandle) -> None:
    for future in handle.futures():
        future.set_result(SaveReport(save_id=str(handle.save_id), nbytes=1))


def test_pending_are_those_that_have_not_ended_oldest_first() -> None:
    tracker = SaveTracker(on_error="warn")
    first, second, third = handles(tracker, 3)
    finish(second)
    assert tracker.pending() == [first, third]
    first.fail(SaveFailedError("x"))
    assert tracker.pending() == [third]


def test_a_handle_that_has_ended_before_it_was_added_is_not_pending() -> None:
    tracker = SaveTracker(on_error="warn")
    handle = SaveHandle(step=0, path="/x", save_id=SaveId(0, 0, "0" * 12))
    finish(handle)
    tracker.add(handle)
    assert tracker.pending() == []


def test_waiting_ends_when_the_last_save_ends() -> None:
    tracker = SaveTracker(on_error="warn")
    (handle,) = handles(tracker, 1)
    waiting = threading.Thread(target=tracker.wait, args=(30.0,))
    waiting.start()
    finish(handle)
    waiting.join(60)
    assert not waiting.is_alive()


def test_waiting_too_short_names_what_is_pending() -> None:
    tracker = SaveTracker(on_error="warn")
    first, second = handles(tracker, 2)
    finish(first)
    began = time.monotonic()
    with pytest.raises(WaitTimeoutError, match="1 saves are still pending") as caught:
        tracker.wait(0.05)
    assert caught.value.save_ids == [str(second.save_id)]
    assert caught.value.timeout_s == 0.05
    assert time.monotonic() - began >= 0.05


def test_errors_that_nobody_fetched_are_raised_together_and_once() -> None:
    tracker = SaveTracker(on_error="raise")
    first, second, third, fourth = handles(tracker, 4)
    errors = [SaveFailedError(f"number {n}") for n in range(3)]
    first.fail(errors[0])
    second.fail(errors[1])
    second.written.exception()
    third.fail(errors[2])
    finish(fourth)
    with pytest.raises(PendingSavesError, match="2 saves failed: number 0; number 2") as caught:
        tracker.raise_errors()
    assert caught.value.errors == [errors[0], errors[2]]
    tracker.raise_errors()


def test_skipped_saves_do_not_count_as_errors() -> None:
    tracker = SaveTracker(on_error="raise")
    (handle,) = handles(tracker, 1)
    handle.fail(SaveSkippedError("busy"))
    tracker.raise_errors()


def test_warn_raises_nothing_and_logs_each_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "asyncckpt")
    tracker = SaveTracker(on_error="warn")
    good, bad, skipped = handles(tracker, 3)
    finish(good)
    bad.fail(SaveFailedError("no space"))
    skipped.fail(SaveSkippedError("step 2 was not saved"))
    tracker.raise_errors()
    assert [r.levelname for r in caplog.records] == ["INFO", "WARNING", "INFO"]
    assert "save of step 0 to /x/0" in caplog.messages[0]
    assert "step 1 to /x/1 failed: no space" in caplog.messages[1]


def test_looking_at_the_log_is_not_fetching() -> None:
    tracker = SaveTracker(on_error="raise")
    (handle,) = handles(tracker, 1)
    handle.fail(SaveFailedError("x"))
    assert not any(f.fetched for f in handle.futures())


def test_a_save_that_has_ended_is_not_pending_although_its_callbacks_have_not_run() -> None:
    class Late(SaveTracker):
        def _ended(self, handle: SaveHandle, done: Future[SaveReport]) -> None:
            threading.Timer(0.05, super()._ended, (handle, done)).start()

    tracker = Late(on_error="raise")
    (handle,) = handles(tracker, 1)
    handle.fail(SaveFailedError("x"))
    assert tracker.pending() == []
    tracker.wait(0.0)
    with pytest.raises(PendingSavesError):
        tracker.raise_errors()


def test_a_result_of_an_own_process_that_is_no_report_ends_the_save() -> None:
    tracker = SaveTracker(on_error="warn")
    (handle,) = handles(tracker, 1)
    handle.written.set_result("done")  # type: ignore[arg-type]
    assert tracker._pending == [], "close() would wait for it"


def test_a_save_that_was_interrupted_is_logged_by_what_interrupted_it(caplog: pytest.LogCaptureFixture) -> None:
    (handle,) = handles(SaveTracker(on_error="warn"), 1)
    handle.fail(KeyboardInterrupt())
    assert caplog.messages == ["save of step 0 to /x/0 failed: KeyboardInterrupt"]

"""Signals that tell a training to stop: noted, passed on, forked, and what is said of the last save."""

from __future__ import annotations

import concurrent.futures
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from real_worker import wait_until
from simulated_boards import SimulatedBoard, Wall

from asyncckpt.errors import SaveFailedError, SignalHandlerError, SlotTimeoutError
from asyncckpt.format.names import SaveId
from asyncckpt.manager.preemption import Preemption, SignalRecorder
from asyncckpt.manager.step_agreement import NoticeboardPoller
from asyncckpt.save_handle import SaveHandle, SaveReport

USUAL = signal.SIGUSR1


def preemption_of(*signals: Any, grace_s: float = 25.0) -> Preemption:
    return Preemption(signals, grace_s, 1, lambda: None)


@pytest.fixture
def usual_handler() -> Iterator[list[int]]:
    """A handler for SIGUSR1 that notes each signal; it must be back at the end."""
    seen: list[int] = []

    def usual(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(USUAL, usual)
    yield seen
    assert signal.signal(USUAL, before) is usual, "it was not put back"


def test_a_signal_is_noted_passed_on_and_the_handler_put_back(usual_handler: list[int]) -> None:
    preemption = preemption_of(USUAL)
    assert not preemption.stops_at(1) and preemption.grace_left_s is None
    signal.raise_signal(USUAL)
    assert usual_handler == [USUAL]
    assert [preemption.stops_at(step) for step in (2, 2, 1, 3)] == [True, True, False, True]
    assert 0 < (preemption.grace_left_s or 0) <= 25.0
    for _ in range(2):
        preemption.close()


def test_a_step_that_was_passed_is_not_stopped_at_when_the_signal_comes_right_after(usual_handler: list[int]) -> None:
    """Else the loop would end at a step that nobody has saved."""
    preemption = preemption_of(USUAL)
    assert not preemption.stops_at(5), "should_save"
    signal.raise_signal(USUAL)
    assert [preemption.stops_at(step) for step in (5, 6, 5)] == [False, True, False]
    preemption.close()


def test_a_handler_that_came_later_stays(usual_handler: list[int]) -> None:
    before = signal.getsignal(USUAL)
    note = SignalRecorder()
    note.install([USUAL])
    signal.signal(USUAL, before)
    note.restore()


def test_a_default_that_ends_the_process_is_put_off() -> None:
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    preemption = preemption_of(signal.SIGUSR2, signal.SIGUSR2)
    signal.raise_signal(signal.SIGUSR2)
    assert preemption.stops_at(0)
    preemption.close()
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL


def test_notes_that_are_closed_in_the_order_in_which_they_were_made_hide_no_signal(usual_handler: list[int]) -> None:
    """The first one finds the second one's handler in its place, and the second one puts the first one's back."""
    usual = signal.getsignal(USUAL)
    first, second = preemption_of(USUAL), preemption_of(USUAL)
    first.close()
    signal.raise_signal(USUAL)
    assert second.stops_at(1) and not first.stops_at(1) and len(usual_handler) == 1
    second.close()
    signal.raise_signal(USUAL)
    assert len(usual_handler) == 2
    signal.signal(USUAL, usual)


def test_a_note_that_is_closed_in_another_thread_hides_no_signal(usual_handler: list[int]) -> None:
    usual, preemption = signal.getsignal(USUAL), preemption_of(USUAL)
    thread = threading.Thread(target=preemption.close)
    thread.start()
    thread.join()
    signal.raise_signal(USUAL)
    assert usual_handler == [USUAL] and preemption.grace_left_s is None
    signal.signal(USUAL, usual)


def test_outside_the_main_thread_a_handler_is_a_typed_error() -> None:
    caught: list[BaseException] = []

    def make() -> None:
        try:
            preemption_of(USUAL)
        except BaseException as error:
            caught.append(error)

    thread = threading.Thread(target=make)
    thread.start()
    thread.join()
    assert isinstance(caught[0], SignalHandlerError) and caught[0].signal == "SIGUSR1"


# ---- forked children ------------------------------------------------------------------------------------------------


def exit_code_of_a_fork(lives: Callable[[], None]) -> int | None:
    child = multiprocessing.get_context("fork").Process(target=lives)
    child.start()
    child.join(60)
    code = child.exitcode
    child.close()
    return code


def test_a_forked_child_is_ended_by_the_signal_as_if_nobody_handled_it() -> None:
    """Pools end their children so, and wait for them."""
    preemption = preemption_of(signal.SIGTERM)
    assert exit_code_of_a_fork(lambda: signal.raise_signal(signal.SIGTERM)) == -signal.SIGTERM
    assert not preemption.stops_at(1)
    preemption.close()


def test_a_forked_child_calls_the_handler_that_was_there() -> None:
    before = signal.signal(USUAL, lambda *_: os._exit(7))
    preemption = preemption_of(USUAL)
    assert exit_code_of_a_fork(lambda: signal.raise_signal(USUAL)) == 7
    preemption.close()
    signal.signal(USUAL, before)


@pytest.mark.parametrize(("closed", "code"), [(1, 7), (2, -signal.SIGTERM)])
def test_a_process_ends_by_the_signal_once_every_note_is_closed(closed: int, code: int) -> None:
    def lives() -> None:
        notes = [preemption_of(signal.SIGTERM) for _ in range(2)]
        for note in notes[:closed]:
            note.close()
        signal.raise_signal(signal.SIGTERM)
        os._exit(7)  # it was put off

    assert exit_code_of_a_fork(lives) == code


# ---- the last save --------------------------------------------------------------------------------------------------


def test_the_end_of_the_grace_is_said_while_the_save_still_blocks(caplog: pytest.LogCaptureFixture) -> None:
    """A process that is killed then has said so."""
    preemption = preemption_of(grace_s=0.01)
    with preemption.log_if_late(7):
        pass  # nobody was told to stop
    preemption.request()
    with preemption.log_if_late(8):
        wait_until(lambda: "step 8 was not staged within the grace time of 0.01 s" in caplog.text, "it is said")
    assert "step 7" not in caplog.text


def test_a_save_within_the_grace_says_nothing(caplog: pytest.LogCaptureFixture) -> None:
    preemption = preemption_of(grace_s=3600.0)
    preemption.request()
    with preemption.log_if_late(8):
        pass
    assert not caplog.text


class OldTimeoutError(Exception):
    """As `concurrent.futures.TimeoutError` of Python 3.10: no builtin."""


@pytest.mark.parametrize("of_310", [False, True])
@pytest.mark.parametrize("outcome", ["staged", "late", "SlotTimeoutError", "TimeoutError", "SaveFailedError"])
def test_after_the_signal_what_is_said_of_the_last_save_is_what_became_of_it(
    outcome: str, of_310: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if of_310:
        monkeypatch.setattr(concurrent.futures._base, "TimeoutError", OldTimeoutError)
        monkeypatch.setattr(concurrent.futures, "TimeoutError", OldTimeoutError)
    handle = SaveHandle(step=8, path="/x", save_id=SaveId(0, 1, "aa" * 8))
    errors = {
        "SlotTimeoutError": SlotTimeoutError("no slot", save_id="x", step=8, path="/x", timeout_s=1.0),
        "TimeoutError": TimeoutError("of a device"),
        "SaveFailedError": SaveFailedError("full", code="disk"),
    }
    if outcome == "staged":
        handle.staged.set_result(SaveReport(save_id="x", nbytes=1))
    elif outcome in errors:
        handle.fail(errors[outcome])
    preemption = preemption_of(grace_s=0.05)
    preemption.request()
    preemption.await_staged(handle)
    expected = {"staged": "step 8 is staged", "late": "step 8 was not staged within"}
    assert expected.get(outcome, "step 8 could not be staged") in caplog.text
    assert len(caplog.records) == 1


def _refuse_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refused)


def test_the_last_save_goes_on_without_a_thread_that_watches_the_grace(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    preemption = preemption_of(grace_s=3600.0)
    preemption.request()
    saved = []
    with monkeypatch.context() as patched:
        _refuse_threads(patched)
        with preemption.log_if_late(8):
            saved.append(8)
    assert saved == [8] and "can't start new thread" in caplog.text


def test_a_watch_without_a_thread_says_so_once_and_asks_for_one_at_the_next_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    looked, last = threading.Event(), []
    watch = NoticeboardPoller(lambda: SimulatedBoard(Wall(1), 0), [lambda board: looked.set()])
    with monkeypatch.context() as patched:
        _refuse_threads(patched)
        for _ in range(2):
            watch.start()
    assert caplog.text.count("can't start new thread") == 1
    for _ in range(2):
        watch.start()
    assert looked.wait(60)
    watch.close(last.append, 60.0)
    assert len(last) == 1

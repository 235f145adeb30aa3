"""Withdrawals reach the worker: again over every session until it has answered, and those from before the run too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future

import pytest

from asyncckpt.client.pending_saves import MAX_WITHDRAWALS, Withdrawals
from asyncckpt.errors import UnknownSaveError, WorkerUnavailableError
from asyncckpt.protocol import messages

SAVE = "000001-00000003-0123456789ab"


class Worker:
    """Keeps what it is told; answers when it is asked to."""

    def __init__(self) -> None:
        self.there = True
        self.told: list[messages.Withdraw] = []
        self.answers: list[Future[messages.Message]] = []

    def send(self, build: Callable[[int], messages.Message]) -> Future[messages.Message] | None:
        if not self.there:
            return None
        message = build(1)
        assert isinstance(message, messages.Withdraw)
        self.told.append(message)
        self.answers.append(Future())
        return self.answers[-1]

    @property
    def saves(self) -> list[str]:
        return [m.save_id for m in self.told]


def test_what_could_not_be_sent_goes_over_the_next_session() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    worker.there = False
    withdrawals.add(SAVE, "no slot", skipped=True)
    worker.there = True
    withdrawals.resend()
    assert worker.saves == [SAVE]
    assert (worker.told[0].reason, worker.told[0].skipped) == ("no slot", True)


@pytest.mark.parametrize("answer", [messages.Ok(id=1), UnknownSaveError("it has ended")])
def test_what_was_answered_is_not_said_again(answer: messages.Message | Exception) -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    withdrawals.add(SAVE, "no slot")
    if isinstance(answer, Exception):
        worker.answers[0].set_exception(answer)
    else:
        worker.answers[0].set_result(answer)
    withdrawals.resend()
    assert worker.saves == [SAVE]


def test_what_a_dead_worker_had_answered_is_said_to_the_next_one() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    withdrawals.add(SAVE, "no slot", skipped=True)
    for times in (2, 3):
        worker.answers[-1].set_result(messages.Ok(id=1))
        withdrawals.repeat_answered()
        assert worker.told == times * worker.told[:1]
    withdrawals.repeat_answered()
    assert len(worker.told) == 3, "it is under way"


def test_of_what_was_answered_the_latest_is_said_again() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    for n in range(2 * MAX_WITHDRAWALS):
        withdrawals.add(f"000001-{n:08d}-0123456789ab", "x")
        worker.answers[-1].set_result(messages.Ok(id=1))
    withdrawals.repeat_answered()
    assert worker.saves[2 * MAX_WITHDRAWALS :] == worker.saves[MAX_WITHDRAWALS : 2 * MAX_WITHDRAWALS]


def test_a_session_that_was_lost_before_the_answer_is_no_answer() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    withdrawals.add(SAVE, "no slot")
    worker.answers[0].set_exception(WorkerUnavailableError("lost"))
    withdrawals.resend()
    assert worker.saves == [SAVE, SAVE]


def test_saves_of_a_lost_worker_are_withdrawn_from_the_next() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    worker.there = False
    withdrawals.add_lost([SAVE])
    worker.there = True
    withdrawals.resend()
    assert worker.saves == [SAVE]


def test_what_was_declined_before_the_run_was_known_follows_with_it() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    withdrawals.add_before_run_known(1, "reentrant")
    assert worker.told == []
    withdrawals.send_for_run("0123456789ab")
    withdrawals.send_for_run("0123456789ab")
    assert worker.saves == ["000000-00000001-0123456789ab"]


def test_they_are_bounded() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=False)
    worker.there = False
    for n in range(3 * MAX_WITHDRAWALS):
        withdrawals.add(f"000001-{n:08d}-0123456789ab", "x")
    worker.there = True
    withdrawals.resend()
    assert len(worker.told) == MAX_WITHDRAWALS


def test_where_nobody_waits_nothing_is_kept() -> None:
    worker = Worker()
    withdrawals = Withdrawals(worker.send, threading.RLock(), alone=True)
    worker.there = False
    withdrawals.add(SAVE, "x")
    worker.there = True
    withdrawals.resend()
    assert worker.told == []

"""What is asked of a worker that does not answer: once, and what comes of it late is given back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.client import slot_lender
from asyncckpt.client.session import DIED
from asyncckpt.client.slot_lender import SlotLender
from asyncckpt.errors import AsyncCkptError, InsufficientMemoryError, WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.protocol import messages
from asyncckpt.protocol.identity import start_ticks

NBYTES = 64 * 1024


class Session:
    """Stands for a session with a worker in this process, which answers when it is told to, or at once."""

    name, error = "s", None

    def __init__(self) -> None:
        self.worker = SimpleNamespace(pid=os.getpid(), pid_start=0)
        self.asked: list[tuple[Any, Future[messages.Message]]] = []
        self.memory = SlotMemory.create(NBYTES)
        self.answers = True

    def request(self, build: Callable[[int], messages.Message], timeout_s: float = 1.0) -> Future[messages.Message]:
        self.asked.append((build(len(self.asked) + 1), Future()))
        if self.answers:
            self.answer(len(self.asked) - 1)
        return self.asked[-1][1]

    def answer(self, number: int) -> None:
        message, future = self.asked[number]
        if isinstance(message, messages.Allocate):
            made = self.memory
            future.set_result(
                messages.Granted(id=message.id, slot=number, fd=made.fd, nbytes=made.nbytes, token=made.token)
            )

    @property
    def kinds(self) -> list[str]:
        return [type(message).__name__ for message, _ in self.asked]


@pytest.fixture
def session() -> Iterator[Session]:
    made = Session()
    yield made
    made.memory.close()


def lender(session: Session, timeout_s: float = 5.0) -> SlotLender:
    made: Any = session
    return SlotLender(lambda: made, lambda: made, made.request, "ipc:///x", timeout_s=timeout_s, attempts=1)


def test_a_slot_is_asked_for_and_opened(session: Session) -> None:
    slot = lender(session).allocate(NBYTES, 1.0)
    assert slot is not None and (slot.number, slot.session, slot.memory.nbytes) == (0, "s", NBYTES)
    slot.close()
    assert session.kinds == ["Allocate"]


def test_a_slot_that_comes_too_late_is_given_back(session: Session) -> None:
    session.answers = False
    assert lender(session).allocate(NBYTES, 0.01) is None
    session.answer(0)
    assert session.kinds == ["Allocate", "Release"]
    assert session.asked[1][0].slot == 0


def test_a_worker_that_does_not_answer_is_asked_for_one_slot_at_a_time(session: Session) -> None:
    """Else it would make one for every save meanwhile once it wakes up, of a whole snapshot each."""
    session.answers, lends = False, lender(session)
    assert [lends.allocate(NBYTES, 0.01) for _ in range(5)] == [None] * 5
    assert session.kinds == ["Allocate"]
    session.answers = True
    session.answer(0)
    slot = lends.allocate(NBYTES, 1.0)
    assert slot is not None
    slot.close()
    assert session.kinds == ["Allocate", "Release", "Allocate"]


@pytest.mark.parametrize("answered", ["before the next save", "during the next save"])
def test_an_interrupt_while_a_slot_is_waited_for_costs_no_slot(
    session: Session, monkeypatch: pytest.MonkeyPatch, answered: str
) -> None:
    def interrupted(*_: Any) -> Any:
        raise KeyboardInterrupt

    session.answers, lends = False, lender(session)
    with monkeypatch.context() as patch:
        patch.setattr(slot_lender, "wait", interrupted)
        with pytest.raises(KeyboardInterrupt):
            lends.allocate(NBYTES)
    if answered == "during the next save":
        assert lends.allocate(NBYTES, 0.01) is None
    assert session.kinds == ["Allocate"], "the worker is asked for one slot at a time"
    session.answer(0)
    assert session.kinds == ["Allocate", "Release"] and session.asked[1][0].slot == 0


@pytest.mark.parametrize("error", [InsufficientMemoryError("no room", nbytes=1), WorkerUnavailableError("gone")])
def test_one_that_is_refused_late_is_forgotten(session: Session, error: AsyncCkptError) -> None:
    session.answers, lends = False, lender(session)
    assert lends.allocate(NBYTES, 0.01) is None
    session.answers = True
    session.asked[0][1].set_exception(error)
    slot = lends.allocate(NBYTES, 1.0)
    assert slot is not None
    slot.close()
    assert session.kinds == ["Allocate", "Allocate"]


def test_where_there_is_nothing_else_to_wait_for_no_answer_is_an_error(session: Session) -> None:
    session.answers = False
    with pytest.raises(WorkerUnavailableError, match="did not lend a slot"):
        lender(session, 0.01).allocate(NBYTES)
    session.answer(0)
    assert session.kinds == ["Allocate", "Release"]


class Closed(SlotMemory):
    """Cannot be opened any more."""

    @classmethod
    def attach(cls, *_: Any, **__: Any) -> SlotMemory:
        raise FileNotFoundError("no such descriptor")


@pytest.mark.parametrize(("looks", "detail"), [(1, DIED), (20, DIED), (None, "slot")])
def test_a_worker_that_is_killed_has_no_descriptors_a_while_before_it_is_seen_to_be_dead(
    session: Session, monkeypatch: pytest.MonkeyPatch, looks: int | None, detail: str
) -> None:
    """Else a save fails that another worker would have had: only who has died is followed by another one."""
    session.worker.pid_start = start_ticks(os.getpid())
    left = [looks]

    def gone(pid: int, started: int) -> bool:
        if left[0] is not None:
            left[0] -= 1
        return left[0] is not None and left[0] < 0

    monkeypatch.setattr(slot_lender, "SlotMemory", Closed)
    monkeypatch.setattr(slot_lender, "has_exited", gone)
    monkeypatch.setattr(slot_lender, "POLL_S", 0.0)
    if looks is None:
        monkeypatch.setattr(slot_lender, "DEATH_WAIT_S", 0.01)
    with pytest.raises(WorkerUnavailableError) as caught:
        lender(session).allocate(NBYTES)
    assert caught.value.facts()["detail"] == detail
    assert session.kinds == ["Allocate", "Release"]

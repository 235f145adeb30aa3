"""What is handed to the worker that follows a dead one, and what is given up instead."""

from __future__ import annotations

import threading
import weakref
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from asyncckpt.client.failover import MAX_HANDOVERS, Failover
from asyncckpt.client.pending_saves import PendingSaves, StagedSnapshot, UnfinishedSave, WriteFuture
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_lender import retry_on_worker_death
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, SaveFailedError, WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.protocol import messages

SAVE = SaveId(1, 2, "0" * 12)
DIED = WorkerUnavailableError("it has died", detail="died")


class FakeSession:
    """A session that grants whatever is handed over, as slot 71; `error`: why it is lost."""

    def __init__(self, name: str = "b" * 16) -> None:
        self.name, self.error = name, None
        self.refuses: AsyncCkptError | None = None
        self.said: list[Any] = []
        self.meanwhile: Any = lambda: None
        self.is_late = False
        self.asked: Future[Any] = Future()

    def request(self, build: Any, timeout_s: float, on_answer: Any = None) -> Future[Any]:
        message, future = build(len(self.said) + 1), Future[Any]()
        self.said.append(message)
        if isinstance(message, messages.Adopt):
            self.asked = future
            self.meanwhile()
            if not self.is_late:
                self.answer(message)
        return future

    def answer(self, m: messages.Adopt) -> None:
        if self.refuses is not None:
            self.asked.set_exception(self.refuses)
        else:
            self.asked.set_result(messages.Granted(id=m.id, slot=71, fd=5, nbytes=m.nbytes, token=m.token))


class Parts:
    """A pool with one slot of a dead worker, the table of saves, and the failover."""

    def __init__(self) -> None:
        self.slot = Slot(number=1, memory=SlotMemory.create(16384), session="a" * 16)
        self.pool = SlotPool(CheckpointerConfig(), lambda nbytes, within_s: self.slot, lambda slot: None)
        self.pool._slots.append(self.slot)
        lock = threading.RLock()
        self.pending = PendingSaves(lock, commit_timeout_s=60.0, free=self.pool.free)
        self.announced: list[tuple[str, UnfinishedSave, int]] = []
        self.given_up: list[tuple[list[str], AsyncCkptError]] = []
        self.failover = Failover(
            self.pool,
            self.pending,
            lock,
            endpoint="ipc:///e",
            timeout_s=1.0,
            announce=lambda session, save, slot: self.announced.append((session.name, save, slot.number)),
            on_given_up=lambda saves, error: self.given_up.append((saves, error)),
        )

    def begin(self, *, is_known: bool = True) -> None:
        self.slot.generation += 1
        self.slot.user, self.slot.staging = SAVE, True
        self.pending.begin(SAVE, None, self.slot.generation, is_known=is_known)

    def seal(self) -> WriteFuture:
        self.slot.memory.control.open(self.slot.generation)
        self.slot.memory.control.seal(b"request", 4096)
        snapshot = StagedSnapshot(
            save_id=SAVE, step=1, path="/x", slot=self.slot, nbytes=1, seconds={}, began=0.0, extra={}
        )
        future = WriteFuture()
        self.pool.staged(self.slot)
        assert self.pending.staged(snapshot, future, None)
        return future

    def end(self) -> None:
        self.pending.end(str(SAVE), None, {})


@pytest.fixture
def parts() -> Any:
    made = Parts()
    yield made
    made.pool.close()
    made.pool.free(SAVE)
    if not made.slot.memory.mapping.closed:
        made.slot.close()


def test_a_staged_save_is_handed_over_and_told_of(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    session: Any = FakeSession()
    parts.failover.hand_over(session)
    (adopt,) = session.said
    assert (adopt.fd, adopt.token) == (parts.slot.memory.fd, parts.slot.memory.token)
    assert (adopt.generation, adopt.ended) == (1, 0)
    assert (parts.slot.number, parts.slot.session) == (71, session.name)
    ((name, save, number),) = parts.announced
    assert (name, save.save_id, number) == (session.name, str(SAVE), 71)
    assert save.snapshot is not None and save.snapshot.resubmitted == 1
    parts.failover.hand_over(session)  # it has it
    assert session.said == [adopt]


def test_a_save_that_is_begun_after_the_worker_s_death_is_not_one_that_it_may_have_written(parts: Parts) -> None:
    parts.begin(is_known=False)
    parts.slot.memory.control.open(1)
    generations = []
    for name in "bc":  # the second is told, since the first may have written it
        session: Any = FakeSession(name * 16)
        parts.failover.hand_over(session)
        generations += [(adopt.generation, adopt.ended) for adopt in session.said]
    assert generations == [(0, 0), (1, 0)]


def test_of_a_save_that_has_ended_the_next_worker_is_not_told(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    parts.end()
    session: Any = FakeSession()
    parts.failover.hand_over(session)
    (adopt,) = session.said
    assert (adopt.generation, adopt.ended) == (1, 1)
    assert parts.announced == []


def test_a_save_that_is_only_begun_leaves_the_one_before_ended(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    parts.end()
    parts.begin()  # and the slot is not opened yet: what lies sealed in it has ended
    session: Any = FakeSession()
    parts.failover.hand_over(session)
    (adopt,) = session.said
    assert (adopt.generation, adopt.ended) == (2, 1)
    ((_, save, _),) = parts.announced
    assert save.snapshot is None


def test_a_slot_that_is_refused_costs_its_save_only(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    session: Any = FakeSession()
    session.refuses = SaveFailedError("it cannot be opened", code="slot")
    parts.failover.hand_over(session)
    assert parts.given_up == [([str(SAVE)], session.refuses)]
    assert parts.pool.held() == []


def test_a_session_that_is_lost_again_changes_nothing(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    session: Any = FakeSession()
    session.refuses = session.error = DIED
    with pytest.raises(WorkerUnavailableError):
        parts.failover.hand_over(session)
    assert parts.pool.held() == [parts.slot]
    assert parts.given_up == []
    assert parts.slot.session == "a" * 16


def test_a_slot_is_handed_over_so_often_and_no_more_until_a_save_has_ended(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    sessions: list[Any] = [FakeSession(f"{n:016x}") for n in range(MAX_HANDOVERS + 1)]
    for session in sessions:
        parts.failover.hand_over(session)
    assert [len(session.said) for session in sessions] == [1] * MAX_HANDOVERS + [0]
    ((saves, error),) = parts.given_up
    assert saves == [str(SAVE)]
    assert f"{MAX_HANDOVERS + 1} workers" in str(error)


def test_a_slot_that_no_save_uses_is_handed_over_any_number_of_times(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    parts.end()
    for n in range(2 * MAX_HANDOVERS):
        session: Any = FakeSession(f"{n:016x}")
        parts.failover.hand_over(session)
        assert len(session.said) == 1


def test_a_slot_that_kills_each_worker_as_it_is_handed_over_is_given_up(parts: Parts) -> None:
    for n in range(MAX_HANDOVERS):
        session: Any = FakeSession(f"{n:016x}")
        session.refuses = session.error = DIED
        with pytest.raises(WorkerUnavailableError):
            parts.failover.hand_over(session)
    parts.failover.hand_over(FakeSession())  # type: ignore[arg-type]
    assert parts.pool.held() == []


def test_the_end_of_a_save_makes_the_count_begin_anew(parts: Parts) -> None:
    for n in range(2 * MAX_HANDOVERS):
        parts.begin()
        parts.seal()
        session: Any = FakeSession(f"{n:016x}")
        parts.failover.hand_over(session)
        parts.end()
    assert parts.given_up == []


def test_a_slot_that_was_closed_meanwhile_is_given_back_at_once(parts: Parts) -> None:
    session: Any = FakeSession()
    session.meanwhile = parts.pool.close
    parts.failover.hand_over(session)
    adopt, release = session.said
    assert isinstance(adopt, messages.Adopt)
    assert release.slot == 71
    assert parts.announced == []


def test_a_slot_that_is_not_taken_in_time_costs_its_save_and_is_given_back_when_it_is_taken(parts: Parts) -> None:
    parts.begin()
    session: Any = FakeSession()
    session.is_late, parts.failover._timeout_s = True, 0.01
    parts.failover.hand_over(session)
    ((saves, error),) = parts.given_up
    assert saves == [str(SAVE)] and isinstance(error, WorkerUnavailableError)
    (adopt,) = session.said
    session.answer(adopt)
    assert session.said[1].slot == 71 and isinstance(session.said[1], messages.Release)
    assert parts.announced == []


class FakeConnection:
    """`connect` raises what it is given, in turn, then returns."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.calls = 0
        self.session: Any = SimpleNamespace(name="a" * 16, error=DIED)

    def connect(self) -> None:
        self.calls += 1
        if self.errors:
            raise self.errors.pop(0)


@pytest.mark.parametrize("error", [WorkerUnavailableError("nobody"), RuntimeError("a bug")])
def test_where_there_is_no_worker_every_save_fails_with_a_typed_error(parts: Parts, error: Exception) -> None:
    parts.begin()
    parts.seal()
    connection: Any = FakeConnection(error)
    parts.failover.start(connection)
    parts.failover.join(60)
    ((saves, found),) = parts.given_up
    assert saves == [str(SAVE)]
    assert isinstance(found, WorkerUnavailableError)
    assert str(error) in str(found)
    assert parts.pool.held() == []


def test_a_checkpointer_that_is_closed_gives_nothing_up(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    connection: Any = FakeConnection(CheckpointerClosedError("closed"))
    parts.failover.start(connection)
    parts.failover.join(60)
    assert parts.given_up == []


def test_saves_that_another_thread_has_handed_over_meanwhile_are_not_given_up(parts: Parts) -> None:
    parts.begin()
    parts.seal()
    connection: Any = FakeConnection(WorkerUnavailableError("nobody"))
    connection.session = SimpleNamespace(name="a" * 16, error=None)  # the slot's
    parts.failover.start(connection)
    parts.failover.join(60)
    assert parts.given_up == [([], parts.given_up[0][1])]
    assert parts.pool.held() == [parts.slot]


def test_what_comes_afterwards_waits_for_what_is_under_way(parts: Parts) -> None:
    go_on, called = threading.Event(), threading.Event()
    connection: Any = FakeConnection()

    def connect() -> Any:
        go_on.wait(60)
        return SimpleNamespace(name=parts.slot.session, error=None)

    connection.connect = connect
    assert not parts.failover.call_when_done(called.set)
    parts.failover.start(connection)
    assert parts.failover.call_when_done(called.set)
    assert not called.is_set()
    go_on.set()
    assert called.wait(60)
    parts.failover.join(60)


def test_without_a_thread_the_saves_fail_typed_and_the_next_takeover_gets_one(
    parts: Parts, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    parts.begin()
    parts.seal()
    connection: Any = FakeConnection()
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        parts.failover.start(connection)
    ((saves, error),) = parts.given_up
    assert saves == [str(SAVE)] and isinstance(error, WorkerUnavailableError)
    assert "can't start new thread" in str(error)
    assert parts.pool.held() == [] and not parts.failover.is_under_way
    assert not parts.failover.call_when_done(lambda: None), "nobody would ever call it"
    parts.failover.join(60)
    parts.failover.start(connection)
    parts.failover.join(60)
    assert connection.calls == 1


class State(dict[str, int]):
    """What a training loop saves."""


def test_a_worker_that_dies_over_a_save_does_not_keep_its_state_alive() -> None:
    died = WorkerUnavailableError("it has died", detail="died")  # its session has it for as long as there is no other
    answers: Any = iter([died, died, None])

    def ask(session: Any) -> str:
        error = next(answers)
        if error is not None:
            raise error
        return "granted"

    def save(state: State) -> str:
        return retry_on_worker_death(SimpleNamespace, ask, 3)  # type: ignore[arg-type]

    state = State(w=1)
    watched = weakref.ref(state)
    assert save(state) == "granted"
    del state
    assert watched() is None

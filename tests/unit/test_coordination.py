"""Ranks that meet again, while changes of their run are on the way: in the end they have agreed on the same."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from asyncckpt import taken_changes
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.coordination import Coordination
from asyncckpt.errors import SaveFailedError
from asyncckpt.exchange import Exchange, Meeting, refused
from asyncckpt.planning.contributions import Change
from asyncckpt.planning.planner import contribution_of
from asyncckpt.planning.state_dict import flatten
from asyncckpt.taken_changes import TakenChanges

WORLD_SIZE = 2
STATE = {"w": torch.arange(6.0)}
MORE = {**STATE, "m": torch.arange(4.0)}
WORKER = "1" * 16


class Room:
    """Where threads meet, in rounds of which each gives everybody's bytes."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD_SIZE, timeout=60)
        self.refusal: tuple[int, str] | None = None
        self.given: list[bytes] = [b""] * WORLD_SIZE


class InMemory(Exchange):
    def __init__(self, rank: int, rooms: dict[str, Room]) -> None:
        self.rank, self.rooms = rank, rooms
        self.before_gather: Callable[[], None] = lambda: None

    def meet(self, name: str, call: str) -> Meeting:
        name = name.partition("/")[2]  # checkpointers are numbered in each process
        return InRoom(self, self.rooms.setdefault(name, Room()))


class InRoom(Meeting):
    def __init__(self, exchange: InMemory, room: Room) -> None:
        self.exchange, self.room = exchange, room

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        room, act = self.room, self.exchange.before_gather
        self.exchange.before_gather = lambda: None
        act()
        room.given[self.exchange.rank] = payload
        try:
            room.barrier.wait()
            found = list(room.given)
            room.barrier.wait()
        except threading.BrokenBarrierError:
            raise refused(*(room.refusal or (-1, "nobody"))) from None
        return found

    def refuse(self, reason: str) -> None:
        self.room.refusal = self.room.refusal or (self.exchange.rank, reason)
        self.room.barrier.abort()

    def close(self) -> None:
        pass


class Ranks:
    def __init__(self) -> None:
        rooms: dict[str, Room] = {}
        self.exchanges = [InMemory(rank, rooms) for rank in range(WORLD_SIZE)]
        self.each = [self.made(rank) for rank in range(WORLD_SIZE)]
        for one in self.each:
            one.links.leader = WORKER

    def made(self, rank: int) -> Coordination:
        exchange = self.exchanges[rank]
        found = Coordination(RankInfo(rank, WORLD_SIZE), CheckpointerConfig(), lambda: exchange, package="1")
        found.links._worker.instance = lambda: WORKER  # type: ignore[method-assign]
        return found

    def together(self, call: Callable[[Coordination], Any]) -> None:
        with ThreadPoolExecutor(WORLD_SIZE) as pool:
            for done in [pool.submit(call, one) for one in self.each]:
                done.result(60)

    def save(self, sequence: int) -> None:
        """Agree as the stager does before a save."""
        flat = flatten(STATE)

        def agree(one: Coordination) -> None:
            one.advance(sequence)
            one.agree(flat, contribution_of(flat), sequence=sequence, path="/x", step=sequence)

        self.together(agree)

    def prepare(self, state: Any) -> None:
        flat = flatten(state)
        self.together(lambda one: one.prepare(lambda: (flat, contribution_of(flat))))

    def hear(self, number: int, effective: int, *ranks: int) -> None:
        change = Change(contributions={}, per_rank=(f"name{number}",)).encode()
        for rank in ranks:
            self.each[rank].take_change(WORKER, number, effective, change)

    def forget(self) -> None:
        for one in self.each:
            one.forget()

    def fingerprints(self) -> list[str]:
        return [one.agreement.fingerprint if one.agreement else "" for one in self.each]

    def agree_on(self, *, n_changes: int, since: list[str]) -> None:
        """All have the same agreement, which is `since`'s after so many changes."""
        one, other = self.fingerprints()
        assert one == other
        assert (one == since[0]) == (not n_changes)


@pytest.mark.parametrize("effective", [1, 2, 5])
def test_a_change_of_which_only_some_had_heard_when_the_ranks_met_again_is_applied_by_none(effective: int) -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.hear(1, effective, 0)
    ranks.forget()
    ranks.save(2)
    met = ranks.fingerprints()
    ranks.hear(1, effective, 1)
    ranks.save(6)
    ranks.agree_on(n_changes=0, since=met)


@pytest.mark.parametrize("late", [0, 1])
def test_a_change_that_comes_while_the_ranks_meet_again_is_applied_by_all(late: int) -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.hear(1, 5, 0, 1)
    ranks.forget()
    ranks.exchanges[1 - late].before_gather = lambda: ranks.hear(2, 5, 1 - late)
    ranks.save(2)
    met = ranks.fingerprints()
    ranks.hear(2, 5, late)
    ranks.save(4)
    ranks.agree_on(n_changes=0, since=met)
    ranks.save(5)
    ranks.agree_on(n_changes=1, since=met)


def test_ranks_that_prepare_while_one_has_applied_a_change_begin_anew() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.hear(1, 1, 0)
    ranks.save(1)
    assert len(set(ranks.fingerprints())) == 2, "that save is lost"
    ranks.prepare(MORE)
    met = ranks.fingerprints()
    ranks.hear(1, 1, 1)
    ranks.save(2)
    ranks.agree_on(n_changes=0, since=met)


def test_a_change_that_waits_outlives_what_ranks_of_one_mind_prepare() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.hear(1, 3, 0)
    ranks.prepare(MORE)
    met = ranks.fingerprints()
    ranks.hear(1, 3, 1)
    ranks.save(2)
    ranks.agree_on(n_changes=0, since=met)
    ranks.save(3)
    ranks.agree_on(n_changes=1, since=met)


def test_another_worker_s_changes_are_counted_apart() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.hear(7, 9, 0, 1)
    ranks.forget()
    ranks.save(1)
    met = ranks.fingerprints()
    for one in ranks.each:
        one.take_change("2" * 16, 1, 2, Change(contributions={}, per_rank=("w",)).encode())
    ranks.save(2)
    ranks.agree_on(n_changes=1, since=met)


def test_what_a_failed_prepare_leaves_is_no_agreement_to_another_worker_either() -> None:
    ranks = Ranks()
    ranks.save(0)

    def fail() -> Any:
        raise ZeroDivisionError

    flat = flatten(MORE)

    def prepare(one: Coordination) -> None:
        with pytest.raises((ZeroDivisionError, SaveFailedError)):
            one.prepare(fail if one.rank.rank else lambda: (flat, contribution_of(flat)))

    ranks.together(prepare)
    for one in ranks.each:
        one.start_over()
        assert one.must_meet


def test_a_change_that_holds_early_makes_those_before_it_hold_as_early() -> None:
    ranks = Ranks()
    ranks.save(0)
    met = ranks.fingerprints()
    ranks.hear(1, 5, 0, 1)
    ranks.hear(2, 2, 0, 1)
    ranks.save(1)
    ranks.agree_on(n_changes=0, since=met)
    ranks.save(2)
    agreed = ranks.fingerprints()
    ranks.save(5)
    assert ranks.fingerprints() == agreed != met, "both hold from save 2 on"


def test_a_save_waits_for_a_change_that_was_announced_and_not_for_one_that_never_comes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(taken_changes, "EXPECT_S", 60.0)
    taken = TakenChanges()
    taken.expect(WORKER, 1)
    late = threading.Timer(0.05, taken.take, (WORKER, 1, 1, b"change"))
    late.start()
    try:
        assert taken.due(1) == [b"change"]
    finally:
        late.join()
    monkeypatch.setattr(taken_changes, "EXPECT_S", 0.1)
    taken.expect(WORKER, 2)
    begun = time.monotonic()
    assert taken.due(2) == [] and taken_changes.EXPECT_S <= time.monotonic() - begun < 60
    monkeypatch.setattr(taken_changes, "EXPECT_S", 600.0)
    taken.expect(WORKER, 2)
    begun = time.monotonic()
    assert taken.due(3) == [] and time.monotonic() - begun < taken_changes.EXPECT_S, "once for each"


def test_saves_that_were_taken_before_a_change_was_heard_of_that_holds_for_them_are_known() -> None:
    taken = TakenChanges()
    taken.due(7)
    assert list(taken.take(WORKER, 1, 8, b"")) == []
    assert list(taken.take(WORKER, 2, 6, b"")) == [6, 7]
    assert len(taken.take(WORKER, 3, -99, b"")) == taken_changes.MAX_MISSED
    taken.overtake([{WORKER: 4}])
    assert list(taken.take(WORKER, 4, 6, b"")) == [], "the ranks have met since"


def test_a_rank_that_took_a_save_too_early_does_not_let_the_others_wait_for_it() -> None:
    """Rank 0 has heard that the ranks meet anew in save 1; rank 1 has not, and goes on without."""
    ranks = Ranks()
    ranks.save(0)
    change = Change(contributions={}, per_rank=("name",)).encode()
    flat = flatten(STATE)
    ranks.each[1].advance(1)
    ranks.each[0].advance(1)
    ranks.each[0].forget()
    with ThreadPoolExecutor(1) as pool:
        begun = time.monotonic()
        waits = pool.submit(ranks.each[0].agree, flat, contribution_of(flat), sequence=1, path="/x", step=1)
        ranks.each[1].take_change(WORKER, 1, 1, change)
        with pytest.raises(SaveFailedError, match="before it heard"):
            waits.result(60)
    assert time.monotonic() - begun < 60
    for thread in threading.enumerate():
        if thread.name == "asyncckpt-late":
            thread.join(60)


def test_a_change_is_taken_also_where_no_thread_tells_the_others_that_this_rank_stays_away(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is taken in the session's thread, which must not end by that."""

    def refused(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    ranks = Ranks()
    ranks.save(0)
    ranks.each[1].advance(1)
    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        ranks.each[1].take_change(WORKER, 1, 1, Change(contributions={}, per_rank=("name",)).encode())
    assert "cannot be told that this one does not meet them at save/1: can't start new thread" in caplog.text


def test_a_rank_that_hears_late_of_one_that_has_not_agreed_stays_away_from_the_saves_that_it_took() -> None:
    """Rank 0 failed to agree for save 1 and meets in save 2; rank 1 took both before it heard, and meets in save 3."""
    ranks = Ranks()
    ranks.save(0)
    flat = flatten(STATE)
    ranks.each[0].forget()
    for sequence in (1, 2):
        ranks.each[1].advance(sequence)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(ranks.each[0].agree, flat, contribution_of(flat), sequence=2, path="/x", step=2)
        ranks.each[1].forget(1)
        with pytest.raises(SaveFailedError, match="before it heard"):
            waits.result(60)
    ranks.save(3)
    ranks.agree_on(n_changes=0, since=ranks.fingerprints())
    ranks.each[1].forget(1)
    assert not ranks.each[1].must_meet, "they have agreed since"
    ranks.each[1].forget(3)
    assert ranks.each[1].must_meet
    for thread in threading.enumerate():
        if thread.name == "asyncckpt-late":
            thread.join(60)

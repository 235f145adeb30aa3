"""Which save the ranks meet in: all of them come to the same, whatever each has heard, and none waits in vain."""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.distributed.meetings import Exchange, Meeting, Save, refused
from asyncckpt.distributed.run_agreement import MAX_MEETINGS_IN_A_ROW, Coordination
from asyncckpt.errors import SaveFailedError
from asyncckpt.planning.planner import contribution_of
from asyncckpt.planning.write_agreement import AssignmentKind
from asyncckpt.protocol.fields import MAX_OUTCOMES
from asyncckpt.state_dict.flatten import flatten

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
        self.rounds = 0


class InMemory(Exchange):
    def __init__(self, rank: int, rooms: dict[str, Room]) -> None:
        self.rank, self.rooms = rank, rooms
        self.counts: dict[str, Iterator[int]] = defaultdict(itertools.count)
        self.breaks_in_round = -1

    def meet_next(self, series: str, call: str, about: Save | None = None) -> Meeting:
        return InRoom(self, self.rooms.setdefault(f"{series}-{next(self.counts[series])}", Room()))

    def announce_absence(self, sequence: int, reason: str) -> None:
        raise NotImplementedError


class InRoom(Meeting):
    def __init__(self, exchange: InMemory, room: Room) -> None:
        self.exchange, self.room, self.round = exchange, room, 0

    def gather(self, payload: bytes, deadline: float) -> list[bytes]:
        room, self.round = self.room, self.round + 1
        room.given[self.exchange.rank] = payload
        try:
            room.barrier.wait()
            found = list(room.given)
            room.barrier.wait()
        except threading.BrokenBarrierError:
            raise refused(*(room.refusal or (-1, "nobody"))) from None
        if self.round == self.exchange.breaks_in_round:
            raise SaveFailedError("this rank lost the others", code="exchange")
        return found

    def refuse(self, reason: str) -> None:
        self.room.refusal = self.room.refusal or (self.exchange.rank, reason)
        self.room.barrier.abort()

    def close(self) -> None:
        pass


class Ranks:
    """Two ranks; `slots` of each. `decided`: what all of them hear of the saves so far."""

    def __init__(self, *slots: int) -> None:
        self.rooms: dict[str, Room] = {}
        self.exchanges = [InMemory(rank, self.rooms) for rank in range(WORLD_SIZE)]
        self.each = [self.made(rank, n) for rank, n in enumerate(slots or (1, 1))]

    def made(self, rank: int, slots: int) -> Coordination:
        exchange, config = self.exchanges[rank], CheckpointerConfig(slots=slots, keep_in_memory="none")
        found = Coordination(RankInfo(rank, WORLD_SIZE), config, lambda: exchange, package="1")
        found.links._worker.instance = lambda: WORKER  # type: ignore[method-assign]
        return found

    def together(self, call: Callable[[Coordination], Any]) -> list[Any]:
        with ThreadPoolExecutor(WORLD_SIZE) as pool:
            return [done.result(60) for done in [pool.submit(call, one) for one in self.each]]

    def save(self, sequence: int, *states: Any) -> list[Any]:
        """Agree as the stager does before a save; returns for each rank whether it met, or its error."""
        flats = [flatten(state) for state in states or (STATE, STATE)]

        def agree(one: Coordination) -> Any:
            assert one.awaited_save(sequence) is None
            met, flat = one.must_meet, flats[one.rank.rank]
            if not met:
                one.skip_meeting(sequence, f"/{sequence}")
                return met
            try:
                one.agree(flat, contribution_of(flat), sequence=sequence, path=f"/{sequence}", step=sequence)
            except SaveFailedError as error:
                return error
            return met

        return self.together(agree)

    def ends(self, sequence: int, *, meet: bool = False, ranks: Sequence[int] = (0, 1)) -> None:
        """These ranks hear how a save has ended."""
        for rank in ranks:
            self.each[rank].outcomes.update(self.each[rank].run_id, [(sequence, meet)])

    def prepare(self, state: Any) -> None:
        flat = flatten(state)
        self.together(lambda one: one.prepare(lambda: (flat, contribution_of(flat))))

    def agree_on(self, name: str, kind: AssignmentKind = AssignmentKind.SHARED) -> None:
        """All have the same agreement, which says so of a tensor of `MORE`."""
        assert len({one.agreement.fingerprint for one in self.each if one.agreement}) == 1
        for one in self.each:
            assert one.agreement is not None
            assert one.agreement.assignment(one.rank.rank, name, "float32", tuple(MORE[name].shape)).kind is kind


@pytest.mark.parametrize("slots", [(1, 1), (2, 2), (3, 2), (16, 16)])
def test_the_ranks_meet_as_many_saves_after_one_that_says_so_as_the_fewest_slots_of_a_rank(slots: Any) -> None:
    ranks, max_in_flight = Ranks(*slots), min(slots)
    assert ranks.save(0) == [True, True]
    for sequence in range(1, 2 + max_in_flight):
        ranks.ends(sequence - 1, meet=sequence == 2)
        assert ranks.save(sequence, MORE, MORE) == [sequence == 1 + max_in_flight] * 2
    ranks.agree_on("m")


def test_a_save_waits_for_the_outcome_that_says_whether_it_meets() -> None:
    ranks = Ranks(2, 2)
    ranks.save(0)
    assert ranks.each[0].awaited_save(1) is None, "the save before the meeting decides nothing any more"
    assert ranks.each[0].awaited_save(2) == 0
    ranks.ends(1, ranks=(0,))
    assert ranks.each[0].awaited_save(2) == 0
    ranks.ends(0, ranks=(0,))
    assert ranks.each[0].awaited_save(2) is None and not ranks.each[0].must_meet
    assert ranks.each[0].awaited_save(4) == 2


def test_what_was_said_of_saves_before_a_meeting_makes_no_other() -> None:
    ranks = Ranks(2, 2)
    ranks.save(0)
    ranks.save(1, MORE, MORE)
    for sequence in (0, 1):
        ranks.ends(sequence, meet=True)
    assert ranks.save(2, MORE, MORE) == [True, True]
    ranks.ends(2)
    assert ranks.save(3, MORE, MORE) == [False, False], "save 1 was taken before they met"
    assert ranks.save(4, MORE, MORE) == [False, False]


def test_a_rank_that_does_not_come_to_a_save_that_meets_fails_it_and_the_next_one_meets() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.ends(0, meet=True)
    ranks.each[1].refuse(1, "/1", "no slot")
    with ThreadPoolExecutor(1) as pool:
        flat = flatten(STATE)
        assert ranks.each[0].awaited_save(1) is None and ranks.each[0].must_meet
        waits = pool.submit(ranks.each[0].agree, flat, contribution_of(flat), sequence=1, path="/1", step=1)
        with pytest.raises(SaveFailedError, match="no slot") as caught:
            waits.result(60)
    assert caught.value.rank == 1
    assert ranks.save(2) == [True, True]


def test_a_rank_that_does_not_know_whether_a_save_meets_refuses_and_comes_to_the_next() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.ends(0, meet=True, ranks=(0,))
    assert ranks.each[1].awaited_save(1) == 0
    ranks.each[1].refuse(1, "/1", "it has not heard of save 0")
    flat = flatten(STATE)
    assert ranks.each[0].awaited_save(1) is None
    with pytest.raises(SaveFailedError, match="has not heard"):
        ranks.each[0].agree(flat, contribution_of(flat), sequence=1, path="/1", step=1)
    ranks.ends(0, meet=True, ranks=(1,))
    assert ranks.save(2) == [True, True]


def test_a_rank_that_does_not_come_to_a_save_that_does_not_meet_lets_nobody_wait() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.ends(0)
    for one in ranks.each:
        one.refuse(1, "/1", "no slot")
    assert not any(name.startswith(Save("/1", 1).series) for name in ranks.rooms), "no meeting was refused"
    ranks.ends(1)
    assert ranks.save(2) == [False, False]


def test_a_rank_that_is_cut_off_in_the_last_round_meets_when_the_others_hear_of_it() -> None:
    ranks = Ranks(2, 2)
    ranks.exchanges[1].breaks_in_round = 3
    met, error = ranks.save(0)
    assert met is True and isinstance(error, SaveFailedError)
    ranks.exchanges[1].breaks_in_round = -1
    met, error = ranks.save(1)
    assert met is False and "lost in the last round of a meeting" in str(error)
    for sequence in (0, 1):
        ranks.ends(sequence, meet=True)
    assert ranks.save(2) == [True, True]
    ranks.ends(2)
    assert ranks.save(3) == ranks.save(4) == [False, False]


def test_a_rank_that_is_cut_off_while_they_prepare_meets_when_the_others_hear_of_it() -> None:
    ranks = Ranks(2, 2)
    ranks.save(0)
    ranks.exchanges[1].breaks_in_round = 3
    flat = flatten(MORE)

    def prepare(one: Coordination) -> None:
        with contextlib.suppress(SaveFailedError):
            one.prepare(lambda: (flat, contribution_of(flat)))

    ranks.together(prepare)
    ranks.exchanges[1].breaks_in_round = -1
    for sequence in (1, 2):
        met, error = ranks.save(sequence)
        assert met is False and "lost in the last round of a meeting" in str(error)
        ranks.ends(sequence, meet=True)
    assert ranks.save(3) == [True, True]


N_TOLD_LATE = MAX_OUTCOMES + 6


@pytest.mark.parametrize("meet", [False, True], ids=["none of them said meet", "one of them said meet"])
def test_a_rank_that_was_told_too_late_of_many_saves_is_in_step_again_after_as_many_as_the_ranks_keep(
    meet: bool,
) -> None:
    """Its worker could not be reached while the others went on: of the saves before the latest, nobody tells it."""
    ranks = Ranks(2, 2)
    ranks.save(0)
    told = [(sequence, meet and sequence > 0) for sequence in range(N_TOLD_LATE)]
    for sequence, _ in told[1:]:
        ranks.each[1].refuse(sequence, f"/{sequence}", "its worker is not there")
    ranks.each[0].outcomes.update(ranks.each[0].run_id, told)
    ranks.each[1].outcomes.update(ranks.each[1].run_id, told[-MAX_OUTCOMES:])
    for sequence in (N_TOLD_LATE, N_TOLD_LATE + 1):
        other, error = ranks.save(sequence)
        assert isinstance(error, SaveFailedError) and "how save 0 has ended" in str(error)
        assert "how save 0 has ended" in str(other) if meet else other is False, "it does not wait for the timeout"
        ranks.ends(sequence, meet=True)
    assert ranks.save(N_TOLD_LATE + 2) == [True, True]
    ranks.ends(N_TOLD_LATE + 2)
    assert ranks.save(N_TOLD_LATE + 3) == ranks.save(N_TOLD_LATE + 4) == [False, False]


def test_a_rank_that_stays_in_doubt_refuses_until_an_outcome_says_that_the_ranks_meet() -> None:
    ranks = Ranks()
    ranks.exchanges[1].breaks_in_round = 3
    ranks.save(0)
    ranks.exchanges[1].breaks_in_round = -1
    ranks.ends(0)  # another rank had withdrawn from it before
    met, error = ranks.save(1)
    assert met is False and isinstance(error, SaveFailedError)
    ranks.ends(1, meet=True)
    assert ranks.save(2) == [True, True]


def lose_worker(ranks: Ranks) -> None:
    for one in ranks.each:
        one.outcomes.note_worker_lost()


@pytest.mark.parametrize("n_slots", [1, 3])
@pytest.mark.parametrize("first", [0, 1], ids=["the first word says meet", "the second word says meet"])
def test_ranks_that_a_dead_worker_and_its_successor_told_different_outcomes_do_not_wait_for_each_other(
    first: int, n_slots: int
) -> None:
    """Save 0 has ended; rank 0 hears of it from the worker that dies, and rank 1 from its successor."""
    ranks = Ranks(n_slots, n_slots)
    ranks.save(0)
    ranks.ends(0, meet=first == 0, ranks=(0,))
    lose_worker(ranks)
    ranks.ends(0, meet=first == 1, ranks=(1,))
    for sequence in range(1, n_slots):
        assert ranks.save(sequence) == [False, False]
        ranks.ends(sequence)
    for sequence in range(n_slots, 2 * n_slots):
        found = ranks.save(sequence)
        assert "has not reported" in str(found[first]) and found[1 - first] is False
        ranks.ends(sequence, meet=True)
    assert ranks.save(2 * n_slots) == [True, True]


@pytest.mark.parametrize("meet", [False, True])
def test_ranks_that_a_dead_worker_told_the_same_go_on_as_it_said(meet: bool) -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.ends(0, meet=meet)
    lose_worker(ranks)
    assert ranks.save(1) == [meet, meet]
    for sequence in range(2, 6):
        ranks.ends(sequence - 1)
        assert ranks.save(sequence) == [False, False]
    assert not any(name.startswith(Save("/5", 5).series) for name in ranks.rooms), (
        "some saves later nobody can expect it any more"
    )


def test_a_rank_that_has_failed_in_an_earlier_round_fails_the_meeting_of_all() -> None:
    ranks = Ranks(2, 2)
    ranks.exchanges[1].breaks_in_round = 2
    assert all(isinstance(found, SaveFailedError) for found in ranks.save(0))
    ranks.exchanges[1].breaks_in_round = -1
    assert ranks.save(1) == [True, True]


def test_ranks_of_which_one_has_another_agreement_begin_anew() -> None:
    ranks = Ranks()
    ranks.save(0, MORE, MORE)
    ranks.each[1].agreement = None
    ranks.ends(0, meet=True)
    assert ranks.save(1) == [True, True]
    ranks.agree_on("m", AssignmentKind.UNAGREED)


def test_ranks_of_one_mind_keep_what_is_not_in_the_save_they_meet_in() -> None:
    ranks = Ranks()
    ranks.save(0, MORE, MORE)
    ranks.ends(0, meet=True)
    assert ranks.save(1) == [True, True]
    ranks.agree_on("m")


def test_something_new_that_is_not_in_the_save_that_meets_makes_the_next_one_meet() -> None:
    """The ranks save two structures in turn, and the one with news never falls on a save that an outcome names."""
    ranks = Ranks()
    ranks.save(0)
    ranks.ends(0)
    assert ranks.save(1, MORE, MORE) == [False, False]
    assert all(one.is_changed(["m"]) for one in ranks.each)
    ranks.ends(1, meet=True)
    assert ranks.save(2) == [True, True]
    ranks.ends(2)
    assert ranks.save(3, MORE, MORE) == [True, True]
    ranks.agree_on("m")
    ranks.ends(3)
    assert ranks.save(4) == [False, False]


def test_something_new_that_never_comes_again_makes_only_so_many_meetings() -> None:
    ranks = Ranks()
    ranks.save(0)
    assert ranks.each[1].is_changed(["m"])
    ranks.ends(0, meet=True)
    for sequence in range(1, 2 + MAX_MEETINGS_IN_A_ROW):
        assert ranks.save(sequence) == [True, True]
        ranks.ends(sequence)
    assert ranks.save(2 + MAX_MEETINGS_IN_A_ROW) == [False, False]
    assert not ranks.each[1].is_changed(["m"]) and ranks.each[1].is_changed(["n"])


def test_a_tensor_that_was_found_to_differ_is_stored_per_rank_whichever_rank_has_heard_of_it() -> None:
    ranks = Ranks()
    ranks.save(0)
    ranks.each[1].differs("w")
    ranks.ends(0, meet=True)
    assert ranks.save(1) == [True, True]
    ranks.agree_on("w", AssignmentKind.PER_RANK)


def test_what_the_ranks_prepare_is_agreed_upon_and_the_saves_before_decide_nothing_more() -> None:
    ranks = Ranks(2, 2)
    ranks.save(0)
    ranks.save(1)
    ranks.ends(0, meet=True)
    ranks.prepare(MORE)
    ranks.ends(1, meet=True)
    assert ranks.save(2) == ranks.save(3) == [False, False]
    assert ranks.each[0].awaited_save(4) == 2


def test_a_failed_prepare_leaves_no_agreement_to_any_rank() -> None:
    ranks = Ranks()
    ranks.save(0)

    def fail() -> Any:
        raise ZeroDivisionError

    flat = flatten(MORE)

    def prepare(one: Coordination) -> None:
        with pytest.raises((ZeroDivisionError, SaveFailedError)):
            one.prepare(fail if one.rank.rank else lambda: (flat, contribution_of(flat)))

    ranks.together(prepare)
    assert ranks.save(1) == [True, True]

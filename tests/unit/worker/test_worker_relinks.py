"""Two cores of which one is replaced by another that gets the same memory: what it is told again, and what stays."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from simulated_workers import SECRET, result_of
from test_worker_links import FOLLOW, LEAD, Pair, Worker
from worker_bench import COMMIT_TIMEOUT_S, ERROR, FIRST, PATH, RUN, SECOND

from asyncckpt.errors import from_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.node_tables import BEAT_S, Outcomes, Report
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

SEALED = {"rank": 1, "world_size": 2}


class Next(Worker):
    """A worker that has taken the place of a dead one: its rank says who leads, and hands its slot over."""

    def __init__(self, rank: int, instance: str, now: float, attempt: int = 2) -> None:
        super().__init__(rank, instance)
        self.now = now
        if rank:
            self.say(m.Follow, **{**FOLLOW, "attempt": attempt})
        else:
            self.say(m.Lead, **{**LEAD, "server_secret": SECRET})

    def adopts(self, *, sealed: bool = True, **changes: Any) -> int:
        """Take the slot over in which FIRST lies, of generation 1; returns the slot's number."""
        slot = self.adopted(generation=1, ended=0)
        if sealed:
            self.read(slot, rank=self.rank, world_size=2, **changes)
        else:
            self.feed(ev.SlotRead, slot=slot, reason="OPEN", opened=True)
        return slot


@pytest.fixture
def pair() -> Pair:
    """Linked workers, each of which has its rank's part of FIRST sealed."""
    made = Pair()
    made.link()
    for worker in (made.leader, made.follower):
        made.stages(worker)
    return made


def replace_follower(pair: Pair, **changes: Any) -> None:
    pair.follower = Next(1, "c" * 16, pair.follower.now)
    pair.follower.adopts(**changes)
    pair.pump()


def replace_leader(pair: Pair) -> None:
    """Another leader comes to be; nobody has handed a slot to it yet."""
    pair.leader.said.clear()
    pair.leader = Next(0, "d" * 16, pair.leader.now)
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)


def leader_writes(pair: Pair) -> list[ac.Commit]:
    pair.leader.feed(ev.Prepared, key=(FIRST, 0))
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    return pair.leader.of(ac.Commit)


def end_of(pair: Pair, rank: int) -> Any:
    return (pair.leader, pair.follower)[rank].row()


# ---- a follower is replaced


def test_a_rank_whose_worker_died_as_it_wrote_goes_on_with_the_next_one(pair: Pair) -> None:
    replace_follower(pair)
    assert pair.leader.phase(rank=1) == "writing" and pair.leader.core.tables.find(FIRST).outcome is None
    pair.follower.feed(ev.Prepared, key=(FIRST, 1))
    pair.writes(pair.follower)
    (commit,) = leader_writes(pair)
    assert commit.remote == (1,)
    pair.leader.feed(ev.Published, save_id=FIRST)
    pair.pump()
    assert [end_of(pair, rank)["phase"] for rank in (0, 1)] == ["committed"] * 2


def test_what_was_durable_stays_so_and_the_commit_does_not_wait_for_the_next_worker(pair: Pair) -> None:
    pair.writes(pair.follower)
    replace_follower(pair)
    assert pair.leader.phase(rank=1) == "durable" and pair.follower.phase(rank=1) == "recovering"
    assert leader_writes(pair)


def test_nothing_is_told_of_a_slot_before_its_rank_has_said_whom_to_follow(pair: Pair) -> None:
    pair.follower = Worker(1, "c" * 16)
    pair.follower.core.tables.runs.clear()
    slot = Next.adopts(pair.follower)  # type: ignore[arg-type]
    pair.follower.feed(ev.Prepared, key=(FIRST, 1))
    assert not pair.follower.said and slot
    pair.follower.say(m.Follow, **{**FOLLOW, "attempt": 2})
    pair.pump()
    pair.writes(pair.follower)
    assert pair.leader.phase(rank=1) == "durable"


def test_a_rank_that_nobody_goes_on_with_ends_its_save_when_it_says_so(pair: Pair) -> None:
    pair.follower = Next(1, "c" * 16, 0.0)
    pair.follower.say(m.Withdraw, save_id=FIRST, reason="the worker that had it was lost", skipped=False)
    pair.pump()
    assert end_of(pair, 0)["error"]["fields"]["code"] == "worker_lost"


def test_a_durable_rank_whose_worker_is_not_replaced_in_its_save_costs_nothing(pair: Pair) -> None:
    pair.writes(pair.follower)
    pair.follower = Next(1, "c" * 16, 0.0)
    pair.follower.say(m.Withdraw, save_id=FIRST, reason="the worker that had it was lost", skipped=False)
    pair.pump()
    assert leader_writes(pair)


def test_nobody_knows_how_a_save_ends_that_was_taken_over_when_the_leader_is_silent(pair: Pair) -> None:
    pair.follower = Next(1, "c" * 16, 0.0)
    pair.follower.adopts()
    pair.follower.feed(ev.Prepared, key=(FIRST, 1))
    pair.follower.now += 1.1 * COMMIT_TIMEOUT_S
    pair.follower.feed(ev.Tick)
    (row,) = pair.follower.pushed()
    assert row["phase"] == "unknown", "the dead worker may have told the leader all that it needs"
    assert not pair.follower.of(ac.Remove)


# ---- the leader is replaced


@pytest.mark.parametrize("first", ["leader", "follower"])
def test_the_next_leader_hears_everything_again_and_commits(pair: Pair, first: str) -> None:
    pair.writes(pair.follower)
    pair.leader = Next(0, "d" * 16, 0.0)
    if first == "leader":
        pair.leader.adopts()
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    if first == "follower":
        pair.leader.adopts()
    assert pair.follower.phase(rank=1) == "durable"
    pair.leader.feed(ev.Prepared, key=(FIRST, 1))
    (commit,) = leader_writes(pair)
    assert commit.remote == (1,) and commit.results == (result_of(FIRST, 0), result_of(FIRST, 1))
    pair.leader.feed(ev.Published, save_id=FIRST)
    pair.pump()
    assert [end_of(pair, rank)["phase"] for rank in (0, 1)] == ["committed"] * 2


def test_what_the_dead_leader_had_committed_is_found_before_anything_ends_it(pair: Pair) -> None:
    pair.writes(pair.follower)
    replace_leader(pair)  # whose own rank has not come
    part = pair.leader.core.tables.saves[FIRST].ranks[1]
    assert part.preparing and part.phase == "recovering"
    pair.follower.feed(ev.Died, session=f"{1:016x}")
    pair.follower.feed(ev.SlotRead, slot=1, reason="SEALED")
    pair.pump(1.1 * COMMIT_TIMEOUT_S)
    assert pair.leader.core.tables.find(FIRST).outcome is None
    pair.leader.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    pair.leader.adopts()
    assert pair.leader.phase() == "committed"


def test_what_is_given_up_while_it_may_be_committed_is_found_to_be_committed(pair: Pair) -> None:
    pair.writes(pair.follower)
    pair.follower = Next(1, "c" * 16, 0.0)
    pair.follower.adopts()
    pair.follower.feed(ev.Prepared, key=(FIRST, 1), error=ERROR)
    pair.leader = Next(0, "d" * 16, 0.0)
    pair.pump(BEAT_S)
    assert pair.leader.phase(rank=1) == "recovering"
    pair.leader.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    pair.pump()
    assert end_of(pair, 1)["phase"] == "committed"


def test_what_a_rank_had_given_up_is_given_up_with_the_next_leader(pair: Pair) -> None:
    pair.follower.feed(ev.Written, key=(FIRST, 1), error=ERROR)
    pair.follower.said.clear()
    replace_leader(pair)
    pair.leader.adopts()
    pair.leader.feed(ev.Prepared, key=(FIRST, 1))
    pair.pump()
    assert [end_of(pair, rank)["error"]["text"] for rank in (0, 1)] == [ERROR["text"]] * 2


def test_consents_and_refusals_of_hooks_are_told_again(pair: Pair) -> None:
    made = Pair()
    made.link()
    for worker in (made.leader, made.follower):
        made.stages(worker, hook_timeout_s=1000.0 * worker.rank)
    made.writes(made.follower)
    made.follower.say(m.Consent, save_id=FIRST, granted=False, reason="the loss is NaN")
    made.follower.said.clear()
    replace_leader(made)
    made.leader.feed(ev.Prepared, key=(FIRST, 1))
    made.pump()
    assert end_of(made, 1)["error"]["fields"]["code"] == "vetoed"


def test_a_rank_that_has_left_or_declined_is_not_waited_for_by_the_next_leader(pair: Pair) -> None:
    made = Pair()
    made.link()
    made.follower.say(m.Withdraw, save_id=FIRST, reason="out of luck", skipped=False)
    made.pump()
    replace_leader(made)
    made.leader.begin(1)
    assert made.leader.phase() == "abandoned"
    pair.follower.feed(ev.Died, session=f"{1:016x}")
    pair.follower.feed(ev.SlotRead, slot=1, reason="SEALED")
    pair.pump()
    replace_leader(pair)
    pair.leader.begin(1, SECOND)
    assert pair.leader.phase(SECOND) == "abandoned" and pair.leader.phase(FIRST, 1) == "recovering"


def test_the_epoch_is_asked_for_again() -> None:
    pair = Pair()
    pair.link()
    pair.follower.say(m.Lineage, run=RUN, path=PATH, least_epoch=0)
    pair.pump()
    replace_leader(pair)
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, epoch=7)
    pair.pump()
    assert [said.epoch for said in pair.heard[1] if isinstance(said, m.LineageFound)] == [7]


def test_what_is_said_to_another_follower_counts_for_silence(pair: Pair) -> None:
    for n in range(12):
        pair.follower.now += 0.1 * COMMIT_TIMEOUT_S
        said = Outcomes(
            sender="a" * 16, counter=100 + n, to="9" * 16, saves=(), epochs=(), decided=(), gone=(), error={}
        )
        pair.follower.feed(ev.Relayed, run=RUN, route=b"", message=said)
        pair.follower.feed(ev.Tick)
    assert end_of(pair, 1)["error"]["fields"]["code"] == "leader_lost"


def test_what_a_replaced_leader_had_said_comes_late_and_is_not_heard(pair: Pair) -> None:
    replace_leader(pair)
    said = Outcomes(sender="a" * 16, counter=100, to="b" * 16, saves=(), epochs=(), decided=(), gone=(), error={})
    pair.follower.feed(ev.Relayed, run=RUN, route=b"", message=said)
    assert pair.follower.core.tables.runs[RUN].leader == "d" * 16


def test_a_part_of_two_dead_workers_is_not_ended_by_a_leader_that_does_not_know_it(pair: Pair) -> None:
    pair.writes(pair.follower)
    assert leader_writes(pair), "and the leader commits, tells its rank, and dies"
    leader, follower = Next(0, "d" * 16, 0.0), Next(1, "c" * 16, 0.0)
    pair.leader, pair.follower = leader, follower
    pair.pump(BEAT_S)
    leader.say(m.Withdraw, save_id=FIRST, reason="the worker that had it was lost", skipped=False)
    follower.adopts()
    lost = [relay.message for relay in follower.said if isinstance(relay.message, Report)]
    follower.said.clear()
    assert [message.parts for message in lost]
    page = replace(lost[-1], parts=(), counter=lost[-1].counter + 10)
    leader.feed(ev.Relayed, run=RUN, route=b"r", message=page)
    leader.now += BEAT_S
    leader.feed(ev.Tick)
    rows = [row for relay in leader.said for row in relay.message.saves]
    assert [row["outcome"] for row in rows] == ["abandoned"], "it knows only that its own rank gives it up"
    for relay in leader.said:
        follower.feed(ev.Relayed, run=RUN, route=b"", message=relay.message)
    leader.said.clear()
    assert follower.phase(rank=1) == "recovering"
    follower.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    assert follower.phase(rank=1) == "committed"


@pytest.mark.parametrize("ended_by", ["another address", "silence"])
@pytest.mark.parametrize("known", ["nothing", "all parts"])
def test_the_next_leader_does_not_wait_for_a_rank_that_has_ended_as_unknown(
    pair: Pair, ended_by: str, known: str
) -> None:
    if known == "all parts":
        pair.writes(pair.follower)
    else:  # its report is lost
        pair.follower.feed(ev.Written, key=(FIRST, 1), result=result_of(FIRST, 1))
    leader = Next(0, "d" * 16, pair.follower.now)
    if ended_by == "silence":
        pair.follower.now += 1.1 * COMMIT_TIMEOUT_S
        pair.follower.feed(ev.Tick)
        leader.now = pair.follower.now
    else:
        pair.follower.say(m.Follow, **{**FOLLOW, "attempt": 2, "address": "tcp://second:7000"})
    assert pair.follower.phase(rank=1) == "unknown"
    pair.leader.said.clear()
    pair.follower.said.clear()
    pair.leader = leader
    leader.adopts()
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert leader.phase() == "recovering", "the dead leader may have committed it"
    leader.feed(ev.Prepared, key=(FIRST, 0))
    for _ in range(3):
        pair.pump(BEAT_S)
    assert leader.phase() == "failed" and pair.follower.phase(rank=1) == "unknown"
    assert leader.row()["error"]["fields"]["code"] == "leader_lost"
    assert "nothing was published" in leader.row()["error"]["text"]


# ---- nobody leads


@pytest.mark.parametrize("said", [True, False])
def test_a_leader_that_is_lost_is_told_with_the_ranks_that_are_missing(said: bool) -> None:
    pair = Pair()
    pair.link()
    if not said:
        pair.pump = lambda seconds=0.0: []  # type: ignore[method-assign]
    pair.stages(pair.follower, commit_timeout_s=30.0)
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    (row,) = pair.follower.pushed()
    assert row["error"]["fields"]["missing_ranks"] == [0]
    assert ("it waited for ranks [0]" if said else "ranks [0] have other workers") in row["error"]["text"]


def test_nobody_is_missing_of_whom_the_lost_leader_had_said_that_it_waits_for_none(pair: Pair) -> None:
    pair.writes(pair.follower)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    pair.pump(BEAT_S)
    pair.follower.now += 1.1 * COMMIT_TIMEOUT_S
    pair.follower.feed(ev.Tick)
    (row,) = pair.follower.pushed()
    assert row["phase"] == "unknown" and row["error"]["fields"]["missing_ranks"] == []


# ---- what another worker may know


def recovers(pair: Pair, leader: Worker) -> None:
    """Let another leader hear of the follower's part, which the dead one had heard of too."""
    pair.leader = leader
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert leader.core.tables.saves[FIRST].ranks[1].phase == "recovering"


@pytest.mark.parametrize("is_committed", [True, False])
@pytest.mark.parametrize("lost", ["", "parts"])
def test_what_rank_0_gives_up_with_another_leader_is_looked_for_before_it_ends(
    pair: Pair, lost: str, is_committed: bool
) -> None:
    pair.writes(pair.follower)
    assert leader_writes(pair)
    pair.leader = leader = Next(0, "d" * 16, pair.leader.now)  # rank 0 has not handed over what it had sealed
    leader.say(m.Withdraw, save_id=FIRST, reason="the worker that had it was lost", skipped=False)
    pair.pump(BEAT_S)
    if lost:  # of a table of several pages the one with its parts
        pair.follower.said.clear()
        pair.follower.now += BEAT_S
        pair.follower.feed(ev.Tick)
        for relay in pair.follower.said:
            page = replace(relay.message, parts=(), counter=relay.message.counter + 10)
            leader.feed(ev.Relayed, run=RUN, route=b"r", message=page)
        pair.follower.said.clear()
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert pair.follower.phase(rank=1) == "durable" and not pair.follower.of(ac.Remove)
    pair.pump(20 * BEAT_S)
    assert leader.core.tables.saves[FIRST].ranks[1].phase == "recovering"
    leader.feed(ev.Prepared, key=(FIRST, 1), committed=is_committed)
    pair.pump(BEAT_S)
    assert end_of(pair, 1)["phase"] == ("committed" if is_committed else "failed")


@pytest.mark.parametrize("error", [None, ERROR])
def test_a_save_that_was_looked_for_in_vain_ends_by_what_was_kept(pair: Pair, error: Any) -> None:
    leader = Next(0, "d" * 16, pair.leader.now)
    recovers(pair, leader)
    leader.say(m.Withdraw, save_id=FIRST, reason="it had failed", skipped=False)
    leader.feed(ev.Prepared, key=(FIRST, 1), error=error)
    assert leader.core.tables.find(FIRST).outcome is not None


def test_a_leader_that_comes_back_does_not_wait_for_a_rank_that_has_ended_as_unknown(pair: Pair) -> None:
    pair.follower = Next(1, "c" * 16, 0.0)
    pair.follower.adopts()
    pair.pump()
    pair.follower.now = 1.1 * COMMIT_TIMEOUT_S
    pair.follower.feed(ev.Tick)  # the leader was silent, but for what is on its way
    assert pair.follower.pushed()[-1]["phase"] == "unknown"
    leader_writes(pair)
    for _ in range(11):
        pair.pump(0.1 * COMMIT_TIMEOUT_S)
    assert pair.leader.core.tables.find(FIRST).outcome == "failed"


def test_a_follower_leaves_it_to_the_leader_whether_a_gone_ranks_hook_has_spoken() -> None:
    pair = Pair()
    pair.link()
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    pair.follower.say(m.Consent, save_id=FIRST, granted=True, reason="")
    pair.pump()
    pair.follower = Next(1, "c" * 16, 0.0)
    slot = pair.follower.adopts(hook_timeout_s=1000.0)
    pair.follower.feed(ev.Died, session=f"{1:016x}")
    pair.follower.feed(ev.SlotRead, slot=1, reason="OPEN")
    pair.follower.read(slot, **SEALED, hook_timeout_s=1000.0)
    assert pair.follower.core.tables.runs[RUN].departed
    pair.follower.feed(ev.Prepared, key=(FIRST, 1))
    pair.pump()
    assert leader_writes(pair)


@pytest.mark.parametrize("refused", [True, False])
def test_a_worker_that_cannot_follow_does_not_end_as_failed_what_its_leader_may_commit(refused: bool) -> None:
    worker = Worker(1, "c" * 16)
    worker.core.tables.runs.clear()
    if refused:
        worker.resources.no_socket = from_wire(ERROR)
        worker.say(m.Follow, **{**FOLLOW, "attempt": 2})
    Next.adopts(worker)  # type: ignore[arg-type]
    worker.feed(ev.Prepared, key=(FIRST, 1))
    worker.feed(ev.Written, key=(FIRST, 1), result=result_of(FIRST, 1))
    worker.now += 1.1 * COMMIT_TIMEOUT_S
    worker.feed(ev.Tick)
    assert worker.phase(rank=1) == ("unknown" if refused else "failed")
    assert bool(worker.of(ac.Remove)) != refused


@pytest.mark.parametrize("speaks", ["before", "after"])
def test_the_outcome_of_a_save_that_a_follower_has_found_committed_is_told_where_no_leader_knows_it(
    pair: Pair, speaks: str
) -> None:
    pair.writes(pair.follower)
    # Rank 0 was told that it is committed, and its worker has died; so has that of rank 1, which was told nothing.
    pair.leader, pair.follower = Next(0, "d" * 16, 0.0), Next(1, "c" * 16, 0.0)
    pair.follower.adopts()
    if speaks == "before":
        pair.pump(BEAT_S)
    pair.follower.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    pair.heard[1].clear()
    for _ in range(3):
        pair.pump(BEAT_S)
    told = [said.outcomes for said in pair.heard[1] if isinstance(said, m.Saves)]
    assert ((0, False),) in told

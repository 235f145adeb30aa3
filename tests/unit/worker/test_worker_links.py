"""Two of_core, one step at a time: who may lead and follow, what is asked through, and what each hears of the other."""

from __future__ import annotations

import gc
import tracemalloc
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from simulated_workers import KEY, SECRET, result_of
from worker_bench import (
    COMMIT_TIMEOUT_S,
    CONFIG,
    ERROR,
    FIRST,
    OTHER_RUN,
    PATH,
    REQUEST,
    RUN,
    Bench,
    code,
)

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.errors import from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.node_tables import BEAT_S, Outcomes, Report
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import sessions
from asyncckpt_worker.core.actions import Listener
from asyncckpt_worker.core.model import MAX_DIRECTORIES
from asyncckpt_worker.core.nodes import leader as leader_module
from asyncckpt_worker.core.nodes.leader import FORGET_S

ADDRESS = "tcp://first:7000"
FOLLOW = {"run": RUN, "address": ADDRESS, "server_public": KEY, "client_public": KEY, "client_secret": SECRET}
FOLLOW |= {"attempt": 1, "timeout_s": 5.0}
LEAD = {"run": RUN, "port": 0, "server_secret": "", "client_public": KEY}


class Worker(Bench):
    """A core with a rank of two, whose peer is b"p" and whose slot is 1. `said`: to other workers, not sent yet."""

    def __init__(self, rank: int, instance: str, world_size: int = 2) -> None:
        super().__init__(replace(CONFIG, instance=instance))
        self.resources.listener = Listener(address=ADDRESS, public=KEY, secret=SECRET)
        self.rank = rank
        self.said: list[ac.Relay] = []
        self.hello(b"p", f"{rank:016x}", rank, world_size)
        self.slot(b"p")

    def feed(self, kind: Any, **fields: Any) -> list[Any]:
        actions = super().feed(kind, **fields)
        self.said += [a for a in actions if isinstance(a, ac.Relay)]
        return actions


class Pair:
    """A worker that leads and one that follows, and what they have told their ranks."""

    def __init__(self) -> None:
        self.leader, self.follower = Worker(0, "a" * 16), Worker(1, "b" * 16)
        self.heard: dict[int, list[Any]] = {0: [], 1: []}

    def link(self) -> Any:
        self.leader.say(m.Lead, **LEAD)
        self.follower.say(m.Follow, **FOLLOW)
        return self.pump()

    def pump(self, seconds: float = 0.0) -> list[Any]:
        """Carry everything that the workers say, after some time; returns what was sent to ranks."""
        for worker in (self.leader, self.follower):
            worker.now += seconds
            worker.feed(ev.Tick)
            self._note(worker)
        for _ in range(20):
            for here, there in ((self.leader, self.follower), (self.follower, self.leader)):
                said, here.said = here.said, []
                for relay in said:
                    route = b"" if relay.route else b"r"
                    there.feed(ev.Relayed, run=relay.run, route=route, message=relay.message)
                    self._note(there)
        return [*self.heard[0], *self.heard[1]]

    def _note(self, worker: Worker) -> None:
        self.heard[worker.rank] += [a.message for a in worker.of(ac.Send)]

    def stages(self, worker: Worker, hook_timeout_s: float = 0, mirror: str = "", **changes: Any) -> None:
        worker.begin(1, **changes)
        worker.feed(ev.Prepared, key=(FIRST, worker.rank))
        worker.submit(1)
        worker.read(1, rank=worker.rank, world_size=2, hook_timeout_s=hook_timeout_s, mirror=mirror, **changes)
        self.pump()

    def writes(self, worker: Worker) -> None:
        worker.feed(ev.Written, key=(FIRST, worker.rank), result=result_of(FIRST, worker.rank), report={"nbytes": 3})
        self.pump()

    def phases(self, save_id: str) -> list[str | None]:
        return [worker.phase(save_id, worker.rank) for worker in (self.leader, self.follower)]

    def rows(self, rank: int) -> list[Any]:
        return [row for said in self.heard[rank] if isinstance(said, m.Saves) for row in said.saves]


@pytest.fixture
def pair() -> Pair:
    """Linked workers."""
    made = Pair()
    assert m.Following in [type(said) for said in made.link()]
    return made


# ---- who leads, who follows


def test_lead_listens_once_and_says_where() -> None:
    leader = Worker(0, "a" * 16)
    first = leader.say(m.Lead, **LEAD)
    assert leader.asked("listen") == [(0, "")]
    again = leader.say(m.Lead, **LEAD)
    assert isinstance(first, m.Leading) and not leader.asked("listen")
    assert replace(again, id=0) == replace(first, id=0)
    assert leader.core.run_of_key(KEY) == RUN and leader.core.run_of_key(SECRET) is None


def test_a_port_that_is_taken_is_refused_and_tried_again() -> None:
    leader = Worker(0, "a" * 16)
    leader.resources.no_socket = from_wire(ERROR)
    assert code(leader.say(m.Lead, **LEAD)) == "save_failed"
    leader.resources.no_socket = None
    assert isinstance(leader.say(m.Lead, **LEAD), m.Leading)


def test_follow_is_answered_when_the_leader_has_spoken() -> None:
    pair = Pair()
    assert pair.follower.say(m.Follow, **FOLLOW) is None
    assert [c.address for c in pair.follower.asked("connect")] == [ADDRESS]
    assert not [said for said in pair.heard[1] if isinstance(said, m.Following)]
    pair.link()
    assert {said.leader for said in pair.heard[1] if isinstance(said, m.Following)} == {"a" * 16}


def test_follow_is_refused_when_nobody_answers_in_time() -> None:
    follower = Worker(1, "b" * 16)
    follower.say(m.Follow, **FOLLOW)
    follower.now = 5.0
    follower.feed(ev.Tick)
    (refused,) = [a.message for a in follower.of(ac.Send)]
    assert code(refused) == "worker_unavailable" and "--advertise" in refused.error["text"]


def test_follow_is_refused_at_once_where_there_can_be_no_connection() -> None:
    follower = Worker(1, "b" * 16)
    follower.resources.no_socket = from_wire(ERROR)
    assert code(follower.say(m.Follow, **FOLLOW)) == "save_failed"
    assert not follower.core.tables.runs[RUN].followed


def test_a_worker_does_not_lead_what_it_follows_nor_follow_what_it_leads(pair: Pair) -> None:
    assert code(pair.follower.say(m.Lead, **LEAD)) == "protocol"
    assert code(pair.leader.say(m.Follow, **FOLLOW)) == "protocol"


def test_a_follower_speaks_for_the_run_of_its_key_only(pair: Pair) -> None:
    pair.follower.begin(1)
    (told,) = pair.follower.said
    pair.leader.say(m.Lead, **{**LEAD, "run": OTHER_RUN, "client_public": SECRET})
    counts = counted(pair.leader, ev.Relayed, run=OTHER_RUN, route=b"x", message=told.message)
    assert "protocol_errors" in counts and pair.leader.core.tables.find(FIRST) is None
    pair.leader.feed(ev.Relayed, run="d" * 12, route=b"x", message=told.message)
    assert not pair.leader.of(ac.Relay), "nobody has led such a run"


def counted(worker: Worker, kind: Any, **fields: Any) -> list[str | None]:
    """Feed an event; returns what was counted for it."""
    actions = worker.core.handle(kind(now=worker.now, **fields))
    worker.said += [a for a in actions if isinstance(a, ac.Relay)]
    return [a.count for a in actions if isinstance(a, ac.Log)]


# ---- a save


def test_a_rank_of_a_follower_is_written_there_and_committed_here(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker)
        assert worker.phase(rank=worker.rank) == "writing"
    assert pair.leader.phase(rank=1) == "writing" and pair.follower.phase(rank=0) is None
    pair.writes(pair.follower)
    assert pair.leader.phase(rank=1) == "durable"
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    (commit,) = pair.leader.of(ac.Commit)
    assert commit.remote == (1,) and commit.results == (result_of(FIRST, 0), result_of(FIRST, 1))
    pair.leader.feed(ev.Published, save_id=FIRST, report={"seconds_commit": 0.5})
    pair.pump()
    assert pair.follower.phase(rank=1) == "committed"
    assert pair.rows(1)[-1]["report"]["seconds_commit"] == 0.5


MIRROR = "s3://bucket/run/step-5"


def fails_its_copy(pair: Pair) -> None:
    """Commit a save with a mirror, whose copy the leader gives up."""
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, mirror=MIRROR)
        pair.writes(worker)
    pair.leader.feed(ev.Published, save_id=FIRST)
    pair.leader.feed(ev.UnmirroredFound, root="/ckpt")
    pair.leader.feed(ev.Copied, save_id=SaveId.parse(FIRST), error=ERROR, is_final=True)


def asked(worker: Worker) -> tuple[str, Any]:
    """Return what a rank is told about the copy."""
    answer = worker.say(m.Mirror, save_id=FIRST, path=PATH, mirror=MIRROR)
    return answer.phase, dict(answer.error)


@pytest.mark.parametrize("asks", ["before", "after"])
def test_a_copy_that_failed_for_good_is_told_to_the_ranks_of_other_nodes(pair: Pair, asks: str) -> None:
    if asks == "before":
        assert asked(pair.follower)[0] == "copying", "it looks for the mirror record"
        pair.follower.feed(ev.Copied, save_id=SaveId.parse(FIRST))
    fails_its_copy(pair)
    pair.pump()
    assert asked(pair.leader) == asked(pair.follower) == ("failed", dict(ERROR))
    assert pair.phases(FIRST) == ["committed", "committed"], "the save itself is not harmed"


def test_a_failed_copy_is_told_again_until_it_arrives_and_to_the_next_follower(pair: Pair) -> None:
    fails_its_copy(pair)
    pair.leader.said.clear()  # lost
    pair.pump()
    assert asked(pair.follower)[0] == "copying"
    pair.pump(BEAT_S)
    assert asked(pair.follower) == ("failed", dict(ERROR))
    pair.follower = Worker(1, "c" * 16)
    pair.follower.say(m.Follow, **{**FOLLOW, "attempt": 2})
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert asked(pair.follower) == ("failed", dict(ERROR))


def test_the_epoch_is_asked_through_and_an_error_told_there(pair: Pair) -> None:
    assert pair.follower.say(m.Lineage, run=RUN, path=PATH, least_epoch=0) is None
    pair.pump()
    assert not pair.follower.of(ac.ScanLineage)
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, error=ERROR)
    pair.pump()
    assert [code(said) for said in pair.heard[1] if isinstance(said, m.Refused)] == ["save_failed"]
    pair.follower.say(m.Lineage, run=RUN, path=PATH, least_epoch=0)
    pair.pump()
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, epoch=7)
    pair.pump()
    assert [said.epoch for said in pair.heard[1] if isinstance(said, m.LineageFound)] == [7]
    assert pair.follower.say(m.Lineage, run=RUN, path="/ckpt/next", least_epoch=0) == m.LineageFound(
        id=pair.follower.ids, epoch=7
    )
    assert pair.leader.say(m.Lineage, run=RUN, path=PATH, least_epoch=0).epoch == 7


def test_an_epoch_that_becomes_larger_is_not_told_before_it_is_found(pair: Pair) -> None:
    def asks(worker: Worker, **changes: Any) -> Any:
        answer = worker.say(m.Lineage, **{"run": RUN, "path": PATH, "least_epoch": 0, **changes})
        pair.pump()
        return answer

    def told() -> list[int]:
        return [said.epoch for said in pair.heard[1] if isinstance(said, m.LineageFound)]

    asks(pair.follower)
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, epoch=1)
    pair.pump()
    assert told() == [1]
    asks(pair.follower, least_epoch=4)
    assert len(pair.leader.of(ac.ScanLineage)) == 1 and told() == [1]
    pair.pump(BEAT_S)
    assert told() == [1]
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, epoch=2)
    pair.pump()
    assert told() == [1, 4]
    assert asks(pair.follower, least_epoch=4).epoch == 4, "its worker knows it"
    assert asks(pair.leader, least_epoch=6) is None
    pair.leader.feed(ev.LineageScanned, run=RUN, path=PATH, epoch=2)
    pair.pump(BEAT_S)
    assert asks(pair.follower).epoch == 6


@pytest.mark.parametrize("is_ring", [False, True])
def test_a_failure_at_the_follower_ends_the_save_on_both_with_one_error(pair: Pair, is_ring: bool) -> None:
    if is_ring:
        fills_a_ring(pair)
    else:
        for worker in (pair.leader, pair.follower):
            pair.stages(worker)
    before = phases(pair)
    pair.follower.feed(ev.Written, key=(FIRST, 1), error=ERROR)
    assert phases(pair) == before, "the leader has not spoken"
    pair.pump()
    zero, one = pair.rows(0)[-1], pair.rows(1)[-1]
    assert zero["phase"] == one["phase"] == "failed" and zero["error"]["text"] == one["error"]["text"] == ERROR["text"]


@pytest.mark.parametrize("how", ["death", "withdrawal"])
def test_a_rank_of_the_follower_that_will_not_come_ends_the_save_here(pair: Pair, how: str) -> None:
    pair.stages(pair.leader)
    if how == "death":
        pair.follower.feed(ev.Died, session=f"{1:016x}")
        pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    else:
        pair.follower.say(m.Withdraw, save_id="000000" + FIRST[6:], reason="out of luck", skipped=False)
    pair.pump()
    fields = pair.rows(0)[-1]["error"]["fields"]
    assert fields["rank"] == 1 and fields["code"] == ("not_sealed" if how == "death" else "withdrawn")


def test_a_rank_is_gone_only_once_the_leader_has_what_it_sealed(pair: Pair) -> None:
    pair.stages(pair.leader)
    pair.follower.begin(1)
    pair.pump()
    pair.follower.feed(ev.Prepared, key=(FIRST, 1))
    pair.follower.submit(1)
    pair.follower.read(1, rank=1, world_size=2)
    pair.follower.said.clear()  # what says that it is sealed is lost
    pair.follower.feed(ev.Died, session=f"{1:016x}")
    pair.follower.feed(ev.SlotRead, slot=1, reason="SEALED")
    pair.pump()
    assert phases(pair) == ("writing", "open") and not pair.leader.core.tables.runs[RUN].departed
    pair.pump(BEAT_S)
    assert phases(pair) == ("writing", "writing") and list(pair.leader.core.tables.runs[RUN].departed) == [1]
    pair.writes(pair.follower)
    assert phases(pair) == ("writing", "durable")


def test_a_save_ends_once_whatever_is_told_later(pair: Pair) -> None:
    pair.stages(pair.leader)
    pair.stages(pair.follower)
    pair.leader.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    pair.pump()
    assert pair.follower.phase(rank=1) == "failed" and FIRST in pair.follower.core.tables.saves, "a job is under way"
    row = {"save_id": FIRST, "outcome": "committed", "error": {}, "report": {}, "missing": (), "known": ()}
    told = Outcomes(sender="a" * 16, counter=99, to="b" * 16, saves=(row,), epochs=(), decided=(), gone=(), error={})
    assert "saves_committed" not in counted(pair.follower, ev.Relayed, run=RUN, route=b"", message=told)
    assert pair.follower.phase(rank=1) == "failed" and pair.follower.core.tables.find(FIRST).outcome == "failed"


# ---- silence


def test_a_leader_that_is_silent_costs_the_save_whose_ranks_are_not_durable(pair: Pair) -> None:
    pair.stages(pair.follower, commit_timeout_s=30.0)
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    (row,) = pair.follower.pushed()
    assert row["phase"] == "failed" and row["error"]["fields"]["code"] == "leader_lost"


def test_nobody_knows_when_a_leader_is_silent_that_had_all_it_needs(pair: Pair) -> None:
    pair.stages(pair.follower, commit_timeout_s=30.0)
    pair.writes(pair.follower)
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    (row,) = pair.follower.pushed()
    assert row["phase"] == "unknown" and row["error"]["code"] == "commit_unknown"
    assert not pair.follower.of(ac.Remove), "it may have been committed"


@pytest.mark.parametrize("while_it", ["writes", "waits for a hook", "writes a ring"])
def test_a_follower_that_is_silent_is_named(pair: Pair, while_it: str) -> None:
    if while_it == "writes a ring":
        fills_a_ring(pair, commit_timeout_s=30.0)
    else:
        for worker in (pair.leader, pair.follower):
            hook_s = 1000.0 * worker.rank if while_it == "waits for a hook" else 0
            pair.stages(worker, commit_timeout_s=30.0, hook_timeout_s=hook_s)
    if while_it == "waits for a hook":
        pair.writes(pair.follower)
        pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    pair.pump(20.0)
    pair.leader.now += 29.0
    pair.leader.feed(ev.Tick)
    assert pair.leader.core.tables.find(FIRST).outcome is None, "it was heard 29 s ago"
    pair.leader.now += 2.0  # its rank may have died, and who was to tell of it takes the leader for gone
    pair.leader.feed(ev.Tick)
    (row,) = pair.leader.pushed()
    assert row["error"]["code"] == "commit_timeout" and list(row["error"]["fields"]["missing_ranks"]) == [1]


def fills_a_ring(pair: Pair, **changes: Any) -> None:
    """The leader's rank has sealed, and the follower's fills a ring, which is written there."""
    pair.stages(pair.leader, **changes)
    worker = pair.follower
    worker.begin(1, **changes)
    worker.feed(ev.Prepared, key=(FIRST, 1))
    worker.submit(1)
    reads_the_ring(pair, streamed=True)
    assert len(worker.of(ac.Write)) == 1
    pair.pump()


def reads_the_ring(pair: Pair, *, streamed: bool) -> None:
    request = replace(REQUEST, rank=1, world_size=2, ring_segments=4, ring_segment_nbytes=1 << 18)
    pair.follower.feed(ev.SlotRead, slot=1, generation=1, request=request, streamed=streamed, opened=streamed)


def phases(pair: Pair) -> tuple[str | None, str | None]:
    return pair.leader.phase(rank=0), pair.leader.phase(rank=1)


def test_a_ring_that_a_follower_writes_is_waited_for_though_another_rank_has_sealed_long_ago(pair: Pair) -> None:
    fills_a_ring(pair)
    for _ in range(20):
        pair.pump(0.5 * COMMIT_TIMEOUT_S)
    assert phases(pair) == ("writing", "open")
    pair.writes(pair.follower)
    for _ in range(9):
        pair.pump(0.1 * COMMIT_TIMEOUT_S)
    assert phases(pair) == ("writing", "open")
    pair.follower.submit(1)
    reads_the_ring(pair, streamed=False)
    pair.pump()
    assert phases(pair) == ("writing", "durable")


def test_a_ring_that_a_follower_has_written_is_waited_for_commit_timeout_s(pair: Pair) -> None:
    fills_a_ring(pair)
    pair.pump(0.9 * COMMIT_TIMEOUT_S)
    pair.pump(0.9 * COMMIT_TIMEOUT_S)
    pair.writes(pair.follower)
    pair.pump(1.1 * COMMIT_TIMEOUT_S)
    assert phases(pair) == ("failed", "failed")
    error = pair.rows(0)[-1]["error"]
    assert error["code"] == "commit_timeout" and list(error["fields"]["missing_ranks"]) == [1]


def test_a_follower_that_is_gone_for_good_is_forgotten(pair: Pair) -> None:
    pair.leader.now += FORGET_S + 1
    pair.leader.feed(ev.Tick)
    assert set(pair.leader.core.tables.sessions) == {f"{0:016x}"} and not pair.leader.core.tables.last_message_at


def test_a_living_follower_that_was_forgotten_is_heard_at_once_when_it_is_back(pair: Pair) -> None:
    for _ in range(100):
        pair.pump(BEAT_S)
    for worker in (pair.leader, pair.follower):  # the network is cut
        for _ in range(int(FORGET_S / BEAT_S) + 2):
            worker.now += BEAT_S
            worker.feed(ev.Tick)
        worker.said.clear()
    assert not pair.leader.core.report()["followers"]
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    for name, worker in (("followers", pair.leader), ("followed", pair.follower)):
        (row,) = worker.core.report()[name]
        assert row["silent_s"] < 2 * BEAT_S, name


def test_a_rank_that_leaves_a_run_and_comes_back_is_known_to_the_leader_at_once(pair: Pair) -> None:
    for _ in range(100):
        pair.pump(BEAT_S)
    pair.follower.say(m.Goodbye)
    pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert not pair.follower.core.report()["followed"], "nobody saves in that run here"
    pair.follower.hello(b"q", "9" * 16, 1, 2)
    pair.follower.say(m.Follow, b"q", **FOLLOW)
    pair.pump(BEAT_S)
    pair.pump(BEAT_S)
    assert not pair.leader.core.tables.runs[RUN].departed


def test_a_rank_that_writes_without_end_is_named_to_all_while_its_worker_lives(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    for _ in range(40):
        pair.pump(BEAT_S)
    assert [worker.row()["missing"] for worker in (pair.leader, pair.follower)] == [[1], [1]]


def test_a_leader_that_comes_back_does_not_wait_for_a_hook_whose_rank_has_given_up(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    assert pair.follower.phase(rank=1) == "unknown"
    pair.pump()
    assert pair.leader.phase() == "failed" and pair.rows(0)[-1]["error"]["fields"]["rank"] == 1


def test_a_leader_that_comes_back_does_not_wait_for_a_consent_that_was_lost(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    for _ in range(3):  # what was written is acknowledged
        pair.pump(BEAT_S)
    pair.follower.say(m.Consent, save_id=FIRST, granted=True, reason="")
    pair.follower.said.clear()  # lost, and then the node is stopped for a while
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    assert pair.follower.phase(rank=1) == "unknown"
    pair.pump()
    assert pair.leader.phase() == "failed" and not pair.leader.of(ac.Commit)


def test_a_rank_is_gone_only_once_the_leader_has_its_consent(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    for _ in range(3):
        pair.pump(BEAT_S)
    pair.follower.say(m.Consent, save_id=FIRST, granted=True, reason="")
    pair.follower.said.clear()  # lost
    pair.follower.feed(ev.Died, session=f"{1:016x}")
    pair.follower.feed(ev.SlotRead, slot=1, reason="SEALED")
    assert not any(row["gone"] for told in pair.follower.said for row in told.message.ranks)
    for _ in range(3):
        pair.pump(BEAT_S)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    assert pair.leader.of(ac.Commit), "it has consented"


def test_a_hook_that_has_spoken_leaves_the_end_to_the_leader(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    pair.follower.say(m.Consent, save_id=FIRST, granted=True, reason="")
    pair.pump()
    pair.follower.now += 31.0
    pair.follower.feed(ev.Tick)
    pair.pump()
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    assert pair.leader.of(ac.Commit)


def test_of_what_was_reported_to_another_leader_only_ranks_are_taken(pair: Pair) -> None:
    pair.follower.begin(1)
    (told,) = pair.follower.said
    late = replace(told.message, to="e" * 16)
    assert "protocol_errors" not in counted(pair.leader, ev.Relayed, run=RUN, route=b"r", message=late)
    assert pair.leader.core.tables.find(FIRST) is None
    (answer,) = [relay.message for relay in pair.leader.said]
    assert isinstance(answer, Outcomes) and answer.sender == "a" * 16, "so it learns who decides"


def report(instance: str, counter: int, ranks: Sequence[int], world_size: int = 2, to: str = "") -> Report:
    """Return a page of a follower whose ranks save nothing."""
    rows = tuple({"rank": rank, "attempt": 1, "gone": ""} for rank in ranks)
    nothing: dict[str, Any] = {"saves": (), "parts": (), "failures": (), "withdrawals": (), "questions": ()}
    return Report(sender=instance, counter=counter, to=to, world_size=world_size, ranks=rows, **nothing)


def joins(leader: Worker, instance: str, ranks: Sequence[int], world_size: int = 2) -> list[Outcomes]:
    """Let a follower report its ranks; returns what the leader answers."""
    leader.said.clear()
    leader.feed(ev.Relayed, run=RUN, route=b"n", message=report(instance, 1, ranks, world_size))
    return [said.message for said in leader.said if isinstance(said.message, Outcomes)]


def test_an_end_without_a_reason_is_a_breach_of_the_rules_and_ends_nothing(pair: Pair) -> None:
    pair.stages(pair.follower)
    row = {"save_id": FIRST, "outcome": "failed", "error": {}, "report": {}, "missing": (), "known": ()}
    told = Outcomes(sender="a" * 16, counter=99, to="b" * 16, saves=(row,), epochs=(), decided=(), gone=(), error={})
    assert "protocol_errors" in counted(pair.follower, ev.Relayed, run=RUN, route=b"", message=told)
    assert pair.follower.phase(rank=1) == "submitted" or pair.follower.phase(rank=1) == "writing"


@pytest.mark.parametrize("wrong", [{"request": b"junk"}, {"result": {"record": {}}}])
def test_a_part_that_makes_no_sense_ends_its_save_and_nothing_else(pair: Pair, wrong: dict[str, Any]) -> None:
    pair.leader.begin(1)
    pair.follower.begin(1)
    pair.pump()
    row = {"save_id": FIRST, "rank": 1, "phase": "durable", "step": 7, "path": PATH, "nbytes": 1, "umask": 0}
    row |= {"overwrite": False, "commit_timeout_s": 9.0, "recovering": False, "streamed": False, "writing": False}
    page = replace(report("b" * 16, 99, [1], to="a" * 16), saves=(FIRST,), parts=({**row, **wrong},))
    assert "protocol_errors" in counted(pair.leader, ev.Relayed, run=RUN, route=b"r", message=page)
    assert pair.leader.phase() == "failed" and pair.leader.row()["error"]["fields"]["code"] == "protocol"


def test_followers_that_no_rank_has_any_more_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "MAX_FOLLOWERS", 1)
    assert not joins(pair.leader, "e" * 16, [1]), "the first one has its rank"
    pair.follower.say(m.Goodbye)
    pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    pair.pump()
    assert joins(pair.leader, "f" * 16, [1])
    assert set(pair.leader.core.tables.last_message_at) == {f"{'f' * 16}.{RUN}"}


def test_a_follower_that_is_not_taken_does_not_try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leader_module, "MAX_FOLLOWERS", 0)
    pair = Pair()
    pair.link()
    assert not pair.follower.said and not pair.leader.said, "neither says anything before some time has passed"
    monkeypatch.setattr(leader_module, "MAX_FOLLOWERS", 1)
    assert not [said for said in pair.pump(BEAT_S / 2) if isinstance(said, m.Following)]
    assert [said for said in pair.pump(BEAT_S / 2) if isinstance(said, m.Following)]


def test_ranks_of_other_nodes_take_no_place_of_our_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    pair.leader.hello(b"q", "9" * 16)
    assert "9" * 16 in pair.leader.core.tables.sessions
    assert code(pair.leader.hello(b"r", "8" * 16)) == "worker_unavailable"


@pytest.mark.parametrize("world_size", [3, MAX_RANKS + 1])
def test_a_follower_of_another_world_is_told_so(pair: Pair, world_size: int) -> None:
    (answer,) = joins(pair.leader, "e" * 16, [1], world_size=world_size)
    assert answer.error["code"] == "ranks_disagree" and len(pair.leader.core.tables.sessions) == 2
    pair.follower.say(m.Follow, **{**FOLLOW, "attempt": 2})
    refused = replace(answer, to="b" * 16, counter=99)
    pair.follower.core.tables.runs[RUN].leader = ""
    pair.follower.say(m.Follow, **{**FOLLOW, "attempt": 3})
    pair.follower.feed(ev.Relayed, run=RUN, route=b"", message=refused)
    assert [code(a.message) for a in pair.follower.of(ac.Send)] == ["ranks_disagree"]


def test_a_follower_remembers_the_epochs_of_some_directories_only(pair: Pair) -> None:
    for n in range(MAX_DIRECTORIES + 5):
        path = f"/ckpt/{n}/a"
        pair.follower.say(m.Lineage, run=RUN, path=path, least_epoch=0)
        pair.pump()
        pair.leader.feed(ev.LineageScanned, run=RUN, path=path, epoch=7)
        pair.pump()
    assert list(pair.follower.core.tables.runs[RUN].epochs)[-1] == f"/ckpt/{n}"
    assert len(pair.follower.core.tables.runs[RUN].epochs) == MAX_DIRECTORIES


def test_what_a_turn_costs_does_not_grow_with_followers_times_ranks() -> None:
    """Counted, not timed: how often the leader looks at the ranks of the open save while all followers are told."""
    looks = []
    for n_nodes in (4, 8):
        leader = Worker(0, "a" * 16, world_size=1 + 4 * n_nodes)
        leader.say(m.Lead, **LEAD)
        for n in range(n_nodes):
            ranks = range(1 + 4 * n, 5 + 4 * n)
            joins(leader, f"{n + 1:016x}", ranks, 1 + 4 * n_nodes)
        leader.begin(1)
        leader.submit(1)
        leader.read(1, world_size=1 + 4 * n_nodes)
        save = leader.core.tables.saves[FIRST]
        save.ranks = Counted(save.ranks)
        leader.now += BEAT_S
        leader.feed(ev.Tick)
        assert len(leader.of(ac.Relay)) == n_nodes, "one page each"
        looks.append(save.ranks.looks)
    assert looks[1] == looks[0], looks


def test_what_a_follower_keeps_does_not_grow_with_the_saves_that_its_ranks_skip(pair: Pair) -> None:
    def skip(numbers: range) -> None:
        for n in numbers:
            save_id = f"000001-{n:08d}-{RUN}"
            pair.follower.say(m.Withdraw, save_id=save_id, reason="skipped: every slot is in use", skipped=True)
            pair.follower.now += BEAT_S
            pair.follower.feed(ev.Tick)
            pair.follower.said.clear()

    skip(range(1, 100))
    tracemalloc.start()
    try:
        skip(range(100, 350))
    finally:
        gc.collect()
        kept = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
    assert kept < 25_000, f"{kept} bytes more after 250 saves"


class Counted(dict[int, Any]):
    """Counts how often somebody goes through it."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_a_run_that_nobody_saves_in_is_followed_no_more(pair: Pair) -> None:
    pair.follower.say(m.Goodbye)
    pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    pair.follower.feed(ev.Tick)
    assert not pair.follower.asked("disconnect"), "the leader has not shown that it knows that the rank is gone"
    pair.pump()
    pair.follower.feed(ev.Tick)
    assert pair.follower.asked("disconnect") == [RUN]
    assert list(pair.leader.core.tables.runs[RUN].departed) == [1]

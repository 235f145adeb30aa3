"""Two brains, one step at a time: who may lead and follow, what is asked through, and what each hears of the other."""

from __future__ import annotations

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
    SECOND,
    Bench,
    code,
)

from asyncckpt.protocol import messages as m
from asyncckpt.protocol.fields import MAX_RANKS
from asyncckpt.protocol.relay import Ended, Joined, Piece, Ringed, Unlinked
from asyncckpt_worker import actions as ac
from asyncckpt_worker import events as ev
from asyncckpt_worker import leading, sessions
from asyncckpt_worker.leading import FORGET_S
from asyncckpt_worker.progress import packed
from asyncckpt_worker.run_record import MAX_DIRECTORIES
from asyncckpt_worker.streams import BEAT_S, Stream

ADDRESS = "tcp://first:7000"
FOLLOW = {"run": RUN, "address": ADDRESS, "server_public": KEY, "client_public": KEY, "client_secret": SECRET}
FOLLOW |= {"attempt": 1, "timeout_s": 5.0}
LEAD = {"run": RUN, "port": 0, "server_secret": "", "client_public": KEY}


class Worker(Bench):
    """A brain with a rank of two, whose peer is b"p" and whose slot is 1. `said`: to other workers, not sent yet."""

    def __init__(self, rank: int, instance: str, world_size: int = 2) -> None:
        super().__init__(replace(CONFIG, instance=instance))
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
        self.leader.feed(ev.Listening, address=ADDRESS, public=KEY, secret=SECRET)
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

    def stages(self, worker: Worker, hook_timeout_s: float = 0, **changes: Any) -> None:
        worker.begin(1, **changes)
        worker.feed(ev.Prepared, key=(FIRST, worker.rank))
        worker.submit(1)
        worker.read(1, rank=worker.rank, world_size=2, hook_timeout_s=hook_timeout_s, **changes)
        self.pump()

    def writes(self, worker: Worker) -> None:
        worker.feed(ev.Written, key=(FIRST, worker.rank), result=result_of(FIRST, worker.rank), report={"nbytes": 3})
        self.pump()

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
    assert leader.say(m.Lead, **LEAD) is None
    assert leader.of(ac.Listen) == [ac.Listen(port=0, secret="")]
    leader.feed(ev.Listening, address=ADDRESS, public=KEY, secret=SECRET)
    (first,) = [a.message for a in leader.of(ac.Send)]
    again = leader.say(m.Lead, **LEAD)
    assert isinstance(first, m.Leading) and not leader.of(ac.Listen)
    assert replace(again, id=0) == replace(first, id=0)
    assert leader.brain.run_of_key(KEY) == RUN and leader.brain.run_of_key(SECRET) is None


def test_a_port_that_is_taken_is_refused_and_tried_again() -> None:
    leader = Worker(0, "a" * 16)
    leader.say(m.Lead, **LEAD)
    leader.feed(ev.Listening, error=ERROR)
    (refused,) = [a.message for a in leader.of(ac.Send)]
    assert code(refused) == "save_failed"
    leader.say(m.Lead, **LEAD)
    assert leader.of(ac.Listen)


def test_follow_is_answered_when_the_leader_has_spoken() -> None:
    pair = Pair()
    assert pair.follower.say(m.Follow, **FOLLOW) is None
    assert [c.address for c in pair.follower.of(ac.Connect)] == [ADDRESS]
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
    follower.say(m.Follow, **FOLLOW)
    follower.feed(ev.Unconnected, run=RUN, error=ERROR)
    (refused,) = [a.message for a in follower.of(ac.Send)]
    assert code(refused) == "save_failed" and follower.of(ac.Disconnect)
    assert not follower.brain.tables.runs[RUN].followed


def test_a_worker_does_not_lead_what_it_follows_nor_follow_what_it_leads(pair: Pair) -> None:
    assert code(pair.follower.say(m.Lead, **LEAD)) == "protocol"
    assert code(pair.leader.say(m.Follow, **FOLLOW)) == "protocol"


def test_a_follower_speaks_for_the_run_of_its_key_only(pair: Pair) -> None:
    pair.follower.said.clear()
    pair.follower.now += BEAT_S
    pair.follower.feed(ev.Tick)
    (beat,) = pair.follower.said
    pair.leader.say(m.Lead, **{**LEAD, "run": OTHER_RUN, "client_public": SECRET})
    pair.leader.feed(ev.Relayed, run=OTHER_RUN, route=b"x", message=beat.message)
    assert [type(r.message).__name__ for r in pair.leader.of(ac.Relay)] == ["Unlinked"]
    stranger = Piece(stream="e" * 16, sender="e" * 16, number=0, first=1, more=False, data=b"", taken=0)
    pair.leader.feed(ev.Relayed, run="d" * 12, route=b"x", message=stranger)
    assert not pair.leader.of(ac.Relay), "nobody has led such a run"


def test_ranks_are_told_who_decides(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        assert worker.say(m.Heartbeat, saves=()).leader == "a" * 16


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


def test_the_epoch_is_asked_through(pair: Pair) -> None:
    assert pair.follower.say(m.Lineage, run=RUN, path=PATH) is None
    pair.pump()
    assert not pair.follower.of(ac.ScanLineage)
    pair.leader.feed(ev.LineageScanned, peer=b"", id=0, run=RUN, path=PATH, epoch=7)
    pair.pump()
    assert [said.epoch for said in pair.heard[1] if isinstance(said, m.LineageFound)] == [7]
    assert pair.follower.say(m.Lineage, run=RUN, path="/ckpt/next") == m.LineageFound(id=pair.follower.ids, epoch=7)
    assert pair.leader.say(m.Lineage, run=RUN, path=PATH).epoch == 7


def test_an_epoch_that_cannot_be_found_is_an_error_there(pair: Pair) -> None:
    pair.follower.say(m.Lineage, run=RUN, path=PATH)
    pair.pump()
    pair.leader.feed(ev.LineageScanned, peer=b"", id=0, run=RUN, path=PATH, error=ERROR)
    pair.pump()
    assert [code(said) for said in pair.heard[1] if isinstance(said, m.Refused)] == ["save_failed"]


def test_a_failure_at_the_follower_ends_the_save_on_both_with_one_error(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker)
    pair.follower.feed(ev.Written, key=(FIRST, 1), error=ERROR)
    assert pair.follower.phase(rank=1) == "writing", "the leader has not spoken"
    pair.pump()
    zero, one = pair.rows(0)[-1], pair.rows(1)[-1]
    assert zero["phase"] == one["phase"] == "failed" and zero["error"]["text"] == one["error"]["text"] == ERROR["text"]


def test_who_is_missing_is_told_to_the_ranks_of_the_follower(pair: Pair) -> None:
    pair.stages(pair.follower)
    pair.pump(BEAT_S)
    assert pair.follower.row()["missing"] == [0]


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


def test_a_save_that_ended_with_a_lost_stream_need_not_be_waited_for(pair: Pair) -> None:
    pair.follower.begin(1)
    (told,) = pair.follower.said
    pair.follower.said.clear()
    over = Unlinked(stream=told.message.stream, sender="a" * 16)  # type: ignore[attr-defined]
    pair.follower.feed(ev.Relayed, run=RUN, route=b"", message=over)
    assert pair.follower.phase(rank=1) == "failed"
    pair.pump()
    pair.leader.begin(1)
    assert pair.leader.phase() == "abandoned" and pair.follower.row()["error"]["fields"]["code"] == "leader_lost"


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


def test_a_follower_that_is_silent_while_it_writes_is_named(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0)
    pair.pump(29.0)
    pair.leader.now += 29.0
    pair.leader.feed(ev.Tick)
    assert pair.leader.brain.tables.saves[FIRST].outcome is None, "it was heard 29 s ago"
    pair.leader.now += 2.0
    pair.leader.feed(ev.Tick)
    (row,) = pair.leader.pushed()
    assert row["error"]["code"] == "commit_timeout" and list(row["error"]["fields"]["missing_ranks"]) == [1]


def test_a_follower_that_is_silent_while_a_hook_is_waited_for_is_named(pair: Pair) -> None:
    for worker in (pair.leader, pair.follower):
        pair.stages(worker, commit_timeout_s=30.0, hook_timeout_s=1000.0 * worker.rank)
    pair.writes(pair.follower)
    pair.leader.feed(ev.Written, key=(FIRST, 0), result=result_of(FIRST, 0))
    pair.pump()
    assert phases(pair) == ("durable", "durable")
    pair.leader.now += 29.0
    pair.leader.feed(ev.Tick)
    assert pair.leader.brain.tables.saves[FIRST].outcome is None, "it was heard 29 s ago"
    pair.leader.now += 2.0  # its rank may have died, and who was to tell of it takes the leader for gone
    pair.leader.feed(ev.Tick)
    (row,) = pair.leader.pushed()
    assert row["error"]["code"] == "commit_timeout" and list(row["error"]["fields"]["missing_ranks"]) == [1]


def fills_a_ring(pair: Pair) -> None:
    """The leader's rank has sealed, and the follower's fills a ring, which is written there."""
    pair.stages(pair.leader)
    worker = pair.follower
    worker.begin(1)
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
    assert phases(pair) == ("writing", "begun")
    pair.writes(pair.follower)
    for _ in range(9):
        pair.pump(0.1 * COMMIT_TIMEOUT_S)
    assert phases(pair) == ("writing", "begun")
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


def test_a_follower_that_is_silent_while_it_writes_a_ring_is_named(pair: Pair) -> None:
    fills_a_ring(pair)
    pair.leader.now += 1.1 * COMMIT_TIMEOUT_S
    pair.leader.feed(ev.Tick)
    (row,) = pair.leader.pushed()
    assert row["error"]["code"] == "commit_timeout" and list(row["error"]["fields"]["missing_ranks"]) == [1]


def test_a_ring_that_fails_at_a_follower_ends_the_save_here(pair: Pair) -> None:
    fills_a_ring(pair)
    pair.follower.feed(ev.Written, key=(FIRST, 1), error=ERROR)
    pair.pump()
    assert phases(pair) == ("failed", "failed")
    assert pair.rows(0)[-1]["error"]["text"] == ERROR["text"]


@pytest.mark.parametrize("save_id", [FIRST, SECOND])
def test_a_ring_of_which_nothing_was_heard_is_no_breach_of_the_rules(pair: Pair, save_id: str) -> None:
    (name,) = pair.leader.brain.tables.heard
    (known,) = pair.leader.brain._leading._links.values()
    pair.stages(pair.leader)
    pair.leader.brain._leading._hearing.take(known, Ringed(save_id=save_id, rank=1, writing=True))
    assert list(pair.leader.brain.tables.heard) == [name]
    assert phases(pair) == ("writing", None)


def test_a_follower_that_is_gone_for_good_is_forgotten(pair: Pair) -> None:
    pair.leader.now += FORGET_S + 1
    pair.leader.feed(ev.Tick)
    assert set(pair.leader.brain.tables.sessions) == {f"{0:016x}"} and not pair.leader.brain.tables.heard


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


def test_a_late_piece_of_a_stream_of_the_worker_before_is_no_breach_of_the_rules(pair: Pair) -> None:
    stream = Stream("e" * 16, "e" * 16)
    joins(pair.leader, stream, [1])
    late = Piece(stream="e" * 16, sender="e" * 16, number=2, first=1, more=False, data=b"", taken=9)
    event = ev.Relayed(now=pair.leader.now, run=RUN, route=b"n", message=late)
    counts = [a.count for a in pair.leader.brain.handle(event) if isinstance(a, ac.Log)]
    assert "protocol_errors" not in counts and "e" * 16 not in pair.leader.brain.tables.heard


def joins(leader: Worker, stream: Stream, ranks: Sequence[int], world_size: int = 2) -> list[str]:
    """Let a follower tell of its ranks; returns the kinds of what the leader answers."""
    for rank in ranks:
        stream.post(packed(Joined(rank=rank, world_size=world_size, attempt=1, opened=1)))
    leader.said.clear()
    for piece in stream.due(leader.now):
        leader.feed(ev.Relayed, run=RUN, route=b"n", message=piece)
    return [said.message.name for said in leader.said]


def test_an_end_without_a_reason_is_a_breach_of_the_rules_and_ranks_get_an_error(pair: Pair) -> None:
    pair.stages(pair.follower)
    followed = pair.follower.brain._following._followed[RUN]
    end = packed(Ended(save_id=FIRST, outcome="failed", error={}, report={}))
    name, number = followed.stream.name, followed.stream.taken + 1
    piece = Piece(stream=name, sender="a" * 16, number=number, first=1, more=False, data=end, taken=0)
    event = ev.Relayed(now=pair.follower.now, run=RUN, route=b"", message=piece)
    counts = [a.count for a in pair.follower.brain.handle(event) if isinstance(a, ac.Log)]
    assert "protocol_errors" in counts
    pair.pump()
    assert all(row.get("error", ERROR) for row in pair.rows(1))


def test_streams_that_no_rank_has_any_more_make_room(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "MAX_LINKS", 1)
    assert joins(pair.leader, Stream("e" * 16, "e" * 16), [1]) == ["unlinked"], "the first one has its rank"
    pair.follower.say(m.Goodbye)
    pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    pair.pump()
    assert "unlinked" not in joins(pair.leader, Stream("f" * 16, "f" * 16), [1])
    assert set(pair.leader.brain.tables.heard) == {"f" * 16}


def test_a_follower_that_is_not_taken_does_not_try_again_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leading, "MAX_LINKS", 0)
    pair = Pair()
    pair.link()
    assert not pair.follower.said and not pair.leader.said, "neither says anything before some time has passed"
    monkeypatch.setattr(leading, "MAX_LINKS", 1)
    assert not [said for said in pair.pump(BEAT_S / 2) if isinstance(said, m.Following)]
    assert [said for said in pair.pump(BEAT_S / 2) if isinstance(said, m.Following)]


def test_ranks_of_other_nodes_take_no_place_of_our_own(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    pair.leader.hello(b"q", "9" * 16)
    assert "9" * 16 in pair.leader.brain.tables.sessions
    assert code(pair.leader.hello(b"r", "8" * 16)) == "worker_unavailable"


def test_a_world_larger_than_any_is_refused(pair: Pair) -> None:
    large = MAX_RANKS + 1
    assert "unlinked" in joins(pair.leader, Stream("e" * 16, "e" * 16), [5], world_size=large)
    assert len(pair.leader.brain.tables.sessions) == 2


def test_a_follower_remembers_the_epochs_of_some_directories_only(pair: Pair) -> None:
    for n in range(MAX_DIRECTORIES + 5):
        path = f"/ckpt/{n}/a"
        pair.follower.say(m.Lineage, run=RUN, path=path)
        pair.pump()
        pair.leader.feed(ev.LineageScanned, peer=b"", id=0, run=RUN, path=path, epoch=7)
        pair.pump()
    assert list(pair.follower.brain.tables.runs[RUN].epochs)[-1] == f"/ckpt/{n}"
    assert len(pair.follower.brain.tables.runs[RUN].epochs) == MAX_DIRECTORIES


def test_what_a_turn_costs_does_not_grow_with_followers_times_ranks() -> None:
    """Counted, not timed: how often the leader looks at the ranks of the open save while all followers are told."""
    looks = []
    for n_nodes in (4, 8):
        leader = Worker(0, "a" * 16, world_size=1 + 4 * n_nodes)
        leader.say(m.Lead, **LEAD)
        leader.feed(ev.Listening, address=ADDRESS, public=KEY, secret=SECRET)
        for n in range(n_nodes):
            ranks = range(1 + 4 * n, 5 + 4 * n)
            joins(leader, Stream(f"{n + 1:016x}", "e" * 16), ranks, 1 + 4 * n_nodes)
        leader.begin(1)
        leader.submit(1)
        leader.read(1, world_size=1 + 4 * n_nodes)
        save = leader.brain.tables.saves[FIRST]
        save.ranks = Counted(save.ranks)
        leader.now += BEAT_S
        leader.feed(ev.Tick)
        assert len(leader.of(ac.Relay)) == 2 * n_nodes, "a beat, and whom the save waits for"
        looks.append(save.ranks.looks)
    assert looks[1] == looks[0], looks


class Counted(dict[int, Any]):
    """Counts how often somebody goes through it."""

    looks = 0

    def values(self) -> Any:
        self.looks += 1
        return super().values()


def test_a_run_that_nobody_saves_in_is_followed_no_more(pair: Pair) -> None:
    pair.follower.say(m.Goodbye)
    pair.follower.feed(ev.SlotRead, slot=1, reason="EMPTY")
    pair.pump()
    pair.follower.feed(ev.Tick)
    assert pair.follower.of(ac.Disconnect) == [ac.Disconnect(run=RUN)]
    assert list(pair.leader.brain.tables.runs[RUN].gone) == [1]

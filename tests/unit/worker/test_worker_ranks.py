"""The worker's core and several ranks: who takes part, consents, is late, or is gone; and what all of them hear."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import ERROR, FIRST, OTHER_RUN, PATH, REQUEST, RUN, SECOND, Bench, code

from asyncckpt.config import MAX_SLOTS
from asyncckpt.errors import SaveFailedError, to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.protocol.fields import MAX_OUTCOMES
from asyncckpt.protocol.samples import encode_samples
from asyncckpt.protocol.save_phases import NOT_AGREED
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev
from asyncckpt_worker.core import runs
from asyncckpt_worker.core.runs import MAX_WITHDRAWN
from asyncckpt_worker.core.status import report as core_report

EPOCH_UNKNOWN = "000000" + FIRST[6:]
EQUAL, OTHER = b"8 bytes!", b"others.."


class Ranks(Bench):
    """A core with one session and one slot per rank. Peers are b"0", b"1", ...; slots 1, 2, ...."""

    def __init__(self, world_size: int = 2, *, join: bool = True) -> None:
        super().__init__()
        self.world_size = world_size
        for rank in range(world_size):
            self.hello(self.peer(rank), self.session(rank), rank, world_size)
            self.slot(self.peer(rank))
            if join:
                self.say(m.Lineage, self.peer(rank), run=RUN, path=PATH, least_epoch=0)
                for scan in self.of(ac.ScanLineage):
                    facts = {"run": scan.run, "path": scan.path}
                    self.feed(ev.LineageScanned, epoch=1, **facts)

    @staticmethod
    def peer(rank: int) -> bytes:
        return str(rank).encode()

    @staticmethod
    def session(rank: int) -> str:
        return f"{rank + 1:016x}"

    def starts(self, rank: int, save_id: str = FIRST, generation: int = 1, **changes: Any) -> Any:
        reply = self.begin(rank + 1, save_id, generation, self.peer(rank), **changes)
        actions = self.actions
        if self.of(ac.Prepare):
            self.feed(ev.Prepared, key=(save_id, rank))
        self.actions = actions
        return reply

    def seals(self, rank: int, save_id: str = FIRST, generation: int = 1, **changes: Any) -> None:
        """Ring the doorbell, and let the worker read what is sealed."""
        self.submit(rank + 1, save_id, generation, self.peer(rank))
        self.read(rank + 1, save_id, generation, rank=rank, world_size=self.world_size, **changes)

    def stages(self, rank: int, save_id: str = FIRST, generation: int = 1, **changes: Any) -> None:
        begun = {name: changes[name] for name in ("path", "step", "overwrite", "commit_timeout_s") if name in changes}
        self.starts(rank, save_id, generation, **begun)
        self.seals(rank, save_id, generation, **changes)

    def writes(self, rank: int, save_id: str = FIRST) -> None:
        self.feed(ev.Written, key=(save_id, rank), result=f"r{rank}")

    def withdraws(self, rank: int, save_id: str = FIRST, *, skipped: bool = False, reason: str = "out of luck") -> Any:
        return self.say(m.Withdraw, self.peer(rank), save_id=save_id, reason=reason, skipped=skipped)

    def dies(self, rank: int, sealed: str = "", generation: int = 1, **changes: Any) -> None:
        """The process dies; its slot is read, and holds `sealed` or nothing."""
        self.feed(ev.Died, session=self.session(rank))
        assert self.of(ac.ReadSlot) == [ac.ReadSlot(slot=rank + 1)]
        if sealed:
            self.read(rank + 1, sealed, generation, rank=rank, world_size=self.world_size, **changes)
        else:
            self.feed(ev.SlotRead, slot=rank + 1, reason="OPEN")

    def error(self, rank: int, save_id: str = FIRST) -> Any:
        """Return what a rank hears of a save's end: by asking."""
        row = self.row(save_id, self.peer(rank))
        return row.get("error") if row else None

    def heard(self) -> dict[bytes, str]:
        """Return the phases that were pushed last, by peer."""
        sends = [a for a in self.of(ac.Send) if isinstance(a.message, m.Saves) and a.message.id == 0]
        return {a.peer: r["phase"] for a in sends for r in a.message.saves}

    def outcome(self, save_id: str = FIRST) -> str | None:
        return self.core.tables.find(save_id).outcome

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick)

    def outcomes(self, rank: int = 0) -> dict[int, bool]:
        """Return what a rank is told of saves that have ended: sequence -> whether all ranks meet again after it."""
        reply = self.say(m.Heartbeat, self.peer(rank), saves=())
        assert reply.run == RUN
        return dict(reply.outcomes)


# ---- who takes part


@pytest.mark.parametrize("begun", [True, False])
@pytest.mark.parametrize(
    ("leaves", "why"), [("death", "its process 7 died"), ("goodbye", "its checkpointer was closed")]
)
def test_rank_that_is_gone_unsealed_ends_the_save_on_all_ranks_which_hear_why(
    begun: bool, leaves: str, why: str
) -> None:
    bench = Ranks(3)
    for rank in range(2):
        bench.stages(rank)
    if begun:
        bench.starts(2)
    if leaves == "death":
        bench.dies(2)
    else:
        bench.say(m.Goodbye, b"2")
        bench.feed(ev.SlotRead, slot=3, reason="OPEN")
    assert bench.heard() == {b"0": "failed", b"1": "failed"} and bench.outcome() == "abandoned"
    for rank in range(2):
        error = bench.error(rank)
        assert error["fields"] == {
            "code": "not_sealed", "rank": 2, "save_id": FIRST, "detail": why, "step": 5, "path": PATH
        }  # fmt: skip
        assert all(part in error["text"] for part in ("step 5", "rank 2", PATH, why))
    assert bench.outcomes() == {0: True}, "it may come back, and then has agreed on nothing"


def test_rank_is_not_gone_before_all_of_its_slots_are_read() -> None:
    bench = Ranks()
    second = bench.slot(b"1")
    bench.stages(0)
    bench.feed(ev.Died, session=bench.session(1))
    bench.feed(ev.SlotRead, slot=2, reason="EMPTY")
    assert bench.outcome() is None
    bench.read(second, FIRST, rank=1, world_size=2)
    assert bench.phase(rank=1) == "sealed" and bench.outcome() is None


def test_save_that_is_begun_after_a_rank_is_gone_ends_at_once() -> None:
    bench = Ranks()
    bench.dies(1)
    assert isinstance(bench.starts(0), m.Ok)
    assert bench.error(0)["fields"]["rank"] == 1 and not bench.of(ac.Write)
    bench.seals(0, SECOND, 2)
    assert bench.error(0, SECOND)["fields"]["code"] == "not_sealed"


def test_rank_that_never_told_its_run_is_known_by_what_it_had_sealed() -> None:
    bench = Ranks(join=False)
    bench.dies(1, FIRST)
    bench.stages(0)
    assert bench.outcome() is None, "it had sealed this one"
    bench.begin(bench.slot(b"0"), SECOND, peer=b"0", path="/ckpt/b")
    assert bench.error(0, SECOND)["fields"]["rank"] == 1


def test_rank_that_comes_back_is_not_gone_any_more() -> None:
    bench = Ranks()
    bench.dies(1)
    bench.hello(b"again", "9" * 16, 1, 2)
    slot = bench.slot(b"again")
    bench.say(m.Lineage, b"again", run=RUN, path=PATH, least_epoch=0)
    bench.stages(0)
    assert bench.outcome() is None
    bench.begin(slot, FIRST, peer=b"again")
    bench.feed(ev.Prepared, key=(FIRST, 1))
    bench.submit(slot, FIRST, peer=b"again")
    bench.read(slot, rank=1, world_size=2)
    assert bench.phase(rank=1) == "writing"


def test_replaced_session_hands_its_rank_over_and_the_next_one_is_missed_when_it_dies() -> None:
    bench = Ranks()
    bench.stages(0)
    bench.hello(b"again", "9" * 16, 1, 2, replaces=bench.session(1))
    bench.feed(ev.SlotRead, slot=2, reason="EMPTY")
    assert bench.outcome() is None, "its next session may seal it"
    bench.feed(ev.Died, session="9" * 16)
    assert bench.error(0)["fields"] == {
        "code": "not_sealed", "rank": 1, "save_id": FIRST, "detail": "its process 7 died", "step": 5, "path": PATH
    }  # fmt: skip


def test_second_session_of_a_rank_cannot_touch_its_save_and_its_death_ends_nothing() -> None:
    bench = Ranks()
    bench.hello(b"twin", "9" * 16, 1, 2)
    bench.say(m.Lineage, b"twin", run=RUN, path=PATH, least_epoch=0)
    twin = bench.slot(b"twin")
    bench.stages(0)
    bench.starts(1)
    assert code(bench.begin(twin, peer=b"twin")) == "protocol"
    assert isinstance(bench.say(m.Withdraw, b"twin", save_id=FIRST, reason="", skipped=False), m.Ok)
    bench.feed(ev.Died, session="9" * 16)
    bench.read(twin, rank=1, world_size=2)
    assert bench.outcome() is None and bench.phase(rank=1) == "open"


@pytest.mark.parametrize("skipped", [False, True])
@pytest.mark.parametrize("save_id", [FIRST, EPOCH_UNKNOWN])
@pytest.mark.parametrize("moment", ["before_all", "before_seals", "others_begun", "others_sealed", "own_begun"])
def test_withdrawal_of_one_rank_ends_the_save_on_all(moment: str, save_id: str, skipped: bool) -> None:
    bench = Ranks()
    if moment in ("others_begun", "others_sealed", "own_begun"):
        bench.starts(0)
    if moment == "others_sealed":
        bench.seals(0)
    if moment == "own_begun":
        bench.starts(1)
    assert isinstance(bench.withdraws(1, save_id, skipped=skipped), m.Ok)
    if moment == "before_all":
        assert isinstance(bench.starts(0), m.Ok) and not bench.of(ac.Prepare)
    if moment == "before_seals":  # no Begin of the others came
        bench.seals(0)
        assert not bench.of(ac.Prepare)
    error = bench.error(0)
    assert error["fields"]["rank"] == 1 and "out of luck" in error["text"]
    assert error["code"] == ("save_skipped" if skipped else "save_failed")
    assert skipped or error["fields"]["code"] == "withdrawn"
    assert not [a for a in bench.actions if isinstance(a, ac.Commit)]
    assert bench.outcomes() == {0: False}
    slots = [bench.slot(b"0"), bench.slot(b"1")]
    for rank, slot in enumerate(slots):
        assert isinstance(bench.begin(slot, SECOND, peer=bench.peer(rank), path="/ckpt/b"), m.Ok)
    assert bench.outcome(SECOND) is None, "it is no withdrawal of the next"


def test_withdrawal_after_the_own_seal_comes_too_late() -> None:
    bench = Ranks()
    bench.stages(1)
    bench.withdraws(1)
    bench.stages(0)
    assert bench.outcome() is None


def test_withdrawals_that_are_remembered_are_bounded() -> None:
    bench = Ranks()
    for sequence in range(MAX_WITHDRAWN + 10):
        bench.withdraws(1, f"000000-{sequence:08d}-{RUN}")
    withdrawn = bench.core.tables.runs[RUN].withdrawn
    assert len(withdrawn) == MAX_WITHDRAWN and min(withdrawn) == 10


def test_runs_without_anybody_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "MAX_RUNS", 10)
    bench = Ranks()
    bench.stages(0)
    for number in range(30):
        bench.withdraws(1, f"000001-00000000-{number:012x}")
    assert len(bench.core.tables.runs) <= 10 + 1
    assert RUN in bench.core.tables.runs, "it has a session and a save under way"


# ---- what all must say alike


@pytest.mark.parametrize(
    ("changes", "word", "advice"),
    [
        ({"path": "/ckpt/b"}, "/ckpt/b", "in the same order"),
        ({"step": 6}, "step 6", "in the same order"),
        ({"overwrite": True}, "overwrite=True", "with the same settings"),
        ({"layout": "dcp"}, "layout='dcp'", "with the same settings"),
        (
            {"plan": "1" * 16},
            "plan",
            "the ranks meet again in one of the next saves",
        ),
    ],
)
def test_ranks_that_differ_hear_so_on_all_ranks(changes: dict[str, Any], word: str, advice: str) -> None:
    bench = Ranks()
    bench.stages(0)
    bench.stages(1, **changes)
    for rank in range(2):
        error = bench.error(rank)
        assert error["code"] == "ranks_disagree" and list(error["fields"]["ranks"]) == [0, 1] and word in error["text"]
        assert advice in error["text"] and ("order" in error["text"]) == (
            not {"plan", "overwrite", "layout"} & set(changes)
        )
    assert not bench.of(ac.Commit) and bench.outcome() == "failed"
    assert bench.outcomes() == {0: True}, "they meet again"


def test_files_of_ranks_that_differ_in_their_path_are_removed_from_both() -> None:
    bench = Ranks()
    bench.stages(0)
    bench.starts(1, path="/ckpt/b")
    request = replace(REQUEST, rank=1, world_size=2, path="/ckpt/b")
    bench.submit(2, peer=b"1")
    bench.feed(ev.SlotRead, slot=2, generation=1, request=request, streamed=True, opened=True)
    bench.seals(1, path="/ckpt/b")
    assert bench.outcome() == "failed"
    bench.writes(1)
    assert not bench.of(ac.Remove), "rank 0 is being written"
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]
    bench.feed(ev.Removed, save_id=FIRST)
    assert bench.of(ac.Remove) == [ac.Remove(save_id=FIRST, path="/ckpt/b")]
    bench.feed(ev.Removed, save_id=FIRST)
    assert not bench.of(ac.Remove)


def test_ranks_that_give_one_call_two_epochs_hear_so_at_once() -> None:
    bench, other = Ranks(), "000002" + FIRST[6:]
    bench.stages(0)
    bench.starts(1, other, path="/ckpt/b")
    assert bench.error(0)["code"] == bench.error(1, other)["code"] == "ranks_disagree"
    assert "000002" in bench.error(0)["text"]


def test_rank_of_another_world_cannot_join_the_run() -> None:
    bench = Ranks()
    bench.hello(b"z", "9" * 16, 0, 3)
    assert code(bench.say(m.Lineage, b"z", run=RUN, path=PATH, least_epoch=0)) == "ranks_disagree"
    assert bench.core.tables.runs[RUN].members == {0: bench.session(0), 1: bench.session(1)}
    bench.stages(0)
    slot = bench.slot(b"z")
    assert code(bench.begin(slot, peer=b"z")) == "ranks_disagree"
    assert bench.error(0)["code"] == "ranks_disagree"


# ---- time


def test_missing_rank_is_named_on_every_rank_when_the_commit_timeout_is_over() -> None:
    bench = Ranks(3)
    bench.starts(2)
    bench.passes(100.0)
    bench.stages(0, commit_timeout_s=50.0)
    bench.stages(1, commit_timeout_s=70.0)
    bench.writes(0)
    assert bench.core.wakes_at == 150.0
    bench.passes(49.0)
    assert bench.row(peer=b"1")["missing"] == [2] and bench.outcome() is None
    bench.passes(1.0)
    for rank in range(3):
        assert bench.error(rank)["code"] == "commit_timeout"
        assert list(bench.error(rank)["fields"]["missing_ranks"]) == [2]
    assert bench.heard() == {} and bench.outcomes() == {0: True}
    assert bench.core.wakes_at is None


def test_commit_timeout_leaves_a_save_alone_that_all_have_sealed() -> None:
    bench = Ranks()
    bench.stages(0, commit_timeout_s=5.0)
    bench.stages(1)
    bench.passes(1e6)
    assert bench.outcome() is None and bench.row(peer=b"0")["missing"] == [0, 1], "it waits for their files"
    for rank in range(2):
        bench.writes(rank)
    assert bench.of(ac.Commit)


def test_status_names_ranks_and_who_is_missing() -> None:
    bench = Ranks(3)
    bench.stages(0)
    bench.starts(1)
    (row,) = core_report(bench.core.tables, "ab" * 8)["saves"]
    assert row == {
        "save_id": FIRST, "step": 5, "path": PATH, "phase": "open", "ranks": {"0": "writing", "1": "open"},
        "missing": [1, 2],
    }  # fmt: skip


# ---- consent

HOOKED: dict[str, Any] = {"hook_timeout_s": 10.0}


def consents(bench: Ranks, rank: int, granted: bool = True, reason: str = "") -> Any:
    return bench.say(m.Consent, bench.peer(rank), save_id=FIRST, granted=granted, reason=reason)


@pytest.fixture
def hooked() -> Ranks:
    """Two ranks are durable, both with a hook."""
    bench = Ranks()
    for rank in range(2):
        bench.stages(rank, **HOOKED)
    for rank in range(2):
        bench.writes(rank)
    assert not bench.of(ac.Commit)
    return bench


def test_commit_waits_for_the_consent_of_every_hook(hooked: Ranks) -> None:
    assert isinstance(consents(hooked, 1), m.Ok) and not hooked.of(ac.Commit)
    consents(hooked, 1)
    assert not hooked.of(ac.Commit), "said twice is said once"
    consents(hooked, 0)
    assert [c.save_id for c in hooked.of(ac.Commit)] == [FIRST]
    assert isinstance(consents(hooked, 0, False), m.Ok), "too late"
    hooked.feed(ev.Published, save_id=FIRST)
    assert hooked.phase() == "committed"


@pytest.mark.parametrize("how", ["refusal", "silence", "death", "goodbye"])
def test_veto_of_one_rank_ends_the_save_on_all(hooked: Ranks, how: str) -> None:
    consents(hooked, 0)
    if how == "refusal":
        consents(hooked, 1, False, "the loss is NaN")
    elif how == "silence":
        assert hooked.core.wakes_at == 10.0
        hooked.passes(10.0)
    elif how == "death":
        hooked.dies(1, FIRST)
    else:
        hooked.say(m.Goodbye, b"1")
        hooked.read(2, FIRST, rank=1, world_size=2)
    assert hooked.heard()[b"0"] == "failed"
    assert [a.save_id for a in hooked.of(ac.Remove)] == [FIRST]
    fields = hooked.error(0)["fields"]
    assert (fields["code"], fields["rank"]) == ("vetoed", 1)
    if how == "refusal":
        assert "the loss is NaN" in fields["detail"]
    consents(hooked, 1)
    assert not hooked.of(ac.Commit)


def queue(bench: Ranks, *, elder_hooked: bool = True) -> None:
    """Let both ranks be durable in two saves; the second waits for the hooks of both."""
    second = [bench.slot(b"0"), bench.slot(b"1")]
    for rank in range(2):
        bench.stages(rank, commit_timeout_s=100.0, **(HOOKED if elder_hooked else {}))
        changes: dict[str, Any] = {"path": "/ckpt/b", "commit_timeout_s": 100.0}
        bench.begin(second[rank], SECOND, peer=bench.peer(rank), **changes)
        bench.feed(ev.Prepared, key=(SECOND, rank))
        bench.submit(second[rank], SECOND, peer=bench.peer(rank))
        bench.read(second[rank], SECOND, rank=rank, world_size=2, **changes, **HOOKED)
        bench.writes(rank, SECOND)


@pytest.mark.parametrize("error", [None, ERROR], ids=["committed", "failed"])
def test_hook_has_its_time_from_when_the_save_before_has_ended(error: dict[str, Any] | None) -> None:
    bench = Ranks()
    queue(bench)
    for rank in range(2):
        bench.writes(rank)
    bench.passes(8.0)
    for rank in range(2):
        consents(bench, rank)
    bench.passes(8.0)
    assert bench.outcome(SECOND) is None, "the earlier one is being committed"
    bench.feed(ev.Published, save_id=FIRST, error=error)
    assert bench.core.wakes_at == 26.0
    bench.passes(8.0)
    assert bench.outcome(SECOND) is None
    bench.passes(2.0)
    assert bench.error(0, SECOND)["fields"]["code"] == "vetoed"


def test_hook_that_is_busy_with_a_later_save_has_its_time_after_that() -> None:
    bench = Ranks()
    queue(bench)
    for rank in range(2):
        bench.writes(rank)
    bench.passes(8.0)
    for rank in range(2):
        bench.say(m.Consent, bench.peer(rank), save_id=SECOND, granted=True, reason="")
    bench.passes(9.0)
    assert bench.outcome() is None
    bench.passes(1.0)
    assert bench.error(0)["fields"]["code"] == "vetoed"


def test_hook_is_not_waited_for_without_end_though_the_save_before_never_ends() -> None:
    bench = Ranks()
    queue(bench, elder_hooked=False)
    bench.passes(109.0)
    assert bench.outcome(SECOND) is None and bench.outcome() is None
    bench.passes(1.0)
    assert bench.error(0, SECOND)["fields"]["code"] == "vetoed" and bench.outcome() is None


def test_consent_that_was_given_outlives_its_rank(hooked: Ranks) -> None:
    consents(hooked, 1)
    hooked.dies(1, FIRST)
    consents(hooked, 0)
    assert hooked.of(ac.Commit)


def test_consent_of_a_twin_or_of_another_world_counts_for_nothing(hooked: Ranks) -> None:
    hooked.hello(b"twin", "9" * 16, 1, 2)
    hooked.hello(b"z", "8" * 16, 1, 3)
    for peer in (b"twin", b"z"):
        for granted in (True, False):
            assert isinstance(hooked.say(m.Consent, peer, save_id=FIRST, granted=granted, reason=""), m.Ok)
    assert isinstance(hooked.say(m.Consent, b"0", save_id=SECOND, granted=True, reason=""), m.Ok)
    consents(hooked, 0)
    assert hooked.outcome() is None and not hooked.of(ac.Commit)


# ---- replicas


def sampled(digest: bytes, split: bool = False, name: str = "w") -> dict[str, Any]:
    return {"samples": encode_samples([("even", True, EQUAL), (name, split, digest)])}


@pytest.mark.parametrize("names", ["ww", "ab"], ids=["equal", "of different tensors"])
def test_samples_that_are_equal_or_of_different_tensors_commit(names: str) -> None:
    bench = Ranks()
    for rank, name in enumerate(names):
        bench.stages(rank, **sampled((EQUAL, OTHER)[rank * (names == "ab")], True, name))
    for rank in range(2):
        bench.writes(rank)
    assert bench.of(ac.Commit) and not bench.outcomes()


@pytest.mark.parametrize("split_on", [(), (0,), (1,), (0, 1)])
def test_replica_that_is_split_and_differs_fails_the_save(split_on: tuple[int, ...]) -> None:
    bench = Ranks(3)
    for rank, digest in enumerate((EQUAL, OTHER, EQUAL)):
        bench.stages(rank, **sampled(digest, split=rank in split_on))
    for rank in range(3):
        error = bench.error(rank)
        assert (error["code"], error["fields"]["fqn"]) == ("replica_mismatch", "w")
        assert list(error["fields"]["ranks"]) == [0, 1, 2] and "[0, 2] and [1]" in error["text"]
    assert bench.outcomes() == {0: True}


# ---- meeting again


def commits(bench: Ranks, save_id: str = FIRST) -> None:
    for rank in range(bench.world_size):
        bench.writes(rank, save_id)
    bench.feed(ev.Published, save_id=save_id)


@pytest.mark.parametrize("changed", [(), (0,), (1,), (0, 1)])
def test_a_rank_that_has_changed_makes_all_ranks_meet_after_the_save(changed: tuple[int, ...]) -> None:
    bench = Ranks()
    for rank in range(2):
        bench.stages(rank, changed=rank in changed)
    assert bench.outcomes() == {}, "it has not ended"
    commits(bench)
    for send in [a for a in bench.of(ac.Send) if isinstance(a.message, m.Saves)]:
        assert dict(send.message.outcomes) == {0: bool(changed)}, "told with the end of the save"
    assert bench.outcome() == "committed"
    assert [bench.outcomes(rank) for rank in range(2)] == [{0: bool(changed)}] * 2
    for rank in range(2):
        bench.stages(rank, SECOND, 2, path="/ckpt/b")
    commits(bench, SECOND)
    assert bench.outcomes() == {0: bool(changed), 1: False}, "each save has an outcome of its own"


@pytest.mark.parametrize(
    ("reason", "skipped", "meet"),
    [("no slot", True, False), ("staging failed", False, False), (NOT_AGREED + "cut off", False, True)],
)
@pytest.mark.parametrize("first", [True, False])
def test_a_rank_that_withdraws_decides_the_save_at_once(reason: str, skipped: bool, meet: bool, first: bool) -> None:
    bench = Ranks()
    if not first:
        bench.stages(0)
    bench.withdraws(1, EPOCH_UNKNOWN, skipped=skipped, reason=reason)
    assert [bench.outcomes(rank) for rank in range(2)] == [{0: meet}] * 2, "also to the rank that takes no part"
    if first:
        bench.stages(0, changed=True)
    assert bench.outcome() == "abandoned" and bench.outcomes() == {0: meet}, "what was told stays"


def test_a_save_that_a_rank_has_changed_in_and_another_withdraws_from_makes_all_meet() -> None:
    bench = Ranks()
    bench.stages(0, changed=True)
    bench.withdraws(1)
    assert bench.outcomes() == {0: True}


@pytest.mark.parametrize(("code", "meet"), [("coverage", True), ("ENOSPC", False)])
def test_a_tensor_that_is_not_covered_makes_the_ranks_meet_and_a_full_disk_does_not(code: str, meet: bool) -> None:
    bench = Ranks()
    for rank in range(2):
        bench.stages(rank)
    for rank in range(2):
        bench.writes(rank)
    bench.feed(ev.Published, save_id=FIRST, error=to_wire(SaveFailedError("failed", code=code)))
    assert bench.outcome() == "failed" and bench.outcomes() == {0: meet}


def test_only_the_latest_outcomes_are_told() -> None:
    assert MAX_OUTCOMES > MAX_SLOTS, "a rank hears too late of the save before its next one"
    bench = Ranks()
    for number in range(MAX_OUTCOMES + 5):
        bench.withdraws(1, f"000000-{number:08d}-{RUN}")
    assert list(bench.outcomes()) == list(range(5, MAX_OUTCOMES + 5))


# ---- lineage


def test_ranks_of_a_run_get_one_epoch_and_another_run_a_larger_one() -> None:
    bench = Bench()
    for rank, peer in enumerate((b"p", b"q")):
        bench.hello(peer, f"{rank + 1:016x}", rank, 2)
    bench.hello(b"z", "9" * 16)

    def ask(peer: bytes, run: str, on_disk: int, path: str = PATH) -> Any:
        reply = bench.say(m.Lineage, peer, run=run, path=path, least_epoch=0)
        for scan in bench.of(ac.ScanLineage):
            facts = {"run": scan.run, "path": scan.path}
            bench.feed(ev.LineageScanned, epoch=on_disk, **facts)
            reply = bench.of(ac.Send)[0].message
        return reply.epoch

    assert ask(b"p", RUN, 3) == 3
    assert ask(b"z", OTHER_RUN, 3) == 4, "the first one has not even begun"
    assert ask(b"q", RUN, 9, PATH + "b") == 3, "whatever has happened there since"
    assert ask(b"p", RUN, 1, "/elsewhere/a") == 1
    assert ask(b"z", OTHER_RUN, 2, "/elsewhere/a") == 2


def test_ranks_that_ask_before_the_first_answer_and_repeats_are_one_scan_and_all_are_answered() -> None:
    bench = Ranks(join=False)
    scans = []
    for _ in range(3):
        for rank in range(2):
            bench.say(m.Lineage, bench.peer(rank), id=70 + rank, run=RUN, path=f"{PATH}{rank}", least_epoch=0)
            scans += bench.of(ac.ScanLineage)
    assert scans == [ac.ScanLineage(run=RUN, path=PATH + "0")]
    bench.feed(ev.LineageScanned, run=RUN, path=PATH + "0", epoch=2)
    answers = {a.peer: a.message for a in bench.of(ac.Send)}
    assert answers == {bench.peer(rank): m.LineageFound(id=70 + rank, epoch=2) for rank in range(2)}


def test_scan_that_fails_is_told_to_everybody_who_has_asked_and_the_next_question_scans_again() -> None:
    bench = Ranks(join=False)
    for rank in range(2):
        bench.say(m.Lineage, bench.peer(rank), id=70 + rank, run=RUN, path=PATH, least_epoch=0)
    bench.feed(ev.LineageScanned, run=RUN, path=PATH, error=ERROR)
    assert {(a.peer, code(a.message)) for a in bench.of(ac.Send)} == {(bench.peer(r), "save_failed") for r in range(2)}
    bench.say(m.Lineage, b"0", id=72, run=RUN, path=PATH, least_epoch=0)
    assert bench.of(ac.ScanLineage)


def test_run_whose_saves_the_worker_knows_keeps_their_epoch() -> None:
    bench = Ranks(join=False)
    bench.starts(0, "000007-00000000-" + RUN)
    bench.say(m.Lineage, b"1", id=70, run=RUN, path=PATH + "b", least_epoch=0)
    bench.feed(ev.LineageScanned, run=RUN, path=PATH + "b", epoch=8)
    assert bench.of(ac.Send)[0].message == m.LineageFound(id=70, epoch=7)


def asks(bench: Bench, peer: bytes = b"0", run: str = RUN, least: int = 0, on_disk: int = 0) -> int:
    """Ask for the epoch of a run in the directory of `PATH`; `on_disk`: what a scan finds there, if one is made."""
    reply = bench.say(m.Lineage, peer, id=70, run=run, path=PATH, least_epoch=least)
    for _ in bench.of(ac.ScanLineage):
        bench.feed(ev.LineageScanned, run=run, path=PATH, epoch=on_disk)
        reply = bench.of(ac.Send)[0].message
    return int(reply.epoch)


def test_run_is_newer_than_what_it_has_restored_from_and_two_such_runs_differ() -> None:
    bench = Ranks(join=False)
    bench.hello(b"z", "9" * 16)
    assert asks(bench, least=499_001, on_disk=1) == 499_001
    assert asks(bench, b"z", OTHER_RUN, least=499_001, on_disk=1) == 499_002
    assert asks(bench, b"1", least=499_001) == 499_001
    assert asks(bench, b"1", least=499_002) == 499_003, "it has restored from the other run since"
    assert asks(bench, b"0") == 499_003


def test_directories_whose_epochs_are_remembered_are_bounded() -> None:
    bench = Ranks()
    for number in range(100):
        path = f"/runs/{number}/a"
        bench.say(m.Lineage, b"0", id=700 + number, run=RUN, path=path, least_epoch=0)
        bench.feed(ev.LineageScanned, run=RUN, path=path, epoch=1)
    assert len(bench.core.tables.runs[RUN].epochs) == 64


# ---- one after the other


def test_save_that_a_rank_skipped_holds_no_later_one() -> None:
    bench = Ranks()
    second = [bench.slot(b"0"), bench.slot(b"1")]
    bench.stages(0)
    bench.withdraws(1, EPOCH_UNKNOWN, skipped=True)
    for rank, slot in enumerate(second):
        bench.begin(slot, SECOND, peer=bench.peer(rank), path="/ckpt/b")
        bench.feed(ev.Prepared, key=(SECOND, rank))
        bench.submit(slot, SECOND, peer=bench.peer(rank))
        bench.read(slot, SECOND, rank=rank, world_size=2, path="/ckpt/b")
        bench.writes(rank, SECOND)
    assert [c.save_id for c in bench.of(ac.Commit)] == [SECOND]

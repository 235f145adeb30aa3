"""The worker's core: slots that a dead worker had lent, handed over by their trainer."""

from __future__ import annotations

from typing import Any

import pytest
from worker_bench import ERROR, FIRST, PATH, SECOND, Bench, code

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

TOKEN = b"t" * 16


@pytest.fixture
def bench() -> Bench:
    made = Bench()
    made.hello()
    return made


def test_an_adopted_slot_is_opened_granted_and_looked_into(bench: Bench) -> None:
    assert bench.adopt(id=70) is None
    (job,) = bench.of(ac.AdoptSlot)
    assert (job.nbytes, job.pid, job.fd, job.token) == (12288, 7, 9, TOKEN)
    bench.feed(ev.SlotAdopted, slot=job.slot, fd=31, token=TOKEN)
    (granted,) = [a.message for a in bench.of(ac.Send)]
    assert granted == m.Granted(id=70, slot=job.slot, fd=31, nbytes=12288, token=TOKEN)
    assert [a.slot for a in bench.of(ac.ReadSlot)] == [job.slot]
    assert bench.adopt(id=70) == granted  # a repeat
    assert not bench.of(ac.AdoptSlot)


def test_what_lies_sealed_in_it_is_taken_up_without_a_doorbell_and_may_be_on_disk(bench: Bench) -> None:
    slot = bench.adopted()
    bench.read(slot, generation=4)
    (prepare,) = bench.of(ac.Prepare)
    assert prepare.resumed
    bench.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = bench.of(ac.Write)
    assert write.resumed
    bench.feed(ev.Written, key=(FIRST, 0), result="r")
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.phase() == "committed"


def test_a_save_that_has_ended_is_not_taken_up_again_and_the_next_one_is_like_any_other(bench: Bench) -> None:
    slot = bench.adopted(generation=4, ended=4)
    bench.read(slot, generation=4)
    assert bench.phase() is None and not bench.of(ac.Prepare)
    bench.begin(slot, generation=5)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot, generation=5)
    bench.read(slot, generation=5)
    (write,) = bench.of(ac.Write)
    assert not write.resumed


def test_a_save_whose_manifest_stands_is_committed_and_nothing_is_written(bench: Bench) -> None:
    slot = bench.adopted()
    bench.read(slot, generation=4)
    bench.feed(ev.Prepared, key=(FIRST, 0), committed=True)
    assert bench.phase() == "committed"
    assert [row["phase"] for row in bench.pushed()] == ["committed"]
    assert not bench.of(ac.Write) and not bench.of(ac.Commit)


def two_ranks() -> Bench:
    bench = Bench()
    for rank, peer in enumerate((b"p", b"q")):
        bench.hello(peer, str(rank + 1) * 16, rank, 2)
    return bench


def test_a_rank_that_comes_late_to_a_save_that_was_committed_hears_so_at_once() -> None:
    bench = two_ranks()
    slots = [bench.adopted(peer=peer) for peer in (b"p", b"q")]
    bench.read(slots[0], generation=4, rank=0, world_size=2)
    bench.feed(ev.Prepared, key=(FIRST, 0), committed=True)
    bench.read(slots[1], generation=4, rank=1, world_size=2)
    assert [bench.phase(FIRST, rank) for rank in (0, 1)] == ["committed", "committed"]
    assert [row["phase"] for row in bench.pushed()] == ["committed"]


def test_a_save_whose_directory_cannot_be_checked_ends_as_unknown_and_nothing_of_it_is_removed() -> None:
    bench = two_ranks()
    slot = bench.adopted(peer=b"q")
    bench.read(slot, generation=4, rank=1, world_size=2)
    bench.feed(ev.Prepared, key=(FIRST, 1), error=ERROR)
    (row,) = bench.pushed()
    assert row["phase"] == "unknown" and row["error"]["code"] == "commit_unknown"
    assert row["error"]["fields"]["code"] == "ENOSPC" and "nothing was published" not in row["error"]["text"]
    assert not bench.of(ac.Remove), "the dead worker may have committed it, and told rank 0"
    late = bench.adopted(peer=b"p")
    bench.read(late, generation=4, world_size=2)
    assert bench.phase() == "unknown", "of this rank as well"


def test_a_save_that_is_known_not_to_be_committed_fails_where_its_directory_cannot_be_prepared() -> None:
    bench = two_ranks()
    slot = bench.adopted(peer=b"q")
    bench.read(slot, generation=4, rank=1, world_size=2)
    bench.feed(ev.Prepared, key=(FIRST, 1), error=ERROR, known_uncommitted=True)
    (row,) = bench.pushed()
    assert row["phase"] == "failed" and row["error"]["text"] == ERROR["text"]


@pytest.mark.parametrize(
    ("second", "phase", "text"),
    [
        ({"committed": True}, "committed", ""),
        ({}, "failed", str(ERROR["text"])),
        ({"error": {**ERROR, "fields": {"code": "EIO", "detail": "also here"}}}, "unknown", "also here"),
    ],
    ids=["finds the manifest", "finds none", "cannot check either"],
)
def test_where_the_check_of_one_rank_fails_that_of_another_decides(
    second: dict[str, Any], phase: str, text: str
) -> None:
    bench = two_ranks()
    for rank, peer in enumerate((b"p", b"q")):
        bench.read(bench.adopted(peer=peer), generation=4, rank=rank, world_size=2)
    bench.feed(ev.Prepared, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "recovering"
    bench.feed(ev.Prepared, key=(FIRST, 1), **second)
    assert [bench.phase(rank=rank) for rank in (0, 1)] == [phase] * 2
    assert not text or text in bench.row()["error"]["text"]


@pytest.mark.parametrize("committed", [True, False])
def test_a_save_that_may_be_committed_does_not_end_by_a_rank_that_is_gone_until_that_is_known(committed: bool) -> None:
    bench = two_ranks()
    slot = bench.adopted(peer=b"p")
    bench.say(m.Lineage, b"q", run=FIRST[-12:], path="/ckpt/a", least_epoch=0)
    bench.read(slot, generation=4, rank=0, world_size=2)
    bench.say(m.Goodbye, b"q")
    assert bench.phase() == "recovering"
    bench.now += 1e6
    bench.feed(ev.Tick)
    assert bench.phase() == "recovering"
    bench.feed(ev.Prepared, key=(FIRST, 0), committed=committed)
    assert bench.phase() == ("committed" if committed else "failed")
    assert committed or bench.row()["error"]["fields"]["code"] == "not_sealed"


def test_a_save_that_is_not_committed_after_all_waits_for_no_hook_of_a_rank_that_is_gone() -> None:
    bench = two_ranks()
    slots = [bench.adopted(peer=peer) for peer in (b"p", b"q")]
    for rank in (0, 1):
        bench.read(slots[rank], generation=4, rank=rank, world_size=2, hook_timeout_s=50.0 * rank)
    bench.feed(ev.Died, session="2" * 16)
    bench.feed(ev.SlotRead, slot=slots[1], reason="SEALED", opened=False)
    assert bench.phase(FIRST, 1) == "recovering"  # it may have been committed by the worker that is dead
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert [bench.phase(FIRST, rank) for rank in (0, 1)] == ["failed", "failed"]
    assert bench.row()["error"]["fields"]["code"] == "vetoed"


def test_a_path_that_another_save_has_taken_meanwhile_refuses_it_unless_it_is_committed(bench: Bench) -> None:
    bench.begin(bench.slot(), SECOND)
    slot = bench.adopted()
    bench.read(slot, generation=4)
    assert bench.phase() == "recovering"
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert bench.row()["error"]["fields"]["code"] == "path_in_use"


def test_a_trainer_that_dies_while_its_slot_is_opened_loses_nothing_that_it_had_sealed() -> None:
    bench = two_ranks()
    bench.adopt(peer=b"p")
    (job,) = bench.of(ac.AdoptSlot)
    bench.feed(ev.Died, session="1" * 16)
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.SlotAdopted, slot=job.slot, fd=31, token=TOKEN)
    assert not bench.of(ac.Send)
    assert bench.of(ac.ReadSlot)
    bench.read(job.slot, generation=4, rank=0, world_size=2)
    assert bench.phase() == "recovering"
    assert not bench.of(ac.FreeSlot)


def test_a_slot_that_cannot_be_opened_is_refused_and_forgotten(bench: Bench) -> None:
    bench.adopt(id=70)
    (job,) = bench.of(ac.AdoptSlot)
    bench.feed(ev.SlotAdopted, slot=job.slot, error=ERROR)
    (refused,) = [a.message for a in bench.of(ac.Send)]
    assert code(refused) == "save_failed"
    assert not bench.core.tables.slots and bench.core.tables.jobs == 0
    assert bench.adopt(id=70) is None  # it may be tried again
    assert bench.of(ac.AdoptSlot)


@pytest.mark.parametrize(
    "wrong",
    [{"nbytes": 4096}, {"nbytes": 12289}, {"nbytes": 1 << 60}, {"ended": 5}],
    ids=["too small", "no whole pages", "too large", "ended after its generation"],
)
def test_a_slot_that_cannot_be_is_refused(bench: Bench, wrong: dict[str, int]) -> None:
    assert code(bench.adopt(**wrong)) == "protocol"
    assert not bench.of(ac.AdoptSlot)


def test_a_worker_that_drains_adopts_nothing(bench: Bench) -> None:
    bench.feed(ev.StopRequested)
    assert code(bench.adopt()) == "worker_unavailable"


@pytest.mark.parametrize("at", ["looking whether it is committed", "writing"])
def test_what_the_worker_before_has_left_goes_when_the_save_fails_here(at: str) -> None:
    bench = two_ranks()
    slots = [bench.adopted(peer=peer) for peer in (b"p", b"q")]
    for rank in (0, 1):
        bench.read(slots[rank], generation=4, rank=rank, world_size=2)
    bench.feed(ev.Prepared, key=(FIRST, 0), error=None if at == "writing" else ERROR)
    assert not bench.of(ac.Remove), "another rank's files are being looked for"
    bench.feed(ev.Prepared, key=(FIRST, 1))
    if at == "writing":
        bench.feed(ev.Written, key=(FIRST, 1), error=ERROR)
        assert not bench.of(ac.Remove), "rank 0 writes still"
        bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert [a.save_id for a in bench.of(ac.Remove)] == [FIRST]
    bench.feed(ev.Removed, save_id=FIRST)
    bench.feed(ev.Tick)
    assert not bench.of(ac.Remove)


# ---- what the worker before had committed lies in adopted slots, and is offered from there


def recalled(bench: Bench, peer: bytes = b"p") -> list[tuple[str, int, int, bool]]:
    """Return save, rank, slot and whether it is committed, of each part that a reader is offered."""
    reply: Any = bench.say(m.Recall, peer, path=PATH, hold=False)
    return [(part["save_id"], part["rank"], part["slot"], part["committed"]) for part in reply.parts]


def told(bench: Bench, peer: bytes = b"p", **changes: Any) -> int:
    """Adopt a slot of a rank that was told of the commit, and look into it."""
    slot = bench.adopted(peer, ended=4, committed=FIRST)
    bench.read(slot, generation=4, **changes)
    return slot


def test_what_was_committed_before_is_offered_until_the_next_save_and_nothing_is_done_about_it(bench: Bench) -> None:
    slot = told(bench)
    assert not bench.of(ac.Prepare) and not bench.of(ac.Write) and not bench.pushed()
    assert recalled(bench) == [(FIRST, 0, slot, True)]
    bench.at_writing(slot, SECOND, 5)
    assert recalled(bench) == [(SECOND, 0, slot, False)]


@pytest.mark.parametrize("seen", [True, False])
def test_it_is_kept_when_the_trainer_dies_and_lent_again(bench: Bench, seen: bool) -> None:
    slot = bench.adopted(ended=4, committed=FIRST)
    if seen:
        bench.read(slot, generation=4)
    bench.feed(ev.Died, session="1" * 16)
    bench.read(slot, generation=4)
    if bench.of(ac.ReadSlot):  # the look that had begun before the death proves nothing
        bench.read(slot, generation=4)
    assert not bench.of(ac.FreeSlot)
    bench.hello(b"q", "2" * 16)
    assert recalled(bench, b"q") == [(FIRST, 0, slot, True)]
    assert bench.say(m.Allocate, b"q", nbytes=12288, populate=True).slot == slot


@pytest.mark.parametrize(
    ("committed", "generation", "changes"),
    [
        ("", 4, {}),
        (SECOND, 4, {}),
        (FIRST, 3, {}),
        (FIRST, 4, {"rank": 1, "world_size": 2}),
    ],
    ids=["said to have failed", "another save", "an older one", "another rank's"],
)
def test_nothing_else_is_taken_for_it(bench: Bench, committed: str, generation: int, changes: dict[str, int]) -> None:
    slot = bench.adopted(ended=4, committed=committed)
    bench.read(slot, generation=generation, **changes)
    assert recalled(bench) == []
    bench.feed(ev.Died, session="1" * 16)
    bench.read(slot, generation=generation, **changes)
    assert [action.slot for action in bench.of(ac.FreeSlot)] == [slot]


@pytest.mark.parametrize("trainer_dies", [False, True])
@pytest.mark.parametrize("told_first", [True, False])
def test_ranks_of_which_one_had_not_heard_of_the_commit_have_it_in_memory_together(
    told_first: bool, trainer_dies: bool
) -> None:
    """Rank 0 was told; rank 1 was not, so that its part is looked for on disk."""
    bench, slots = two_ranks(), {}
    for rank in (0, 1) if told_first else (1, 0):
        if rank == 0:
            slots[0] = told(bench, world_size=2)
        else:
            slots[1] = bench.adopted(b"q")
            bench.read(slots[1], generation=4, rank=1, world_size=2)
    if trainer_dies:
        bench.feed(ev.Died, session="1" * 16)
        bench.read(slots[0], generation=4, world_size=2)
        assert not bench.of(ac.FreeSlot)
    if bench.core.tables.part((FIRST, 1)).preparing:  # type: ignore[union-attr]
        bench.feed(ev.Prepared, key=(FIRST, 1), committed=True)
    assert bench.phase(FIRST, 1) == "committed"
    bench.feed(ev.Tick)
    assert recalled(bench, b"q") == [(FIRST, 0, slots[0], True), (FIRST, 1, slots[1], True)]

"""The worker's core and slots that are written while they are filled, rings or not: nothing counts before the seal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import COMMIT_TIMEOUT_S, CONFIG, ERROR, FIRST, PATH, REQUEST, SECOND, Bench

from asyncckpt.errors import to_wire
from asyncckpt.protocol import messages as m
from asyncckpt.storage.files import copy_unknown
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

RING: dict[str, Any] = {"ring_segments": 4, "ring_segment_nbytes": 262_144}
WHOLE: dict[str, Any] = {}
"""Fields of the request: of a slot that is a ring, and of one with room for everything."""


class Streams(Bench):
    """A bench with a session and a slot."""

    def __init__(self, fields: dict[str, Any], world_size: int = 1) -> None:
        super().__init__()
        self.request = replace(REQUEST, world_size=world_size, **fields)
        self.hello(world_size=world_size)
        self.number = self.slot()

    def read_slot(self, *, streamed: bool, slot: int = 0, generation: int = 1, **changes: Any) -> list[Any]:
        """Answer a ReadSlot with a slot that is being filled, or sealed."""
        request = replace(self.request, **changes)
        where = {"slot": slot or self.number, "generation": generation}
        return self.feed(ev.SlotRead, **where, request=request, streamed=streamed, opened=streamed)

    def at_streaming(self) -> ac.Write:
        """Bring a save to where it is written and staged."""
        self.begin(self.number)
        self.feed(ev.Prepared, key=(FIRST, 0))
        self.submit(self.number)
        self.read_slot(streamed=True)
        (write,) = self.of(ac.Write)
        return write

    def seal(self, slot: int = 0) -> list[Any]:
        """Ring the second doorbell, and answer what it leads to."""
        self.submit(slot or self.number)
        return self.read_slot(streamed=False, slot=slot)

    def withdraw(self) -> None:
        """The trainer takes its save back."""
        self.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)

    def join(self, rank: int) -> tuple[bytes, int]:
        """Return the peer and the slot of another rank of the same world."""
        peer = b"q%d" % rank
        self.hello(peer, str(rank + 1) * 16, rank=rank, world_size=self.request.world_size, pid=7 + rank)
        return peer, self.slot(peer)

    def passes(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick)

    def phases(self) -> tuple[str | None, str | None]:
        return self.phase(rank=0), self.phase(rank=1)


@pytest.fixture
def ring() -> Streams:
    return Streams(RING)


@pytest.fixture
def whole() -> Streams:
    return Streams(WHOLE)


@pytest.fixture(params=[RING, WHOLE], ids=["ring", "whole"])
def either(request: pytest.FixtureRequest) -> Streams:
    """What holds of both."""
    return Streams(request.param)


# ---- whether it is a ring or not


def test_a_slot_is_written_while_its_save_is_only_begun(either: Streams) -> None:
    write = either.at_streaming()
    assert (write.slot, write.generation, write.early, write.resumed) == (either.number, 1, True, False)
    assert write.request == either.request and either.phase() == "open"
    either.submit(either.number)
    either.read_slot(streamed=True)
    assert not either.of(ac.Write), "a doorbell that comes again begins nothing twice"


def test_the_seal_comes_before_the_end_of_the_writing_and_starts_no_other(either: Streams) -> None:
    either.at_streaming()
    either.seal()
    assert (either.phase(), either.of(ac.Write)) == ("writing", [])
    either.feed(ev.Written, key=(FIRST, 0), result="files")
    assert either.phase() == "durable"
    (commit,) = either.of(ac.Commit)
    assert commit.results == ("files",)


def test_nothing_is_committed_that_is_written_and_not_sealed(either: Streams) -> None:
    either.at_streaming()
    either.feed(ev.Written, key=(FIRST, 0), result="files")
    assert (either.phase(), either.of(ac.Commit)) == ("open", [])
    either.seal()
    assert either.phase() == "durable"
    assert len(either.of(ac.Commit)) == 1


@pytest.mark.parametrize("first", ["Begin", "Prepared"])
def test_writing_begins_when_directory_and_request_are_there(either: Streams, first: str) -> None:
    if first == "Begin":
        either.begin(either.number)
    either.submit(either.number)  # without a Begin: it was lost, or is under way
    either.read_slot(streamed=True)
    assert not either.of(ac.Write)
    assert first == "Begin" or either.of(ac.Prepare)
    either.feed(ev.Prepared, key=(FIRST, 0))
    assert len(either.of(ac.Write)) == 1


def test_a_directory_that_cannot_be_made_ends_the_save_and_writes_nothing(either: Streams) -> None:
    either.begin(either.number)
    either.submit(either.number)
    either.read_slot(streamed=True)
    either.feed(ev.Prepared, key=(FIRST, 0), error=ERROR)
    assert (either.phase(), either.of(ac.Write), either.of(ac.CutOff)) == ("failed", [], [])


@pytest.mark.parametrize("ends", [{"error": ERROR}, {"result": "files"}], ids=["error", "result"])
def test_a_save_that_its_trainer_takes_back_is_cut_off_and_leaves_nothing(either: Streams, ends: Any) -> None:
    write = either.at_streaming()
    either.withdraw()
    assert either.phase() == "abandoned"
    assert either.of(ac.CutOff) == [ac.CutOff(slot=write.slot, generation=1)]
    either.feed(ev.Written, key=(FIRST, 0), **ends)
    assert either.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]


def test_files_that_were_written_before_a_save_was_taken_back_are_removed(either: Streams) -> None:
    either.at_streaming()
    either.feed(ev.Written, key=(FIRST, 0), result="files")
    either.withdraw()
    assert (either.phase(), len(either.of(ac.Remove))) == ("abandoned", 1)


def test_a_slot_whose_trainer_dies_unsealed_is_cut_off_and_freed_when_nobody_reads_it(either: Streams) -> None:
    either.at_streaming()
    either.feed(ev.Died, session="1" * 16)
    either.read_slot(streamed=True)
    assert either.phase() == "abandoned"
    assert (len(either.of(ac.CutOff)), either.of(ac.FreeSlot)) == (1, [])
    either.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(either.of(ac.FreeSlot)) == 1


def test_what_is_sealed_when_its_trainer_dies_is_committed(either: Streams) -> None:
    either.at_streaming()
    either.feed(ev.Died, session="1" * 16)
    either.read_slot(streamed=False)
    assert (either.phase(), either.of(ac.CutOff)) == ("writing", [])
    either.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(either.of(ac.Commit)) == 1


def test_what_its_dead_trainer_had_only_begun_to_fill_is_not_written(either: Streams) -> None:
    either.begin(either.number)
    either.feed(ev.Prepared, key=(FIRST, 0))
    either.feed(ev.Died, session="1" * 16)
    either.read_slot(streamed=True)
    assert (either.phase(), either.of(ac.Write)) == ("abandoned", [])


def test_the_next_save_may_use_the_slot_at_once_and_its_memory_is_not_freed_under_the_writing(either: Streams) -> None:
    either.at_streaming()
    either.withdraw()
    assert isinstance(either.begin(either.number, SECOND, 2), m.Ok)
    either.feed(ev.Died, session="1" * 16)
    either.feed(ev.SlotRead, slot=either.number, reason="open", opened=True)
    assert (either.phase(SECOND), either.of(ac.FreeSlot)) == ("abandoned", [])
    either.feed(ev.Prepared, key=(SECOND, 0))
    either.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(either.of(ac.FreeSlot)) == 1


@pytest.mark.parametrize("streamed", [True, False])
def test_the_next_save_in_a_slot_may_be_read_before_its_begin_and_the_end_of_the_one_before(
    either: Streams, streamed: bool
) -> None:
    either.at_streaming()
    either.submit(either.number)
    # The trainer's copy has failed, and it saves to the same path again, in the same slot.
    either.read_slot(streamed=streamed, generation=2, save_id=SECOND)
    reached = "open" if streamed else "sealed"
    assert (either.phase(), either.phase(SECOND)) == ("abandoned", reached)
    either.withdraw()
    either.begin(either.number, SECOND, generation=2)
    assert either.phase(SECOND) == reached
    # What is read of the one before, later than that, ends nothing.
    either.submit(either.number, SECOND, generation=2)
    either.read_slot(streamed=True)
    assert either.phase(SECOND) == reached


@pytest.mark.parametrize("fields", [RING, WHOLE], ids=["ring", "whole"])
def test_a_rank_that_never_seals_ends_what_another_streams(fields: dict[str, Any]) -> None:
    bench = Streams(fields, world_size=2)
    peer, other = bench.join(1)
    bench.begin(other, peer=peer)
    bench.feed(ev.Prepared, key=(FIRST, 1))
    bench.at_streaming()
    bench.feed(ev.Died, session="2" * 16)
    bench.feed(ev.SlotRead, slot=other, reason="open", opened=True)
    assert bench.phases() == ("abandoned", "abandoned")
    assert [a.slot for a in bench.of(ac.CutOff)] == [bench.number]


# ---- slots with room for everything: an error before the seal costs nothing


def test_what_is_sealed_before_its_directory_is_there_is_written_as_ever(whole: Streams) -> None:
    whole.begin(whole.number)
    whole.submit(whole.number)
    whole.read_slot(streamed=True)
    whole.seal()
    whole.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = whole.of(ac.Write)
    assert not write.early


def test_an_error_before_the_seal_ends_nothing_and_the_seal_leads_to_another_attempt(whole: Streams) -> None:
    whole.at_streaming()
    whole.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert whole.phase() == "open"
    whole.submit(whole.number)
    whole.read_slot(streamed=True)  # a doorbell that comes again begins nothing twice
    assert not whole.of(ac.Write)
    whole.seal()
    (write,) = whole.of(ac.Write)
    assert (whole.phase(), write.early) == ("writing", False)
    whole.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert whole.phase() == "failed"
    assert [part["path"] for part in whole.say(m.Recall, path=PATH, hold=False).parts] == [PATH]


def test_an_error_that_is_heard_of_after_the_seal_leads_to_another_attempt_too(whole: Streams) -> None:
    whole.at_streaming()
    whole.seal()
    whole.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    (write,) = whole.of(ac.Write)
    assert (whole.phase(), write.early, write.slot, write.generation) == ("writing", False, whole.number, 1)
    whole.feed(ev.Died, session="1" * 16)  # it is sealed, and its slot is not freed under the second writing either
    whole.read_slot(streamed=False)
    assert (whole.phase(), whole.of(ac.FreeSlot)) == ("writing", [])
    whole.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert whole.phase() == "failed"
    assert not whole.of(ac.Write)


@pytest.mark.parametrize("sealed", [False, True])
def test_after_a_copy_that_may_still_be_made_nothing_is_written_again_under_the_same_names(
    whole: Streams, sealed: bool
) -> None:
    whole.at_streaming()
    if sealed:
        whole.seal()
    unknown = to_wire(copy_unknown("no answer", save_id=FIRST, rank=0, step=5, path=PATH))
    whole.feed(ev.Written, key=(FIRST, 0), error=unknown)
    assert (whole.phase(), whole.of(ac.Write)) == ("failed", [])
    assert whole.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]
    if not sealed:
        whole.seal()
    assert (whole.phase(), whole.of(ac.Write)) == ("failed", [])


def test_a_rank_that_stops_while_it_is_written_is_waited_for_as_long_as_one_that_is_not() -> None:
    bench = Streams(WHOLE, world_size=2)
    peer, other = bench.join(1)
    bench.at_streaming()
    bench.at_writing(other, peer=peer, rank=1)
    bench.feed(ev.Written, key=(FIRST, 1), result="files")
    bench.now = COMMIT_TIMEOUT_S + 1.0
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)  # nothing was staged for so long
    bench.feed(ev.Tick)
    assert bench.phases() == ("failed", "failed")
    assert len(bench.of(ac.Remove)) == 1


@pytest.mark.parametrize("sealed", [False, True])
def test_a_drain_cuts_a_stopped_trainer_s_writing_off_and_writes_anew_what_is_sealed_just_then(
    whole: Streams, sealed: bool
) -> None:
    whole.at_streaming()
    whole.feed(ev.StopRequested)
    whole.read_slot(streamed=True)
    assert not whole.of(ac.CutOff)
    whole.passes(CONFIG.staging_grace_s)
    assert whole.of(ac.CutOff) == [ac.CutOff(slot=whole.number, generation=1)]
    assert not whole.of(ac.Exit), "the job removes its files first"
    if sealed:
        whole.seal()
    whole.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    if not sealed:
        whole.read_slot(streamed=True)
        assert whole.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]
        return
    assert [write.early for write in whole.of(ac.Write)] == [False]
    whole.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(whole.of(ac.Commit)) == 1


def test_the_next_worker_writes_only_what_is_sealed_and_removes_what_stands_before(whole: Streams) -> None:
    slot = whole.adopted(generation=1, ended=0)
    whole.read_slot(streamed=True, slot=slot)
    whole.begin(slot)
    (prepare,) = whole.of(ac.Prepare)
    assert prepare.resumed  # the files that stand may have taken the room that they need
    whole.feed(ev.Prepared, key=(FIRST, 0))
    whole.submit(slot)
    whole.read_slot(streamed=True, slot=slot)
    assert (whole.phase(), whole.of(ac.Write)) == ("open", [])
    whole.seal(slot)
    (write,) = whole.of(ac.Write)
    assert (whole.phase(), write.early, write.resumed) == ("writing", False, True)


def test_what_a_dead_worker_had_begun_to_write_is_removed_when_the_save_is_taken_back(whole: Streams) -> None:
    slot = whole.adopted(generation=1, ended=0)
    whole.read_slot(streamed=True, slot=slot)
    whole.begin(slot)
    whole.feed(ev.Prepared, key=(FIRST, 0))
    whole.withdraw()
    assert [(a.save_id, a.path) for a in whole.of(ac.Remove)] == [(FIRST, PATH)]
    assert whole.phase() == "abandoned"


@pytest.mark.parametrize("removing", [False, True], ids=["removed before", "being removed"])
def test_what_a_dead_worker_had_begun_to_write_is_removed_when_another_rank_has_failed_before(removing: bool) -> None:
    bench = Streams(WHOLE, world_size=2)
    slot = bench.adopted(generation=1, ended=0)
    bench.read_slot(streamed=True, slot=slot)
    peer, other = bench.join(1)
    bench.begin(other, peer=peer)
    bench.feed(ev.Prepared, key=(FIRST, 1), error=ERROR)
    assert bench.phase(rank=1) == "failed"
    if removing:
        save = bench.core.tables.find_or_reopen(FIRST)
        save.job, save.jobs = "remove", 1
    bench.begin(slot)
    assert (bench.phase(), len(bench.of(ac.Remove))) == ("failed", 0 if removing else 1)
    bench.feed(ev.Removed, save_id=FIRST)
    assert len(bench.of(ac.Remove)) == (1 if removing else 0)


@pytest.mark.parametrize(("fields", "offered"), [(WHOLE, [PATH]), (RING, [])], ids=["whole", "ring"])
def test_a_ring_is_neither_kept_nor_offered(fields: dict[str, Any], offered: list[str]) -> None:
    bench = Streams(fields)
    bench.at_streaming()
    bench.seal()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.feed(ev.Published, save_id=FIRST)
    assert [part["path"] for part in bench.say(m.Recall, path=PATH, hold=False).parts] == offered
    bench.feed(ev.Died, session="1" * 16)
    bench.read_slot(streamed=False)
    assert len(bench.of(ac.FreeSlot)) == (0 if offered else 1)


# ---- rings: what went through is not there any more


def test_an_error_of_the_writing_ends_the_save_that_is_still_staged(ring: Streams) -> None:
    ring.at_streaming()
    ring.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert ring.phase() == "failed"
    assert ring.row()["error"]["fields"]["code"] == "ENOSPC"


def test_a_slot_that_is_adopted_with_an_unfinished_ring_is_written_once_its_trainer_has_begun_it_here(
    ring: Streams,
) -> None:
    slot = ring.adopted(generation=1, ended=0)
    ring.read_slot(streamed=True, slot=slot)
    assert (ring.phase(), ring.of(ac.Write)) == (None, [])
    ring.begin(slot)
    (prepare,) = ring.of(ac.Prepare)
    assert prepare.resumed
    ring.submit(slot)
    ring.read_slot(streamed=True, slot=slot)
    assert not ring.of(ac.Write)
    ring.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = ring.of(ac.Write)
    assert (write.slot, write.resumed, write.early) == (slot, True, True)
    ring.seal(slot)
    assert (ring.phase(), ring.of(ac.Write)) == ("writing", [])
    ring.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(ring.of(ac.Commit)) == 1


def test_a_ring_that_is_adopted_and_whose_trainer_dies_before_its_seal_ends_and_its_files_go(ring: Streams) -> None:
    slot = ring.adopted(generation=1, ended=0)
    ring.read_slot(streamed=True, slot=slot)
    ring.begin(slot)
    ring.feed(ev.Prepared, key=(FIRST, 0))
    ring.submit(slot)
    ring.read_slot(streamed=True, slot=slot)
    ring.feed(ev.Died, session="1" * 16)
    ring.read_slot(streamed=True, slot=slot)
    assert ring.phase() == "abandoned"
    assert [a.slot for a in ring.of(ac.CutOff)] == [slot]
    ring.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(ring.of(ac.Remove)) == 1


def test_an_adopted_ring_that_nobody_has_begun_here_ends_with_its_trainer(ring: Streams) -> None:
    slot = ring.adopted(generation=1, ended=0)
    ring.feed(ev.Died, session="1" * 16)
    for _ in range(2):
        ring.read_slot(streamed=True, slot=slot)
    assert (ring.phase(), ring.of(ac.Write)) == (None, [])
    assert slot in [free.slot for free in ring.of(ac.FreeSlot)]


@pytest.mark.parametrize("committed", [True, False])
def test_a_sealed_ring_of_a_dead_worker_is_committed_or_written_as_resumed(ring: Streams, committed: bool) -> None:
    ring.read_slot(streamed=False, slot=ring.adopted(generation=1, ended=0))
    (prepare,) = ring.of(ac.Prepare)
    assert prepare.resumed
    ring.feed(ev.Prepared, key=(FIRST, 0), committed=committed)
    assert [(write.resumed, write.early) for write in ring.of(ac.Write)] == ([] if committed else [(True, False)])
    assert ring.phase() == ("committed" if committed else "writing")


def test_a_ring_that_the_worker_before_had_committed_is_not_offered(ring: Streams) -> None:
    ring.read_slot(streamed=False, slot=ring.adopted(generation=1, ended=1, committed=FIRST))
    assert ring.phase() is None
    assert ring.say(m.Recall, path=PATH, hold=False).parts == ()


def beside_a_sealed_rank(world_size: int = 2) -> Streams:
    """Rank 0's ring is being written, and rank 1 has sealed."""
    bench = Streams(RING, world_size)
    peer, other = bench.join(1)
    bench.at_streaming()
    bench.at_writing(other, peer=peer, rank=1)
    return bench


def test_a_ring_that_is_being_written_is_waited_for_though_another_rank_has_sealed_long_ago() -> None:
    bench = beside_a_sealed_rank()
    bench.passes(10 * COMMIT_TIMEOUT_S)
    assert bench.phases() == ("open", "writing")
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.passes(0.9 * COMMIT_TIMEOUT_S)
    bench.seal()
    assert bench.phases() == ("durable", "writing")


def test_a_ring_that_is_written_and_not_sealed_is_waited_for_commit_timeout_s() -> None:
    bench = beside_a_sealed_rank()
    bench.passes(10 * COMMIT_TIMEOUT_S)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.passes(1.1 * COMMIT_TIMEOUT_S)
    assert bench.phases() == ("failed", "failed")


def test_a_rank_that_has_not_even_begun_is_not_waited_for_because_another_s_ring_is_being_written() -> None:
    bench = beside_a_sealed_rank(world_size=3)
    bench.passes(1.1 * COMMIT_TIMEOUT_S)
    assert bench.phases() == ("failed", "failed")

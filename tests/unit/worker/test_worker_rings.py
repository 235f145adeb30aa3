"""The worker's core and rings: they are written while they are staged, and their saves stay begun until the seal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import COMMIT_TIMEOUT_S, ERROR, FIRST, PATH, REQUEST, SECOND, Bench

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev

RINGED = {"ring_segments": 4, "ring_segment_nbytes": 262_144}


class Rings(Bench):
    """A bench with a session and a slot."""

    def __init__(self) -> None:
        super().__init__()
        self.hello()
        self.number = self.slot()

    def read_ring(self, *, streamed: bool, save_id: str = FIRST, slot: int = 0, **changes: Any) -> list[Any]:
        """Answer a ReadSlot with a ring that is being filled, or sealed."""
        request = replace(REQUEST, save_id=save_id, **{**RINGED, **changes})
        return self.feed(
            ev.SlotRead, slot=slot or self.number, generation=1, request=request, streamed=streamed, opened=streamed
        )

    def at_streaming(self) -> ac.Write:
        """Bring a save to where its ring is written and staged."""
        self.begin(self.number)
        self.feed(ev.Prepared, key=(FIRST, 0))
        self.submit(self.number)
        self.read_ring(streamed=True)
        (write,) = self.of(ac.Write)
        return write

    def seal(self) -> list[Any]:
        """Ring the second doorbell, and answer what it leads to."""
        self.submit(self.number)
        return self.read_ring(streamed=False)


@pytest.fixture
def bench() -> Rings:
    return Rings()


def test_a_ring_is_written_while_its_save_is_only_begun(bench: Rings) -> None:
    write = bench.at_streaming()
    assert (write.slot, write.generation, write.request.ring_segments) == (bench.number, 1, 4)
    assert bench.phase() == "open"


def test_the_seal_comes_before_the_end_of_the_writing(bench: Rings) -> None:
    bench.at_streaming()
    bench.seal()
    assert bench.phase() == "writing"
    assert not bench.of(ac.Write)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert bench.phase() == "durable"
    (commit,) = bench.of(ac.Commit)
    assert commit.results == ("files",)


def test_nothing_is_committed_that_is_written_and_not_sealed(bench: Rings) -> None:
    bench.at_streaming()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert (bench.phase(), bench.of(ac.Commit)) == ("open", [])
    bench.seal()
    assert bench.phase() == "durable"
    assert len(bench.of(ac.Commit)) == 1


@pytest.mark.parametrize("first", ["Begin", "Prepared"])
def test_writing_begins_when_directory_and_request_are_there(bench: Rings, first: str) -> None:
    if first == "Begin":
        bench.begin(bench.number)
    bench.submit(bench.number)  # without a Begin: it was lost, or is under way
    bench.read_ring(streamed=True)
    assert not bench.of(ac.Write)
    assert first == "Begin" or bench.of(ac.Prepare)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    assert len(bench.of(ac.Write)) == 1


def test_a_doorbell_that_comes_again_begins_nothing_twice(bench: Rings) -> None:
    bench.at_streaming()
    bench.submit(bench.number)
    bench.read_ring(streamed=True)
    assert not bench.of(ac.Write)


def test_a_directory_that_cannot_be_made_ends_the_save_and_writes_nothing(bench: Rings) -> None:
    bench.begin(bench.number)
    bench.submit(bench.number)
    bench.read_ring(streamed=True)
    bench.feed(ev.Prepared, key=(FIRST, 0), error=ERROR)
    assert (bench.phase(), bench.of(ac.Write), bench.of(ac.CutOff)) == ("failed", [], [])


def test_an_error_of_the_writing_ends_the_save_that_is_still_staged(bench: Rings) -> None:
    bench.at_streaming()
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "failed"
    assert bench.row()["error"]["fields"]["code"] == "ENOSPC"


def test_a_save_that_its_trainer_takes_back_is_cut_off(bench: Rings) -> None:
    write = bench.at_streaming()
    bench.say(m.Withdraw, save_id=FIRST, reason="the copy failed", skipped=False)
    assert bench.phase() == "abandoned"
    assert bench.of(ac.CutOff) == [ac.CutOff(slot=write.slot, generation=1)]


def test_a_ring_whose_trainer_dies_is_cut_off_and_its_slot_freed_when_nobody_reads_it(bench: Rings) -> None:
    bench.at_streaming()
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=True)
    assert bench.phase() == "abandoned"
    assert len(bench.of(ac.CutOff)) == 1
    assert not bench.of(ac.FreeSlot)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(bench.of(ac.FreeSlot)) == 1


def test_what_is_written_to_its_end_after_all_is_removed(bench: Rings) -> None:
    bench.at_streaming()
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert bench.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]


def test_a_ring_that_is_sealed_when_its_trainer_dies_is_committed(bench: Rings) -> None:
    bench.at_streaming()
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=False)
    assert (bench.phase(), bench.of(ac.CutOff)) == ("writing", [])
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(bench.of(ac.Commit)) == 1


def test_a_ring_that_its_dead_trainer_had_only_begun_to_fill_is_not_written(bench: Rings) -> None:
    bench.begin(bench.number)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=True)
    assert (bench.phase(), bench.of(ac.Write)) == ("abandoned", [])


def adopted(bench: Rings) -> int:
    """Take over the slot of a ring whose worker has died; returns the slot."""
    bench.say(m.Adopt, fd=9, nbytes=12_288, token=b"t" * 16, generation=1, ended=0, committed="")
    (adopt,) = bench.of(ac.AdoptSlot)
    bench.feed(ev.SlotCreated, slot=adopt.slot, fd=9, token=b"t" * 16)
    return adopt.slot


def test_a_slot_that_is_adopted_with_an_unfinished_ring_is_written_once_its_trainer_has_begun_it_here(
    bench: Rings,
) -> None:
    slot = adopted(bench)
    bench.read_ring(streamed=True, slot=slot)
    assert not bench.of(ac.Write)
    assert bench.phase() is None
    bench.begin(slot)
    (prepare,) = bench.of(ac.Prepare)
    assert prepare.resumed
    bench.submit(slot)
    bench.read_ring(streamed=True, slot=slot)
    assert not bench.of(ac.Write)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = bench.of(ac.Write)
    assert (write.slot, write.resumed, write.early) == (slot, True, True)
    bench.submit(slot)
    bench.read_ring(streamed=False, slot=slot)
    assert (bench.phase(), bench.of(ac.Write)) == ("writing", [])
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(bench.of(ac.Commit)) == 1


def test_a_ring_that_is_adopted_and_whose_trainer_dies_before_its_seal_ends_and_its_files_go(bench: Rings) -> None:
    slot = adopted(bench)
    bench.read_ring(streamed=True, slot=slot)
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.read_ring(streamed=True, slot=slot)
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=True, slot=slot)
    assert bench.phase() == "abandoned"
    assert [a.slot for a in bench.of(ac.CutOff)] == [slot]
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(bench.of(ac.Remove)) == 1


def test_an_adopted_ring_that_nobody_has_begun_here_ends_with_its_trainer(bench: Rings) -> None:
    slot = adopted(bench)
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=True, slot=slot)
    bench.read_ring(streamed=True, slot=slot)
    assert (bench.phase(), bench.of(ac.Write)) == (None, [])
    assert slot in [free.slot for free in bench.of(ac.FreeSlot)]


def test_a_sealed_ring_of_a_dead_worker_is_written_as_resumed(bench: Rings) -> None:
    slot = adopted(bench)
    bench.read_ring(streamed=False, slot=slot)
    (prepare,) = bench.of(ac.Prepare)
    assert prepare.resumed
    bench.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = bench.of(ac.Write)
    assert (write.resumed, write.early) == (True, False)


def test_a_sealed_ring_of_a_dead_worker_that_has_committed_it_is_committed(bench: Rings) -> None:
    bench.read_ring(streamed=False, slot=adopted(bench))
    bench.feed(ev.Prepared, key=(FIRST, 0), committed=True)
    assert bench.phase() == "committed"


def test_a_ring_is_neither_kept_nor_offered(bench: Rings) -> None:
    bench.at_streaming()
    bench.seal()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.feed(ev.Published, save_id=FIRST)
    assert bench.say(m.Recall, path=PATH, hold=False).parts == ()
    bench.feed(ev.Died, session="1" * 16)
    bench.read_ring(streamed=False)
    assert len(bench.of(ac.FreeSlot)) == 1


def test_a_ring_that_the_worker_before_had_committed_is_not_offered(bench: Rings) -> None:
    bench.say(m.Adopt, fd=9, nbytes=12_288, token=b"t" * 16, generation=1, ended=1, committed=FIRST)
    (adopt,) = bench.of(ac.AdoptSlot)
    bench.feed(ev.SlotCreated, slot=adopt.slot, fd=9, token=b"t" * 16)
    bench.read_ring(streamed=False, slot=adopt.slot)
    assert bench.phase() is None
    assert bench.say(m.Recall, path=PATH, hold=False).parts == ()


def test_the_next_save_may_use_the_slot_of_a_ring_that_was_taken_back(bench: Rings) -> None:
    bench.at_streaming()
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    assert isinstance(bench.begin(bench.number, SECOND, 2), m.Ok)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase(SECOND) == "open"


class Pair(Bench):
    """Rank 0's ring is being written, and rank 1 has sealed."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[int] = []
        for rank, peer in enumerate((b"p", b"q")):
            self.hello(peer, str(rank + 1) * 16, rank=rank, world_size=2, pid=7 + rank)
            self.numbers.append(self.slot(peer))
        self.begin(self.numbers[0])
        self.feed(ev.Prepared, key=(FIRST, 0))
        self.submit(self.numbers[0])
        self.read_ring(streamed=True)
        self.at_writing(self.numbers[1], peer=b"q", rank=1)

    def read_ring(self, *, streamed: bool) -> None:
        request = replace(REQUEST, world_size=2, **RINGED)  # type: ignore[arg-type]
        self.feed(ev.SlotRead, slot=self.numbers[0], generation=1, request=request, streamed=streamed, opened=streamed)

    def later(self, seconds: float) -> None:
        self.now += seconds
        self.feed(ev.Tick)

    def phases(self) -> tuple[str | None, str | None]:
        return self.phase(rank=0), self.phase(rank=1)


def test_a_ring_that_is_being_written_is_waited_for_though_another_rank_has_sealed_long_ago() -> None:
    pair = Pair()
    pair.later(10 * COMMIT_TIMEOUT_S)
    assert pair.phases() == ("open", "writing")
    pair.feed(ev.Written, key=(FIRST, 0), result="files")
    pair.later(0.9 * COMMIT_TIMEOUT_S)
    pair.submit(pair.numbers[0])
    pair.read_ring(streamed=False)
    assert pair.phases() == ("durable", "writing")


def test_a_ring_that_is_written_and_not_sealed_is_waited_for_commit_timeout_s() -> None:
    pair = Pair()
    pair.later(10 * COMMIT_TIMEOUT_S)
    pair.feed(ev.Written, key=(FIRST, 0), result="files")
    pair.later(1.1 * COMMIT_TIMEOUT_S)
    assert pair.phases() == ("failed", "failed")


def test_a_rank_that_has_not_even_begun_is_not_waited_for_because_another_s_ring_is_being_written() -> None:
    bench = Bench()
    slots = []
    for rank, peer in enumerate((b"p", b"q")):
        bench.hello(peer, str(rank + 1) * 16, rank=rank, world_size=3, pid=7 + rank)
        slots.append(bench.slot(peer))
    bench.begin(slots[0])
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slots[0])
    request = replace(REQUEST, world_size=3, **RINGED)  # type: ignore[arg-type]
    bench.feed(ev.SlotRead, slot=slots[0], generation=1, request=request, streamed=True, opened=True)
    bench.at_writing(slots[1], peer=b"q", rank=1)
    bench.now += 1.1 * COMMIT_TIMEOUT_S
    bench.feed(ev.Tick)
    assert (bench.phase(rank=0), bench.phase(rank=1)) == ("failed", "failed")


def test_a_rank_that_never_seals_ends_the_ring_of_another() -> None:
    bench = Bench()
    slots = []
    for rank, peer in enumerate((b"p", b"q")):
        bench.hello(peer, str(rank + 1) * 16, rank=rank, world_size=2, pid=7 + rank)
        slots.append(bench.slot(peer))
        bench.begin(slots[-1], peer=peer)
        bench.feed(ev.Prepared, key=(FIRST, rank))
    bench.submit(slots[0])
    request = replace(REQUEST, save_id=FIRST, world_size=2, **RINGED)  # type: ignore[arg-type]
    bench.feed(ev.SlotRead, slot=slots[0], generation=1, request=request, streamed=True, opened=True)
    assert len(bench.of(ac.Write)) == 1
    bench.feed(ev.Died, session="2" * 16)
    bench.feed(ev.SlotRead, slot=slots[1], reason="open", opened=True)
    assert (bench.phase(rank=0), bench.phase(rank=1)) == ("abandoned", "abandoned")
    assert [a.slot for a in bench.of(ac.CutOff)] == [slots[0]]

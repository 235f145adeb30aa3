"""The worker's core and slots that are written while they are being filled: nothing counts before the seal."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from worker_bench import COMMIT_TIMEOUT_S, CONFIG, ERROR, FIRST, PATH, REQUEST, SECOND, Bench

from asyncckpt.protocol import messages as m
from asyncckpt_worker.core import actions as ac
from asyncckpt_worker.core import events as ev


class Early(Bench):
    """A bench with a session and a slot."""

    def __init__(self, world_size: int = 1) -> None:
        super().__init__()
        self.hello(world_size=world_size)
        self.number = self.slot()

    def read_slot(self, *, streamed: bool, slot: int = 0, generation: int = 1, save_id: str = FIRST) -> list[Any]:
        """Answer a ReadSlot with a slot that is being filled, or sealed."""
        return self.feed(
            ev.SlotRead,
            slot=slot or self.number,
            generation=generation,
            request=replace(REQUEST, save_id=save_id),
            streamed=streamed,
            opened=streamed,
        )

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

    def adopted(self) -> int:
        """Take over the slot of a save that was being staged when its worker died; returns the slot."""
        self.say(m.Adopt, fd=9, nbytes=12_288, token=b"t" * 16, generation=1, ended=0, committed="")
        (adopt,) = self.of(ac.AdoptSlot)
        self.feed(ev.SlotCreated, slot=adopt.slot, fd=9, token=b"t" * 16)
        return adopt.slot


@pytest.fixture
def bench() -> Early:
    return Early()


def test_a_slot_is_written_while_its_save_is_only_begun(bench: Early) -> None:
    write = bench.at_streaming()
    assert (write.slot, write.generation, write.early, write.resumed) == (bench.number, 1, True, False)
    assert bench.phase() == "open"


@pytest.mark.parametrize("streamed", [True, False])
def test_the_next_save_in_a_slot_may_be_read_before_its_begin_and_the_end_of_the_one_before(
    bench: Early, streamed: bool
) -> None:
    bench.at_streaming()
    bench.submit(bench.number)
    # The trainer's copy has failed, and it saves to the same path again, in the same slot.
    bench.read_slot(streamed=streamed, generation=2, save_id=SECOND)
    reached = "open" if streamed else "sealed"
    assert (bench.phase(), bench.phase(SECOND)) == ("abandoned", reached)
    bench.say(m.Withdraw, save_id=FIRST, reason="its copy has failed", skipped=False)
    bench.begin(bench.number, SECOND, generation=2)
    assert bench.phase(SECOND) == reached
    # What is read of the one before, later than that, ends nothing.
    bench.submit(bench.number, SECOND, generation=2)
    bench.read_slot(streamed=True)
    assert bench.phase(SECOND) == reached


def test_the_seal_comes_before_the_end_of_the_writing_and_starts_no_other(bench: Early) -> None:
    bench.at_streaming()
    bench.seal()
    assert (bench.phase(), bench.of(ac.Write)) == ("writing", [])
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert bench.phase() == "durable"
    assert len(bench.of(ac.Commit)) == 1


def test_nothing_is_committed_that_is_written_and_not_sealed(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert (bench.phase(), bench.of(ac.Commit)) == ("open", [])
    bench.seal()
    assert bench.phase() == "durable"
    assert len(bench.of(ac.Commit)) == 1


def test_what_is_sealed_before_its_directory_is_there_is_written_as_ever(bench: Early) -> None:
    bench.begin(bench.number)
    bench.submit(bench.number)
    bench.read_slot(streamed=True)
    bench.seal()
    bench.feed(ev.Prepared, key=(FIRST, 0))
    (write,) = bench.of(ac.Write)
    assert not write.early


def test_an_error_before_the_seal_ends_nothing_and_the_seal_leads_to_another_attempt(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "open"
    bench.submit(bench.number)
    bench.read_slot(streamed=True)  # a doorbell that comes again begins nothing twice
    assert not bench.of(ac.Write)
    bench.seal()
    (write,) = bench.of(ac.Write)
    assert (bench.phase(), write.early) == ("writing", False)
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "failed"
    assert [part["path"] for part in bench.say(m.Recall, path=PATH, hold=False).parts] == [PATH]


def test_an_error_that_is_heard_of_after_the_seal_leads_to_another_attempt_too(bench: Early) -> None:
    bench.at_streaming()
    bench.seal()
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    (write,) = bench.of(ac.Write)
    assert (bench.phase(), write.early, write.slot, write.generation) == ("writing", False, bench.number, 1)
    bench.feed(ev.Died, session="1" * 16)  # it is sealed, and its slot is not freed under the second writing either
    bench.read_slot(streamed=False)
    assert (bench.phase(), bench.of(ac.FreeSlot)) == ("writing", [])
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert bench.phase() == "failed"
    assert not bench.of(ac.Write)


def test_a_rank_that_stops_while_it_is_written_is_waited_for_as_long_as_one_that_is_not() -> None:
    bench = Early(world_size=2)
    bench.hello(b"q", "2" * 16, rank=1, world_size=2)
    other = bench.slot(b"q")
    bench.begin(other, peer=b"q")
    bench.feed(ev.Prepared, key=(FIRST, 1))
    bench.submit(other, peer=b"q")
    bench.feed(
        ev.SlotRead,
        slot=other,
        generation=1,
        request=replace(REQUEST, rank=1, world_size=2),
        streamed=True,
        opened=True,
    )
    assert [write.key for write in bench.of(ac.Write)] == [(FIRST, 1)]
    bench.at_writing(bench.number)
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.now = COMMIT_TIMEOUT_S + 1.0
    bench.feed(ev.Written, key=(FIRST, 1), error=ERROR)  # nothing was staged for so long
    bench.feed(ev.Tick)
    assert (bench.phase(), bench.phase(rank=1)) == ("failed", "failed")
    assert len(bench.of(ac.Remove)) == 1


def test_a_drain_does_not_wait_for_a_stopped_trainer_longer_because_its_state_is_being_written(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.StopRequested)
    bench.read_slot(streamed=True)
    assert not bench.of(ac.CutOff)
    bench.now = CONFIG.staging_grace_s
    bench.feed(ev.Tick)
    assert bench.of(ac.CutOff) == [ac.CutOff(slot=bench.number, generation=1)]
    assert not bench.of(ac.Exit), "the job removes its files first"
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    bench.read_slot(streamed=True)
    assert bench.of(ac.Exit) == [ac.Exit(complete=True, reason="drained")]


def test_what_is_sealed_just_when_a_drain_has_cut_its_writing_off_is_written_anew(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.StopRequested)
    bench.read_slot(streamed=True)
    bench.now = CONFIG.staging_grace_s
    bench.feed(ev.Tick)
    bench.seal()
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert [write.early for write in bench.of(ac.Write)] == [False]
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    assert len(bench.of(ac.Commit)) == 1


@pytest.mark.parametrize("ends", ["error", "result"])
def test_a_save_that_its_trainer_takes_back_is_cut_off_and_leaves_nothing(bench: Early, ends: str) -> None:
    write = bench.at_streaming()
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    assert bench.phase() == "abandoned"
    assert bench.of(ac.CutOff) == [ac.CutOff(slot=write.slot, generation=1)]
    bench.feed(ev.Written, key=(FIRST, 0), **({"error": ERROR} if ends == "error" else {"result": "files"}))
    assert bench.of(ac.Remove) == [ac.Remove(save_id=FIRST, path=PATH)]


def test_files_that_were_written_before_a_save_was_taken_back_are_removed(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    assert (bench.phase(), len(bench.of(ac.Remove))) == ("abandoned", 1)


def test_the_next_save_may_use_the_slot_at_once_and_its_memory_is_not_freed_under_the_writing(bench: Early) -> None:
    bench.at_streaming()
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    assert isinstance(bench.begin(bench.number, SECOND, 2), m.Ok)
    bench.feed(ev.Died, session="1" * 16)
    bench.feed(ev.SlotRead, slot=bench.number, reason="open", opened=True)
    assert (bench.phase(SECOND), bench.of(ac.FreeSlot)) == ("abandoned", [])
    bench.feed(ev.Prepared, key=(SECOND, 0))
    bench.feed(ev.Written, key=(FIRST, 0), error=ERROR)
    assert len(bench.of(ac.FreeSlot)) == 1


def test_a_dead_trainer_s_unsealed_slot_ends_its_writing(bench: Early) -> None:
    bench.at_streaming()
    bench.feed(ev.Died, session="1" * 16)
    bench.read_slot(streamed=True)
    assert (bench.phase(), len(bench.of(ac.CutOff))) == ("abandoned", 1)


def test_a_committed_one_is_kept_and_offered_as_any_other(bench: Early) -> None:
    bench.at_streaming()
    bench.seal()
    bench.feed(ev.Written, key=(FIRST, 0), result="files")
    bench.feed(ev.Published, save_id=FIRST)
    assert [part["path"] for part in bench.say(m.Recall, path=PATH, hold=False).parts] == [PATH]


def test_the_next_worker_writes_only_what_is_sealed_and_removes_what_stands_before(bench: Early) -> None:
    slot = bench.adopted()
    bench.read_slot(streamed=True, slot=slot)
    bench.begin(slot)
    (prepare,) = bench.of(ac.Prepare)
    assert prepare.resumed  # the files that stand may have taken the room that they need
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.submit(slot)
    bench.read_slot(streamed=True, slot=slot)
    assert (bench.phase(), bench.of(ac.Write)) == ("open", [])
    bench.seal(slot)
    (write,) = bench.of(ac.Write)
    assert (bench.phase(), write.early, write.resumed) == ("writing", False, True)


def test_what_a_dead_worker_had_begun_to_write_is_removed_when_the_save_is_taken_back(bench: Early) -> None:
    slot = bench.adopted()
    bench.read_slot(streamed=True, slot=slot)
    bench.begin(slot)
    bench.feed(ev.Prepared, key=(FIRST, 0))
    bench.say(m.Withdraw, save_id=FIRST, reason="torn", skipped=False)
    assert [(a.save_id, a.path) for a in bench.of(ac.Remove)] == [(FIRST, PATH)]
    assert bench.phase() == "abandoned"


@pytest.mark.parametrize("removing", [False, True], ids=["removed before", "being removed"])
def test_what_a_dead_worker_had_begun_to_write_is_removed_when_another_rank_has_failed_before(removing: bool) -> None:
    bench = Early(world_size=2)
    slot = bench.adopted()
    bench.read_slot(streamed=True, slot=slot)
    bench.hello(b"q", "2" * 16, rank=1, world_size=2)
    bench.begin(bench.slot(b"q"), peer=b"q")
    bench.feed(ev.Prepared, key=(FIRST, 1), error=ERROR)
    assert bench.phase(rank=1) == "failed"
    if removing:
        save = bench.core.tables.opened(FIRST)
        save.job, save.jobs = "remove", 1
    bench.begin(slot)
    assert (bench.phase(), len(bench.of(ac.Remove))) == ("failed", 0 if removing else 1)
    bench.feed(ev.Removed, save_id=FIRST)
    assert len(bench.of(ac.Remove)) == (1 if removing else 0)


def test_a_save_that_begins_after_the_takeover_has_no_files_of_the_worker_before(bench: Early) -> None:
    slot = bench.adopted()
    bench.feed(ev.SlotRead, slot=slot, reason="open", opened=True)
    bench.begin(slot, SECOND, 2)
    (prepare,) = bench.of(ac.Prepare)
    assert not prepare.resumed

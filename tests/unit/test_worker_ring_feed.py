"""Where the worker's segments come from: waited for as long as a trainer may still fill them, and no longer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_bench import FIRST, REQUEST

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.names import SaveId, index_name, shard_name
from asyncckpt.memory.ring import Counters, Ledger
from asyncckpt.memory.slot import PAGE_NBYTES, SlotError
from asyncckpt.protocol.request import RING_UNIT_NBYTES, PartRange, encode_request
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_job import RankJob
from asyncckpt_worker import rings
from asyncckpt_worker.actions import Write
from asyncckpt_worker.rings import _RingFeed
from asyncckpt_worker.slots import SlotStore
from asyncckpt_worker.writer import Writer

PARTS = (PartRange(offset=PAGE_NBYTES, nbytes=5 * RING_UNIT_NBYTES - 7),)
SLOT, GENERATION = 1, 3


class Trainer:
    """A slot whose ring a trainer has begun to fill, and the worker's feed of it."""

    def __init__(self, commit_timeout_s: float = 60.0) -> None:
        self.slots = SlotStore()
        self.memory = self.slots.create(SLOT, 4 * PAGE_NBYTES + 2 * RING_UNIT_NBYTES)
        self.counters = Counters(self.memory, GENERATION)
        self.memory.control.open(GENERATION)
        self.counters.reset()
        self.memory.control.stream(b"request", 2 * PAGE_NBYTES + 2 * RING_UNIT_NBYTES)
        request = replace(
            REQUEST,
            save_id=FIRST,
            parts=PARTS,
            ring_segments=2,
            ring_segment_nbytes=RING_UNIT_NBYTES,
            commit_timeout_s=commit_timeout_s,
        )
        job = Write(key=(FIRST, 0), slot=SLOT, generation=GENERATION, request=request)
        self.feed = _RingFeed(job, self.memory, self.slots)

    def fails(self, count: int = 0) -> SaveFailedError:
        with pytest.raises(SaveFailedError) as caught:
            self.feed.await_filled(count, lambda: True)
        assert caught.value.code == "not_sealed"
        return caught.value


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(rings, "PARTING_S", 0.01)
    made = Trainer()
    yield made
    made.slots.close()


def test_what_is_filled_already_is_not_waited_for(trainer: Trainer) -> None:
    trainer.counters.filled = 2
    assert trainer.feed.await_filled(0, lambda: True) == 2
    assert trainer.feed.filled() == 2


def test_a_segment_is_waited_for(trainer: Trainer) -> None:
    later = threading.Timer(0.02, lambda: setattr(trainer.counters, "filled", 1))
    later.start()
    assert trainer.feed.await_filled(0, lambda: True) == 1
    later.join()


def test_nobody_waits_who_is_told_not_to_go_on(trainer: Trainer) -> None:
    assert trainer.feed.await_filled(0, lambda: False) == 0


def test_the_trainer_sees_what_is_free(trainer: Trainer) -> None:
    trainer.feed.freed(2)
    assert trainer.counters.freed == 2


def test_a_trainer_that_fills_nothing_ends_the_save() -> None:
    trainer = Trainer(commit_timeout_s=0.05)
    assert "commit_timeout_s=0.05" in str(trainer.fails())
    trainer.slots.close()


def test_a_save_that_has_ended_is_not_waited_for_but_what_is_filled_is_written(trainer: Trainer) -> None:
    trainer.counters.filled = 1
    trainer.slots.cut_off(SLOT, GENERATION)
    assert trainer.feed.await_filled(0, lambda: True) == 1
    trainer.fails(1)


def test_an_earlier_save_of_the_slot_that_has_ended_cuts_nothing_off(trainer: Trainer) -> None:
    trainer.slots.cut_off(SLOT, GENERATION - 1)
    trainer.counters.filled = 1
    trainer.feed.check()
    assert not trainer.slots.is_cut_off(SLOT, GENERATION)


@pytest.mark.parametrize("how", ["discard", "open"])
def test_a_trainer_that_gives_the_ring_up_ends_the_writing(trainer: Trainer, how: str) -> None:
    trainer.counters.filled = 1
    control = trainer.memory.control
    control.discard() if how == "discard" else control.open(GENERATION + 1)
    with pytest.raises(SaveFailedError, match="gave it up"):
        trainer.feed.check()
    trainer.fails()


def test_more_segments_than_there_are_are_refused(trainer: Trainer) -> None:
    trainer.counters.filled = 6
    assert "6 segments" in str(trainer.fails())


def test_a_slot_that_is_gone_is_cut_off(trainer: Trainer) -> None:
    trainer.slots.cut_off(99, 1)
    assert trainer.slots.is_cut_off(99, 1)


def test_a_sealed_ring_is_fed_to_its_end(trainer: Trainer) -> None:
    trainer.counters.filled = 5
    trainer.memory.control.finish()
    trainer.slots.cut_off(SLOT, GENERATION)  # its trainer has died meanwhile
    assert trainer.feed.await_filled(3, lambda: True) == 5
    trainer.feed.check()


def test_a_segment_s_checksums_are_in_the_ledger_for_whoever_comes_next(trainer: Trainer) -> None:
    trainer.feed.wrote(1, b"checksum")
    assert Ledger(trainer.memory, trainer.feed.ring).digests_of(1) == b"checksum"


def test_a_writing_that_ends_late_leaves_the_ledger_to_the_next_save(trainer: Trainer) -> None:
    trainer.feed.wrote(1, b"of first")
    trainer.memory.control.open(GENERATION + 1)
    trainer.feed.wrote(1, b"too late")
    assert trainer.feed.ledger.digests_of(1) == b"of first"


@pytest.mark.parametrize("how", ["gives it up", "goes on", "goes on and seals"])
def test_a_snapshot_that_a_late_writing_has_written_to_is_refused_and_no_other(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    """Of the next one other bytes lie where the ledger of the one before was, and their checksum would be taken."""
    control, note = trainer.memory.control, Ledger.note

    def late(ledger: Ledger, number: int, digests: bytes) -> None:
        control.discard()
        if how != "gives it up":
            control.open(GENERATION + 1)
        if how == "goes on and seals":
            control.seal(b"request", 2 * PAGE_NBYTES + 2 * RING_UNIT_NBYTES)
        note(ledger, number, digests)

    trainer.slots.check_unspoiled(SLOT, GENERATION)
    monkeypatch.setattr(Ledger, "note", late)
    trainer.feed.wrote(1, b"checksum")
    if how == "gives it up":
        control.open(GENERATION + 1)
        trainer.slots.check_unspoiled(SLOT, GENERATION + 1)
    else:
        with pytest.raises(SlotError, match="earlier snapshot"):
            trainer.slots.check_unspoiled(SLOT, GENERATION + 1)
        assert not control.is_sealed(GENERATION + 1), "nor is it offered to anybody"
    trainer.slots.check_unspoiled(SLOT, GENERATION + 2)


@pytest.mark.parametrize("ring", [True, False])
def test_no_file_is_made_of_a_snapshot_that_was_written_to(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ring: bool
) -> None:
    monkeypatch.setattr(Ledger, "note", lambda *_: trainer.memory.control.open(GENERATION + 1))
    trainer.feed.wrote(1, b"checksum")
    request = replace(REQUEST, save_id=FIRST, path=str(tmp_path), parts=PARTS)
    if ring:
        request = replace(request, ring_segments=2, ring_segment_nbytes=RING_UNIT_NBYTES)
    job = Write(key=(FIRST, 0), slot=SLOT, generation=GENERATION + 1, request=request)
    with pytest.raises(SaveFailedError, match="earlier snapshot"):
        Writer(Files(), trainer.slots, (), 2).write(job)
    assert list(tmp_path.iterdir()) == []


def test_a_late_writing_that_is_under_way_is_waited_for(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    began, goes_on, ended = threading.Event(), threading.Event(), threading.Event()

    def late(ledger: Ledger, number: int, digests: bytes) -> None:
        began.set()
        assert goes_on.wait(60)

    def check() -> None:
        with pytest.raises(SlotError):
            trainer.slots.check_unspoiled(SLOT, GENERATION + 1)
        ended.set()

    monkeypatch.setattr(Ledger, "note", late)
    with ThreadPoolExecutor(2) as pool:
        writing = pool.submit(trainer.feed.wrote, 1, b"checksum")
        assert began.wait(60)
        trainer.memory.control.open(GENERATION + 1)
        checking = pool.submit(check)
        assert not ended.wait(0.01)
        goes_on.set()
        writing.result(60)
        checking.result(60)


def test_more_segments_freed_than_filled_are_refused(trainer: Trainer) -> None:
    trainer.counters.filled, trainer.counters.freed = 2, 3
    with pytest.raises(SaveFailedError, match="3 segments"):
        trainer.feed.freed_before()
    trainer.counters.filled = 3
    assert trainer.feed.freed_before() == 3


def test_of_a_ring_whose_freed_segments_are_not_in_a_dead_worker_s_files_these_are_removed(
    trainer: Trainer, tmp_path: Any
) -> None:
    save_id = SaveId.parse(FIRST)
    job = RankJob(
        path=str(tmp_path),
        save_id=save_id,
        rank=0,
        world_size=1,
        parts=((PAGE_NBYTES, 10), (2 * PAGE_NBYTES, 10)),
        structure=b"",
        objects=b"",
        n_tensors=0,
    )
    mine = [index_name(save_id, 0), *(shard_name(save_id, 0, part, "safetensors") for part in (0, 1))]
    others = [shard_name(save_id, 1, 0, "safetensors"), "notes.txt"]
    for name in mine + others:
        (tmp_path / name).write_bytes(b"x")
    request = replace(trainer.feed._job.request, parts=tuple(PartRange(offset=o, nbytes=n) for o, n in job.parts))
    write = replace(trainer.feed._job, request=request, resumed=True)
    trainer.counters.filled, trainer.counters.freed = 2, 1
    trainer.memory.control.seal(encode_request(request), 2 * PAGE_NBYTES + 2 * RING_UNIT_NBYTES)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SaveFailedError) as caught:
        rings.write_ring(write, job, trainer.memory, trainer.slots, files=Files(), pool=pool)
    assert caught.value.code == "ring_lost"
    assert sorted(os.listdir(tmp_path)) == sorted(others)

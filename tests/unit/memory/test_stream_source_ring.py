"""Where the worker's segments come from: waited for as long as a trainer may still fill them, and no longer."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from worker_bench import FIRST, REQUEST

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.names import SaveId, index_name, shard_name
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import Counters
from asyncckpt.protocol.request import RING_UNIT_NBYTES, PartRange, encode_request
from asyncckpt.storage.files import Files
from asyncckpt_worker.core.actions import Write
from asyncckpt_worker.io import stream_source
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.stream_source import StreamSource
from asyncckpt_worker.io.writer import Writer

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
        self.source = StreamSource(job, self.memory, self.slots)

    def fails(self, count: int = 0) -> SaveFailedError:
        with pytest.raises(SaveFailedError) as caught:
            self.source.await_filled(count, lambda: True)
        assert caught.value.code == "not_sealed"
        return caught.value


@pytest.fixture
def trainer(monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(stream_source, "WITHDRAW_WAIT_S", 0.01)
    made = Trainer()
    yield made
    made.slots.close()


def test_what_is_filled_already_is_not_waited_for(trainer: Trainer) -> None:
    trainer.counters.filled = 2 * RING_UNIT_NBYTES
    assert trainer.source.await_filled(0, lambda: True) == 2
    assert trainer.source.filled() == 2


def test_a_segment_is_waited_for(trainer: Trainer) -> None:
    later = threading.Timer(0.02, lambda: setattr(trainer.counters, "filled", RING_UNIT_NBYTES))
    later.start()
    assert trainer.source.await_filled(0, lambda: True) == 1
    later.join()


def test_nobody_waits_who_is_told_not_to_go_on(trainer: Trainer) -> None:
    assert trainer.source.await_filled(0, lambda: False) == 0


def test_the_trainer_sees_what_is_free(trainer: Trainer) -> None:
    trainer.source.freed(2)
    assert trainer.counters.freed == 2 * RING_UNIT_NBYTES


def test_a_trainer_that_fills_nothing_ends_the_save() -> None:
    trainer = Trainer(commit_timeout_s=0.05)
    assert "commit_timeout_s=0.05" in str(trainer.fails())
    trainer.slots.close()


def test_a_save_that_has_ended_is_not_waited_for_but_what_is_filled_is_written(trainer: Trainer) -> None:
    trainer.counters.filled = RING_UNIT_NBYTES
    trainer.slots.cut_off(SLOT, GENERATION)
    assert trainer.source.await_filled(0, lambda: True) == 1
    trainer.fails(1)


def test_an_earlier_save_of_the_slot_that_has_ended_cuts_nothing_off(trainer: Trainer) -> None:
    trainer.slots.cut_off(SLOT, GENERATION - 1)
    trainer.counters.filled = RING_UNIT_NBYTES
    trainer.source.check()
    assert not trainer.slots.is_cut_off(SLOT, GENERATION)


@pytest.mark.parametrize("how", ["discard", "open"])
def test_a_trainer_that_gives_the_ring_up_ends_the_writing(trainer: Trainer, how: str) -> None:
    trainer.counters.filled = RING_UNIT_NBYTES
    control = trainer.memory.control
    control.discard() if how == "discard" else control.open(GENERATION + 1)
    with pytest.raises(SaveFailedError, match="abandoned it"):
        trainer.source.check()
    trainer.fails()


def test_more_segments_than_there_are_are_refused(trainer: Trainer) -> None:
    trainer.counters.filled = 5 * RING_UNIT_NBYTES + 1
    assert f"{5 * RING_UNIT_NBYTES + 1} bytes" in str(trainer.fails())


def test_a_slot_that_is_gone_is_cut_off(trainer: Trainer) -> None:
    trainer.slots.cut_off(99, 1)
    assert trainer.slots.is_cut_off(99, 1)


def test_a_sealed_ring_is_fed_to_its_end(trainer: Trainer) -> None:
    trainer.counters.filled = 5 * RING_UNIT_NBYTES - 7
    trainer.memory.control.finish()
    trainer.slots.cut_off(SLOT, GENERATION)  # its trainer has died meanwhile
    assert trainer.source.await_filled(3, lambda: True) == 5
    trainer.source.check()


@pytest.mark.parametrize("is_sealed", [True, False])
def test_of_a_ring_that_a_dead_worker_has_not_finished_nothing_is_written_or_removed(
    trainer: Trainer, tmp_path: Path, *, is_sealed: bool
) -> None:
    save_id = SaveId.parse(FIRST)
    names = [index_name(save_id, 0), shard_name(save_id, 0, 0, "safetensors"), "notes.txt"]
    for name in names:
        (tmp_path / name).write_bytes(b"x")
    request = replace(trainer.source._job.request, path=str(tmp_path))
    if is_sealed:
        trainer.memory.control.seal(encode_request(request), 2 * PAGE_NBYTES + 2 * RING_UNIT_NBYTES)
    job = replace(trainer.source._job, request=request, resumed=True, early=not is_sealed)
    with ThreadPoolExecutor(1) as pool, pytest.raises(SaveFailedError) as caught:
        Writer(Files(), trainer.slots, (), 2).write(job, pool)
    assert caught.value.code == "stream_lost"
    assert {name: (tmp_path / name).read_bytes() for name in os.listdir(tmp_path)} == dict.fromkeys(names, b"x")

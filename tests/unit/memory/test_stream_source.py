"""Files that are written while their slot is being filled, by several threads in any order: byte for byte the slot."""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from worker_bench import FIRST, REQUEST

from asyncckpt.client import slot_stream
from asyncckpt.client.slot_stream import Watermark
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.checksums import BLOCK_NBYTES, block_digest
from asyncckpt.format.coverage import Tally
from asyncckpt.format.index import decode_index
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId, index_name, objects_name, shard_name
from asyncckpt.format.objects import encode_objects
from asyncckpt.format.structure import Structure, encode_structure
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import Counters
from asyncckpt.protocol.request import PartRange, SaveRequest, encode_request
from asyncckpt.storage.files import Files
from asyncckpt_worker.core.actions import Write
from asyncckpt_worker.io import stream_source
from asyncckpt_worker.io.content_digest import rest_print
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.stream_source import CheckRequest, unchecked

SLOT, GENERATION = 1, 3
SAVE_ID = SaveId.parse(FIRST)
NBYTES = (5 * BLOCK_NBYTES - 77, 3 * BLOCK_NBYTES, 5000)


class Trainer:
    """A slot of three parts, of a save to `path`, that is filled piece by piece."""

    def __init__(self, rng: random.Random, path: Path) -> None:
        self.rng, self.path = rng, str(path)
        offsets = [PAGE_NBYTES]
        for nbytes in NBYTES:
            offsets.append(offsets[-1] + round_up(nbytes))
        self.end = offsets[-1]
        self.parts = tuple(PartRange(offset=o, nbytes=n) for o, n in zip(offsets, NBYTES, strict=False))
        self.slots = SlotStore()
        self.memory = self.slots.create(SLOT, self.end + 5 * PAGE_NBYTES)
        self.view = self.memory.mapping.view()
        self.view[PAGE_NBYTES : self.end] = b"\xa5" * (self.end - PAGE_NBYTES)
        self.counters = Counters(self.memory, GENERATION)
        self.memory.control.open(GENERATION)
        for part in self.parts:  # headers stand from the beginning
            at = part.offset + SAVE_ID_OFFSET
            self.view[at : at + SAVE_ID_NBYTES] = save_id_bytes(SAVE_ID)
            self.view[part.offset + part.nbytes : part.offset + round_up(part.nbytes)] = bytes(-part.nbytes % 4096)
        self.counters.reset()
        self.memory.control.stream(encode_request(self.request()), self.end)
        self.mark = Watermark(PAGE_NBYTES, self.end, self._tell)
        self.pieces = self._pieces()
        self.wanted: list[bytes] = []

    def _tell(self, nbytes: int) -> None:
        self.counters.filled = nbytes

    def _pieces(self) -> list[tuple[int, int]]:
        found = []
        for part in self.parts:
            at, end = part.offset + SAVE_ID_OFFSET + SAVE_ID_NBYTES, part.offset + part.nbytes
            while at < end:
                nbytes = min(end - at, self.rng.randint(1, BLOCK_NBYTES))
                found.append((at, nbytes))
                at += nbytes
        return found

    def fill(self, until: int | None = None) -> None:
        """Copy the first `until` pieces of a random order, by two threads."""
        todo = self.pieces.copy()
        self.mark.expect([at for at, _ in todo])
        self.rng.shuffle(todo)
        todo = todo[:until]

        def work() -> None:
            while True:
                try:
                    at, nbytes = todo.pop()
                except IndexError:
                    return
                self.view[at : at + nbytes] = os.urandom(nbytes)
                self.mark.done(at)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.wanted = [bytes(self.view[p.offset : p.offset + p.nbytes]) for p in self.parts]

    def request(self, **fields: Any) -> SaveRequest:
        """Return what the slot says; `fields` of it."""
        return replace(REQUEST, **{"save_id": FIRST, "path": self.path, "parts": self.parts, **fields})

    def job(self, **fields: Any) -> Write:
        """Return the worker's job; `fields` of its request."""
        request = self.request(**fields)
        return Write(key=(FIRST, 0), slot=SLOT, generation=GENERATION, request=request, early=True)

    def write(self, check_request: CheckRequest = unchecked, **fields: Any) -> Any:
        """Do the worker's job."""
        job = self.job(**fields)
        with ThreadPoolExecutor(3) as pool:
            found, kept = stream_source.write_streamed(
                job, self.memory, self.slots, check_request, files=Files(), pool=pool
            )
        assert not kept
        return found

    def writing(self, check_request: CheckRequest = unchecked) -> tuple[threading.Thread, list[Any]]:
        """Do it in a thread; its result or error comes into the list."""
        found: list[Any] = []

        def run() -> None:
            try:
                found.append(self.write(check_request))
            except Exception as error:
                found.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        return thread, found

    def close(self) -> None:
        self.view.release()
        self.slots.close()


@pytest.fixture
def trainer(rng: random.Random, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(stream_source, "EXTENT_NBYTES", BLOCK_NBYTES)
    monkeypatch.setattr(stream_source, "WITHDRAW_WAIT_S", 0.01)
    monkeypatch.setattr(slot_stream, "STEP_NBYTES", 1)
    made = Trainer(rng, tmp_path)
    yield made
    made.close()


def test_files_and_checksums_are_those_of_the_bytes_that_the_slot_has_in_the_end(
    trainer: Trainer, tmp_path: Path
) -> None:
    thread, found = trainer.writing()
    trainer.fill()
    trainer.memory.control.finish()
    thread.join(60)
    assert [type(one).__name__ for one in found] == ["RankResult"]
    assert trainer.counters.freed == trainer.parts[-1].offset + NBYTES[-1] - PAGE_NBYTES
    shards = decode_index((tmp_path / index_name(SAVE_ID, 0)).read_bytes()).shards
    for number, (wanted, shard) in enumerate(zip(trainer.wanted, shards, strict=True)):
        assert (tmp_path / shard_name(SAVE_ID, 0, number, "safetensors")).read_bytes() == wanted
        blocks = [wanted[at : at + BLOCK_NBYTES] for at in range(0, len(wanted), BLOCK_NBYTES)]
        assert shard.digests == b"".join(block_digest(memoryview(block)) for block in blocks)


@pytest.mark.parametrize("how", ["discard", "open", "cut off"])
def test_a_staging_that_is_given_up_leaves_no_file(
    trainer: Trainer, tmp_path: Path, rng: random.Random, how: str
) -> None:
    thread, found = trainer.writing()
    trainer.fill(rng.randrange(len(trainer.pieces)))
    control = trainer.memory.control
    if how == "cut off":
        trainer.slots.cut_off(SLOT, GENERATION)
    else:
        control.discard() if how == "discard" else control.open(GENERATION + 1)
    thread.join(60)
    assert [type(one) for one in found] == [SaveFailedError]
    assert os.listdir(tmp_path) == []


def test_a_seal_alone_says_nothing_of_what_is_filled(trainer: Trainer, tmp_path: Path) -> None:
    trainer.memory.control.finish()
    with pytest.raises(SaveFailedError, match=r"staged nothing for commit_timeout_s=0\.05"):
        trainer.write(commit_timeout_s=0.05)
    assert os.listdir(tmp_path) == []


def test_what_was_filled_and_sealed_by_a_trainer_that_is_dead_is_written_to_its_end(
    trainer: Trainer, tmp_path: Path
) -> None:
    trainer.fill()
    trainer.memory.control.finish()
    trainer.slots.cut_off(SLOT, GENERATION)
    assert trainer.write().nbytes > sum(NBYTES)


OBJECTS = encode_objects(SAVE_ID, [1, "two", None])


def test_index_and_objects_are_those_of_the_request_of_the_seal(trainer: Trainer, tmp_path: Path) -> None:
    proved: list[SaveRequest] = []

    def check_request(request: SaveRequest) -> Tally:
        proved.append(request)
        assert not (tmp_path / index_name(SAVE_ID, 0)).exists()
        return Tally(kinds=b"k", sums=b"s")

    thread, found = trainer.writing(check_request)
    trainer.fill()
    structure = encode_structure(Structure(tree=("d", ()), tensors=(), n_objects=3, part_nbytes=NBYTES))
    sealed = trainer.request(structure=structure, objects=OBJECTS, n_tensors=5, metadata='{"a": 1}', step=-9)
    deadline = time.monotonic() + 10
    while len(os.listdir(tmp_path)) < len(NBYTES) and time.monotonic() < deadline:
        time.sleep(0.001)
    assert found == [] and not (tmp_path / index_name(SAVE_ID, 0)).exists()
    trainer.memory.control.ask_again(encode_request(sealed), trainer.end + 2 * PAGE_NBYTES)
    trainer.memory.control.finish()
    thread.join(60)
    assert decode_index((tmp_path / index_name(SAVE_ID, 0)).read_bytes()).structure == structure
    assert (tmp_path / objects_name(SAVE_ID, 0)).read_bytes() == OBJECTS
    assert found[0].record.n_tensors == 5
    assert found[0].rest_print == rest_print(sealed)
    assert proved == [sealed] and found[0].tally == Tally(kinds=b"k", sums=b"s")


@pytest.mark.parametrize("field", ["parts", "path", "fsync", "umask", "overwrite"])
def test_a_seal_of_other_files_than_were_begun_is_no_end_of_these(trainer: Trainer, tmp_path: Path, field: str) -> None:
    thread, found = trainer.writing()
    trainer.fill()
    first = trainer.request()
    other = {"parts": first.parts[:-1], "path": "/elsewhere", "fsync": not first.fsync, "umask": first.umask ^ 0o7}
    other["overwrite"] = not first.overwrite
    request = encode_request(trainer.request(**{field: other[field]}))
    trainer.memory.control.seal(request, trainer.end + 2 * PAGE_NBYTES)
    thread.join(60)
    assert [type(one) for one in found] == [SaveFailedError] and "other files" in str(found[0])
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("how", ["discard", "cut off", "time"])
def test_what_is_filled_and_never_sealed_leaves_no_file(trainer: Trainer, tmp_path: Path, how: str) -> None:
    trainer.fill()
    if how == "time":
        with pytest.raises(SaveFailedError, match=r"not sealed it for commit_timeout_s=0\.05"):
            trainer.write(commit_timeout_s=0.05)
    else:
        thread, found = trainer.writing()
        deadline = time.monotonic() + 10
        while len(os.listdir(tmp_path)) < len(NBYTES) and time.monotonic() < deadline:
            time.sleep(0.001)
        trainer.memory.control.discard() if how == "discard" else trainer.slots.cut_off(SLOT, GENERATION)
        thread.join(60)
        assert [type(one) for one in found] == [SaveFailedError]
    assert os.listdir(tmp_path) == []

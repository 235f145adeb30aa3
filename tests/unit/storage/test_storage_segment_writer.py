"""Files that are written out of a ring while it is filled: the same as from memory that holds all, or none."""

from __future__ import annotations

import errno
import os
import random
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from ring_trainer import DEADLINE_S, Trainer, contents
from storage_samples import Snapshot, failing

from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.storage import segment_writer
from asyncckpt.storage.files import Files
from asyncckpt.storage.segment_writer import StreamedImage


@pytest.fixture
def snapshot() -> Iterator[Snapshot]:
    with Snapshot({f"t{n}": 700_000 + n for n in range(5)}, n_parts=2) as made:
        yield made


@pytest.fixture
def trainer(snapshot: Snapshot) -> Iterator[Trainer]:
    made = Trainer(snapshot, 1, 3)
    yield made
    made.close()


class Buffered(Files):
    """A file system without O_DIRECT."""

    def set_direct(self, fd: int, direct: bool) -> None:
        if direct:
            raise OSError(errno.EINVAL, "no O_DIRECT")


@pytest.mark.parametrize("files", [Files, Buffered])
def test_whatever_goes_through_a_ring_is_written_as_from_memory(
    tmp_path: Path, rng: random.Random, files: type[Files]
) -> None:
    for turn in range(12):
        lengths = {f"t{n}": rng.choice([1, 900, 65_536, 300_000, 1_100_000]) for n in range(rng.randrange(1, 7))}
        whole, ringed = tmp_path / f"{turn}-whole", tmp_path / f"{turn}-ring"
        whole.mkdir()
        ringed.mkdir()
        with Snapshot(lengths, n_parts=rng.randrange(1, 4), seed=turn) as snapshot:
            trainer = Trainer(snapshot, rng.randrange(1, 4), rng.randrange(2, 7))
            try:
                threads = rng.randrange(2, 6)
                mirror = rng.choice(["", "s3://bucket/a"])  # checksums are of blocks of 256 or of 32 KiB
                found = trainer.write(ringed, files(), threads=threads, mirror=mirror)
                wanted = snapshot.write(str(whole), files(), threads=threads, mirror=mirror)
            finally:
                trainer.close()
        assert contents(ringed) == contents(whole)
        assert found.record == wanted.record
        assert found.shards_print == wanted.shards_print
        assert trainer.most_unfreed <= trainer.ring.n_cells
        assert trainer.counts == sorted(trainer.counts)
        assert trainer.counts[-1] == len(trainer.ring.segments)


@pytest.mark.parametrize("fsync", [True, False])
def test_without_direct_writes_a_segment_is_flushed_before_it_is_free(
    tmp_path: Path, trainer: Trainer, *, fsync: bool
) -> None:
    flushed = 0

    class Counting(Buffered):
        def fsync(self, fd: int) -> None:
            nonlocal flushed
            flushed += 1
            super().fsync(fd)

    seen: list[tuple[int, int]] = []
    free = trainer.freed

    def freed(count: int) -> None:
        seen.append((count, flushed))
        free(count)

    trainer.freed = freed  # type: ignore[method-assign]
    trainer.write(tmp_path, Counting(), fsync=fsync)
    assert all(flushes >= count if fsync else flushes == 0 for count, flushes in seen)


class Reluctant(Files):
    """Refuses O_DIRECT from some write on, and takes less than it is given."""

    def __init__(self, refuses_at: int) -> None:
        self._refuses_at, self._lock, self._writes = refuses_at, threading.Lock(), 0
        self.direct: set[int] = set()

    def set_direct(self, fd: int, direct: bool) -> None:
        super().set_direct(fd, direct)
        self.direct.add(fd) if direct else self.direct.discard(fd)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        with self._lock:
            self._writes += 1
            late = self._writes > self._refuses_at
        if late and fd in self.direct:
            raise OSError(errno.EINVAL, "no O_DIRECT any more")
        return super().pwrite(fd, buffer[: max(4096, len(buffer) // 8192 * 4096)], offset)


@pytest.mark.parametrize("refuses_at", [0, 1, 5, 12])
def test_a_ring_whose_direct_writes_are_short_and_then_refused_is_written_whole(
    tmp_path: Path, snapshot: Snapshot, trainer: Trainer, refuses_at: int
) -> None:
    ringed, whole = tmp_path / "ring", tmp_path / "whole"
    ringed.mkdir()
    whole.mkdir()
    trainer.write(ringed, Reluctant(refuses_at), threads=3)
    snapshot.write(str(whole))
    assert contents(ringed) == contents(whole)
    assert trainer.counts == sorted(trainer.counts)


def test_an_error_in_any_call_removes_every_file_and_is_raised(tmp_path: Path) -> None:
    for call in ("open", "fallocate", "pwrite", "ftruncate", "fsync", "close", "fstat"):
        path = tmp_path / call
        path.mkdir()
        with Snapshot({"a": 2_000_000}) as snapshot:
            trainer = Trainer(snapshot, 1, 2)
            try:
                with pytest.raises(OSError) as caught:
                    trainer.write(path, failing(call, errno.EDQUOT, at="safetensors" if call == "open" else ""))
                assert caught.value.errno == errno.EDQUOT
            finally:
                trainer.close()
        assert os.listdir(path) == []


def test_an_error_of_a_helper_ends_the_wait_for_a_trainer_that_waits_for_that_very_segment(
    tmp_path: Path, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segment_writer, "HELPER_WAIT_S", DEADLINE_S)  # so that helpers write everything
    calling = threading.get_ident()
    waiting = threading.Event()
    await_filled = trainer.await_filled

    class FailsInAHelper(Files):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if threading.get_ident() != calling and waiting.wait(DEADLINE_S):
                raise OSError(errno.ENOSPC, "no room")
            return super().pwrite(fd, buffer, offset)

    def waits(count: int, goes_on: Callable[[], bool]) -> int:
        if count >= trainer.ring.n_cells:  # all cells are filled, and none will be free
            waiting.set()
        return await_filled(count, goes_on)

    trainer.await_filled = waits  # type: ignore[method-assign]
    with pytest.raises(OSError, match="no room"):
        trainer.write(tmp_path, FailsInAHelper(), threads=8)
    assert os.listdir(tmp_path) == []


def test_segments_that_never_come_leave_no_file(tmp_path: Path, snapshot: Snapshot) -> None:
    for stops_at in (0, 1, 4):
        trainer = Trainer(snapshot, 1, 3, stops_at=stops_at)
        try:
            with pytest.raises(InterruptedError):
                trainer.write(tmp_path)
        finally:
            trainer.close()
        assert os.listdir(tmp_path) == []


def test_a_ring_that_is_given_up_leaves_no_file(tmp_path: Path, trainer: Trainer) -> None:
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls > 5:
            raise ValueError("given up")

    with pytest.raises(ValueError, match="given up"):
        trainer.write(tmp_path, check=check)
    assert os.listdir(tmp_path) == []


def test_a_ring_that_carries_another_save_id_is_refused(tmp_path: Path, trainer: Trainer, snapshot: Snapshot) -> None:
    other = snapshot.save_id.with_parts(sequence=77)
    with pytest.raises(OSError, match="save id"):
        trainer.write(tmp_path, save_id=other)
    assert os.listdir(tmp_path) == []


def test_a_pool_that_has_no_thread_to_spare_only_slows_it_down(tmp_path: Path, trainer: Trainer) -> None:
    busy = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(busy.wait)
        try:
            trainer.writer(tmp_path, threads=4).write(pool)
        finally:
            busy.set()
    assert trainer.counts[-1] == len(trainer.ring.segments)


def test_a_segment_is_not_freed_before_those_in_front_of_it(
    tmp_path: Path, snapshot: Snapshot, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that a helper has the first one: the calling thread, held there, would call nobody for the others.
    monkeypatch.setattr(segment_writer, "HELPER_WAIT_S", DEADLINE_S)
    held, first = threading.Event(), []

    class HoldsTheFirst(Files):
        def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
            if offset == 0 and not first and len(buffer) >= BLOCK_NBYTES:
                first.append(fd)
                assert held.wait(DEADLINE_S)
            return super().pwrite(fd, buffer, offset)

    trainer = Trainer(snapshot, 1, 3)
    free = trainer.freed

    def freed(count: int) -> None:
        free(count)
        if trainer.most_unfreed == 3:
            held.set()

    trainer.freed = freed  # type: ignore[method-assign]
    try:
        trainer.write(tmp_path, HoldsTheFirst(), threads=3)
    finally:
        held.set()
        trainer.close()
    assert trainer.counts.count(0) >= 1, "later ones were done, and the first was not"
    assert trainer.most_unfreed <= 3


def test_the_image_of_a_ring_gives_the_bytes_of_the_cell_where_a_segment_lies(snapshot: Snapshot) -> None:
    ring = StreamLayout(snapshot.parts, BLOCK_NBYTES, 2)
    slot = memoryview(bytearray(4096 + ring.cells_nbytes))
    image = StreamedImage(slot, ring)
    assert len(image) == len(snapshot.image) - 4096
    for number, segment in enumerate(ring.segments):
        slot[ring.offset_of(number)] = number + 1
        offset, _ = snapshot.parts[segment.part]
        assert image[offset + segment.start : offset + segment.start + 1][0] == number + 1

"""A trainer that fills a ring from a snapshot, and the writers of its files: for the tests of storage."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from storage_samples import Snapshot

from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.segment_writer import SegmentWriter

DEADLINE_S = 60.0
DIRTY = 0xA5


class Trainer:
    """Fills a ring from a snapshot, in a thread; plays the feed too.

    Args:
        snapshot: What goes through it.
        n_blocks: Of a segment.
        n_cells: Of the ring.
        stops_at: Fills so many segments; the next one is never filled.
    """

    def __init__(self, snapshot: Snapshot, n_blocks: int, n_cells: int, stops_at: int | None = None) -> None:
        self.ring = self.layout = StreamLayout(snapshot.parts, n_blocks * BLOCK_NBYTES, n_cells)
        self.memory = Memory(-1, 8192 + self.ring.cells_nbytes)
        self.slot = self.memory.view()
        self.slot[:] = bytes([DIRTY]) * len(self.slot)
        self._snapshot, self._stops_at = snapshot, stops_at
        self._changed = threading.Condition()
        self._filled = self._freed = 0
        self._ended = False
        self.most_unfreed = 0
        self.counts: list[int] = []
        self._thread = threading.Thread(target=self._fill)
        self._thread.start()

    def _fill(self) -> None:
        for number, segment in enumerate(self.ring.segments):
            with self._changed:
                if number == self._stops_at:
                    return
                assert self._changed.wait_for(
                    lambda number=number: self._ended or self._freed > number - self.ring.n_cells, DEADLINE_S
                )
                if self._ended:
                    return
            offset, _ = self._snapshot.parts[segment.part]
            at, nbytes = self.ring.offset_of(number), segment.end - segment.start
            padded = -(-nbytes // 4096) * 4096
            self.slot[at : at + nbytes] = self._snapshot.image[offset + segment.start : offset + segment.end]
            self.slot[at + nbytes : at + padded] = bytes(padded - nbytes)
            with self._changed:
                self._filled = number + 1
                self.most_unfreed = max(self.most_unfreed, self._filled - self._freed)
                self._changed.notify_all()

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        deadline = time.monotonic() + (0.05 if self._stops_at is not None else DEADLINE_S)
        with self._changed:
            while not self._changed.wait_for(lambda: self._filled > count, 0.01):
                if not goes_on():
                    return count
                if time.monotonic() > deadline:
                    raise InterruptedError("nothing more is filled")
            return self._filled

    def filled(self) -> int:
        with self._changed:
            return self._filled

    def freed(self, count: int) -> None:
        with self._changed:
            self.counts.append(count)
            self._freed = count
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        self._thread.join(DEADLINE_S)
        self.slot.release()
        self.memory.close()

    def writer(
        self,
        path: Path,
        files: Files | None = None,
        check: Callable[[], None] = lambda: None,
        threads: int = 2,
        **changes: Any,
    ) -> SegmentWriter:
        request = self._snapshot.request(str(path), **changes)
        return SegmentWriter(request, self.slot, self, files or Files(), check=check, threads=threads)

    def write(self, path: Path, *args: Any, **kw: Any) -> RankResult:
        with ThreadPoolExecutor(4) as pool:
            return self.writer(path, *args, **kw).write(pool)


def contents(path: Path) -> dict[str, bytes]:
    """Return what lies in a directory."""
    return {file.name: file.read_bytes() for file in sorted(path.iterdir())}

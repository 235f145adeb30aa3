"""One rank's files of one save, written while they are still being staged: segment by segment, out of a ring.

The bytes of a segment are there once, so what has gone wrong cannot be written again: the files are removed, as after
any failure. Everything else is as in `rank_files`.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from typing import Protocol

from asyncckpt.format.layout import round_up
from asyncckpt.memory.ring import Ring
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_files import RankWriter
from asyncckpt.storage.rank_job import RankJob, RankResult


class Feed(Protocol):
    """Where the segments come from."""

    ring: Ring

    def await_filled(self, count: int) -> int:
        """Return how many segments are filled, once these are more than `count`.

        Raises:
            Exception: There will be none.

        Blocks: as the feed says.
        """

    def freed(self, count: int) -> None:
        """So many segments, from the first on, are needed no more."""


class RingImage:
    """The image whose segments pass through a ring: what was filled and not freed of it can be read.

    Args:
        slot: The bytes of the slot.
        ring: Where segments lie in it.
        parts: Where each begins in the image, and its exact length.
    """

    is_page_aligned = True

    def __init__(self, slot: memoryview, ring: Ring, parts: Sequence[tuple[int, int]]) -> None:
        self._slot, self._ring = slot, ring
        self._offsets = [offset for offset, _ in parts]
        self._nbytes = max((offset + round_up(nbytes) for offset, nbytes in parts), default=0)

    def __len__(self) -> int:
        """Return the image's length in bytes."""
        return self._nbytes

    def __getitem__(self, piece: slice) -> memoryview:
        """Return bytes of one segment."""
        part = bisect_right(self._offsets, piece.start) - 1
        start = piece.start - self._offsets[part]
        number = self._ring.number_of(part, start)
        at = self._ring.offset_of(number) + start - self._ring.segments[number].start
        return self._slot[at : at + piece.stop - piece.start]


def write_ring_files(
    job: RankJob, slot: memoryview, feed: Feed, *, files: Files, pool: Executor, check: Callable[[], None]
) -> RankResult:
    """As `rank_files.write_rank_files`, from the segments of `feed` as they are filled.

    Only segments that are there get a thread of `pool`; the calling thread waits for them, and writes too.

    Args:
        job: What to write.
        slot: The bytes of the slot; page-aligned.
        feed: Says which segments are filled, and hears which are free.
        files: The storage seam.
        pool: Runs the other writing threads.
        check: As there; looks at the slot.

    Returns:
        The result; every file is complete, and durable when `job.fsync`.

    Raises:
        Exception: As there, and whatever `feed` raises.

    Blocks: for the writes and for the segments.
    """
    writer = _RingWriter(job, RingImage(slot, feed.ring, job.parts), feed, files, check)
    writer.write_shards(pool)
    return writer.finish(job)


class _RingWriter(RankWriter):
    """Its threads take segments out of `_ready`, where the calling thread puts them."""

    def __init__(self, job: RankJob, image: RingImage, feed: Feed, files: Files, check: Callable[[], None]) -> None:
        self._feed, self._ring = feed, feed.ring
        super().__init__(job, image, files, check)
        self._ready: deque[int] = deque()
        self._written = [False] * len(self._ring.segments)
        self._freed = 0

    def _plan(self) -> list[tuple[int, int, int]]:
        for segment in self._ring.segments:
            self._remaining[segment.part] = self._remaining.get(segment.part, 0) + 1
        return []  # nothing is there yet

    def _write_shards(self, pool: Executor) -> None:
        helpers: list[Future[None]] = []
        try:
            self._feed_threads(pool, helpers)
        except BaseException as error:
            self._stop(error)
        finally:
            # IMPORTANT: as in `RankWriter`: no thread may still use the slot when this returns.
            with self._lock:
                self._ready.clear()
            for helper in helpers:
                if not helper.cancel():
                    helper.result()
            for shard in self.shards:
                shard.abandon()
        if self._error is not None:
            raise self._error
        if not all(self._written):
            raise AssertionError("segments were left unwritten without an error")

    def _feed_threads(self, pool: Executor, helpers: list[Future[None]]) -> None:
        filled, total = 0, len(self._ring.segments)
        while self._error is None:
            if not self._ready:
                if filled == total:
                    return
                now = self._feed.await_filled(filled)
                with self._lock:
                    self._ready.extend(range(filled, now))
                filled = now
            helpers[:] = [helper for helper in helpers if not helper.done()]
            # Not one that waits for what is to come: threads are all saves' together.
            for _ in range(min(len(self._ready), self._threads) - 1 - len(helpers)):
                helpers.append(pool.submit(self._take_all))
            self._take_one()

    def _take_all(self) -> None:
        while self._take_one():
            pass

    def _take_one(self) -> bool:
        """Write a segment that is ready; False: none is. Errors are kept, not raised."""
        with self._lock:
            if not self._ready or self._error is not None:
                return False
            number = self._ready.popleft()
        try:
            self._write_segment(number)
        except BaseException as error:
            self._stop(error)
        return True

    def _stop(self, error: BaseException | None) -> None:
        super()._stop(error)
        with self._lock:
            self._ready.clear()

    def _write_segment(self, number: int) -> None:
        segment = self._ring.segments[number]
        shard = self.shards[segment.part]
        self.check()
        if segment.start == 0:
            self._check_image(segment.part)
        shard.write_extent(segment.start, min(round_up(segment.end), shard.extent_nbytes_total))
        if self.job.fsync and not shard.direct:
            # IMPORTANT: else what the ring keeps out of memory piles up there as the kernel's dirty pages.
            shard.flush()
        self.check()
        with self._lock:
            self._remaining[segment.part] -= 1
            last = self._remaining[segment.part] == 0
        if last:
            shard.finish()
        with self._lock:
            self._written[number] = True
            while self._freed < len(self._written) and self._written[self._freed]:
                self._freed += 1
            self._feed.freed(self._freed)

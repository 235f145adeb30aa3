"""One rank's files of one save, written while they are still being staged: segment by segment.

Out of a ring the bytes of a segment come once, so what has gone wrong cannot be written again; out of a whole slot it
can, once that is sealed. Either way the files are removed, as after any failure. Everything else is as in `rank_files`.
What another process has written of a ring, and died, `ring_takeover` goes on with.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from concurrent.futures import Executor

from asyncckpt.format.checksum import BLOCK_NBYTES, DIGEST_NBYTES, block_count
from asyncckpt.format.layout import round_up
from asyncckpt.memory.ring import Ring
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.segment_writer import Feed, SegmentWriter
from asyncckpt.storage.shard_writer import ShardWriter


def as_begun(job: RankJob) -> RankJob:
    """Return the job: nothing more was said when it was sealed."""
    return job


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
    job: RankJob,
    slot: memoryview,
    feed: Feed,
    *,
    files: Files,
    pool: Executor,
    check: Callable[[], None],
    final: Callable[[RankJob], RankJob] = as_begun,
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
        final: Returns the job as it is sealed, once it is: of that are index and objects. Default: as it was begun.

    Returns:
        The result; every file is complete, and durable when `job.fsync`.

    Raises:
        Exception: As there, and whatever `feed` raises.

    Blocks: for the writes and for the segments.
    """
    writer = RingWriter(job, RingImage(slot, feed.ring, job.parts), feed, files, check)
    writer.write_shards(pool)
    return writer.finish_as(final)


def write_staged_files(
    job: RankJob,
    slot: memoryview,
    feed: Feed,
    *,
    files: Files,
    pool: Executor,
    check: Callable[[], None],
    final: Callable[[RankJob], RankJob] = as_begun,
) -> RankResult:
    """As `write_ring_files`, from a slot that has room for everything; of `feed.ring` only the segments count.

    Raises:
        Exception: As there.

    Blocks: as there.
    """
    writer = SegmentWriter(job, slot, feed, files, check)
    writer.write_shards(pool)
    return writer.finish_as(final)


class RingWriter(SegmentWriter):
    """The memory of segments is used again: `_freed` are written, from the first on."""

    _freed = 0

    def _let_go(self, number: int, shard: ShardWriter) -> None:
        if self.job.fsync and not shard.direct:
            # IMPORTANT: else what the ring keeps out of memory piles up there as the kernel's dirty pages.
            shard.flush()
        # IMPORTANT: before it is freed: whoever goes on after this process's death can prove by nothing else what it
        # has written.
        _, where = self._row(number)
        self._feed.wrote(number, bytes(shard.digests[where]))

    def _row(self, number: int) -> tuple[ShardWriter, slice]:
        segment = self._ring.segments[number]
        first = segment.start // BLOCK_NBYTES * DIGEST_NBYTES
        nbytes = block_count(segment.end - segment.start) * DIGEST_NBYTES
        return self.shards[segment.part], slice(first, first + nbytes)

    def _note_written(self) -> None:
        while self._freed < len(self._written) and self._written[self._freed]:
            self._freed += 1
        self._feed.freed(self._freed)

    def skip(self, count: int, digests_of: Callable[[int], bytes]) -> None:
        """The first `count` segments were written by another process, with these checksums; before anything else."""
        for number in range(count):
            shard, where = self._row(number)
            shard.digests[where] = digests_of(number)
            self._remaining[self._ring.segments[number].part] -= 1
            self._written[number] = True
        self._filled = self._freed = count

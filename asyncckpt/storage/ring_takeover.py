"""One rank's files from a ring that another process had begun to write, and died: what of it is there counts.

What it has freed is in memory no more. But the checksums are, each since before its segment was freed. So whatever it
says that it has written is flushed and read back before anything is built on it: an error of its writes may have been
told to nobody else. The rest comes from the ring, into the same files. What the dead one may have been writing when it
was killed is read back too: over a network a write can end after its process has, out of a cell that is used again.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import Executor

from asyncckpt.failpoints import reach
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.reading_back import OtherBytesError, ReadingBack
from asyncckpt.storage.ring_files import RingImage, RingWriter, as_begun
from asyncckpt.storage.segment_writer import Feed
from asyncckpt.storage.shard_writer import ShardWriter
from asyncckpt.storage.small_files import small_paths

_logger = logging.getLogger("asyncckpt.storage")


def take_over_ring_files(
    job: RankJob,
    slot: memoryview,
    feed: Feed,
    count: int,
    digests_of: Callable[[int], bytes],
    *,
    files: Files,
    pool: Executor,
    check: Callable[[], None],
    final: Callable[[RankJob], RankJob] = as_begun,
) -> RankResult:
    """As `ring_files.write_ring_files`, where a dead process has written, and freed, the first segments.

    The caller has found that its files are not whole, so that nobody can have committed them.

    Args:
        job, slot, feed, files, pool, check, final: As there.
        count: So many segments were freed.
        digests_of: From the number of one of these to the checksums of its blocks.

    Raises:
        OtherBytesError: What was freed is not in the files. These are removed, as after any error.
        Exception: As there.

    Blocks: as there, and for reading back what was freed.
    """
    writer = _Successor(job, RingImage(slot, feed.ring, job.parts), feed, files, check)
    writer.skip(count, digests_of)
    writer.write_shards(pool)
    return writer.finish_as(final)


class _Successor(RingWriter):
    """`_ends`: of each shard that the dead one has begun, where the last of its segments that was freed ends.

    `_doubtful`: of each of these, where what it may have been writing ends: all that was in a cell.
    """

    def skip(self, count: int, digests_of: Callable[[int], bytes]) -> None:
        super().skip(count, digests_of)
        self._ends = {self.shards[s.part]: s.end for s in self._ring.segments[:count]}
        in_cells = self._ring.segments[: count + self._ring.n_cells]
        self._doubtful = {self.shards[s.part]: s.end for s in in_cells if self.shards[s.part] in self._ends}
        self._whole = {shard for shard, end in self._ends.items() if end == shard.nbytes}
        for shard in self._ends:
            shard.go_on()

    def _write_shards(self, pool: Executor) -> None:
        reach("ring: taking over")
        self._clear_the_way()
        for shard, end in self._ends.items():
            self._look_at(shard, end)
            reach("ring: file looked at")
            self.job.progress(end)
        text = "goes on with what another worker has written of rank %d: %d of %d segments"
        facts = (self.job.rank, sum(self._written), len(self._written))
        _logger.info(text, *facts, extra={"save_id": str(self.job.save_id)})
        super()._write_shards(pool)
        reach("ring: reading back")
        # IMPORTANT: after the flush of each file. What can be read then is there, whatever the dead one was told; and
        # after each was cut, which waits for writes that are still under way.
        for shard, end in self._doubtful.items():
            reading = ReadingBack(shard.path, shard.nbytes, bytes(shard.digests), self.files, self.check)
            try:
                reading.run(end, pool, self._threads, flush=self.job.fsync and shard in self._whole)
            except FileNotFoundError as error:
                raise OtherBytesError(f"{shard.path} has vanished") from error
            shard.first = reading.first
            reach("ring: read back")

    def _clear_the_way(self) -> None:
        """Remove what is written anew; the index first, which would say of the others that they are whole."""
        for path in small_paths(self.job) + [s.path for s in self.shards if s not in self._ends]:
            reach("ring: clearing the way")
            with contextlib.suppress(FileNotFoundError):
                self.files.unlink(path)

    def _look_at(self, shard: ShardWriter, end: int) -> None:
        """Prove, before anything is written to it, that this can be what the dead process has begun."""
        try:
            found = self.files.lstat(shard.path)
        except FileNotFoundError as error:
            raise OtherBytesError(f"{os.path.basename(shard.path)} is not there") from error
        least, most = (shard.nbytes, shard.nbytes) if shard in self._whole else (end, shard.extent_nbytes_total)
        # One with another name as well is not written to: it may be anybody's, and of anywhere.
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or not least <= found.st_size <= most:
            raise OtherBytesError(f"{os.path.basename(shard.path)} is not what the worker before had begun to write")

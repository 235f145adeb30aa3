"""Writes a snapshot while its trainer still stages it: what is filled so far, from the slot's beginning on.

IMPORTANT: it only begins sooner what the seal would begin. Nothing of it counts before the seal: until then a failure
ends nothing, and the files are written anew.
"""

from __future__ import annotations

from bisect import bisect_right
from concurrent.futures import Executor
from dataclasses import replace
from itertools import accumulate

from asyncckpt.failpoints import reach
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.ring import Ring
from asyncckpt.memory.slot import PAGE_NBYTES, SlotError
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_files import EXTENT_NBYTES
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.ring_files import write_staged_files
from asyncckpt_worker.actions import Write
from asyncckpt_worker.freshness import rest_print
from asyncckpt_worker.rings import Prove, Waiting, unproved
from asyncckpt_worker.slots import SlotStore


def write_early(
    job: Write,
    rank_job: RankJob,
    memory: SlotMemory,
    slots: SlotStore,
    prove: Prove = unproved,
    *,
    files: Files,
    pool: Executor,
) -> RankResult:
    """Write one rank's files from a slot that is being filled.

    Raises:
        SlotError: The trainer has given it up, is gone, or fills nothing any more. Files of this rank are removed.
        OSError: A call failed; the same.

    Blocks: for the trainer, at most `commit_timeout_s` for each segment, and for the writes.
    """
    feed = EarlyFeed(job, memory, slots, prove)
    view = memory.mapping.view()
    try:
        reach("early: begun")
        found = write_staged_files(rank_job, view, feed, files=files, pool=pool, check=feed.check, final=feed.final)
        return replace(found, rest_print=rest_print(feed.request), tally=feed.tally)
    finally:
        view.release()


class EarlyFeed(Waiting):
    """What the trainer has filled, of a slot that has room for everything."""

    def __init__(self, job: Write, memory: SlotMemory, slots: SlotStore, prove: Prove = unproved) -> None:
        parts = job.request.parts
        ring = Ring([part.nbytes for part in parts], EXTENT_NBYTES, 1)
        super().__init__(job, memory, slots, ring, prove)
        # What must be filled before a segment is: also if parts did not lie one after another.
        ends = accumulate((parts[s.part].offset - PAGE_NBYTES + s.end for s in ring.segments), max)
        self._ends = list(ends)

    def check(self) -> None:
        """Prove that the trainer has not given the slot up.

        Raises:
            SlotError: It has.
        """
        if not self._memory.control.is_written(self._job.generation):
            raise self.ended("the trainer gave it up, or uses it for the next save")

    def filled(self) -> int:
        """Return how many segments are filled."""
        return bisect_right(self._ends, self._counters.filled)

    def wrote(self, number: int, digests: bytes) -> None:
        """Nothing is lost with this process: all of it stays in the slot."""

    def freed(self, count: int) -> None:
        """Nothing is used again before the save has ended."""

    def ended(self, detail: str) -> Exception:
        """Return the error of a slot that is not filled to its end."""
        return SlotError(f"slot {self._job.slot}, generation {self._job.generation}: {detail}")

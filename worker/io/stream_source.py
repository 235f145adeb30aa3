"""Writes a snapshot while its trainer fills the slot: whole slots before their seal, and rings, for what does not fit.

IMPORTANT: of a whole slot nothing of it counts before the seal: until then a failure ends nothing, and the files are
written anew. Of a ring it ends the save: what was written is in memory no more.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import ProtocolError, SaveFailedError
from asyncckpt.format.coverage import Tally
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import PAGE_NBYTES, SlotError
from asyncckpt.memory.streaming import Counters, StreamLayout
from asyncckpt.protocol.request import SaveRequest, decode_request
from asyncckpt.storage.files import Files, step_and_rank
from asyncckpt.storage.rank_writer import DEFAULT_THREADS, EXTENT_NBYTES, RankResult, RankWriter
from asyncckpt.storage.recovery import keep_ring_files
from asyncckpt.storage.segment_writer import SegmentWriter, StreamedImage
from asyncckpt_worker.core.actions import Write
from asyncckpt_worker.io.content_digest import rest_print
from asyncckpt_worker.io.slot_store import SlotStore

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Between two looks at the trainer's counter: a segment takes a disk some milliseconds. Chosen, not measured."""

SAID_AT_THE_SEAL = ("structure", "objects", "n_tensors", "metadata", "step")
"""Of a request: what may be another one when the slot is sealed (memory/SPEC.md, section 5)."""

STREAM_LOST = (
    "the worker that was writing it has died, and the state is larger than arena_limit_bytes, so that what it had "
    "written is in memory no more"
)

PARTING_S = 2.0
"""A trainer that gives a slot up says why, by a message that the core gets in milliseconds: it is waited for, so that
other ranks hear that reason. Chosen."""


Prove = Callable[[SaveRequest], Tally | None]
"""Looks at a request before index and objects of it are written; raises where its structure is none."""


def unproved(request: SaveRequest) -> Tally | None:
    """Look at nothing."""
    return None


def write_streamed(
    job: Write,
    memory: SlotMemory,
    slots: SlotStore,
    prove: Prove = unproved,
    *,
    files: Files,
    pool: Executor,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> tuple[RankResult, bool]:
    """Write one rank's files as they are filled. Of a ring that a dead worker has begun: keep what that has finished.

    `prove` looks at the request of the seal.

    Returns:
        The result, and whether the shards were kept.

    Raises:
        SaveFailedError: The trainer has not filled it (`not_sealed`): files of this rank are removed. Or a worker that
            is dead had begun to write a ring and not finished (`stream_lost`): its files stay, and are the caller's.
        OSError: A call failed: files of this rank are removed, unless a dead worker's were looked at.

    Blocks: for the trainer, at most `commit_timeout_s` for each segment, and for the writes.
    """
    source = StreamSource(job, memory, slots, prove)
    view = memory.mapping.view()
    try:
        reach("stream: begun")
        kept = False
        if job.resumed:
            # IMPORTANT: nothing is removed here: a leader on another node may be committing these files right now.
            result, kept = _finished(source, view, files), True
        else:
            writer = SegmentWriter(
                job.request, view, source, files, check=source.check, threads=threads, progress=progress
            )
            result = writer.write(pool, source.final)
        return replace(result, rest_print=rest_print(source.request), tally=source.tally), kept
    finally:
        view.release()


def _finished(source: StreamSource, view: memoryview, files: Files) -> RankResult:
    """Return the result of a ring's files that a dead worker has finished."""
    found: RankResult | None = None
    if source.is_sealed():  # else there is no index yet
        image = StreamedImage(view, source.layout)
        found = keep_ring_files(RankWriter(source.final(), image, files, check=source.check))
    if found is None:
        raise source.failed("stream_lost", STREAM_LOST)
    return found


class StreamSource:
    """What the trainer fills of a slot, as `segment_writer.Source`.

    Attributes:
        layout: The segments.
        request: The one that the slot was streamed with; after `final`, of the seal.
        tally: What `prove` has returned.
    """

    def __init__(self, job: Write, memory: SlotMemory, slots: SlotStore, prove: Prove = unproved) -> None:
        request = self.request = job.request
        self.layout = StreamLayout(request.parts, request.ring_segment_nbytes or EXTENT_NBYTES, request.ring_segments)
        self.tally: Tally | None = None
        self._prove, self._counters = prove, Counters(memory, job.generation)
        self._job, self._memory, self._slots = job, memory, slots

    def check(self) -> None:
        """Prove that the trainer has not given the slot up.

        Raises:
            SaveFailedError: It has.
        """
        if not self._memory.control.is_written(self._job.generation):
            deadline = time.monotonic() + PARTING_S
            while not self._is_cut_off() and time.monotonic() < deadline:
                time.sleep(LAST_POLL_S)
            raise self.failed("not_sealed", "the trainer gave it up while it was being written")

    def filled(self) -> int:
        """Return how many segments are filled.

        Raises:
            SaveFailedError: More than there are.
        """
        filled = self._counters.filled
        if filled > self.layout.image_nbytes:
            text = f"{filled} bytes are said to be filled, of {self.layout.image_nbytes}"
            raise self.failed("not_sealed", text)
        return self.layout.count_in(filled)

    def freed(self, count: int) -> None:
        """So many segments are needed no more: in a ring, the trainer may fill their cells again."""
        self._counters.freed = self.layout.end_of(count)
        reach("stream: segments freed")

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        """Return how many segments are filled, once these are more than `count`, or `goes_on()` is False.

        Raises:
            SaveFailedError: There will be none.

        Blocks: at most `commit_timeout_s`.
        """
        deadline, pause_s = time.monotonic() + self._job.request.commit_timeout_s, FIRST_POLL_S
        while True:
            self.check()
            filled = self.filled()
            if filled > count or not goes_on():
                return filled
            if self._is_cut_off():
                text = "the trainer is gone, or the save has ended, before all of it was staged"
                raise self.failed("not_sealed", text)
            if time.monotonic() >= deadline:
                timeout_s = self._job.request.commit_timeout_s
                raise self.failed("not_sealed", f"the trainer has staged nothing for commit_timeout_s={timeout_s:g}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def is_sealed(self) -> bool:
        """Whether the trainer has sealed it."""
        return self._memory.control.is_sealed(self._job.generation)

    def final(self) -> SaveRequest:
        """Return the request of the seal, once the trainer has sealed: it may know more by then.

        Raises:
            SaveFailedError: It is not sealed, or was sealed with other files.

        Blocks: at most `commit_timeout_s`.
        """
        control, asked = self._memory.control, self._job.request
        deadline, pause_s = time.monotonic() + asked.commit_timeout_s, FIRST_POLL_S
        while not self.is_sealed():
            self.check()
            if self._is_cut_off():
                raise self.failed("not_sealed", "the trainer is gone, or the save has ended, before it was sealed")
            if time.monotonic() >= deadline:
                text = f"the trainer has not sealed it for commit_timeout_s={asked.commit_timeout_s:g}"
                raise self.failed("not_sealed", text)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        # IMPORTANT: a system call between the look at the state and what it speaks of, as the trainer makes one between
        # these stores (`Counters`): no message has ordered them.
        _ = self._counters.filled
        try:
            generation, data = control.read_request()
            sealed = decode_request(data, self._memory.nbytes - PAGE_NBYTES)
        except (SlotError, ProtocolError) as error:
            raise self.failed("not_sealed", f"what was sealed cannot be read: {error}") from error
        may_differ = {name: getattr(asked, name) for name in SAID_AT_THE_SEAL}
        if generation != self._job.generation or replace(sealed, **may_differ) != asked:
            raise self.failed("not_sealed", "it was sealed with other files than it was begun with")
        self.request, self.tally = sealed, self._prove(sealed)
        return sealed

    def failed(self, code: str, detail: str) -> SaveFailedError:
        """Return the error of a slot that is not filled to its end, or of a ring that is lost."""
        request = self._job.request
        return SaveFailedError(
            f"save {request.save_id} ({step_and_rank(request.step, request.rank)}) to {request.path} failed: {detail}; "
            "nothing was published; save again",
            code=code,
            detail=detail,
        )

    def _is_cut_off(self) -> bool:
        return self._slots.is_cut_off(self._job.slot, self._job.generation)

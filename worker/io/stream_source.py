"""Writes a snapshot while its trainer fills the slot: whole slots before their seal, and rings.

IMPORTANT: a failure before the seal of a whole slot must not end the save: the sealed snapshot is written again. A
failure of a ring ends the save, since the segments that were written are no longer in memory.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

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
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.segment_writer import SegmentWriter, StreamedImage
from asyncckpt_worker.core.actions import Write
from asyncckpt_worker.io.content_digest import rest_print
from asyncckpt_worker.io.slot_store import SlotStore

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Poll interval of the trainer's counter, first and last: a disk writes a segment in milliseconds. Chosen."""

FIELDS_FINAL_AT_SEAL = ("structure", "objects", "n_tensors", "metadata", "step")
"""Fields of a request that may change until the slot is sealed (memory/SPEC.md, section 5)."""

STREAM_LOST = (
    "the worker that was writing it has died; as the state is larger than arena_limit_bytes, the parts that it had "
    "written are no longer in memory"
)

WITHDRAW_WAIT_S = 2.0
"""How long to wait for the Withdraw of a trainer that has abandoned the slot: it has the reason, which all ranks should
get as the error. Chosen."""


CheckRequest = Callable[[SaveRequest], Tally | None]
"""Checks a request, before or after the seal; raises if its structure does not decode."""


def unchecked(request: SaveRequest) -> Tally | None:
    """Check nothing."""
    return None


def write_streamed(
    job: Write,
    memory: SlotMemory,
    slots: SlotStore,
    check_request: CheckRequest = unchecked,
    *,
    files: Files,
    pool: Executor,
    threads: int = DEFAULT_THREADS,
    progress: Callable[[int], None] = lambda nbytes: None,
    history: ShardHistory | None = None,
) -> tuple[RankResult, bool]:
    """Write one rank's files while its slot is filled. A ring of a dead worker: keep its files if complete.

    If there may be unchanged shards to link, wait until a whole slot is sealed: they cannot be told before.

    Returns:
        The result, and whether the shards were kept.

    Raises:
        SaveFailedError: The trainer has not filled the slot (`not_sealed`); files of this rank were removed. Or a dead
            worker had not finished a ring (`stream_lost`); its files stay, and the caller removes them.
        OSError: A call failed; files of this rank were removed, except those of a dead worker.

    Blocks: for the trainer, at most `commit_timeout_s` for each segment, and for the writes.
    """
    source = StreamSource(job, memory, slots, check_request)
    view = memory.mapping.view()
    try:
        reach("stream: begun")
        kept = False
        how: dict[str, Any] = {"check": source.check, "threads": threads, "progress": progress}
        if job.resumed:
            # IMPORTANT: nothing is removed here: a leader on another node may be committing these files.
            result, kept = _finished(source, view, files), True
        elif job.request.ring_segments:
            result = SegmentWriter(job.request, view, source, files, **how).write(pool, source.final)
        elif job.request.reuse and history is not None and history.shards(job.request.path, job.request.rank):
            result = RankWriter(source.final(), view, files, history=history, **how).write(pool)
        else:
            result = SegmentWriter(job.request, view, source, files, history=history, **how).write(pool, source.final)
        # IMPORTANT: the tally must be that of the sealed structure, which may differ from the one before the seal.
        return replace(result, rest_print=rest_print(source.request), tally=source.tally), kept
    finally:
        view.release()


def _finished(source: StreamSource, view: memoryview, files: Files) -> RankResult:
    """Return the result of a ring's files that a dead worker has completed."""
    found: RankResult | None = None
    if source.is_sealed():  # before the seal there is no index
        image = StreamedImage(view, source.layout)
        found = keep_ring_files(RankWriter(source.final(), image, files, check=source.check))
    if found is None:
        raise source.failed("stream_lost", STREAM_LOST)
    return found


class StreamSource:
    """A slot that a trainer fills, as `segment_writer.Source`.

    Attributes:
        layout: Layout of the segments.
        request: The request before the seal; after `final`, the sealed one.
        tally: Result of `check_request`.
    """

    def __init__(
        self, job: Write, memory: SlotMemory, slots: SlotStore, check_request: CheckRequest = unchecked
    ) -> None:
        request = self.request = job.request
        self.layout = StreamLayout(request.parts, request.ring_segment_nbytes or EXTENT_NBYTES, request.ring_segments)
        self.tally: Tally | None = None
        self._check_request, self._counters = check_request, Counters(memory, job.generation)
        self._job, self._memory, self._slots = job, memory, slots

    def check(self) -> None:
        """Check that the trainer has not abandoned the slot.

        Raises:
            SaveFailedError: It has.
        """
        if not self._memory.control.is_written(self._job.generation):
            deadline = time.monotonic() + WITHDRAW_WAIT_S
            while not self._is_cut_off() and time.monotonic() < deadline:
                time.sleep(LAST_POLL_S)
            raise self.failed("not_sealed", "the trainer abandoned it while it was being written")

    def filled(self) -> int:
        """Return the number of filled segments.

        Raises:
            SaveFailedError: The trainer's counter exceeds the size.
        """
        filled = self._counters.filled
        if filled > self.layout.image_nbytes:
            text = f"the trainer reports {filled} bytes as filled, expected at most {self.layout.image_nbytes}"
            raise self.failed("not_sealed", text)
        return self.layout.count_in(filled)

    def freed(self, count: int) -> None:
        """Set the number of segments that are no longer needed: the trainer of a ring may fill their cells again."""
        self._counters.freed = self.layout.end_of(count)
        reach("stream: segments freed")

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        """Return the number of filled segments, once it is above `count` or `goes_on()` is False.

        Raises:
            SaveFailedError: The trainer will not fill more segments, or has filled none in time.

        Blocks: at most `commit_timeout_s`.
        """
        deadline, pause_s = time.monotonic() + self._job.request.commit_timeout_s, FIRST_POLL_S
        while True:
            self.check()
            filled = self.filled()
            if filled > count or not goes_on():
                return filled
            if self._is_cut_off():
                text = "the trainer has exited, or the save has ended, before all of it was staged"
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
        """Return the sealed request, which may differ in `FIELDS_FINAL_AT_SEAL`.

        Raises:
            SaveFailedError: The slot was not sealed in time, or was sealed with other files.

        Blocks: at most `commit_timeout_s`.
        """
        control, asked = self._memory.control, self._job.request
        deadline, pause_s = time.monotonic() + asked.commit_timeout_s, FIRST_POLL_S
        while not self.is_sealed():
            self.check()
            if self._is_cut_off():
                raise self.failed("not_sealed", "the trainer has exited, or the save has ended, before it was sealed")
            if time.monotonic() >= deadline:
                text = f"the trainer has not sealed it for commit_timeout_s={asked.commit_timeout_s:g}"
                raise self.failed("not_sealed", text)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        # IMPORTANT: a system call between the load of the state and the loads of the request. It orders them, like the
        # trainer's system call between its stores (`Counters`): there is no message that does.
        _ = self._counters.filled
        try:
            generation, data = control.read_request()
            sealed = decode_request(data, self._memory.nbytes - PAGE_NBYTES)
        except (SlotError, ProtocolError) as error:
            raise self.failed("not_sealed", f"the sealed request cannot be read: {error}") from error
        may_differ = {name: getattr(asked, name) for name in FIELDS_FINAL_AT_SEAL}
        if generation != self._job.generation or replace(sealed, **may_differ) != asked:
            raise self.failed("not_sealed", "the sealed request has other files than the request before the seal")
        self.request, self.tally = sealed, self._check_request(sealed)
        return sealed

    def failed(self, code: str, detail: str) -> SaveFailedError:
        """Return the error of a slot that was not filled completely, or of a lost ring."""
        request = self._job.request
        return SaveFailedError(
            f"save {request.save_id} ({step_and_rank(request.step, request.rank)}) to {request.path} failed: {detail}; "
            "nothing was published; save again",
            code=code,
            detail=detail,
        )

    def _is_cut_off(self) -> bool:
        return self._slots.is_cut_off(self._job.slot, self._job.generation)

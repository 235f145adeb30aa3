"""Writes a snapshot that is larger than its slot: segment by segment, while its trainer fills the next ones."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import replace

from asyncckpt.errors import ProtocolError, SaveFailedError
from asyncckpt.failpoints import reach
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.ring import Counters, Ledger, Ring
from asyncckpt.memory.slot import PAGE_NBYTES, SlotError
from asyncckpt.protocol.request import SaveRequest, decode_request
from asyncckpt.storage.failures import whose
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.reading_back import OtherBytesError
from asyncckpt.storage.resuming import keep_ring_files
from asyncckpt.storage.ring_files import RingImage, write_ring_files
from asyncckpt.storage.ring_takeover import take_over_ring_files
from asyncckpt.storage.tally import Tally
from asyncckpt_worker.actions import Write
from asyncckpt_worker.freshness import rest_print
from asyncckpt_worker.slots import SlotStore

FIRST_POLL_S, LAST_POLL_S = 0.0002, 0.005
"""Between two looks at the trainer's counter: a segment takes a disk some milliseconds. Chosen, not measured."""

SAID_AT_THE_SEAL = ("structure", "objects", "n_tensors", "metadata", "step")
"""Of a request: what may be another one when the slot is sealed (memory/SPEC.md, sections 5 and 6)."""

PARTING_S = 2.0
"""A trainer that gives a ring up says why, by a message that the brain gets in milliseconds: it is waited for, so that
other ranks hear that reason. Chosen."""


Prove = Callable[[SaveRequest], Tally | None]
"""Looks at a request before index and objects of it are written; raises where its structure is none."""


def unproved(request: SaveRequest) -> Tally | None:
    """Look at nothing."""
    return None


def write_ring(
    job: Write,
    rank_job: RankJob,
    memory: SlotMemory,
    slots: SlotStore,
    prove: Prove = unproved,
    *,
    files: Files,
    pool: Executor,
) -> tuple[RankResult, bool]:
    """Write one rank's files from a ring; those that the worker before has finished are kept, others are gone on with.

    `prove` looks at the request of the seal.

    Returns:
        The result, and whether the shards were kept.

    Raises:
        SaveFailedError: The trainer has not filled it (`not_sealed`), or what a worker that is dead had written of it
            is not in its files (`ring_lost`). Files of this rank are removed.
        OSError: A call failed; the same, unless it was to find out whether a dead worker's files are whole.

    Blocks: for the trainer, at most `commit_timeout_s` for each segment, and for the writes.
    """
    feed = _RingFeed(job, memory, slots, prove)
    view = memory.mapping.view()
    try:
        reach("ring: begun")
        if not job.resumed:
            found = write_ring_files(rank_job, view, feed, files=files, pool=pool, check=feed.check, final=feed.final)
            return replace(found, rest_print=rest_print(feed.request), tally=feed.tally), False
        # IMPORTANT: never removed where they are whole: a leader on another node may be committing them right now.
        if memory.control.is_sealed(job.generation):  # else there is no index yet
            image, sealed = RingImage(view, feed.ring, rank_job.parts), feed.final(rank_job)
            kept = keep_ring_files(sealed, image, files=files, check=feed.check)
            if kept is not None:
                return replace(kept, rest_print=rest_print(feed.request), tally=feed.tally), True
        count = feed.freed_before()
        found = take_over_ring_files(
            rank_job,
            view,
            feed,
            count,
            feed.ledger.digests_of,
            files=files,
            pool=pool,
            check=feed.check,
            final=feed.final,
        )
        return replace(found, rest_print=rest_print(feed.request), tally=feed.tally), False
    except OtherBytesError as error:
        text = (
            f"what a worker that has died had written of it is not there: {error}. In memory it is no more, since the "
            "state is larger than arena_limit_bytes"
        )
        raise _failed(job.request, "ring_lost", text) from error
    finally:
        view.release()


class Waiting(ABC):
    """Waits for what a trainer fills and seals. `ring`: the segments. `request`: after `final` the sealed one."""

    def __init__(self, job: Write, memory: SlotMemory, slots: SlotStore, ring: Ring, prove: Prove) -> None:
        self.ring, self.request = ring, job.request
        self.tally: Tally | None = None
        self._prove, self._counters = prove, Counters(memory, job.generation)
        self._job, self._memory, self._slots = job, memory, slots

    @abstractmethod
    def check(self) -> None:
        """Raise what `ended` returns once the trainer has given up."""

    @abstractmethod
    def filled(self) -> int:
        """Return how many segments are filled."""

    @abstractmethod
    def ended(self, detail: str) -> Exception:
        """Return the error that there will be no more, because of `detail`."""

    def await_filled(self, count: int, goes_on: Callable[[], bool]) -> int:
        """Return how many segments are filled, once these are more than `count`, or `goes_on()` is False.

        Raises:
            Exception: There will be none: as `ended`.

        Blocks: at most `commit_timeout_s`.
        """
        deadline, pause_s = time.monotonic() + self._job.request.commit_timeout_s, FIRST_POLL_S
        while True:
            self.check()
            filled = self.filled()
            if filled > count or not goes_on():
                return filled
            if self._is_cut_off():
                raise self.ended("the trainer is gone, or the save has ended, before all of it was staged")
            if time.monotonic() >= deadline:
                timeout_s = self._job.request.commit_timeout_s
                raise self.ended(f"the trainer has staged nothing for commit_timeout_s={timeout_s:g}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)

    def final(self, job: RankJob) -> RankJob:
        """Return the job as the trainer has sealed it, once it has: it may know more by then.

        Raises:
            Exception: It is not sealed, or was sealed with other files: as `ended`.

        Blocks: at most `commit_timeout_s`.
        """
        control, asked = self._memory.control, self._job.request
        deadline, pause_s = time.monotonic() + asked.commit_timeout_s, FIRST_POLL_S
        while not control.is_sealed(self._job.generation):
            self.check()
            if self._is_cut_off():
                raise self.ended("the trainer is gone, or the save has ended, before it was sealed")
            if time.monotonic() >= deadline:
                raise self.ended(f"the trainer has not sealed it for commit_timeout_s={asked.commit_timeout_s:g}")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, LAST_POLL_S)
        # IMPORTANT: a system call between the look at the state and what it speaks of, as the trainer makes one between
        # these stores (`Counters`): no message has ordered them.
        _ = self._counters.filled
        try:
            generation, data = control.read_request()
            sealed = decode_request(data, self._memory.nbytes - PAGE_NBYTES)
        except (SlotError, ProtocolError) as error:
            raise self.ended(f"what was sealed cannot be read: {error}") from error
        may_differ = {name: getattr(asked, name) for name in SAID_AT_THE_SEAL}
        if generation != self._job.generation or replace(sealed, **may_differ) != asked:
            raise self.ended("it was sealed with other files than it was begun with")
        self.request, self.tally = sealed, self._prove(sealed)
        return replace(job, structure=sealed.structure, objects=sealed.objects, n_tensors=sealed.n_tensors)

    def _is_cut_off(self) -> bool:
        return self._slots.is_cut_off(self._job.slot, self._job.generation)


class _RingFeed(Waiting):
    """What the trainer fills of a ring."""

    def __init__(self, job: Write, memory: SlotMemory, slots: SlotStore, prove: Prove = unproved) -> None:
        request = job.request
        lengths = [part.nbytes for part in request.parts]
        super().__init__(job, memory, slots, Ring(lengths, request.ring_segment_nbytes, request.ring_segments), prove)
        self.ledger = Ledger(memory, self.ring)

    def check(self) -> None:
        """Prove that the trainer has not given the ring up.

        Raises:
            SaveFailedError: It has.
        """
        if not self._memory.control.is_written(self._job.generation):
            deadline = time.monotonic() + PARTING_S
            while not self._is_cut_off() and time.monotonic() < deadline:
                time.sleep(LAST_POLL_S)
            raise self.ended("the trainer gave it up while it was being written")

    def filled(self) -> int:
        """Return how many segments are filled.

        Raises:
            SaveFailedError: More than there are.
        """
        filled = self._counters.filled
        if filled > len(self.ring.segments):
            raise self.ended(f"{filled} segments are said to be filled, of {len(self.ring.segments)}")
        return filled

    def wrote(self, number: int, digests: bytes) -> None:
        """Leave the checksums to whoever comes after this process, unless the slot is the next save's by now."""
        self._slots.note(self._job.slot, self._job.generation, lambda: self.ledger.note(number, digests))

    def freed(self, count: int) -> None:
        """So many segments are needed no more."""
        self._counters.freed = count
        reach("ring: segments freed")

    def freed_before(self) -> int:
        """Return how many segments a worker that is dead has freed.

        Raises:
            SaveFailedError: More than were ever filled.
        """
        freed, filled = self._counters.freed, self.filled()
        if freed > filled:
            raise self.ended(f"{freed} segments are said to be written, and {filled} filled")
        return freed

    def ended(self, detail: str) -> SaveFailedError:
        """Return the error of a ring that is not filled to its end."""
        return _failed(self._job.request, "not_sealed", detail)


def _failed(request: SaveRequest, code: str, detail: str) -> SaveFailedError:
    return SaveFailedError(
        f"save {request.save_id} ({whose(request.step, request.rank)}) to {request.path} failed: {detail}; "
        "nothing was published; save again",
        code=code,
        detail=detail,
    )

"""Reading wanted byte ranges of shard files: whole blocks, verified, handed on by several threads.

What the page cache has comes in small steps, so that digest and copy find it in the processor's cache; the rest comes
by O_DIRECT in large extents.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.failpoints import reach
from asyncckpt.format.layout import PAGE_NBYTES, round_up
from asyncckpt.format.names import SaveId
from asyncckpt.memory.copying import view_at
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.cached_copies import BRING_FROM_NBYTES
from asyncckpt.storage.damage import is_sound
from asyncckpt.storage.extents import Extent, ReadReport, Source, are_at_hand, deliver
from asyncckpt.storage.files import Files, named
from asyncckpt.storage.quicker import Quicker
from asyncckpt.storage.read_plan import (
    EXACT_BELOW_NBYTES,
    EXTENT_NBYTES,
    Batch,
    ShardRequest,
    Spread,
    Step,
    buffer_nbytes,
    fqns_of,
    is_through,
    pages_of,
    plan_batches,
    plan_extents,
    with_verifiers,
)
from asyncckpt.storage.shard_reader import NO_DESCRIPTORS, ShardReader
from asyncckpt.uninterrupted import uninterrupted

DEFAULT_THREADS, BUFFERS_NBYTES = 4, 192 << 20
"""All threads' buffers together: three quarters of what a load may take beside its targets (design/API.md, 256 MB)."""


def read_shards(
    path: str,
    save_id: SaveId | None,
    requests: Sequence[ShardRequest],
    *,
    files: Files,
    threads: int = DEFAULT_THREADS,
    verify: bool = True,
    on_corrupt: Callable[[CorruptCheckpointError], None] | None = None,
    buffer: memoryview | None = None,
    extent_nbytes: int = EXTENT_NBYTES,
) -> ReadReport:
    """Read, verify and hand on all wanted ranges.

    All files are opened and checked (length, save id) before the first byte is handed on.

    Args:
        path: The checkpoint's directory.
        save_id: Whose files they must be; None: files of another format, which have no digests to verify.
        requests: One per file.
        files: The storage seam.
        threads: Readers, the calling thread among them; half as many more verify meanwhile.
        verify: False checks no digest, and reads whole pages instead of whole blocks, of short runs not even these.
        on_corrupt: Called, from any thread, for every damaged block instead of raising; its bytes are not handed on.
        buffer: Page-aligned memory for what one thread reads, of at least a block: whoever reads often keeps one, for
            the kernel's fresh pages cost as much as a copy. None, or more threads: new memory.
        extent_nbytes: What one thread reads at a time, at most. A `buffer` that is used is filled in one read.

    Raises:
        CorruptCheckpointError: A file is missing, of another length or save, or a block differs from its checksum;
            with file, FQN and byte range.
        OSError: A read failed; names the file and the byte range.
        Exception: Whatever a sink raises.

    Blocks: for the reads. No thread is left when this returns or raises.
    """
    requests = [r for r in requests if any(w.nbytes for w in r.wanted)]
    for request in requests:
        ShardReader(path, request.shard, save_id, files).close()
    reader = _Reader(path, save_id, files, verify, on_corrupt)
    limit = len(buffer) if threads == 1 and buffer is not None else extent_nbytes
    todo = [extent for request in requests for extent in reader.plan(request, threads, limit)]
    if todo:
        reader.run(todo, threads, buffer)
    return ReadReport(cached_nbytes=reader.cached_nbytes, disk_nbytes=reader.disk_nbytes)


class _Reader:
    """One `read_shards`. What is cold and read through is brought in in large pages, unless that takes more of the
    processor: where memory that nobody has touched must come from a host, they are such more often (ADR 0034)."""

    def __init__(
        self,
        path: str,
        save_id: SaveId | None,
        files: Files,
        verify: bool,
        on_corrupt: Callable[[CorruptCheckpointError], None] | None,
    ) -> None:
        self._path, self._save_id, self._files = path, save_id, files
        self._verify, self._on_corrupt = verify, on_corrupt
        self._lock, self._disk = threading.Lock(), threading.Semaphore()
        self._idle, self._helping = threading.Condition(self._lock), 0
        self._todo: list[Extent] = []
        self._sources: list[Source] = []
        self._error: BaseException | None = None
        self._at_hand = self._scarce = self._alone = False
        self._large_pages = Quicker(sum)
        self.cached_nbytes = self.disk_nbytes = 0

    def plan(self, request: ShardRequest, threads: int, extent_nbytes: int) -> list[Extent]:
        """Cut what is wanted of a file into extents."""
        limit = min(extent_nbytes, BUFFERS_NBYTES // with_verifiers(threads))
        unit, exact_below = (request.block_nbytes, 0) if self._verify else (PAGE_NBYTES, EXACT_BELOW_NBYTES)
        groups = plan_extents(request, threads, unit=unit, exact_below=exact_below, extent_nbytes=limit)
        batches = plan_batches(request)
        assert not (self._verify and any(w.every for w in request.wanted)), "a checksum is of a whole block"
        source = Source(request, len(groups) + len(batches))
        self._sources.append(source)
        return [Extent(source, steps) for steps in groups] + [Extent(source, [], batch) for batch in batches]

    def run(self, todo: list[Extent], threads: int, buffer: memoryview | None) -> None:
        """Work through all extents; the first error of any thread is raised once all have stopped."""
        room = round_up(max(e.batch.nbytes if e.batch else buffer_nbytes(e.steps) for e in todo))
        self._todo = todo[::-1]
        self._disk = threading.Semaphore(max(1, threads))
        threads = max(1, min(with_verifiers(threads), len(todo), BUFFERS_NBYTES // room))
        try:
            if threads > 1 or any(is_through(e.steps) for e in todo):
                self._at_hand = self._are_at_hand(todo)
            if self._at_hand:
                threads = min(threads, len(os.sched_getaffinity(0)))  # nothing waits for a disk
            if self._scarce:
                threads = 1
            if threads == 1 and buffer is not None and room <= len(buffer):
                part = buffer, ctypes.addressof(ctypes.c_char.from_buffer(buffer))
                self._work(*part)
                self._work_alone(*part)
            else:
                with Mapping(-1, room * threads) as memory:
                    self._work_together(memory, room, threads)
        finally:
            for source in self._sources:
                source.close()
        if self._error is not None:
            raise self._error

    def _are_at_hand(self, todo: list[Extent]) -> bool:
        try:
            return are_at_hand(todo, lambda e: self._open(e.source, through=is_through(e.steps)))
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            self._scarce = True
            return False

    def _work_together(self, memory: Mapping, room: int, threads: int) -> None:
        whole = memory.view()
        parts = [(whole[n * room : (n + 1) * room], memory.address + n * room) for n in range(threads)]
        with ThreadPoolExecutor(threads, "asyncckpt-read") as pool:  # the calling thread is one of them
            try:
                with uninterrupted():
                    for part in parts[1:]:
                        pool.submit(self._help, *part)
                self._work(*parts[0])
            except BaseException as error:
                self._stop(error)
            finally:
                self._wait_for_helpers()
        self._work_alone(*parts[0])

    def _help(self, buffer: memoryview, address: int) -> None:
        """Work in a thread that is waited for."""
        with self._idle:
            self._helping += 1
        try:
            self._work(buffer, address)
        finally:
            with self._idle:
                self._helping -= 1
                self._idle.notify_all()

    def _wait_for_helpers(self) -> None:
        """Wait until no other thread is at work.

        IMPORTANT: nothing ends this early, not even a second Ctrl-C: they would read on into memory that is freed.
        """
        while True:
            try:
                with self._idle:
                    self._idle.wait_for(lambda: not self._helping)
                return
            except BaseException as error:
                self._stop(error)

    def _work(self, buffer: memoryview, address: int) -> None:
        """One thread: take extents until none is left or one has failed. Errors are kept, not raised.

        Where no file descriptor is left, all threads end, and one does the rest with one file open at a time.
        """
        while True:
            with self._lock:
                if not self._todo or (self._scarce and not self._alone):
                    return
                extent = self._todo.pop()
            try:
                if is_through(extent.steps):
                    self._read_through(extent.source, extent.steps, buffer, address)
                elif extent.batch:
                    self._read_batch(extent.source, extent.batch, buffer, address)
                else:
                    self._read(extent.source, extent.steps, buffer, address)
            except BaseException as error:
                if isinstance(error, OSError) and error.errno in NO_DESCRIPTORS and not self._alone:
                    with self._lock:  # its file could not be opened: nothing of it was handed on
                        self._todo.append(extent)
                        self._scarce = True
                else:
                    self._stop(error)
                return

    def _work_alone(self, buffer: memoryview, address: int) -> None:
        """Do what is left, where no descriptor was, with one file open at a time. No other thread is at work."""
        if self._scarce and self._error is None:
            self._alone = True
            self._work(buffer, address)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._todo.clear()
            self._error = (self._error or error) if isinstance(error, Exception) else error  # Ctrl-C is heard

    def _read_batch(self, source: Source, batch: Batch, buffer: memoryview, address: int) -> None:
        self._open(source).read_batch(batch, buffer, address)
        reach("load: ranges read")
        self._release(source, cached_nbytes=batch.nbytes)

    def _read_through(self, source: Source, steps: list[Step], buffer: memoryview, address: int) -> None:
        reader = self._open(source, through=True)
        for _, group in itertools.groupby(steps, lambda step: id(step.wanted[0])):
            together = list(group)
            began, in_large = time.thread_time(), not self._at_hand and self._large_pages.is_first(None)
            if (self._at_hand or in_large) and self._copied(reader, together, (address, len(buffer))):
                reach("load: bytes copied")
            else:
                for step in together:
                    with buffer[: step.end - step.start] as view:
                        if in_large:
                            reader.copies.bring(step.start, len(view))
                        reader.read_buffered(view, step.start, len(view))
                        self._hand_on(source, step, view, address)
            nbytes = together[-1].end - together[0].start
            if not self._at_hand and nbytes >= BRING_FROM_NBYTES:
                self._large_pages.took(None, (time.thread_time() - began) / nbytes, first=in_large)
        self._release(source, cached_nbytes=steps[-1].end - steps[0].start)

    def _copied(self, reader: ShardReader, steps: list[Step], room: tuple[int, int]) -> bool:
        """Copy what is wanted of one range straight to where it goes; False where that was not done."""
        (start, _, (wanted,)), end = steps[0], steps[-1].end
        spread: Spread | None = getattr(wanted.sink, "runs", None)
        runs = spread(start - wanted.offset, end - start) if spread is not None else None
        return runs is not None and reader.copies.copy(start, end - start, runs, room, is_there=self._at_hand)

    def _read(self, source: Source, steps: list[Step], buffer: memoryview, address: int) -> None:
        reader = self._open(source)
        start, end, at = steps[0].start, steps[-1].end, 0
        if (lies_at := reader.address(start, end - start)) is not None:  # no copy of it is made on the way
            for step in steps:
                with view_at(lies_at + step.start - start, step.end - step.start) as view:
                    self._hand_on(source, step, view, lies_at + step.start - start)
            reader.is_done(start, end - start)
            at = len(steps)
        elif reader.is_cached(*pages_of(start, end, reader.nbytes)):
            while at < len(steps):
                nbytes = steps[at].end - steps[at].start
                with buffer[:nbytes] as view:
                    if not reader.read_cached(view, steps[at].start):
                        break
                self._hand_on(source, steps[at], buffer, address)
                at += 1
        if at < len(steps):
            low, nbytes = pages_of(start := steps[at].start, end, reader.nbytes)
            try:
                with self._disk:
                    reader.read(buffer, low, nbytes)
            except OSError as error:
                wanted = [w for step in steps[at:] for w in step.wanted]
                raise named(error, str(error.filename), f"tensor {fqns_of(wanted)}") from error
            for step in steps[at:]:
                with buffer[step.start - low : step.end - low] as view:
                    self._hand_on(source, step, view, address + step.start - low)
        disk_nbytes = end - start if at < len(steps) else 0
        self._release(source, cached_nbytes=end - steps[0].start - disk_nbytes, disk_nbytes=disk_nbytes)

    def _open(self, source: Source, *, through: bool = False) -> ShardReader:
        with source.lock:
            if through not in source.readers:
                if self._alone:
                    for one in self._sources:
                        one.close()
                        one.readers.clear()
                opened = ShardReader(self._path, source.request.shard, self._save_id, self._files, read_ahead=through)
                source.readers[through] = opened
                reach("load: shard opened")
            return source.readers[through]

    def _release(self, source: Source, *, cached_nbytes: int, disk_nbytes: int = 0) -> None:
        """Count an extent that was read; close the file behind its last."""
        with self._lock:
            self.cached_nbytes += cached_nbytes
            self.disk_nbytes += disk_nbytes
        with source.lock:
            source.remaining -= 1
            if source.remaining == 0:
                source.close()

    def _hand_on(self, source: Source, step: Step, view: memoryview, address: int) -> None:
        """Verify a step, whose bytes are in `view` at `address`, and give each range its part."""
        reach("load: bytes read")
        if self._verify and not is_sound(self._path, source.request, step, view, self._on_corrupt):
            return
        deliver(step, address)

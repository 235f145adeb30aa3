"""Reads byte ranges of shard files with several threads. Whole blocks are read, verified, and then copied.

Data in the page cache are read in small steps, so that they are still in the processor's cache when they are verified
and copied. Other data are read with O_DIRECT in large extents.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import DIGEST_NBYTES, block_digests
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping, copy_bytes
from asyncckpt.storage.files import Files, named
from asyncckpt.storage.read_plan import (
    EXACT_BELOW_NBYTES,
    EXTENT_NBYTES,
    READ_THROUGH_NBYTES,
    Batch,
    ShardRequest,
    Step,
    Wanted,
    buffer_nbytes,
    fqns_of,
    has_buffered_rows,
    is_buffered,
    pages_of,
    plan_batches,
    plan_extents,
    with_verifiers,
)

DEFAULT_THREADS, BUFFERS_NBYTES = 4, 192 << 20
"""Number of reading threads; most bytes of all threads' buffers: three quarters of the 256 MB that a load may take
besides its targets."""


MAX_SPARSITY = 8
"""For a batch of short ranges, the kernel is asked to read the bytes between them as well if at least one byte in
this many is wanted. Chosen, not measured."""

CACHE_SAMPLES = 8
"""Number of extents that are sampled to find whether all are in the page cache. If so, there are no more threads than
cores: with six threads on two cores, which wait for the GIL, a load of 1.5 GB from memory takes 25 % longer."""

NO_DESCRIPTORS = (errno.EMFILE, errno.ENFILE)
"""Errors of open(2) if no more files can be opened."""

_NOT_CACHED = frozenset({errno.EAGAIN, errno.EINTR})
_NO_NOWAIT = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NOT_A_FILE = frozenset({errno.ENOENT, errno.ELOOP, errno.ENXIO, errno.ENOTDIR})


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
) -> None:
    """Read all wanted ranges, verify them, and deliver them.

    All files are opened and checked (length, save ID) before the first byte is delivered.

    Args:
        path: The checkpoint's directory.
        save_id: ID of the save that the files must have; None: files of another format, which have no checksums.
        requests: The ranges of each file.
        files: The `Files` to read with.
        threads: Number of threads that read at the same time, the calling thread included. Half as many more verify
            meanwhile.
        verify: Whether to compare checksums. If not, whole pages are read instead of whole blocks, and short runs
            exactly.
        on_corrupt: Called, from any thread, with the error of each damaged block instead of raising it. The bytes of
            the block are not delivered.
        buffer: Page-aligned memory of at least a block, used if one thread reads. Callers that read often keep one,
            because new pages of the kernel cost as much as a copy. None, or with several threads: new memory.
        extent_nbytes: Most bytes that one thread reads at a time. If `buffer` is used, its length.

    Raises:
        CorruptCheckpointError: A file is missing, has another length or save ID, or a block differs from its checksum;
            with file, FQN and byte range.
        OSError: A read failed; names the file and the byte range.
        Exception: As a sink.

    Blocks: for the reads. When it returns or raises, no thread is left.
    """
    requests = [r for r in requests if any(w.nbytes for w in r.wanted)]
    for request in requests:
        ShardFile(path, request.shard, save_id, files).close()
    read = _ParallelRead(path, save_id, files, verify, on_corrupt)
    limit = len(buffer) if threads == 1 and buffer is not None else extent_nbytes
    todo = [extent for request in requests for extent in read.plan(request, threads, limit)]
    if todo:
        read.run(todo, threads, buffer)


@dataclass(slots=True)
class _Source:
    """A shard file, which is open from its first extent to its last."""

    request: ShardRequest
    remaining: int
    file: ShardFile | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class _Extent(NamedTuple):
    """What one thread reads of one file at a time: consecutive steps, or a batch of short ranges."""

    source: _Source
    steps: list[Step]
    batch: Batch | None = None


class _ParallelRead:
    """One call of `read_shards`: its plan, its threads, and their first error."""

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
        self._todo: list[_Extent] = []
        self._sources: list[_Source] = []
        self._error: BaseException | None = None
        self._lacks_descriptors = self._is_alone = False

    def plan(self, request: ShardRequest, threads: int, extent_nbytes: int) -> list[_Extent]:
        """Return the extents of a file, each for one thread."""
        limit = min(extent_nbytes, BUFFERS_NBYTES // with_verifiers(threads))
        if self._verify:
            how = {"unit": request.block_nbytes, "gaps_below": READ_THROUGH_NBYTES}
        else:
            how = {"unit": PAGE_NBYTES, "exact_below": EXACT_BELOW_NBYTES}
        groups = plan_extents(request, threads, extent_nbytes=limit, **how)
        batches = plan_batches(request)
        assert not (self._verify and any(w.every for w in request.wanted)), "a checksum is of a whole block"
        source = _Source(request, len(groups) + len(batches))
        self._sources.append(source)
        return [_Extent(source, steps) for steps in groups] + [_Extent(source, [], batch) for batch in batches]

    def run(self, todo: list[_Extent], threads: int, buffer: memoryview | None) -> None:
        """Read all extents. The first error of any thread is raised after all threads have stopped."""
        room = round_up(max(e.batch.nbytes if e.batch else buffer_nbytes(e.steps) for e in todo))
        self._todo = todo[::-1]
        self._disk = threading.Semaphore(max(1, threads))
        threads = max(1, min(with_verifiers(threads), len(todo), BUFFERS_NBYTES // room))
        try:
            if threads > 1 and self._seem_cached(todo):
                threads = min(threads, len(os.sched_getaffinity(0)))  # no thread waits for a disk
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

    def _seem_cached(self, todo: list[_Extent]) -> bool:
        """Whether all extents seem to be in the page cache, by a sample of them."""
        try:
            return all(self._open(e.source).is_cached(*_span_of(e)) for e in todo[:: -(-len(todo) // CACHE_SAMPLES)])
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS:
                raise
            return False

    def _work_together(self, memory: Mapping, room: int, threads: int) -> None:
        whole = memory.view()
        parts = [(whole[n * room : (n + 1) * room], memory.address + n * room) for n in range(threads)]
        with ThreadPoolExecutor(threads, "asyncckpt-read") as pool:  # the calling thread is one of them
            try:
                with signals_deferred():
                    for part in parts[1:]:
                        pool.submit(self._help, *part)
                self._work(*parts[0])
            except BaseException as error:
                self._stop(error)
            finally:
                self._wait_for_helpers()
        self._work_alone(*parts[0])

    def _help(self, buffer: memoryview, address: int) -> None:
        """Do the work of another thread, for which `_wait_for_helpers` waits."""
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

        IMPORTANT: nothing may end this early, not even a second Ctrl-C: the threads would read into freed memory.
        """
        while True:
            try:
                with self._idle:
                    self._idle.wait_for(lambda: not self._helping)
                return
            except BaseException as error:
                self._stop(error)

    def _work(self, buffer: memoryview, address: int) -> None:
        """Body of each thread: read extents until none is left or one has failed. Errors are stored, not raised.

        If no file descriptor is left, all threads end, and then one reads the rest with one file open at a time.
        """
        while True:
            with self._lock:
                if not self._todo or (self._lacks_descriptors and not self._is_alone):
                    return
                extent = self._todo.pop()
            try:
                if not self._opened(extent):
                    return
                if extent.batch:
                    self._read_batch(extent.source, extent.batch, buffer, address)
                else:
                    self._read_steps(extent.source, extent.steps, buffer, address)
                with extent.source.lock:
                    extent.source.remaining -= 1
                    if extent.source.remaining == 0:
                        extent.source.close()
            except BaseException as error:
                self._stop(error)
                return

    def _opened(self, extent: _Extent) -> bool:
        """Open the file of an extent. If no descriptor is left, put the extent back for `_work_alone`, return False.

        Only here a missing descriptor is not an error, since no byte of the extent was delivered yet.
        """
        try:
            self._open(extent.source)
        except OSError as error:
            if error.errno not in NO_DESCRIPTORS or self._is_alone:
                raise
            with self._lock:
                self._todo.append(extent)
                self._lacks_descriptors = True
            return False
        return True

    def _work_alone(self, buffer: memoryview, address: int) -> None:
        """After a lack of descriptors, read the remaining extents with one file open at a time, in this thread only."""
        if self._lacks_descriptors and self._error is None:
            self._is_alone = True
            self._work(buffer, address)

    def _stop(self, error: BaseException) -> None:
        with self._lock:
            self._todo.clear()
            self._error = (self._error or error) if isinstance(error, Exception) else error  # Ctrl-C comes first

    def _open(self, source: _Source) -> ShardFile:
        with source.lock:
            if source.file is None:
                if self._is_alone:
                    for one in self._sources:
                        one.close()
                request = source.request
                source.file = ShardFile(
                    self._path, request.shard, self._save_id, self._files, read_ahead=has_buffered_rows(request)
                )
                reach("load: shard opened")
            return source.file

    def _read_batch(self, source: _Source, batch: Batch, buffer: memoryview, address: int) -> None:
        file, sink, position = self._open(source), batch.wanted.sink, batch.first * batch.wanted.nbytes
        if isinstance(sink, int):
            memory = (ctypes.c_char * batch.nbytes).from_address(sink + position)
            with memoryview(memory) as typed, typed.cast("B") as target:
                file.read_ranges(target, batch)
        else:
            file.read_ranges(buffer, batch)
            if sink is not None:
                sink.deliver(position, address, batch.nbytes)
        reach("load: ranges read")

    def _read_steps(self, source: _Source, steps: list[Step], buffer: memoryview, address: int) -> None:
        """Read an extent: the steps that are in the page cache one by one, the rest at once with O_DIRECT."""
        file, buffered = self._open(source), is_buffered(steps)
        start, end, at = steps[0].start, steps[-1].end, 0
        if buffered or file.is_cached(*pages_of(start, end, file.nbytes)):
            while at < len(steps):
                step = steps[at]
                with buffer[: step.end - step.start] as view:
                    if buffered:
                        file.read_buffered(view, step.start, len(view))
                    elif not file.read_cached(view, step.start):
                        break
                    self._deliver(source, step, view, address)
                at += 1
        if at == len(steps):
            return
        low, nbytes = pages_of(steps[at].start, end, file.nbytes)
        try:
            with self._disk:
                file.read(buffer, low, nbytes)
        except OSError as error:
            wanted = [w for step in steps[at:] for w in step.wanted]
            raise named(error, str(error.filename), f"tensor {fqns_of(wanted)}") from error
        for step in steps[at:]:
            with buffer[step.start - low : step.end - low] as view:
                self._deliver(source, step, view, address + step.start - low)

    def _deliver(self, source: _Source, step: Step, view: memoryview, address: int) -> None:
        """Verify a step, whose bytes are in `view` at `address`, and deliver each range's part of it."""
        reach("load: bytes read")
        if self._verify and not self._is_sound(source.request, step, view):
            return
        start, end, wanted = step
        for offset, nbytes, _, sink, _, _, _ in wanted:
            low = offset if offset > start else start
            high = min(offset + nbytes, end)
            if type(sink) is int:
                copy_bytes(sink + low - offset, address + low - start, high - low)
            elif sink is not None:
                sink.deliver(low - offset, address + low - start, high - low)  # type: ignore[union-attr]

    def _is_sound(self, request: ShardRequest, step: Step, view: memoryview) -> bool:
        """Whether the blocks of a step have the right checksums. The errors of others are reported or raised."""
        unit, digests = request.block_nbytes, request.shard.digests
        first = step.start // unit * DIGEST_NBYTES
        found = block_digests(view, unit)
        if found == digests[first : first + len(found)]:
            return True
        for error in _damaged_blocks(self._path, request, step, found):
            if self._on_corrupt is None:
                raise error
            self._on_corrupt(error)
        return False


def _span_of(extent: _Extent) -> tuple[int, int]:
    """Return offset and length of the bytes of an extent; for a batch with the bytes between its ranges."""
    if extent.batch is None:
        start = extent.steps[0].start // PAGE_NBYTES * PAGE_NBYTES
        return start, extent.steps[-1].end - start
    return extent.batch.span


class ShardFile:
    """One shard file, open for reading, after checks of its length and save ID.

    Its methods that read may be called from several threads; `close()` only when none is reading.

    Args:
        path: The checkpoint's directory.
        shard: Name and exact length of the file.
        save_id: ID of the save that the file must have; None: a file of another format, which may be a symbolic link.
        files: The `Files` to read with.
        read_ahead: Whether the kernel reads ahead. For a file that `read_buffered` reads from start to end, that takes
            a third of the time, because the kernel then uses larger pages.

    Raises:
        CorruptCheckpointError: It is missing, not a regular file, or has another length or save ID.
        OSError: It cannot be opened or read.
    """

    def __init__(
        self, path: str, shard: ShardRecord, save_id: SaveId | None, files: Files, *, read_ahead: bool = False
    ) -> None:
        self.name, self.nbytes, self._origin = shard.name, shard.nbytes, shard.origin
        self._directory, self._files = path, files
        self._path = os.path.join(path, shard.name)
        self._flags = os.O_RDONLY | (os.O_NOFOLLOW if save_id is not None else 0)
        self._direct_fd = -1
        self._tried_direct = False
        self._nowait = True
        self._lock = threading.Lock()
        try:
            self._fd = files.open(self._path, self._flags | os.O_NONBLOCK)
        except OSError as error:
            if error.errno not in _NOT_A_FILE:
                raise
            raise self._corrupt("it is missing" if error.errno == errno.ENOENT else str(error.strerror)) from error
        try:
            self._check(save_id, read_ahead)
        except BaseException:
            self.close()
            raise

    def _check(self, save_id: SaveId | None, read_ahead: bool) -> None:
        if not read_ahead:
            with contextlib.suppress(OSError):
                self._files.advise_random(self._fd)
        found = self._files.fstat(self._fd)
        if not stat.S_ISREG(found.st_mode):
            raise self._corrupt("it is not a regular file")
        if found.st_size != self.nbytes:
            raise self._corrupt(
                f"{found.st_size} bytes long, {self.nbytes} were written: it was "
                f"{'cut short' if found.st_size < self.nbytes else 'extended'}",
                offset=min(found.st_size, self.nbytes),
                nbytes=abs(found.st_size - self.nbytes),
            )
        if save_id is None:
            return
        marker = bytearray(SAVE_ID_NBYTES)
        try:
            self._files.preadv(self._fd, [marker], SAVE_ID_OFFSET)
        except OSError as error:
            raise named(error, self._path, "reading its save id") from error
        expected = self._origin or save_id
        if bytes(marker) != save_id_bytes(expected):
            raise self._corrupt(
                f"it has save id {bytes(marker).decode('ascii', 'replace')!r}, expected {expected}: it is a file of "
                "another checkpoint, or damaged",
                offset=SAVE_ID_OFFSET,
                nbytes=SAVE_ID_NBYTES,
            )

    def _corrupt(self, detail: str, offset: int | None = None, nbytes: int | None = None) -> CorruptCheckpointError:
        return CorruptCheckpointError(
            f"{self._path}: {detail}", path=self._directory, file=self.name, offset=offset, nbytes=nbytes, detail=detail
        )

    def is_cached(self, offset: int, nbytes: int) -> bool:
        """Whether a range that begins at a page seems to be in the page cache. It may be evicted before it is read."""
        return self._nowait and self._files.resident(self._fd, offset, nbytes)

    def read_cached(self, view: memoryview, offset: int) -> bool:
        """Fill `view` from `offset` on if all bytes are in the page cache; else return False, without waiting.

        Raises:
            OSError: The read failed.
        """
        try:
            return self._files.preadv(self._fd, [view], offset, os.RWF_NOWAIT) == len(view)
        except OSError as error:
            if error.errno in _NO_NOWAIT:
                self._nowait = False
            elif error.errno not in _NOT_CACHED:
                raise named(error, self._path, f"reading bytes {offset} to {offset + len(view)}") from error
            return False

    def read(self, buffer: memoryview, offset: int, nbytes: int) -> None:
        """Fill `buffer[:nbytes]` from `offset` on, with O_DIRECT if possible.

        Args:
            buffer: Page-aligned memory of whole pages.
            offset: Offset in the file; O_DIRECT is used only for whole pages.
            nbytes: Number of bytes, at most to the end of the file.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: The read failed.
        """
        pages = offset % PAGE_NBYTES == 0 and (nbytes % PAGE_NBYTES == 0 or offset + nbytes == self.nbytes)
        self.read_buffered(buffer, offset, nbytes, self._read_direct(buffer, offset, nbytes) if pages else 0)

    def read_buffered(self, buffer: memoryview, offset: int, nbytes: int, done: int = 0) -> None:
        """Fill `buffer[done:nbytes]` through the page cache; `offset`: that of `buffer[0]` in the file.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: The read failed.
        """
        while done < nbytes:
            try:
                count = self._files.preadv(self._fd, [buffer[done:nbytes]], offset + done)
            except OSError as error:
                raise named(error, self._path, f"reading bytes {offset + done} to {offset + nbytes}") from error
            if count <= 0:
                raise self._corrupt("it ends early", offset=offset + done, nbytes=nbytes - done)
            done += count

    def read_ranges(self, buffer: memoryview, batch: Batch) -> None:
        """Fill `buffer` with the ranges of a batch, without gaps.

        Raises:
            CorruptCheckpointError: The file ends early.
            OSError: A read failed.
        """
        nbytes, every, at = batch.wanted.nbytes, batch.wanted.every, batch.start
        if every <= MAX_SPARSITY * nbytes:  # otherwise each small read would wait for the disk
            with contextlib.suppress(OSError):
                self._files.advise_needed(self._fd, *batch.span)
        for start in range(0, batch.nbytes, nbytes):
            with buffer[start : start + nbytes] as view:
                self.read_buffered(view, at, nbytes)
            at += every

    def _read_direct(self, buffer: memoryview, offset: int, nbytes: int) -> int:
        """Read whole pages with O_DIRECT. Return the number of bytes read; 0 if O_DIRECT does not work."""
        fd = self._open_direct()
        done = 0
        while fd >= 0 and done < nbytes:
            try:
                count = self._files.preadv(fd, [buffer[done : round_up(nbytes)]], offset + done)
            except OSError as error:
                if error.errno == errno.EINVAL:
                    break
                raise named(error, self._path, f"reading bytes {offset + done} to {offset + nbytes}") from error
            if done + count >= nbytes:
                return nbytes
            if count < PAGE_NBYTES:
                break
            done += count // PAGE_NBYTES * PAGE_NBYTES
        return done

    def _open_direct(self) -> int:
        with self._lock:
            if self._tried_direct:
                return self._direct_fd
            self._tried_direct = True
            try:
                fd = self._files.open(self._path, self._flags | os.O_DIRECT)
            except OSError as error:
                if error.errno in (errno.EINVAL, errno.ENOENT, *NO_DESCRIPTORS):
                    return -1
                raise
            try:
                if not os.path.samestat(self._files.fstat(self._fd), self._files.fstat(fd)):
                    raise self._corrupt("it was replaced while it was read")
            except BaseException:  # otherwise another thread would continue to read it
                with contextlib.suppress(OSError):
                    self._files.close(fd)
                raise
            self._direct_fd = fd
            return fd

    def close(self) -> None:
        """Close both descriptors. Idempotent. Errors are ignored, since nothing was written."""
        for fd in (self._fd, self._direct_fd):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._files.close(fd)
        self._fd = self._direct_fd = -1


def _damaged_blocks(path: str, request: ShardRequest, step: Step, found: bytes) -> Iterator[CorruptCheckpointError]:
    """Yield the error of each damaged block of a step. `found`: checksums of the bytes that were read."""
    unit, digests = request.block_nbytes, request.shard.digests
    for n, start in enumerate(range(step.start, step.end, unit)):
        at = start // unit * DIGEST_NBYTES
        if found[n * DIGEST_NBYTES : (n + 1) * DIGEST_NBYTES] != digests[at : at + DIGEST_NBYTES]:
            yield _damaged(path, request, step.wanted, start, min(start + unit, step.end))


def _damaged(
    path: str, request: ShardRequest, wanted: Sequence[Wanted], start: int, end: int
) -> CorruptCheckpointError:
    """Return the error of a damaged block, bytes `start` to `end`. `wanted`: ranges that may overlap it."""
    touched = [w for w in wanted if w.offset < end and start < w.offset + w.nbytes]
    detail = f"bytes {start} to {end} differ from their checksum"
    name = request.shard.name
    return CorruptCheckpointError(
        f"{path}/{name}: {detail}; they hold tensor {fqns_of(touched)}. Load an earlier checkpoint",
        path=path,
        file=name,
        fqn=touched[0].fqn if touched else None,
        offset=start,
        nbytes=end - start,
        detail=detail,
    )

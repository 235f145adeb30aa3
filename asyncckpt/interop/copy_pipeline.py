"""Copies the elements of tensors into the files of a target, in bounded memory: reading, checksums, writing. No torch.

A file is a sequence of pieces: bytes that are known, such as headers, and payloads, which are the elements of tensors.
The file is cut into windows of `WINDOW_NBYTES`. Several threads each take the next window, read its payloads, add its
other bytes, and write it, with O_DIRECT if the file system supports it. A window may hold CRC-32s of elements in
earlier windows, and then waits for those.
"""

from __future__ import annotations

import os
import threading
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from asyncckpt.basics.deferred_signals import join_all, signals_deferred
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.layout import Payload, round_up
from asyncckpt.format.torch_zip import combined_crc32
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import FileShardWriter

WINDOW_NBYTES = 12 << 20
"""A multiple of the block that has one checksum. Measured on two cores: 16 MiB take as long, 8 MiB 5% longer
(ADR 0039)."""

MAX_THREADS = 8
"""Each has a window and a read buffer: 200 MiB together."""

_ENDS_NBYTES = 1 << 20
"""Room in the read buffer beyond one window. Reads are rounded outwards to whole blocks of the source; with this room
one read fills a window. When it took two or three reads, the disk was idle between them, and a conversion took a
seventh longer (ADR 0019)."""

_LARGE_NBYTES = 1 << 20
"""Shorter reads and writes, such as those of headers, are not limited by `DuplexFiles`. Chosen, not measured."""

_CRC_NBYTES = 4

Progress = Callable[[int, int], None]
"""Called with (bytes done, bytes in total); each byte of the target counts twice: when written and when read back."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """The content of one file of a target.

    Attributes:
        name: Name in the target's directory; not used if the target is a single file.
        pieces: The content in order.
        crc_at: Where CRC-32s are written: (index of the payload in `pieces`, offset in the file after its elements).
    """

    name: str
    pieces: tuple[bytes | Payload, ...]
    crc_at: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return sum(map(length_of, self.pieces))


def length_of(piece: bytes | Payload) -> int:
    """Return the length of a piece in bytes."""
    return len(piece) if isinstance(piece, bytes) else piece.nbytes


def payload_places(file: OutputFile) -> Iterator[tuple[Payload, int]]:
    """Yield every payload with its offset in the file."""
    at = 0
    for piece in file.pieces:
        if isinstance(piece, Payload):
            yield piece, at
        at += length_of(piece)


@dataclass(slots=True)
class Target:
    """What a conversion writes.

    Attributes:
        files: The files in the order in which they are written; one file if `is_directory` is False.
        is_directory: Whether the target is a directory.
        finish: Called with (directory, digests by file name) after `files` are written; writes the files that depend on
            the digests. None: there are none.
        keeps_nesting: Whether a reader finds the same containers, with keys of the same types, and the same tied
            tensors.
        block_nbytes: Bytes of a file that have one digest.
    """

    files: Sequence[OutputFile]
    is_directory: bool
    finish: Callable[[str, dict[str, bytes]], None] | None = None
    keeps_nesting: bool = False
    block_nbytes: int = BLOCK_NBYTES

    @property
    def nbytes(self) -> int:
        """Length of all `files` in bytes."""
        return sum(file.nbytes for file in self.files)


class ElementRun(NamedTuple):
    """Consecutive bytes of a tensor's row-major elements in a window.

    Attributes:
        piece: Index of the payload in the pieces of the file.
        tensor: Number of the tensor.
        start: Offset of the first byte in the tensor's elements.
        nbytes: Number of bytes.
        at: Offset of the first byte in the file.
    """

    piece: int
    tensor: int
    start: int
    nbytes: int
    at: int


class Window(NamedTuple):
    """Bytes `start` to `end` of a file: `texts` are known bytes, each with its offset in the file; `runs` are read."""

    start: int
    end: int
    texts: list[tuple[int, memoryview]]
    runs: list[ElementRun]


def windows_of(file: OutputFile, nbytes: int) -> Iterator[Window]:
    """Cut a file into windows of `nbytes`; the last may be shorter. Each byte is in exactly one text or run."""
    window, at = Window(0, nbytes, [], []), 0
    for number, piece in enumerate(file.pieces):
        length = length_of(piece)
        done = 0
        while done < length:
            if at == window.end:
                yield window
                window = Window(at, at + nbytes, [], [])
            count = min(length - done, window.end - at)
            if isinstance(piece, Payload):
                window.runs.append(ElementRun(number, piece.tensor, done, count, at))
            else:
                window.texts.append((at, memoryview(piece)[done : done + count]))
            at += count
            done += count
    yield window._replace(end=at)


class ReadsRuns(Protocol):
    """Reads the elements of a window; several threads may call it."""

    def read(
        self, runs: Sequence[ElementRun], address: int, origin: int, buffer: memoryview
    ) -> Mapping[ElementRun, int]:
        """Read and verify the runs of a window.

        Args:
            runs: The runs.
            address: Memory address of the byte at offset `origin` of the file; the following bytes come after it.
            origin: An offset in the file.
            buffer: Page-aligned memory for the reads.

        Returns:
            The CRC-32s of those runs for which one was computed, to be compared with the source's.
        """


def write_files(
    directory: str,
    target: Target,
    reader: ReadsRuns,
    files: Files,
    mode: int,
    step: Callable[[int], None],
    *,
    threads: int,
) -> dict[str, bytes]:
    """Write, flush and close all files of a target.

    Args:
        directory: The directory for the files; if the target is one file, its path. The files must not exist.
        target: The content of the files.
        reader: Reads the source.
        files: The storage seam.
        mode: Permission bits.
        step: Called in the calling thread with the length in bytes of each window that was written.
        threads: Threads that read and write; at most `MAX_THREADS` are used.

    Returns:
        The digests of the blocks of each file, by file name.

    Raises:
        OSError: A system call failed; names the file. Incomplete files may be left.
        Exception: An error of `reader`.

    Blocks: until everything is read and written. No thread is left when this returns or raises.
    """
    outputs = [
        _Output(file, os.path.join(directory, file.name) if target.is_directory else directory, target, files, mode)
        for file in target.files
    ]
    try:
        _Copying(outputs, reader).run(min(threads, MAX_THREADS), step)
    finally:
        for output in outputs:
            output.writer.abandon()
    return {output.file.name: bytes(output.writer.digests) for output in outputs}


class _StoppedError(Exception):
    """Another thread has failed, so this one stops waiting."""


class _Checksums:
    """The CRC-32s of one file's payloads, computed window by window in any order, and written into later windows.

    IMPORTANT: `put` waits for the windows that hold the elements. This cannot deadlock: they are earlier windows, which
    threads have taken before, and `take` is called for them before their own `put`.
    """

    def __init__(self, file: OutputFile) -> None:
        self._fields = sorted((offset, piece) for piece, offset in file.crc_at)
        self._left = {piece: length_of(file.pieces[piece]) for piece, _ in file.crc_at}
        self._sums: dict[int, list[tuple[int, int, int]]] = {piece: [] for piece in self._left}
        self._changed = threading.Condition()
        self._has_failed = False

    def take(self, window: Window, room: memoryview, known: Mapping[ElementRun, int]) -> None:
        """Compute the CRC-32 of each run of a window, except those that are `known`."""
        for run in window.runs:
            if run.piece in self._left:
                at = run.at - window.start
                crc = known[run] if run in known else zlib.crc32(room[at : at + run.nbytes])
                with self._changed:
                    self._sums[run.piece].append((run.start, run.nbytes, crc))
                    self._left[run.piece] -= run.nbytes
                    self._changed.notify_all()

    def put(self, window: Window, room: memoryview) -> None:
        """Write the bytes of CRC-32s that are in a window. Blocks: until the earlier windows were taken."""
        first, end = (bisect_left(self._fields, (at,)) for at in (window.start - _CRC_NBYTES + 1, window.end))
        for offset, piece in self._fields[first:end]:
            with self._changed:
                while self._left[piece] and not self._has_failed:
                    self._changed.wait()
                if self._has_failed:
                    raise _StoppedError
            crc = 0
            for start, nbytes, of_run in sorted(self._sums[piece]):
                crc = combined_crc32(crc, of_run, nbytes) if start else of_run
            data = crc.to_bytes(_CRC_NBYTES, "little")
            low, high = max(offset, window.start), min(offset + _CRC_NBYTES, window.end)
            room[low - window.start : high - window.start] = data[low - offset : high - offset]

    def fail(self) -> None:
        """Wake all waiting threads; they raise `_StoppedError`."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()


class _Image:
    """The bytes of a file as `FileShardWriter` takes them: a window is held from `put` until it is written."""

    is_page_aligned = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(nbytes)
        self._windows: dict[int, memoryview] = {}

    def put(self, start: int, window: memoryview) -> None:
        self._windows[start] = window

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice, /) -> memoryview:
        return self._windows.pop(piece.start)[: piece.stop - piece.start]


class _Output:
    """One file of the target. `windows_left` is the number of windows that are not written yet."""

    def __init__(self, file: OutputFile, path: str, target: Target, files: Files, mode: int) -> None:
        nbytes = file.nbytes
        self.file, self.checksums, self._image = file, _Checksums(file), _Image(nbytes)
        self.writer = FileShardWriter(
            path,
            self._image,
            0,
            nbytes,
            block_nbytes=target.block_nbytes,
            aligned=True,
            mode=mode,
            fsync=True,
            files=files,
        )
        self.windows_left = -(-nbytes // WINDOW_NBYTES)

    def write(self, start: int, window: memoryview) -> None:
        """Compute the digests of a window of whole pages, and write it."""
        self._image.put(start, window)
        self.writer.write_extent(start, min(start + len(window), self.writer.extent_nbytes_total))


class _Copying:
    """Copies all windows of all files, with several threads."""

    def __init__(self, outputs: Sequence[_Output], reader: ReadsRuns) -> None:
        self._outputs, self._reader = outputs, reader
        self._todo = ((output, window) for output in outputs for window in windows_of(output.file, WINDOW_NBYTES))
        self._lock = threading.Lock()
        self._is_stopped = False
        self._done: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def run(self, n_threads: int, step: Callable[[int], None]) -> None:
        """Copy all windows. The first error of a thread is raised after all threads have stopped."""
        threads = [threading.Thread(target=self._work, name=f"asyncckpt-convert-{n}") for n in range(n_threads)]
        try:
            with signals_deferred():
                for thread in threads:
                    thread.start()
            for _ in threads:
                while (found := self._done.get()) is not None:
                    if isinstance(found, BaseException):
                        raise found
                    step(found)
        finally:
            self._is_stopped = True
            # IMPORTANT: a thread that went on would write to closed files, whose descriptors may be reused.
            join_all(threads)

    def _work(self) -> None:
        """Copy windows until none is left or a thread has failed. Errors are put into the queue, not raised."""
        size = round_up(WINDOW_NBYTES)
        try:
            with Memory(-1, 2 * size + _ENDS_NBYTES) as memory, memory.view() as view, view[:size] as room:
                while not self._is_stopped and (found := self._next()) is not None:
                    self._copy(*found, memory.address, room, view[size:])
        except _StoppedError:
            pass
        except BaseException as error:
            self._is_stopped = True
            for output in self._outputs:
                output.checksums.fail()
            self._done.put(error)
        finally:
            self._done.put(None)

    def _next(self) -> tuple[_Output, Window] | None:
        with self._lock:
            return next(self._todo, None)

    def _copy(self, output: _Output, window: Window, address: int, room: memoryview, buffer: memoryview) -> None:
        """Read, complete and write a window; finish the file after its last window."""
        start, nbytes = window.start, window.end - window.start
        for at, text in window.texts:
            room[at - start : at - start + len(text)] = text
        end = round_up(nbytes)
        room[nbytes:end] = bytes(end - nbytes)
        output.checksums.take(window, room, self._reader.read(window.runs, address, start, buffer))
        output.checksums.put(window, room)
        output.write(start, room[:end])
        with self._lock:
            output.windows_left -= 1
            is_whole = not output.windows_left
        if is_whole:
            output.writer.finish()
        self._done.put(nbytes)


class DuplexFiles(Files):
    """File operations with a limit on concurrent large reads, and a separate limit on concurrent large writes.

    Many disks read at full speed while they write. Without limits, threads that each read and then write come to do so
    at the same time: all read while the disk writes nothing, then all write (ADR 0039).

    Args:
        threads: How many threads may access the disk at once: half of them read, half of them write.
    """

    def __init__(self, threads: int) -> None:
        each = max(1, threads // 2)
        self._reads, self._writes = threading.Semaphore(each), threading.Semaphore(each)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` into `buffers`. Blocks: a large read without `flags` waits for other large reads."""
        if flags or len(buffers[0]) < _LARGE_NBYTES:
            return super().preadv(fd, buffers, offset, flags)
        with self._reads:
            return super().preadv(fd, buffers, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write `buffer` at `offset`. Blocks: a large write waits for other large writes."""
        if len(buffer) < _LARGE_NBYTES:
            return super().pwrite(fd, buffer, offset)
        with self._writes:
            return super().pwrite(fd, buffer, offset)

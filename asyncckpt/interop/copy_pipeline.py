"""Copies the elements of tensors into the files of a target, in bounded memory: reading, checksums, writing. No torch.

A file is a sequence of pieces, bytes that are known and payloads that are read, and is cut into windows. Several
threads each take the next window, read what belongs into it, complete it, and write it, by O_DIRECT where that works.
What a window depends on are CRC-32s of elements in earlier ones: they stand behind the elements.
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
from asyncckpt.format.layout import Payload, round_up
from asyncckpt.format.torch_zip import combined_crc32
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import FileShardWriter

WINDOW_NBYTES = 12 << 20
"""Whole blocks of checksums. Measured on two cores: 16 MiB take as long, 8 MiB a twentieth more (ADR 0039)."""

MAX_THREADS = 8
"""With a window and a buffer to read each, they have 200 MiB."""

_ENDS_NBYTES = 1 << 20
"""What is read around the elements of a window, as whole blocks of the source: so much more is in the buffer, that one
read fills a window. In two or three, as the window's length and its place in the source cut it, there was as often
nothing on its way: a seventh of the time (ADR 0019)."""

_LARGE_NBYTES = 1 << 20
"""Shorter reads and writes, of headers say, do not wait for their turn. Chosen, not measured."""

_CRC_NBYTES = 4

Progress = Callable[[int, int], None]
"""(bytes that are done, bytes in all); the target's are counted twice, written and compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputFile:
    """One file, front to back.

    Attributes:
        name: Below the target's directory; of a single file, anything.
        pieces: Its content in order.
        crc_at: (number of a payload among the pieces, offset in the file behind its elements): where its CRC-32 goes.
    """

    name: str
    pieces: tuple[bytes | Payload, ...]
    crc_at: tuple[tuple[int, int], ...] = ()

    @property
    def nbytes(self) -> int:
        """Length of the file."""
        return sum(map(length_of, self.pieces))


def length_of(piece: bytes | Payload) -> int:
    """Return the bytes of a piece."""
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
        files: In the order in which they are written. One without a directory: the file itself.
        is_directory: Whether the target is one.
        finish: Writes what depends on the digests of the files: (directory, digests by file name). None: nothing.
        keeps_nesting: Whether a reader finds the same containers, with keys of the same types, and the same ties.
    """

    files: Sequence[OutputFile]
    is_directory: bool
    finish: Callable[[str, dict[str, bytes]], None] | None = None
    keeps_nesting: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes of all files that are known in advance."""
        return sum(file.nbytes for file in self.files)


class Run(NamedTuple):
    """Consecutive bytes of a tensor's row-major elements in a window.

    Attributes:
        piece: Number of their payload among the file's pieces.
        tensor: Number of the tensor.
        start: Of the first byte among the tensor's.
        nbytes: How many.
        at: Offset in the file.
    """

    piece: int
    tensor: int
    start: int
    nbytes: int
    at: int


class Window(NamedTuple):
    """Bytes `start` to `end` of a file: `texts` are known, as (offset in the file, bytes), and `runs` are read."""

    start: int
    end: int
    texts: list[tuple[int, memoryview]]
    runs: list[Run]


def windows_of(file: OutputFile, nbytes: int) -> Iterator[Window]:
    """Cut a file into windows of `nbytes`, but for the last; every byte is in one text or run. Empty payloads: none."""
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
                window.runs.append(Run(number, piece.tensor, done, count, at))
            else:
                window.texts.append((at, memoryview(piece)[done : done + count]))
            at += count
            done += count
    yield window._replace(end=at)


class ReadsRuns(Protocol):
    """Reads the elements that a window wants; several threads may call it."""

    def read(self, runs: Sequence[Run], address: int, origin: int, buffer: memoryview) -> Mapping[Run, int]:
        """Read and verify runs.

        Args:
            runs: Of one window.
            address: Where the byte at `origin` of the file goes; the others behind it.
            origin: See `address`.
            buffer: Page-aligned memory that is read into first.

        Returns:
            The CRC-32s of those runs whose elements were summed up for a comparison with the source.
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
    """Write all files of a target, flush and close them.

    Args:
        directory: Where they go; of a target that is one file, its path. None of them may exist.
        target: What they are made of.
        reader: Of the source.
        files: The storage seam.
        mode: Permission bits.
        step: Called by this thread with the bytes of every window that was written.
        threads: That read and write; at most `MAX_THREADS` are used.

    Returns:
        By file name the digests of its blocks.

    Raises:
        OSError: Names the file; files may be left behind, incomplete.
        Exception: Whatever the reader raises.

    Blocks: for reading and writing everything. No thread is left when this returns or raises.
    """
    outputs = [
        _Output(file, os.path.join(directory, file.name) if target.is_directory else directory, files, mode)
        for file in target.files
    ]
    try:
        _Copying(outputs, reader).run(min(threads, MAX_THREADS), step)
    finally:
        for output in outputs:
            output.writer.abandon()
    return {output.file.name: bytes(output.writer.digests) for output in outputs}


class _StoppedError(Exception):
    """Another thread has failed."""


class _Checksums:
    """The CRC-32s of one file's payloads: summed up window by window, in any order, and put where they belong.

    IMPORTANT: whoever puts one waits for the windows that hold its elements. These are earlier ones, which are taken
    earlier, and wait for nothing before they are summed up.
    """

    def __init__(self, file: OutputFile) -> None:
        self._fields = sorted((offset, piece) for piece, offset in file.crc_at)
        self._left = {piece: length_of(file.pieces[piece]) for piece, _ in file.crc_at}
        self._sums: dict[int, list[tuple[int, int, int]]] = {piece: [] for piece in self._left}
        self._changed = threading.Condition()
        self._has_failed = False

    def take(self, window: Window, room: memoryview, known: Mapping[Run, int]) -> None:
        """Sum up a window's elements, but for runs whose sums are `known`."""
        for run in window.runs:
            if run.piece in self._left:
                at = run.at - window.start
                crc = known[run] if run in known else zlib.crc32(room[at : at + run.nbytes])
                with self._changed:
                    self._sums[run.piece].append((run.start, run.nbytes, crc))
                    self._left[run.piece] -= run.nbytes
                    self._changed.notify_all()

    def put(self, window: Window, room: memoryview) -> None:
        """Put the checksums, or what of their bytes belongs into a window. Blocks: for earlier windows."""
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
        """Let nobody wait any longer."""
        with self._changed:
            self._has_failed = True
            self._changed.notify_all()


class _Image:
    """The bytes of a file while they pass: those of a window are there from `put` until they are taken."""

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
    """One file of the target; `windows_left` are not written yet."""

    def __init__(self, file: OutputFile, path: str, files: Files, mode: int) -> None:
        nbytes = file.nbytes
        self.file, self.checksums, self._image = file, _Checksums(file), _Image(nbytes)
        self.writer = FileShardWriter(path, self._image, 0, nbytes, aligned=True, mode=mode, fsync=True, files=files)
        self.windows_left = -(-nbytes // WINDOW_NBYTES)

    def write(self, start: int, window: memoryview) -> None:
        """Digest and write a window, of whole pages."""
        self._image.put(start, window)
        self.writer.write_extent(start, min(start + len(window), self.writer.extent_nbytes_total))


class _Copying:
    """All windows of all files, and the threads that work through them."""

    def __init__(self, outputs: Sequence[_Output], reader: ReadsRuns) -> None:
        self._outputs, self._reader = outputs, reader
        self._todo = ((output, window) for output in outputs for window in windows_of(output.file, WINDOW_NBYTES))
        self._lock = threading.Lock()
        self._is_stopped = False
        self._done: SimpleQueue[int | BaseException | None] = SimpleQueue()

    def run(self, n_threads: int, step: Callable[[int], None]) -> None:
        """Work through all windows; the first error of any thread is raised once all have stopped."""
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
            # IMPORTANT: threads would go on writing to files that are closed, and whose numbers others have by then.
            join_all(threads)

    def _work(self) -> None:
        """One thread: copy windows until none is left or a thread has failed. Errors are passed on, not raised."""
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
        """Read, complete and write a window, and finish the file after its last one."""
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
    """File calls of a copy: so many large reads, and so many large writes, go to the disk at a time.

    A disk may read as fast while it writes as it does otherwise. But it serves threads that each read, then write, all
    at once, so that they fall into step: all read while nothing is written, and then all write (ADR 0039).

    Args:
        threads: How many may be at the disk at once: half of them read, and half of them write.
    """

    def __init__(self, threads: int) -> None:
        each = max(1, threads // 2)
        self._reads, self._writes = threading.Semaphore(each), threading.Semaphore(each)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` into `buffers`. Blocks: for its turn, where it is much and may wait for the disk."""
        if flags or len(buffers[0]) < _LARGE_NBYTES:
            return super().preadv(fd, buffers, offset, flags)
        with self._reads:
            return super().preadv(fd, buffers, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at `offset`. Blocks: for its turn, where it is much."""
        if len(buffer) < _LARGE_NBYTES:
            return super().pwrite(fd, buffer, offset)
        with self._writes:
            return super().pwrite(fd, buffer, offset)

"""Writes the files of a target: one window is read while others are digested and written, by O_DIRECT where it works.

A CRC-32 that stands before the elements that it is of, in a block whose window is written before they have all passed:
such a block is held back and written when the number is known. No byte is written twice.
"""

from __future__ import annotations

import os
import zlib
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from asyncckpt.conversion import windows
from asyncckpt.conversion.pieces import OutputFile, Target
from asyncckpt.conversion.runs import RunReader
from asyncckpt.conversion.windows import Window, windows_of
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.format.layout import round_up
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import ShardWriter

EXTENT_NBYTES = 8 << 20
"""One write. Whole blocks; two threads write."""

_WRITERS, _ROOMS, _AHEAD = 2, 4, 2
_CRC_NBYTES = 4
_MAX_HELD = 2
"""Blocks: the field before the elements that are passing may lie in two."""


def write_files(
    directory: str, target: Target, reader: RunReader, files: Files, mode: int, step: Callable[[int], None]
) -> dict[str, bytes]:
    """Write all files of a target, flush and close them.

    Args:
        directory: Where they go; of a target that is one file, its path. None of them may exist.
        target: What they are made of.
        reader: Of the source.
        files: The storage seam.
        mode: Permission bits.
        step: Called with the bytes of every window that was written.

    Returns:
        By file name the digests of its blocks.

    Raises:
        OSError: Names the file; files may be left behind, incomplete.
        Exception: Whatever the reader raises.

    Blocks: for reading and writing everything. No thread is left when this returns or raises.
    """
    with _Pipeline(reader, files, mode, step) as pipeline:
        for file in target.files:
            pipeline.add(file, os.path.join(directory, file.name) if target.is_directory else directory)
        return dict(pipeline.run())


class _Image:
    """The bytes of a file while they pass: each extent is there from `put` until it is taken."""

    is_page_aligned = True

    def __init__(self, nbytes: int) -> None:
        self._nbytes = round_up(nbytes)
        self._extents: dict[int, memoryview] = {}

    def put(self, start: int, extent: memoryview) -> None:
        self._extents[start] = extent

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice, /) -> memoryview:
        return self._extents.pop(piece.start)[: piece.stop - piece.start]


class _Output:
    """One file of the target: its writer, and the CRC-32s that go into it.

    Attributes:
        fields: (offset, number of the payload) of CRC-32s that are not in a window yet, the last first.
        wanted: Payloads that have one.
        crcs: Of those that have passed, or have no bytes.
        running: CRC-32 of what has passed of the one that is passing.
    """

    def __init__(self, file: OutputFile, path: str, files: Files, mode: int) -> None:
        nbytes = file.nbytes
        self.file = file
        self.image = _Image(nbytes)
        self.writer = ShardWriter(
            path, self.image, 0, nbytes, aligned=True, mode=mode, fsync=True, files=files
        )
        self.fields = sorted(((offset, piece) for piece, offset in file.crc_at), reverse=True)
        self.wanted = {piece for piece, _ in file.crc_at}
        self.crcs = {n: 0 for n in self.wanted if isinstance(p := file.pieces[n], Payload) and not p.nbytes}
        self.running = 0


class _Held(NamedTuple):
    """A block that waits for CRC-32s: where it begins, its memory, and (offset, payload) of what it waits for."""

    start: int
    view: memoryview
    fields: list[tuple[int, int]]


class _Room(NamedTuple):
    """Memory of one window."""

    address: int
    view: memoryview


class _Reading(NamedTuple):
    """A window that is read, or was."""

    output: _Output
    window: Window
    room: _Room
    done: Future[None]


class _Writing(NamedTuple):
    """A window that is written, or was."""

    room: _Room
    nbytes: int
    done: list[Future[None]]


class _Pipeline:
    """Windows on their way: read ahead by a thread, completed by the caller's, written by two."""

    def __init__(self, reader: RunReader, files: Files, mode: int, step: Callable[[int], None]) -> None:
        self._reader, self._files, self._mode, self._step = reader, files, mode, step
        self._outputs: list[_Output] = []
        size = round_up(windows.WINDOW_NBYTES)
        self._memory = Mapping(-1, _ROOMS * size + _MAX_HELD * BLOCK_NBYTES)
        self._whole = self._memory.view()
        address = self._memory.address
        self._rooms = deque(_Room(address + n * size, self._whole[n * size : (n + 1) * size]) for n in range(_ROOMS))
        held = range(_ROOMS * size, self._memory.nbytes, BLOCK_NBYTES)
        self._spare = [self._whole[at : at + BLOCK_NBYTES] for at in held]
        self._held: list[_Held] = []
        self._reading: deque[_Reading] = deque()
        self._writing: deque[_Writing] = deque()
        self._read_pool = ThreadPoolExecutor(1, "asyncckpt-convert-read")
        self._write_pool = ThreadPoolExecutor(_WRITERS, "asyncckpt-convert-write")

    def __enter__(self) -> _Pipeline:
        return self

    def __exit__(self, *_: object) -> None:
        for pool in (self._read_pool, self._write_pool):
            pool.shutdown(cancel_futures=True)
        for output in self._outputs:
            output.writer.abandon()
        self._memory.close()

    def add(self, file: OutputFile, path: str) -> None:
        """Have a file written, after those before it."""
        self._outputs.append(_Output(file, path, self._files, self._mode))

    def run(self) -> Iterator[tuple[str, bytes]]:
        """Write all files; yield the name of each that is finished, and the digests of its blocks."""
        for output in self._outputs:
            for window in windows_of(output.file, windows.WINDOW_NBYTES):
                if len(self._reading) == _AHEAD:
                    yield from self._advance()
                if not self._rooms:
                    self._settle()
                room = self._rooms.popleft()
                done = self._read_pool.submit(self._fill, window, room)
                self._reading.append(_Reading(output, window, room, done))
        while self._reading:
            yield from self._advance()

    def _fill(self, window: Window, room: _Room) -> None:
        """Bring everything of a window that is known or read into its memory."""
        for at, text in window.texts:
            room.view[at - window.start : at - window.start + len(text)] = text
        nbytes = window.end - window.start
        room.view[nbytes : round_up(nbytes)] = bytes(round_up(nbytes) - nbytes)
        self._reader.read(window.runs, room.address, window.start)

    def _advance(self) -> Iterator[tuple[str, bytes]]:
        """Complete the window that was read first, and have it written; yield its file if that was the last of it."""
        output, window, room, done = self._reading[0]
        done.result()
        self._complete(output, window, room)
        self._reading.popleft()
        if window.end == output.writer.nbytes:
            yield self._finish(output)

    def _settle(self) -> None:
        """Wait for the window whose writing began first."""
        writing = self._writing[0]
        for future in writing.done:
            future.result()
        self._writing.popleft()
        self._rooms.append(writing.room)
        self._step(writing.nbytes)

    def _finish(self, output: _Output) -> tuple[str, bytes]:
        while self._writing:
            self._settle()
        assert not self._held, "a checksum of a payload that never passed"
        output.writer.finish()
        return output.file.name, bytes(output.writer.digests)

    # ---- one window, all of which is in memory ------------------------------------------------------------------

    def _complete(self, output: _Output, window: Window, room: _Room) -> None:
        """Put the CRC-32s into a window, and have it written but for the blocks that wait for one."""
        self._pass(output, window, room)
        self._release(output)
        end = min(window.start + round_up(window.end - window.start), output.writer.extent_nbytes_total)
        waiting: dict[int, list[tuple[int, int]]] = {}
        for offset, piece in self._fields_in(output, window):
            if piece in output.crcs:
                _put_crc(room.view, window.start, window.end, offset, output.crcs[piece])
            else:
                last = min(offset + _CRC_NBYTES, window.end) - 1
                for block in {at // BLOCK_NBYTES * BLOCK_NBYTES for at in (max(offset, window.start), last)}:
                    waiting.setdefault(block, []).append((offset, piece))
        for start, fields in waiting.items():
            view, at = self._spare.pop(), start - window.start
            view[:] = room.view[at : at + BLOCK_NBYTES]  # whole: this window is not the last
            self._held.append(_Held(start, view, fields))
        futures = []
        for start, stop in _extents(window.start, end, sorted(waiting)):
            output.image.put(start, room.view[start - window.start : stop - window.start])
            futures.append(self._write_pool.submit(output.writer.write_extent, start, stop))
        self._writing.append(_Writing(room, window.end - window.start, futures))

    def _pass(self, output: _Output, window: Window, room: _Room) -> None:
        """Take the CRC-32s of a window's runs."""
        for run in window.runs:
            if run.piece in output.wanted:
                at = run.at - window.start
                output.running = zlib.crc32(room.view[at : at + run.nbytes], output.running if run.start else 0)
                if run.is_last:
                    output.crcs[run.piece] = output.running

    def _fields_in(self, output: _Output, window: Window) -> Iterator[tuple[int, int]]:
        """Yield the fields that lie in a window, or some bytes of them; of payloads without a byte there are none."""
        while output.fields and output.fields[-1][0] < window.end:
            offset, piece = output.fields[-1]
            yield offset, piece
            if offset + _CRC_NBYTES > window.end:
                return  # the rest is in the next window
            output.fields.pop()

    def _release(self, output: _Output) -> None:
        """Write the blocks that were held back and wait for nothing any more."""
        ready = [held for held in self._held if all(piece in output.crcs for _, piece in held.fields)]
        for held in ready:
            end = held.start + BLOCK_NBYTES
            for offset, piece in held.fields:
                _put_crc(held.view, held.start, end, offset, output.crcs[piece])
            output.image.put(held.start, held.view)
            output.writer.write_extent(held.start, end)
            self._held.remove(held)
            self._spare.append(held.view)


def _put_crc(view: memoryview, start: int, end: int, offset: int, crc: int) -> None:
    """Write what of a CRC-32 at `offset` lies in a view of the bytes `start` to `end`."""
    data = crc.to_bytes(_CRC_NBYTES, "little")
    low, high = max(offset, start), min(offset + _CRC_NBYTES, end)
    if low < high:
        view[low - start : high - start] = data[low - offset : high - offset]


def _extents(start: int, end: int, held: list[int]) -> Iterator[tuple[int, int]]:
    """Cut the bytes `start` to `end` into extents, around the blocks that are held back."""
    for stop in [*held, end]:
        while start < stop:
            yield start, min(start + EXTENT_NBYTES, stop)
            start = min(start + EXTENT_NBYTES, stop)
        start = stop + BLOCK_NBYTES

"""CRC-32s of payloads that pass in windows, and their places in the file.

One that stands before the elements that it is of, whose windows come later, makes its block wait: it is held back, and
released when the number is known. So no byte is written twice.
"""

from __future__ import annotations

import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from asyncckpt.conversion.pieces import OutputFile
from asyncckpt.conversion.windows import Run, Window
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.format.crc import joined
from asyncckpt.format.layout import round_up
from asyncckpt.memory.mapping import Mapping

_CRC_NBYTES = 4
_MAX_HELD = 2
"""Blocks: of the elements that are passing, whose field lies in two at most. Those before have passed."""


class _Held(NamedTuple):
    """A block that waits: where it begins in the file, its memory, and (offset, payload) of what it waits for."""

    start: int
    view: memoryview
    fields: list[tuple[int, int]]


class PassingChecksums:
    """The checksums of one file. For each window `sums`; then, in order and by one thread at a time, `released`, and
    `put` where it `concerns` the window: where a place of one lies in it.

    Args:
        file: The file.
    """

    def __init__(self, file: OutputFile) -> None:
        self._fields = sorted(((offset, piece) for piece, offset in file.crc_at), reverse=True)
        self._wanted = {piece for piece, _ in file.crc_at}
        self._known = {n: 0 for n in self._wanted if isinstance(p := file.pieces[n], Payload) and not p.nbytes}
        self._at = sorted(offset for _, offset in file.crc_at)
        self._running = 0
        self._memory = Mapping(-1, _MAX_HELD * BLOCK_NBYTES)
        whole = self._memory.view()
        self._spare = [whole[at : at + BLOCK_NBYTES] for at in range(0, self._memory.nbytes, BLOCK_NBYTES)]
        self._held: list[_Held] = []

    def close(self) -> None:
        """Free the memory of the blocks."""
        self._spare.clear()
        self._held.clear()
        self._memory.close()

    def concerns(self, window: Window) -> bool:
        """Whether a field, or some of its bytes, lies in a window; any thread. Else there is nothing to `put`."""
        first = bisect_right(self._at, window.start - _CRC_NBYTES)
        return first < len(self._at) and self._at[first] < window.end

    @property
    def wanted(self) -> set[int]:
        """The pieces whose checksums there are, by their numbers."""
        return self._wanted

    def sums(self, window: Window, room: memoryview, known: dict[int, int]) -> list[tuple[Run, int]]:
        """Return the checksums of a window's elements, run by run; any thread, in any order.

        Args:
            window: See above.
            room: Its memory, filled.
            known: By piece: those that are computed already.
        """
        found = []
        for run in window.runs:
            if run.piece not in self._wanted:
                continue
            if run.piece in known:
                found.append((run, known[run.piece]))
            else:
                at = run.at - window.start
                with room[at : at + run.nbytes] as elements:
                    found.append((run, zlib.crc32(elements)))
        return found

    def released(self, sums: Sequence[tuple[Run, int]]) -> Iterator[tuple[int, memoryview]]:
        """Take a window's `sums`; yield the blocks that waited for them: (offset, bytes)."""
        for run, crc in sums:
            self._running = joined(self._running, crc, run.nbytes) if run.start else crc
            if run.is_last:
                self._known[run.piece] = self._running
        waiting = []
        for held in self._held:
            if any(piece not in self._known for _, piece in held.fields):
                waiting.append(held)
                continue
            for offset, piece in held.fields:
                _put(held.view, held.start, held.start + BLOCK_NBYTES, offset, self._known[piece])
            yield held.start, held.view
            self._spare.append(held.view)
        self._held = waiting

    def put(self, window: Window, room: memoryview) -> list[tuple[int, int]]:
        """Put into a window the checksums that are known, and take a copy of the blocks that wait for others.

        Returns:
            The extents of the window that can be written, up to its last page: (start, end) in the file.
        """
        waiting: dict[int, list[tuple[int, int]]] = {}
        for offset, piece in self._fields_in(window):
            if piece in self._known:
                _put(room, window.start, window.end, offset, self._known[piece])
                continue
            last = min(offset + _CRC_NBYTES, window.end) - 1
            for block in {at // BLOCK_NBYTES * BLOCK_NBYTES for at in (max(offset, window.start), last)}:
                waiting.setdefault(block, []).append((offset, piece))
        extents, at = [], window.start
        for block, fields in sorted(waiting.items()):
            view, start = self._spare.pop(), block - window.start
            view[:] = room[start : start + BLOCK_NBYTES]  # a whole one: what it waits for is in a later window
            self._held.append(_Held(block, view, fields))
            extents.append((at, block))
            at = block + BLOCK_NBYTES
        extents.append((at, window.start + round_up(window.end - window.start)))
        return [(start, end) for start, end in extents if start < end]

    def _fields_in(self, window: Window) -> Iterator[tuple[int, int]]:
        """Yield the fields that lie in a window, or some bytes of which do."""
        while self._fields and self._fields[-1][0] < window.end:
            yield self._fields[-1]
            if self._fields[-1][0] + _CRC_NBYTES > window.end:
                return  # the rest of it is in the next window
            self._fields.pop()


def _put(view: memoryview, start: int, end: int, offset: int, crc: int) -> None:
    """Write what of a checksum at `offset` lies in a view of the bytes `start` to `end`."""
    data = crc.to_bytes(_CRC_NBYTES, "little")
    low, high = max(offset, start), min(offset + _CRC_NBYTES, end)
    view[low - start : high - start] = data[low - offset : high - offset]

"""Elements that arrive in a window: moved to their place a block at a time, and summed up while the cache has them.

A pass of its own for the CRC-32s of archives, and one for the digests of blocks, would each bring all elements from
memory once more.
"""

from __future__ import annotations

import zlib
from collections.abc import Container

from asyncckpt.conversion.windows import Run, Window
from asyncckpt.format.checksum import BLOCK_NBYTES, block_digest
from asyncckpt.memory.copying import copy_bytes


class Arriving:
    """What is known of a window's elements that came by `sink`. For one thread.

    Args:
        window: That is filled.
        address: Of its memory.
        room: Its memory.
        summed: The pieces whose CRC-32 is wanted, by their numbers.

    Attributes:
        crcs: By piece: of its elements in this window.
        digests: Of those of the file's blocks, by number, that elements of one run fill.
    """

    def __init__(self, window: Window, address: int, room: memoryview, summed: Container[int]) -> None:
        self.start, self.address, self.room, self.summed = window.start, address, room, summed
        self.crcs: dict[int, int] = {}
        self.digests: dict[int, bytes] = {}

    def sink(self, run: Run, *, summed: bool = False) -> ArrivingRun:
        """Return what takes the elements of a run, front to back; `summed`: their CRC-32 is wanted in any case."""
        return ArrivingRun(self, run, summed or run.piece in self.summed)


class ArrivingRun:
    """Takes the elements of one run, front to back: a `Sink`."""

    def __init__(self, into: Arriving, run: Run, is_summed: bool) -> None:
        self._into, self._run, self._is_summed = into, run, is_summed
        self._done = self._crc = 0

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        """Move elements to their place; see `Sink`."""
        assert position == self._done, "one thread reads a run, front to back"
        run, end = self._run, position + nbytes
        while self._done < end:
            at = run.at + self._done
            count = min(end - self._done, BLOCK_NBYTES - at % BLOCK_NBYTES)
            self._move(at, address + self._done - position, count)
            self._done += count
        if self._is_summed and end == run.nbytes:
            self._into.crcs[run.piece] = self._crc

    def _move(self, at: int, source: int, nbytes: int) -> None:
        """Move elements of one block to offset `at` of the file; digest the block with its last of them."""
        into, low = self._into, at - self._into.start
        copy_bytes(into.address + low, source, nbytes)
        if self._is_summed:
            with into.room[low : low + nbytes] as elements:
                self._crc = zlib.crc32(elements, self._crc)
        end = at + nbytes
        if end % BLOCK_NBYTES == 0 and end - BLOCK_NBYTES >= self._run.at:
            with into.room[end - BLOCK_NBYTES - into.start : end - into.start] as block:
                into.digests[end // BLOCK_NBYTES - 1] = block_digest(block)

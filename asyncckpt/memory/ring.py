"""Rings: a slot whose body is a window that moves over an image larger than it (SPEC.md section 5).

    image    | part 0: segment 0 | 1 | 2 | part 1: segment 3 | 4 | ...
    slot     | head page | cell 0 | cell 1 | ... | ledger | request | tail page |  segment n: cell n modulo their number

The trainer counts what it has filled, the worker what it has freed; each polls the other's counter. What is freed is in
memory no more, but for its checksums: the ledger has them, for a worker that comes after one that dies.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import (
    COUNTERS_GENERATIONS,
    COUNTERS_NBYTES,
    COUNTERS_OFFSET,
    LEDGER_ENTRY_NBYTES,
    LEDGER_UNIT_NBYTES,
    PAGE_NBYTES,
    SlotError,
)

_COUNTER = struct.Struct("<QQ")
_ONES = (1 << 64) - 1
_FREED_OFFSET = 32
_READS = 100
"""So often a counter is read in the middle of a write at most; a write takes nanoseconds. Chosen."""


class Segment(NamedTuple):
    """Bytes `start` to `end` of a part's file, the pages' padding excluded."""

    part: int
    start: int
    end: int


class Ring:
    """Where the segments of an image lie.

    Args:
        part_nbytes: Exact lengths of the parts.
        segment_nbytes: Length of a segment, and of a cell: whole pages.
        n_cells: How many there are.

    Attributes:
        segments: In their order.
        cells_nbytes: Of all cells.
        ledger_nbytes: Of the ledger, which follows the cells: whole pages.
    """

    def __init__(self, part_nbytes: Sequence[int], segment_nbytes: int, n_cells: int) -> None:
        self.segment_nbytes, self.n_cells = segment_nbytes, n_cells
        self.cells_nbytes = segment_nbytes * n_cells
        self.segments = tuple(
            Segment(part, start, min(start + segment_nbytes, nbytes))
            for part, nbytes in enumerate(part_nbytes)
            for start in range(0, nbytes, segment_nbytes)
        )
        self._row_nbytes = LEDGER_ENTRY_NBYTES * _blocks(segment_nbytes)
        self.ledger_nbytes = ledger_nbytes(part_nbytes, segment_nbytes)
        self._firsts: list[int] = []
        at = 0
        for nbytes in part_nbytes:
            self._firsts.append(at)
            at += -(-nbytes // segment_nbytes)

    def is_like(self, other: Ring) -> bool:
        """Whether the same image is cut into segments, and these lie in cells, in the same way."""
        return (self.segments, self.segment_nbytes, self.n_cells) == (
            other.segments,
            other.segment_nbytes,
            other.n_cells,
        )

    def number_of(self, part: int, start: int) -> int:
        """Return the number of the segment that byte `start` of a part's file lies in."""
        return self._firsts[part] + start // self.segment_nbytes

    def offset_of(self, number: int) -> int:
        """Return where a segment lies in the slot."""
        return PAGE_NBYTES + number % self.n_cells * self.segment_nbytes

    @property
    def end(self) -> int:
        """Where cells and ledger end in the slot, and the request may begin."""
        return PAGE_NBYTES + self.cells_nbytes + self.ledger_nbytes

    def row_of(self, number: int) -> tuple[int, int]:
        """Return where the ledger has a segment's checksums in the slot, and how many bytes these are."""
        segment = self.segments[number]
        at = PAGE_NBYTES + self.cells_nbytes + number * self._row_nbytes
        return at, LEDGER_ENTRY_NBYTES * _blocks(segment.end - segment.start)


def ledger_nbytes(part_nbytes: Sequence[int], segment_nbytes: int) -> int:
    """Return how long the ledger of a ring of these is."""
    n_segments = sum(-(-nbytes // segment_nbytes) for nbytes in part_nbytes)
    return -(-LEDGER_ENTRY_NBYTES * _blocks(segment_nbytes) * n_segments // PAGE_NBYTES) * PAGE_NBYTES


def _blocks(nbytes: int) -> int:
    return -(-nbytes // LEDGER_UNIT_NBYTES)


class Ledger:
    """The checksums of what the worker has written of one generation of a ring; its fd must outlive it.

    IMPORTANT: a segment's are there before it counts as freed, and stay until the slot is opened again: they are all
    that is left of it in memory when the worker dies. By system calls, as `Counters`.
    """

    def __init__(self, memory: SlotMemory, ring: Ring) -> None:
        self._memory, self._ring = memory, ring

    def note(self, number: int, digests: bytes) -> None:
        """Take the checksums of a segment's blocks, one behind the other.

        Raises:
            SlotError: They were not written.
        """
        at, nbytes = self._ring.row_of(number)
        if len(digests) != nbytes or os.pwrite(self._memory.fd, digests, at) != nbytes:
            raise SlotError(f"the checksums of segment {number} were not written")

    def digests_of(self, number: int) -> bytes:
        """Return them. Of a segment that is not freed, they are whatever lies there.

        Raises:
            SlotError: They cannot be read.
        """
        at, nbytes = self._ring.row_of(number)
        found = os.pread(self._memory.fd, nbytes, at)
        if len(found) != nbytes:
            raise SlotError(f"the checksums of segment {number} cannot be read")
        return found


class Counters:
    """What was filled and freed of one generation: of a ring in segments, else in bytes of the body and never freed.

    The slot's fd must outlive it.

    IMPORTANT: by system calls, not through the mapping. On some architectures a plain store may be seen before the
    bytes of the cell that it speaks of; the kernel's locks of page and file order both.
    """

    def __init__(self, memory: SlotMemory, generation: int) -> None:
        self._memory = memory
        self._offset = COUNTERS_OFFSET + COUNTERS_NBYTES * (generation % COUNTERS_GENERATIONS)

    def reset(self) -> None:
        """Nothing is filled, nothing freed; by the trainer, before the slot is streamed."""
        self._write(self._offset, 0)
        self._write(self._offset + _FREED_OFFSET, 0)

    @property
    def filled(self) -> int:
        """How much the trainer has filled, from the beginning on."""
        return self._read(self._offset)

    @filled.setter
    def filled(self, count: int) -> None:
        self._write(self._offset, count)

    def note_staged(self, nbytes: int) -> None:
        """As `SlotControl.note_staged`."""
        self._memory.control.note_staged(nbytes)

    @property
    def freed(self) -> int:
        """How many segments, from the first on, the worker needs no more."""
        return self._read(self._offset + _FREED_OFFSET)

    @freed.setter
    def freed(self, count: int) -> None:
        self._write(self._offset + _FREED_OFFSET, count)

    def _write(self, offset: int, count: int) -> None:
        if os.pwrite(self._memory.fd, _COUNTER.pack(count, count ^ _ONES), offset) != _COUNTER.size:
            raise SlotError("a counter of the ring was not written")

    def _read(self, offset: int) -> int:
        for _ in range(_READS):
            count, complement = _COUNTER.unpack(os.pread(self._memory.fd, _COUNTER.size, offset))
            if count == complement ^ _ONES:
                return int(count)
        raise SlotError("a counter of the ring is damaged")

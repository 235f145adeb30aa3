"""A slot that is written while it is being filled: its segments, and counters of filled and written bytes (SPEC.md 5).

    a slot with room for the image   | head page | part 0 | part 1 | ... | request | tail page |
    a ring, for a larger image       | head page | cell 0 | cell 1 | ... | request | tail page |

The trainer counts the bytes that it has filled, the worker those that it has written; each polls the other's counter. A
ring reuses the memory of written segments: segment n is in cell n modulo the number of cells. If the worker dies, the
save through a ring fails.
"""

from __future__ import annotations

import os
import struct
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import (
    COUNTERS_GENERATIONS,
    COUNTERS_NBYTES,
    COUNTERS_OFFSET,
    PAGE_NBYTES,
    SlotError,
)

_COUNTER = struct.Struct("<QQ")
_ONES = (1 << 64) - 1
_FREED_OFFSET = 32
_READS = 100
"""Most reads of a counter that is being written: a write takes nanoseconds. Chosen."""


class Segment(NamedTuple):
    """Bytes `start` to `end` of a part's file, without padding."""

    part: int
    start: int
    end: int


class StreamLayout:
    """The segments of an image, and their places in a slot.

    Args:
        parts: Offset of each file in the image, counted from the slot's beginning, and its exact length, in bytes.
        segment_nbytes: Length of a segment and of a cell, in whole pages.
        n_cells: Number of cells of a ring; 0: the slot is not a ring, and has room for the image.

    Attributes:
        segments: The segments in the order of the files.
        cells_nbytes: Size of all cells.
        image_nbytes: Size of the image, from the end of the head page on.
        end: Least offset of the request in the slot.
    """

    def __init__(self, parts: Sequence[tuple[int, int]], segment_nbytes: int, n_cells: int = 0) -> None:
        self.segment_nbytes, self.n_cells = segment_nbytes, n_cells
        self.cells_nbytes = segment_nbytes * n_cells
        self.segments = tuple(
            Segment(part, start, min(start + segment_nbytes, nbytes))
            for part, (_, nbytes) in enumerate(parts)
            for start in range(0, nbytes, segment_nbytes)
        )
        self._offsets = [offset for offset, _ in parts]
        self.image_nbytes = max((o - PAGE_NBYTES + -(-n // PAGE_NBYTES) * PAGE_NBYTES for o, n in parts), default=0)
        self.end = PAGE_NBYTES + (self.cells_nbytes if n_cells else self.image_nbytes)
        # `max`: the parts need not be in the order of their offsets.
        self._ends = list(accumulate((self._offsets[s.part] - PAGE_NBYTES + s.end for s in self.segments), max))
        self._firsts: list[int] = []
        at = 0
        for _, nbytes in parts:
            self._firsts.append(at)
            at += -(-nbytes // segment_nbytes)

    def is_like(self, other: StreamLayout) -> bool:
        """Whether `other` has the same segments at the same offsets of the slot."""
        mine = (self.segments, self._offsets, self.segment_nbytes, self.n_cells)
        return mine == (other.segments, other._offsets, other.segment_nbytes, other.n_cells)

    def number_of(self, part: int, start: int) -> int:
        """Return the number of the segment that contains byte `start` of a part's file."""
        return self._firsts[part] + start // self.segment_nbytes

    def number_at(self, offset_bytes: int) -> int:
        """Return the number of the segment with a byte of the image; its offset counts from the slot's beginning."""
        part = bisect_right(self._offsets, offset_bytes) - 1
        return self.number_of(part, offset_bytes - self._offsets[part])

    def offset_of(self, number: int) -> int:
        """Return the offset of a segment in the slot."""
        if self.n_cells:
            return PAGE_NBYTES + number % self.n_cells * self.segment_nbytes
        return self.image_offset_of(number)

    def image_offset_of(self, number: int) -> int:
        """Return the offset of a segment in the image, counted from the slot's beginning."""
        segment = self.segments[number]
        return self._offsets[segment.part] + segment.start

    def end_of(self, count: int) -> int:
        """Return the value of a counter once the first `count` segments are filled, or written."""
        return self._ends[count - 1] if count else 0

    def count_in(self, nbytes: int) -> int:
        """Return how many segments are filled, or written, if a counter has the value `nbytes`."""
        return bisect_right(self._ends, nbytes)


class Counters:
    """The counters of one generation: how many bytes of its image, from the beginning on, are filled and written.

    The slot's fd must outlive this object.

    IMPORTANT: access the counters by system calls, not through the mapping. On some architectures another process may
    see a plain store before the bytes of the image that were stored earlier; the kernel's locks of page and file order
    them.
    """

    def __init__(self, memory: SlotMemory, generation: int) -> None:
        self._memory = memory
        self._offset = COUNTERS_OFFSET + COUNTERS_NBYTES * (generation % COUNTERS_GENERATIONS)

    def reset(self) -> None:
        """Set both counters to 0. Called by the trainer, before the slot is streamed."""
        self._write(self._offset, 0)
        self._write(self._offset + _FREED_OFFSET, 0)

    @property
    def filled(self) -> int:
        """Number of bytes that the trainer has filled."""
        return self._read(self._offset)

    @filled.setter
    def filled(self, nbytes: int) -> None:
        self._write(self._offset, nbytes)

    @property
    def freed(self) -> int:
        """Number of bytes that the worker has written, so that their memory may be reused."""
        return self._read(self._offset + _FREED_OFFSET)

    @freed.setter
    def freed(self, nbytes: int) -> None:
        self._write(self._offset + _FREED_OFFSET, nbytes)

    def _write(self, offset: int, nbytes: int) -> None:
        if os.pwrite(self._memory.fd, _COUNTER.pack(nbytes, nbytes ^ _ONES), offset) != _COUNTER.size:
            raise SlotError(f"a counter of the slot at offset {offset} was not written")

    def _read(self, offset: int) -> int:
        for _ in range(_READS):
            nbytes, complement = _COUNTER.unpack(os.pread(self._memory.fd, _COUNTER.size, offset))
            if nbytes == complement ^ _ONES:
                return int(nbytes)
        raise SlotError(f"the counter of the slot at offset {offset} is damaged")

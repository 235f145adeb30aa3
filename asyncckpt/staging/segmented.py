"""The image of a plan piece by piece: what lies in each segment of a ring, and its copy into the segment's cell."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.ring import Ring
from asyncckpt.planning.plan import SavePlan
from asyncckpt.staging.cutting import copyable, cut_out, nbytes_before, runs
from asyncckpt.staging.moving import FULL, Pace, careful_move

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources, each of the dtype and shape of the other."""


class _Piece(NamedTuple):
    """Bytes `start` to `end` of a box, at `at` of the segment."""

    box: int
    start: int
    end: int
    at: int


class _Contents(NamedTuple):
    """What lies in a segment: bytes that are the same in every save, as (offset, bytes), and pieces of boxes."""

    fixed: list[tuple[int, bytes]]
    pieces: list[_Piece]


class SegmentedImage:
    """See the module. The memory must outlive it; it belongs to whoever mapped it.

    Args:
        address: Where the slot starts in this process.
        plan: What to lay out.
        ring: Of the plan's parts.
    """

    def __init__(self, address: int, plan: SavePlan, ring: Ring) -> None:
        self.plan, self.ring = plan, ring
        self._address = address
        self._numbers = [box.number for box in plan.boxes]
        shapes = plan.signature[1]
        self._partial = {n: box for n, box in enumerate(plan.boxes) if box.sizes != shapes[box.number][1]}
        self._contents = [_Contents([], []) for _ in ring.segments]
        self._lay_out()

    def settle(self) -> None:
        """Nothing moves but in the calling thread."""

    # ---- where everything lies --------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        chunks = self.plan.layout.chunks
        fixed: list[list[tuple[int, bytes]]] = [[(0, p.header), *p.inserts] for p in self.plan.layout.parts]
        for n, chunk in enumerate(chunks):
            if chunk.nbytes:
                for number, start, end in self._cut(chunk.part, chunk.offset_bytes, chunk.nbytes):
                    at = chunk.offset_bytes + start - self.ring.segments[number].start
                    self._contents[number].pieces.append(_Piece(n, start, end, at))
        for part, ranges in enumerate(fixed):
            ranges += self._holes(part, ranges)
            for offset, data in ranges:
                for number, start, end in self._cut(part, offset, len(data)):
                    at = offset + start - self.ring.segments[number].start
                    self._contents[number].fixed.append((at, data[start:end]))

    def _cut(self, part: int, offset: int, nbytes: int) -> Iterator[tuple[int, int, int]]:
        """Yield (segment, start, end) of the pieces of a range of a part, which is cut at the segments' ends."""
        start = 0
        while start < nbytes:
            number = self.ring.number_of(part, offset + start)
            end = min(
                nbytes,
                (offset + start) // self.ring.segment_nbytes * self.ring.segment_nbytes
                - offset
                + self.ring.segment_nbytes,
            )
            yield number, start, end
            start = end

    def _holes(self, part: int, fixed: Sequence[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
        """Return zeros for what nothing else lies in: a cell holds old bytes."""
        taken = [(offset, offset + len(data)) for offset, data in fixed]
        taken += [(c.offset_bytes, c.offset_bytes + c.nbytes) for c in self.plan.layout.chunks if c.part == part]
        nbytes = self.plan.layout.parts[part].nbytes
        found, at = [], 0
        for start, end in [*sorted(taken), (nbytes, nbytes)]:
            if start > at:
                found.append((at, bytes(start - at)))
            at = max(at, end)
        return found

    # ---- copying ----------------------------------------------------------------------------------------------------

    def fill(
        self,
        number: int,
        tensors: Sequence[torch.Tensor],
        places: Sequence[int | None],
        save_id: SaveId,
        pace: Pace = FULL,
    ) -> dict[int, Pairs]:
        """Copy what lies in the host's memory into a segment's cell, which must be free.

        Args:
            number: Of the segment.
            tensors: The state's, by number.
            places: Which device each lies on, or None.
            save_id: Of the save.
            pace: Whether moves are careful.

        Returns:
            What is left, by device.

        Raises:
            RuntimeError: From torch, when a tensor cannot be copied.
            OSError: With a pace that is careful: the memory of a tensor has gone.
        """
        cell = self._address + self.ring.offset_of(number)
        segment = self.ring.segments[number]
        for at, data in self._contents[number].fixed:
            ctypes.memmove(cell + at, data, len(data))
        if segment.start == 0:
            ctypes.memmove(cell + SAVE_ID_OFFSET, save_id_bytes(save_id), SAVE_ID_NBYTES)
        nbytes = segment.end - segment.start
        # The bytes behind the file's end go to disk for a moment before the file is cut: never old contents.
        ctypes.memset(cell + nbytes, 0, round_up(nbytes) - nbytes)
        move: Callable[[int, int, int], object] = careful_move if pace.careful else ctypes.memmove
        found: dict[int | None, Pairs] = {}
        with torch.no_grad():  # IMPORTANT: it is per thread; see copy_cpu.py
            for piece in self._contents[number].pieces:
                n, box = self._numbers[piece.box], self._partial.get(piece.box)
                tensor, place = tensors[n], places[n]
                if place is None and tensor.device.type == "cpu" and tensor.is_contiguous():
                    before = 0 if box is None else nbytes_before(box, tensor.dtype, tensor.shape)
                    move(cell + piece.at, tensor.data_ptr() + before + piece.start, piece.end - piece.start)
                else:
                    pairs = found.setdefault(place, ([], []))
                    self._pair(cell, piece, tensor if box is None else cut_out(tensor, box), pairs)
            if None in found:
                torch._foreach_copy_(*found[None])
        return {place: pairs for place, pairs in found.items() if place is not None}

    def _pair(self, cell: int, piece: _Piece, source: torch.Tensor, pairs: Pairs) -> None:
        """Add the copies of a piece of a tensor that torch has to copy."""
        itemsize = source.element_size()
        # Boxes lie at multiples of their items' size, and segments end at multiples of every one.
        assert piece.start % itemsize == piece.end % itemsize == 0
        at = cell + piece.at
        for run in runs(source, piece.start // itemsize, piece.end // itemsize):
            nbytes = run.numel() * itemsize
            memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(at), dtype=torch.uint8)
            pairs[0].append(copyable(memory.view(run.dtype).view(run.shape)))
            pairs[1].append(copyable(run))
            at += nbytes

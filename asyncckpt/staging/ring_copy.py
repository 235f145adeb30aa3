"""States that are larger than their memory: the ring that they go through, what lies in each segment, and the copy."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import torch

from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import MIN_RING_SEGMENTS, RING_UNIT_NBYTES, PartRange
from asyncckpt.staging.copy_engine import Engine
from asyncckpt.staging.cpu_copy import Share, copyable, cut_out, nbytes_before, runs
from asyncckpt.staging.memcopy import FULL, Pace, careful_move

SEGMENT_NBYTES = 16 << 20
"""As `storage.rank_writer.EXTENT_NBYTES`: one write."""

MANY_SEGMENTS = 8
"""Of less memory than so many segments of that length, shorter ones are made: some are being written, some filled.
Chosen, not measured."""


Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources, each of the dtype and shape of the other."""

ALL = Share([], [])
"""Not looked at: segments follow one another in the files' order."""


def ring_within(limit_nbytes: int, parts: Sequence[PartRange], room_nbytes: int) -> StreamLayout | None:
    """Return the longest ring for a slot of at most `limit_nbytes`.

    Args:
        limit_nbytes: See above.
        parts: The files that pass through it.
        room_nbytes: Of the slot, for the request, in whole pages.

    Returns:
        None where that is too little for one.
    """
    cells_nbytes = limit_nbytes - 2 * PAGE_NBYTES - room_nbytes
    unit = RING_UNIT_NBYTES
    segment_nbytes = max(unit, min(SEGMENT_NBYTES, cells_nbytes // MANY_SEGMENTS // unit * unit))
    n_cells = cells_nbytes // segment_nbytes
    if n_cells < MIN_RING_SEGMENTS:
        return None
    return StreamLayout(parts, segment_nbytes, n_cells)


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

    def __init__(self, address: int, plan: SavePlan, ring: StreamLayout) -> None:
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
        with torch.no_grad():  # IMPORTANT: it is per thread; see cpu_copy.py
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


class RingCopy:
    """The copy of a state through a ring: each segment when its cell is free, announced to the worker that writes it.

    For one save; does what `SlotImage.copy` does for one that fits.

    Args:
        image: Of the slot.
        stream: Of the slot.
        places: Which device each tensor lies on, or None.
        engine: Copies from devices.
        save_id: Of the save.
    """

    def __init__(
        self,
        image: SegmentedImage,
        stream: SlotStream,
        places: Sequence[int | None],
        engine: Engine,
        save_id: SaveId,
    ) -> None:
        self._image, self._stream = image, stream
        self._places, self._engine, self._save_id = places, engine, save_id

    def copy(self, tensors: Sequence[torch.Tensor], share: Share = ALL, pace: Pace = FULL) -> None:
        """Copy everything.

        Args:
            tensors: The state's, by number.
            share: See `ALL`.
            pace: As for `SlotImage.copy`; the calling thread moves.

        Raises:
            AsyncCkptError: As `SlotStream.await_cell`.
            RuntimeError: From torch, or a device.
            OSError: As for `SlotImage.copy`.

        Blocks: for all but the last segments to be written.
        """
        layout, done_nbytes = self._image.ring, 0
        for number, segment in enumerate(layout.segments):
            self._stream.await_cell(number)
            left = self._image.fill(number, tensors, self._places, self._save_id, pace)
            for index, (targets, sources) in left.items():
                self._engine.copy_here(index, targets, sources)
            self._stream.has_filled(layout.end_of(number + 1))
            done_nbytes += segment.end - segment.start
            self._stream.note_staged(done_nbytes)

    def drop_moves(self) -> None:
        """Let a `copy` that another thread runs end early; what it has copied is worth nothing."""
        self._stream.drop()

    def patience(self) -> float:
        """As `SlotStream.patience`."""
        return self._stream.patience()

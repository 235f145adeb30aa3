"""Copies a state through a ring: a slot that is smaller than the state.

The files are cut into segments. A cell is the memory of one segment; the slot has a few, which are used in turn. A
segment is copied into its cell once the worker has written the segment that the cell held before (memory/SPEC.md,
section 5). So the save takes as long as writing does.
"""

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
from asyncckpt.staging.copy_engine import CopyEngine
from asyncckpt.staging.cpu_copy import cut_out, integer_view, nbytes_before, runs
from asyncckpt.staging.memcopy import fault_safe_copy

SEGMENT_NBYTES = 16 << 20
"""Length of a segment. As `storage.rank_writer.EXTENT_NBYTES`: one write."""

MANY_SEGMENTS = 8
"""The least number of cells, if there is not enough memory for as many of `SEGMENT_NBYTES`: then segments are shorter.
Some cells are being written while others are filled. Chosen, not measured."""


Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources: each target has the dtype and shape of its source."""


def ring_within(limit_nbytes: int, parts: Sequence[PartRange], request_room_nbytes: int) -> StreamLayout | None:
    """Return the longest ring for a slot of at most `limit_nbytes`.

    Args:
        limit_nbytes: The largest size of the slot.
        parts: The files that pass through the ring.
        request_room_nbytes: Bytes of the slot for the request, in whole pages.

    Returns:
        None if the limit is too small for a ring.
    """
    cells_nbytes = limit_nbytes - 2 * PAGE_NBYTES - request_room_nbytes
    unit = RING_UNIT_NBYTES
    segment_nbytes = max(unit, min(SEGMENT_NBYTES, cells_nbytes // MANY_SEGMENTS // unit * unit))
    n_cells = cells_nbytes // segment_nbytes
    if n_cells < MIN_RING_SEGMENTS:
        return None
    return StreamLayout(parts, segment_nbytes, n_cells)


class _Piece(NamedTuple):
    """Bytes `start` to `end` of a box, and their offset `at` in the segment."""

    box: int
    start: int
    end: int
    at: int


class _Contents(NamedTuple):
    """Contents of a segment: bytes that are the same in every save, as (offset, bytes), and pieces of boxes."""

    fixed: list[tuple[int, bytes]]
    pieces: list[_Piece]


class RingImage:
    """The image of a plan's shard files, by segments, and the copy of one segment into its cell.

    The caller owns the memory, and must not unmap it before this object is gone.

    Args:
        address: Address of the slot's first byte in this process.
        plan: The plan whose files are laid out.
        ring: Layout of the ring.
    """

    def __init__(self, address: int, plan: SavePlan, ring: StreamLayout) -> None:
        self.plan, self.ring = plan, ring
        self._address = address
        self._numbers = [box.number for box in plan.boxes]
        shapes = plan.signature[1]
        self._partial = {n: box for n, box in enumerate(plan.boxes) if box.sizes != shapes[box.number][1]}
        self._contents = [_Contents([], []) for _ in ring.segments]
        self._assign_contents()

    def lay_out(self) -> None:
        """Do nothing: `fill` writes every byte of a segment."""

    def settle(self) -> None:
        """Do nothing: there are no threads that copy."""

    # ---- contents of each segment ------------------------------------------------------------------------------------

    def _assign_contents(self) -> None:
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
        """Cut a range of a part at the borders of segments; yield (segment, start, end) of each piece of the range."""
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
        """Return zeros for the bytes of a part that nothing else covers, since cells hold old bytes."""
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
        devices: Sequence[int | None],
        save_id: SaveId,
        fault_safe: bool = False,
    ) -> dict[int, Pairs]:
        """Copy the part of a segment that is in host memory into its cell, which must be free.

        Args:
            number: Number of the segment.
            tensors: All tensors of the state, by number.
            devices: Index of the device that each tensor lies on; None: host memory.
            save_id: ID of the save.
            fault_safe: Raise OSError, not SIGSEGV, if the memory of a tensor is unmapped meanwhile.

        Returns:
            The copies that are left, by device.

        Raises:
            RuntimeError: From torch, when a tensor cannot be copied.
            OSError: `fault_safe`, and the memory of a tensor was unmapped.
        """
        cell = self._address + self.ring.offset_of(number)
        segment = self.ring.segments[number]
        for at, data in self._contents[number].fixed:
            ctypes.memmove(cell + at, data, len(data))
        if segment.start == 0:
            ctypes.memmove(cell + SAVE_ID_OFFSET, save_id_bytes(save_id), SAVE_ID_NBYTES)
        nbytes = segment.end - segment.start
        # The padding is written to disk before the file is truncated: it must not hold old contents.
        ctypes.memset(cell + nbytes, 0, round_up(nbytes) - nbytes)
        copy: Callable[[int, int, int], object] = fault_safe_copy if fault_safe else ctypes.memmove
        found: dict[int | None, Pairs] = {}
        with torch.no_grad():  # IMPORTANT: it is per thread; see cpu_copy.py
            for piece in self._contents[number].pieces:
                n, box = self._numbers[piece.box], self._partial.get(piece.box)
                tensor, device = tensors[n], devices[n]
                if device is None and tensor.device.type == "cpu" and tensor.is_contiguous():
                    before = 0 if box is None else nbytes_before(box, tensor.dtype, tensor.shape)
                    copy(cell + piece.at, tensor.data_ptr() + before + piece.start, piece.end - piece.start)
                else:
                    pairs = found.setdefault(device, ([], []))
                    self._pair(cell, piece, tensor if box is None else cut_out(tensor, box), pairs)
            if None in found:
                torch._foreach_copy_(*found[None])
        return {device: pairs for device, pairs in found.items() if device is not None}

    def _pair(self, cell: int, piece: _Piece, source: torch.Tensor, pairs: Pairs) -> None:
        """Append to `pairs` the copies by torch for a piece of a tensor."""
        itemsize = source.element_size()
        # Boxes begin at multiples of their item size, and segments end at multiples of every item size.
        assert piece.start % itemsize == piece.end % itemsize == 0
        at = cell + piece.at
        for run in runs(source, piece.start // itemsize, piece.end // itemsize):
            nbytes = run.numel() * itemsize
            memory = torch.frombuffer((ctypes.c_char * nbytes).from_address(at), dtype=torch.uint8)
            pairs[0].append(integer_view(memory.view(run.dtype).view(run.shape)))
            pairs[1].append(integer_view(run))
            at += nbytes


class RingCopy:
    """The `CopyJob` of a ring: copies each segment once its cell is free, and tells the worker. For one save.

    Args:
        image: The image in the slot.
        stream: Stream of the slot.
        tensors: All tensors of the state, by number.
        devices: Index of the device that each tensor lies on; None: host memory.
        engine: Copies from devices.
        save_id: ID of the save.
    """

    def __init__(
        self,
        image: RingImage,
        stream: SlotStream,
        tensors: Sequence[torch.Tensor],
        devices: Sequence[int | None],
        engine: CopyEngine,
        save_id: SaveId,
    ) -> None:
        self._image, self._stream, self._tensors = image, stream, tensors
        self._devices, self._engine, self._save_id = devices, engine, save_id

    @property
    def has_work(self) -> bool:
        """See `CopyJob`: all segments."""
        return True

    def run(self, fault_safe: bool = False) -> None:
        """Copy all segments, in the calling thread.

        Raises:
            AsyncCkptError: As `SlotStream.await_cell`.
            RuntimeError: From torch, or a device.
            OSError: `fault_safe`, and the memory of a tensor was unmapped.

        Blocks: until all but the last segments are written.
        """
        layout, done_nbytes = self._image.ring, 0
        for number, segment in enumerate(layout.segments):
            self._stream.await_cell(number)
            on_devices = self._image.fill(number, self._tensors, self._devices, self._save_id, fault_safe)
            for index, (targets, sources) in on_devices.items():
                self._engine.copy_to_host(index, targets, sources)
            self._stream.has_filled(layout.end_of(number + 1))
            done_nbytes += segment.end - segment.start
            self._stream.note_staged(done_nbytes)

    def cancel(self) -> None:
        """See `CopyJob`."""
        self._stream.drop()

    def extended_deadline(self) -> float:
        """As `SlotStream.extended_deadline`."""
        return self._stream.extended_deadline()

"""States that are larger than their memory: the ring that they go through, what lies in each segment, and the copy."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import MIN_RING_SEGMENTS, RING_UNIT_NBYTES, PartRange, SaveRequest, encode_request
from asyncckpt.staging.copy_cpu import Share
from asyncckpt.staging.cutting import copyable, cut_out, nbytes_before, runs
from asyncckpt.staging.deferred import Copies
from asyncckpt.staging.engine import Engine
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.moving import FULL, Pace, careful_move
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.requests import StructureReport
from asyncckpt.staging.streaming import Process, SlotStream
from asyncckpt.staging.torn import MOST, Source, SourceWatch, Turns, sampled
from asyncckpt.staging.transfer import Transfer
from asyncckpt.state_dict.flatten import Flattened

SEGMENT_NBYTES = 16 << 20
"""As `storage.rank_writer.EXTENT_NBYTES`: one write."""

MANY_SEGMENTS = 8
"""Of less memory than so many segments of that length, shorter ones are made: some are being written, some filled.
Chosen, not measured."""

REQUEST_SLACK_NBYTES = 64 * 1024
"""Room for objects that grow between saves, so that a longer log line needs no new slot. Chosen, not measured."""

CLONED_NBYTES = 64 << 20
"""Of what no optimizer owns, so much is cloned at most for a copy behind the training; beyond it `save()` waits for
everything. Chosen: statistics and counters."""

Pairs = tuple[list[torch.Tensor], list[torch.Tensor]]
"""Targets and sources, each of the dtype and shape of the other."""

ALL = Share([], [])
"""Not looked at: segments follow one another in the files' order."""

_log = logging.getLogger("asyncckpt")


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
    return StreamLayout([(part.offset, part.nbytes) for part in parts], segment_nbytes, n_cells)


class Sized(NamedTuple):
    """What a save asks, and the memory that it takes: `nbytes` of a slot, to which `spare_nbytes` may be added."""

    asked: SaveRequest
    request: bytes
    nbytes: int
    spare_nbytes: int
    ring: StreamLayout | None


class Begun(NamedTuple):
    """A copy that has begun, or is done: what `DeferredCopy` takes; without `later` nothing is left."""

    copies: Copies
    later: frozenset[int]
    left: Share
    tensors: Sequence[torch.Tensor]
    watch: SourceWatch
    seal: Callable[[], None]
    transfer: Transfer | None = None


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


class Rings:
    """See the module. One per checkpointer.

    Args:
        process: Is told that a ring is being filled.
        config: For `arena_limit_bytes`, `keep_in_memory`, `slot_timeout_s` and `overlap_check`.
        engine: Copies from devices.
        overlap: Says what may be copied behind the training.
        turns: Of the windows that are looked at.
    """

    def __init__(
        self, process: Process, config: CheckpointerConfig, engine: Engine, overlap: Overlap, turns: Turns
    ) -> None:
        self._process, self._config, self._engine, self._overlap = process, config, engine, overlap
        self._turns = turns
        self._said = False

    def size(self, plan: SavePlan, asked: SaveRequest) -> Sized:
        """Return what a save takes: a slot for everything, or a ring where that is more than the limit.

        A limit that is too small even for a ring is the pool's to refuse.
        """
        request = encode_request(asked)
        whole = Sized(asked, request, slot_nbytes(plan.body_nbytes, len(request)), REQUEST_SLACK_NBYTES, None)
        limit, several = self._config.arena_limit_bytes, 2 if self._config.keep_in_memory == "latest" else 1
        if limit is None or several * whole.nbytes <= limit:
            return whole
        room = round_up(len(request) + REQUEST_SLACK_NBYTES, REQUEST_SLACK_NBYTES)
        ring = ring_within(limit // several, asked.parts, room)
        if ring is None:
            return whole
        asked = replace(asked, ring_segments=ring.n_cells, ring_segment_nbytes=ring.segment_nbytes)
        nbytes = ring.end + room + PAGE_NBYTES
        return Sized(asked, encode_request(asked), nbytes, 0, ring)

    def begin(
        self,
        slot: LentSlot,
        sized: Sized,
        plan: SavePlan,
        flat: Flattened,
        report: StructureReport,
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> Begun:
        """Copy a state through a slot that is open, or begin to where that may be done behind the training.

        Raises:
            AsyncCkptError, RuntimeError, OSError: As `SlotStream` and `RingCopy.copy`.

        Blocks: without `later` in the result, for all but the last segments to be written.
        """
        assert sized.ring is not None
        self._say(step, plan, sized.ring)
        places = self._engine.places(flat.tensors)
        later, owners, tensors = self._later(flat.tensors, places, plan)
        watch = SourceWatch(flat, later, owners, save_id=save_id, step=step, path=path)
        if later and self._config.overlap_check != "off":
            # The slot's bytes are gone by the time that they could be compared: the sources alone are.
            def sources_of(some: Sequence[int]) -> list[Source]:
                return [Source(n, flat.tensors[n], None) for n in some]

            if self._config.overlap_check == "hash":
                watch.digest(sources_of(sorted(later)))
            else:
                watch.sample(sampled(sorted(later), self._turns.next(plan), MOST, sources_of))
        image = ring_image_of(slot, plan, sized.ring)
        request = self._request(sized, report)
        stream = SlotStream(
            self._process, slot, request, image.ring.end, image.ring, save_id=save_id, step=step, path=path
        )
        copies = RingCopy(image, stream, places, self._engine, save_id)
        if not later:
            copies.copy(tensors)
        return Begun(copies, later, Share([], [0] if later else []), tensors, watch, stream.finish)

    def _later(
        self, tensors: list[torch.Tensor], places: Sequence[int | None], plan: SavePlan
    ) -> tuple[frozenset[int], list[torch.Tensor], list[torch.Tensor]]:
        """Return what is copied behind the training, as `Overlap.later`, and out of what: sources, or clones."""
        later, owners = self._overlap.later(tensors, range(len(tensors)), needs_core=False)
        now = sorted({box.number for box in plan.boxes} - later)
        cloned = sum(tensors[n].numel() * tensors[n].element_size() for n in now)
        if not later or cloned > CLONED_NBYTES or any(place is not None for place in places):
            return frozenset(), [], tensors
        with torch.no_grad():  # IMPORTANT: `parameter.data = other` must not free what is still to be copied
            for n in later:
                tensors[n] = tensors[n].detach()
            copied = list(tensors)
            for n in now:
                source = tensors[n].detach()
                clone = copyable(source).clone(memory_format=torch.contiguous_format)
                copied[n] = clone.view(source.dtype)
        return later, owners, copied

    def _request(self, sized: Sized, report: StructureReport) -> bytes:
        """Return the request, with the samples of what lies on devices: it is as long as it was with zeros."""
        if not report.samples.apart:
            return sized.request
        fetched = []
        for _, window in report.samples.apart:
            (place,) = self._engine.places([window])
            assert place is not None
            host = torch.empty(window.numel(), dtype=torch.uint8, device="cpu")
            self._engine.copy_here(place, [host], [window])
            fetched.append(ctypes.string_at(host.data_ptr(), host.numel()))
        return encode_request(replace(sized.asked, samples=report.samples.completed(fetched).encode()))

    def _say(self, step: int, plan: SavePlan, ring: StreamLayout) -> None:
        level, self._said = logging.INFO if self._said else logging.WARNING, True
        kept = ", and is not kept in memory" if self._config.keep_in_memory == "latest" else ""
        _log.log(
            level,
            "step %d: %d bytes do not fit into arena_limit_bytes=%d: they go through %d bytes of memory in segments. "
            "The save takes as long as writing%s",
            step,
            plan.file_nbytes,
            self._config.arena_limit_bytes,
            ring.cells_nbytes,
            kept,
        )


def ring_image_of(slot: LentSlot, plan: SavePlan, ring: StreamLayout) -> SegmentedImage:
    """Return the slot's image of `plan` by segments: as `warmth.image_of`."""
    for found in (slot.views, *slot.kept):
        if isinstance(found, SegmentedImage) and found.plan.layout is plan.layout and found.ring.is_like(ring):
            break
    else:
        found = SegmentedImage(slot.memory.mapping.address, plan, ring)
    if found is not slot.views:
        if found in slot.kept:
            slot.kept.remove(found)
        if slot.views is not None:
            slot.kept.append(slot.views)
            del slot.kept[: -PlanCache.MAX_PLANS]
        slot.views = found
    return found

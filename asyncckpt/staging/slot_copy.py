"""How the copy of a state begins into a slot that has room for all of it."""

from __future__ import annotations

import ctypes
import itertools
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch

from asyncckpt.basics.gc_control import gc_paused
from asyncckpt.client.slot import LentSlot
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.client.slot_stream import Process, SlotStream, Watermark, pays
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import InsufficientMemoryError
from asyncckpt.format.layout import round_up
from asyncckpt.format.names import SaveId
from asyncckpt.memory.heap import give_back
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.memory.streaming import StreamLayout
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import SaveRequest, encode_request
from asyncckpt.staging.copy_engine import Engine
from asyncckpt.staging.cpu_copy import Share, SlotImage, copyable
from asyncckpt.staging.deferred_copy import Copies
from asyncckpt.staging.device_copy import Transfer
from asyncckpt.staging.device_snapshot import Snapshot
from asyncckpt.staging.memcopy import FULL, Pace
from asyncckpt.staging.mutation_check import MOST, MOST_ON_DEVICES, Source, SourceWatch, Turns, sampled
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.ring_copy import RingCopy, SegmentedImage, ring_within
from asyncckpt.staging.save_request import StructureReport, seal_with
from asyncckpt.state_dict.flatten import Flattened

REQUEST_SLACK_NBYTES = 64 * 1024
"""Room for objects that grow between saves, so that a longer log line needs no new slot. Chosen, not measured."""

_log = logging.getLogger("asyncckpt")


CLONED_NBYTES = 64 << 20
"""Of what no optimizer owns, so much is cloned at most for a copy behind the training; beyond it `save()` waits for
everything. Chosen: statistics and counters."""


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
        if not report.samples.device_windows:
            return sized.request
        fetched = []
        for _, window in report.samples.device_windows:
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


class Whole:
    """See the module. One per checkpointer.

    Args:
        process: The worker, which may begin to write before everything is copied.
        config: For `staging` and `overlap_check`.
        engine: Copies.
        overlap: Says what may be copied behind the training.
        turns: Of the windows that are looked at.
    """

    def __init__(
        self,
        process: Process,
        config: CheckpointerConfig,
        engine: Engine,
        overlap: Overlap,
        turns: Turns,
    ) -> None:
        self._process, self._config, self._engine, self._overlap = process, config, engine, overlap
        self._turns = turns

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
        """Copy what must be before `save()` returns, into a slot that is open.

        Raises:
            StagingError, RuntimeError: As `Engine.copy`.

        Blocks: for the copy.
        """
        image = image_of(slot, plan)
        later, owners, snapshot = self._later(image, flat.tensors)
        watched = later if snapshot is None else later - snapshot.numbers
        with torch.no_grad():  # IMPORTANT: `parameter.data = other` must not free what is still to be copied
            for n in later:
                flat.tensors[n] = flat.tensors[n].detach()
        now, rest = image.split(later)
        watch = SourceWatch(flat, watched, owners, save_id=save_id, step=step, path=path)
        looked_at: list[torch.Tensor] = []
        if watched and self._config.overlap_check != "off":
            boxes = [*(box[0] for box in rest.large), *rest.small]
            if watched is not later:
                boxes = [n for n, number in zip(boxes, image.numbers(boxes), strict=True) if number in watched]
            if self._config.overlap_check == "hash":
                watch.digest([Source(*pair) for pair in image.pairs(flat.tensors, boxes)])
            else:
                looked_at = self._sample(watch, image, flat.tensors, boxes)
        windows = [window for _, window in report.samples.device_windows]
        left, transfer = self._engine.copy(
            slot,
            image,
            flat.tensors,
            save_id,
            (now, rest),
            windows,
            snapshot,
            watched=looked_at,
            overlapped=bool(later),
        )
        seal: Callable[[], None] = partial(slot.memory.control.seal, sized.request, image.body_end)
        if windows and transfer is not None:
            seal = partial(seal_with, slot, image.body_end, sized.asked, report.samples, transfer)
        copies: Copies = image
        # What devices copy is counted by nobody, and the request may lack what they are still asked for.
        if later and transfer is None and pays(sum(box[2] for box in left.large)):
            stream = SlotStream(
                self._process, slot, sized.request, image.body_end, save_id=save_id, step=step, path=path
            )
            copies, seal = StreamedCopy(image, slot, stream), stream.finish
        return Begun(copies, later, left, flat.tensors, watch, seal, transfer)

    def _sample(
        self, watch: SourceWatch, image: SlotImage, tensors: Sequence[torch.Tensor], boxes: Sequence[int]
    ) -> list[torch.Tensor]:
        """Digest windows of what is copied from the host's memory; returns those of what is copied from devices.

        What lies on a device, and not row-major, is left out: to read a window of it takes kernels by itself.
        """
        turn, places = self._turns.next(image.plan), self._engine.places(tensors)
        here, there = boxes, list[int]()
        if any(place is not None for place in places):
            placed = [(n, places[number]) for n, number in zip(boxes, image.numbers(boxes), strict=True)]
            here = [n for n, place in placed if place is None]
            there = [n for n, place in placed if place is not None]

        def sources_of(some: Sequence[int]) -> list[Source]:
            return list(map(Source._make, image.pairs(tensors, some)))

        watch.sample(sampled(here, turn, MOST, sources_of))
        chosen = sampled(there, turn, MOST_ON_DEVICES, sources_of, n_pieces=1)
        return watch.sample_on_devices([one for one in chosen if one[0].tensor.is_contiguous()])

    def _later(
        self, image: SlotImage, tensors: Sequence[torch.Tensor]
    ) -> tuple[frozenset[int], list[torch.Tensor], Snapshot | None]:
        """Return what is copied later and who else owns it, as `Overlap.later`; and room for copies on the devices."""
        later, owners = self._overlap.later(tensors, self._engine.deferrable(image, tensors))
        snapshot = self._engine.snapshot(image, tensors) if self._config.staging == "device" else None
        if snapshot is None:
            return later, owners, None
        return later | snapshot.numbers, [o for o in owners if not self._engine.is_apart(o)], snapshot


class StreamedCopy:
    """Does what the image does, and tells the worker how far it is. For one save.

    Args:
        image: Of the slot.
        slot: Its memory.
        stream: Of the slot.
    """

    def __init__(self, image: SlotImage, slot: LentSlot, stream: SlotStream) -> None:
        self._image = image

        def tell(nbytes: int) -> None:
            stream.has_filled(nbytes)
            image.progress.come_to(nbytes)

        address = slot.memory.mapping.address
        self._mark = Watermark(address + PAGE_NBYTES, address + image.body_end, tell)

    def copy(self, tensors: Sequence[torch.Tensor], share: Share, pace: Pace = FULL) -> None:
        """As `SlotImage.copy`: the rest of what the slot is to hold."""
        self._image.copy(tensors, share, pace, self._mark)

    def drop_moves(self) -> None:
        """As `SlotImage.drop_moves`."""
        self._image.drop_moves()

    def patience(self) -> float:
        """As `SlotImage.patience`."""
        return self._image.patience()


MANY_BOXES = 2000
"""From here on a plan takes some megabytes for a moment. Chosen, not measured."""

_numbers = itertools.count()


def image_of(slot: LentSlot, plan: SavePlan) -> SlotImage:
    """Return the slot's image of `plan`: the one it has, or had when it was last used for that plan, or a new one.

    Plans of one structure under several agreements share their layout, and with it the image.
    """
    current = slot.views
    if isinstance(current, SlotImage) and current.plan.layout is plan.layout:
        return current
    found = next((views for views in slot.kept if views.plan.layout is plan.layout), None)
    if isinstance(found, SlotImage):
        slot.kept.remove(found)
        found.lay_out()
    else:
        with gc_paused():
            found = SlotImage(slot.memory.mapping.address, plan)
        if len(plan.boxes) >= MANY_BOXES:
            give_back()  # what a plan and its views take for a moment, and their C library keeps
    if current is not None:
        slot.kept.append(current)
        del slot.kept[: -PlanCache.MAX_PLANS]
    slot.views = found
    return found


def warm(
    pool: SlotPool, plan: SavePlan, nbytes: int, ready: Callable[[LentSlot], object], *, spare_nbytes: int
) -> None:
    """See to it that the pool has a slot of `nbytes`, with its pages mapped and views for `plan`.

    Args:
        pool: Of the checkpointer.
        plan: To be saved.
        nbytes: What a save of it needs.
        ready: Called with the slot, whose pages are there: pins it where that is needed, and makes the views.
        spare_nbytes: As for `SlotPool.acquire`.

    Raises:
        InsufficientMemoryError: There is no room for it, or there are no pages for it.
        AsyncCkptError: As `SlotPool.acquire`.

    Blocks: for an allocation and its pages; while every slot is in use and too small, as `on_busy` says.
    """
    if pool.fits(nbytes):
        return  # in use now, so its pages are there
    user = SaveId(0, next(_numbers), "prepare")
    slot = pool.acquire(nbytes, plan, user, step=0, path="(prepare)", spare_nbytes=spare_nbytes)
    try:
        if slot.views is None:
            _fault_in(slot)
        ready(slot)
    finally:
        pool.free(user)


def _fault_in(slot: LentSlot) -> None:
    """Map every page of a new slot, which the worker may still be faulting in."""
    mapping = slot.memory.mapping
    try:
        complete = mapping.populate(0, mapping.nbytes)
    except OSError as error:
        raise InsufficientMemoryError(
            f"there are no {mapping.nbytes} bytes of memory for the next save: {error}", nbytes=mapping.nbytes
        ) from error
    if not complete:  # a kernel before 5.14: touch them
        ctypes.memset(mapping.address + PAGE_NBYTES, 0, mapping.nbytes - 2 * PAGE_NBYTES)

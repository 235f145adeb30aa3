"""States that are larger than their memory: how large the ring is that they go through, and how their copy begins."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.layout import round_up
from asyncckpt.format.names import SaveId
from asyncckpt.memory.ring import Counters, Ring, ledger_nbytes
from asyncckpt.memory.slot import PAGE_NBYTES, slot_nbytes
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.planner import PlanCache
from asyncckpt.protocol.request import MIN_RING_SEGMENTS, RING_UNIT_NBYTES, SaveRequest, encode_request
from asyncckpt.staging.copy_cpu import Share
from asyncckpt.staging.cutting import copyable
from asyncckpt.staging.deferred import Copies
from asyncckpt.staging.engine import Engine
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.requests import News
from asyncckpt.staging.ring_copy import RingCopy
from asyncckpt.staging.segmented import SegmentedImage
from asyncckpt.staging.torn import MOST, Source, SourceWatch, Turns, window_in, windows_of
from asyncckpt.staging.transfer import Transfer

SEGMENT_NBYTES = 16 << 20
"""As `storage.rank_files.EXTENT_NBYTES`: one write."""

MANY_SEGMENTS = 8
"""Of less memory than so many segments of that length, shorter ones are made: some are being written, some filled.
Chosen, not measured."""

REQUEST_SLACK_NBYTES = 64 * 1024
"""Room for objects that grow between saves, so that a longer log line needs no new slot. Chosen, not measured."""

CLONED_NBYTES = 64 << 20
"""Of what no optimizer owns, so much is cloned at most for a copy behind the training; beyond it `save()` waits for
everything. Chosen: statistics and counters."""

_log = logging.getLogger("asyncckpt")


def ring_within(limit_nbytes: int, part_nbytes: Sequence[int], room_nbytes: int) -> Ring | None:
    """Return the longest ring for a slot of at most `limit_nbytes`.

    Args:
        limit_nbytes: See above.
        part_nbytes: Exact lengths of the files that pass through it.
        room_nbytes: Of the slot, for the request, in whole pages.

    Returns:
        None where that is too little for one.
    """
    cells_nbytes = limit_nbytes - 2 * PAGE_NBYTES - room_nbytes
    unit = RING_UNIT_NBYTES
    segment_nbytes = max(unit, min(SEGMENT_NBYTES, cells_nbytes // MANY_SEGMENTS // unit * unit))
    n_cells = (cells_nbytes - ledger_nbytes(part_nbytes, segment_nbytes)) // segment_nbytes
    return Ring(part_nbytes, segment_nbytes, n_cells) if n_cells >= MIN_RING_SEGMENTS else None


class Sized(NamedTuple):
    """What a save asks, and the memory that it takes: `nbytes` of a slot, to which `spare_nbytes` may be added."""

    asked: SaveRequest
    request: bytes
    nbytes: int
    spare_nbytes: int
    ring: Ring | None


class Streams(Protocol):
    """The trainer's end of the wire, as far as rings need it."""

    def stream(self, save_id: SaveId, slot: LentSlot) -> Callable[[], bool]:
        """As `Submitting.stream`."""


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
        self, process: Streams, config: CheckpointerConfig, engine: Engine, overlap: Overlap, turns: Turns
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
        ring = ring_within(limit // several, [part.nbytes for part in plan.layout.parts], room)
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
        news: News,
        *,
        save_id: SaveId,
        step: int,
        path: str,
    ) -> Begun:
        """Copy a state through a slot that is open, or begin to where that may be done behind the training.

        Raises:
            AsyncCkptError, RuntimeError, OSError: As `RingCopy.copy`.

        Blocks: without `later` in the result, for all but the last segments to be written.
        """
        assert sized.ring is not None
        self._say(step, plan, sized.ring)
        places = self._engine.places(flat.tensors)
        later, owners, tensors = self._later(flat.tensors, places, plan)
        watch = SourceWatch(flat, later, owners, save_id=save_id, step=step, path=path)
        if later and self._config.overlap_check != "off":
            # The slot's bytes are gone by the time that they could be compared: the sources alone are.
            sources = [Source(n, flat.tensors[n], None) for n in sorted(later)]
            if self._config.overlap_check == "hash":
                watch.digest(sources)
            else:
                chosen = windows_of(len(sources), self._turns.next(plan), MOST)
                sampled = [(sources[at], window_in(sources[at].tensor.numel(), *piece)) for at, *piece in chosen]
                watch.sample([(source, window) for source, window in sampled if window.n])
        image = ring_image_of(slot, plan, sized.ring)
        control, counters = slot.memory.control, Counters(slot.memory, slot.generation)
        counters.reset()
        control.stream(self._request(sized, news), image.ring.end)
        copies = RingCopy(
            image,
            counters,
            places,
            self._engine,
            self._process.stream(save_id, slot),
            save_id=save_id,
            step=step,
            path=path,
            timeout_s=self._config.slot_timeout_s,
            handover_s=self._config.worker_start_timeout_s,
        )
        if not later:
            copies.copy(tensors)
        return Begun(copies, later, Share([], [0] if later else []), tensors, watch, control.finish)

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

    def _request(self, sized: Sized, news: News) -> bytes:
        """Return the request, with the samples of what lies on devices: it is as long as it was with zeros."""
        if not news.samples.apart:
            return sized.request
        fetched = []
        for _, window in news.samples.apart:
            (place,) = self._engine.places([window])
            assert place is not None
            host = torch.empty(window.numel(), dtype=torch.uint8)
            self._engine.copy_here(place, [host], [window])
            fetched.append(ctypes.string_at(host.data_ptr(), host.numel()))
        return encode_request(replace(sized.asked, samples=news.samples.completed(fetched).encode()))

    def _say(self, step: int, plan: SavePlan, ring: Ring) -> None:
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


def ring_image_of(slot: LentSlot, plan: SavePlan, ring: Ring) -> SegmentedImage:
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

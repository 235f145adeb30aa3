"""How the copy of a state begins into a slot that has room for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.staging.copy_cpu import Share, SlotImage
from asyncckpt.staging.deferred import Copies
from asyncckpt.staging.engine import Engine
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.moving import FULL, Pace
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.requests import StructureReport, seal_with
from asyncckpt.staging.segmented_copy import Begun, Sized
from asyncckpt.staging.snapshots import Snapshot
from asyncckpt.staging.streaming import Process, SlotStream, Watermark, pays
from asyncckpt.staging.torn import MOST, MOST_ON_DEVICES, Source, SourceWatch, Turns, sampled
from asyncckpt.staging.warmth import image_of
from asyncckpt.state_dict.flatten import Flattened


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
        windows = [window for _, window in report.samples.apart]
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

"""How the copy of a state begins into a slot that has room for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch

from asyncckpt.config import CheckpointerConfig
from asyncckpt.format.names import SaveId
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.sampling import Window
from asyncckpt.staging import early
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.deferred import Copies
from asyncckpt.staging.engine import Engine
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.requests import News, seal_with
from asyncckpt.staging.rings import Begun, Sized
from asyncckpt.staging.snapshots import Snapshot
from asyncckpt.staging.torn import MOST, MOST_ON_DEVICES, Source, SourceWatch, Turns, window_in, windows_of
from asyncckpt.staging.warmth import image_of


class Whole:
    """See the module. One per checkpointer.

    Args:
        doorbell: Of the worker, which may begin to write before everything is copied.
        config: For `staging` and `overlap_check`.
        engine: Copies.
        overlap: Says what may be copied behind the training.
        turns: Of the windows that are looked at.
    """

    def __init__(
        self,
        doorbell: early.Doorbell,
        config: CheckpointerConfig,
        engine: Engine,
        overlap: Overlap,
        turns: Turns,
    ) -> None:
        self._doorbell, self._config, self._engine, self._overlap = doorbell, config, engine, overlap
        self._turns = turns

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
        windows = [window for _, window in news.samples.apart]
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
            seal = partial(seal_with, slot, image.body_end, sized.asked, news.samples, transfer)
        copies: Copies = image
        # What devices copy is counted by nobody, and the request may lack what they are still asked for.
        if later and transfer is None and early.pays(left):
            copies = early.EarlyCopy(image, slot, sized.request)
            self._doorbell.announce(save_id, slot)
            seal = slot.memory.control.finish
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
        watch.sample(_chosen(image, tensors, here, turn, MOST))
        chosen = _chosen(image, tensors, there, turn, MOST_ON_DEVICES)
        return watch.sample_on_devices([(s, w) for s, w in chosen if s.tensor.is_contiguous()])

    def _later(
        self, image: SlotImage, tensors: Sequence[torch.Tensor]
    ) -> tuple[frozenset[int], list[torch.Tensor], Snapshot | None]:
        """Return what is copied later and who else owns it, as `Overlap.later`; and room for copies on the devices."""
        later, owners = self._overlap.later(tensors, self._engine.deferrable(image, tensors))
        snapshot = self._engine.snapshot(image, tensors) if self._config.staging == "device" else None
        if snapshot is None:
            return later, owners, None
        return later | snapshot.numbers, [o for o in owners if not self._engine.is_apart(o)], snapshot


def _chosen(
    image: SlotImage, tensors: Sequence[torch.Tensor], boxes: Sequence[int], turn: int, most: int
) -> list[tuple[Source, Window]]:
    """Return what is looked at of boxes at a save."""
    chosen = windows_of(len(boxes), turn, most)
    pairs = image.pairs(tensors, [boxes[at] for at, _, _ in chosen])
    found = []
    for pair, (_, piece, pieces) in zip(pairs, chosen, strict=True):
        window = window_in(pair[2].numel(), piece, pieces)
        if window.n:
            found.append((Source(*pair), window))
    return found

"""A copy whose slot is written while it is being filled: the worker hears how far it is (memory/SPEC.md, section 6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch

from asyncckpt.failpoints import reach
from asyncckpt.format.names import SaveId
from asyncckpt.memory.ring import Counters
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.staging.copy_cpu import Share, SlotImage
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.moving import FULL, Pace
from asyncckpt.staging.watermark import Watermark

EARLY_FROM_NBYTES = 128 << 20
"""Less than that is copied in about the time that the worker needs to begin."""


class Doorbell(Protocol):
    """The trainer's end of the wire, as far as this needs it."""

    def announce(self, save_id: SaveId, slot: LentSlot) -> None:
        """As `Submitting.announce`."""


class EarlyCopy:
    """Does what the image does, and counts. For one save.

    Args:
        image: Of the slot.
        slot: Open, and of this save.
        request: What the seal would write.
    """

    def __init__(self, image: SlotImage, slot: LentSlot, request: bytes) -> None:
        self._image = image
        address = slot.memory.mapping.address
        counters = Counters(slot.memory, slot.generation)
        counters.reset()
        slot.memory.control.stream(request, image.body_end)

        def tell(nbytes: int) -> None:
            counters.filled = nbytes
            reach("early: more filled")
            image.progress.come_to(nbytes)

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


def pays(left: Share) -> bool:
    """Whether enough is left to copy behind the training."""
    return sum(box[2] for box in left.large) >= EARLY_FROM_NBYTES

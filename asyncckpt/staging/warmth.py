"""Slots that are ready before they are needed: their pages are there, and a plan's views of them."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable

from asyncckpt.collector import collector_paused
from asyncckpt.errors import InsufficientMemoryError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.heap import give_back
from asyncckpt.memory.slot import PAGE_NBYTES
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.slot_pool import SlotPool

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
        with collector_paused():
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

"""Which save an event is about, so that a bug that it brings to light ends that one only."""

from __future__ import annotations

from collections.abc import Mapping

from asyncckpt_worker.events import Broken, Event, Prepared, Published, Received, Removed, SlotRead, Written
from asyncckpt_worker.records import Slot


def concerned(event: Event, slots: Mapping[int, Slot]) -> str | None:
    """Return the save's id, or None when the event is about none."""
    match event:
        case Prepared() | Written():
            return event.key[0]
        case Published() | Removed() | Broken():
            return event.save_id
        case SlotRead() if event.request is not None:
            return event.request.save_id
        case SlotRead() if (slot := slots.get(event.slot)) is not None and slot.key is not None:
            return slot.key[0]
        case Received():
            return getattr(event.message, "save_id", None)
    return None

"""Which slot is not to be overwritten: the one with the newest committed snapshot, where the user wants that kept."""

from __future__ import annotations

from asyncckpt.errors import InsufficientMemoryError
from asyncckpt.format.names import SaveId
from asyncckpt.staging.lent_slot import LentSlot


class Keeping:
    """One owner: the pool, under its lock.

    Args:
        wanted: `keep_in_memory="latest"`. Else nothing is ever kept.

    Attributes:
        slot: The slot, or None.
    """

    def __init__(self, *, wanted: bool) -> None:
        self.wanted = wanted
        self.slot: LentSlot | None = None
        self._sequence = -1

    def committed(self, slot: LentSlot, save_id: SaveId) -> None:
        """The snapshot in `slot` is committed: it is kept, unless a later one is."""
        slot.committed = (save_id, slot.generation)
        if self.wanted and save_id.sequence > self._sequence:
            self.slot, self._sequence = slot, save_id.sequence

    def forget(self, slot: LentSlot) -> None:
        """The slot is closed."""
        if slot is self.slot:
            self.slot = None

    def is_idle(self, slot: LentSlot) -> bool:
        """Whether no save uses the slot, and none will need what it holds."""
        return slot.free and slot is not self.slot


def too_large(what: str, nbytes: int, several: int, limit: int) -> InsufficientMemoryError:
    """Return the error of a save, `what`, of which `several` slots of `nbytes` are more than there may be."""
    slots = "two slots, since keep_in_memory='latest', each" if several > 1 else "a slot"
    return InsufficientMemoryError(
        f"{what}: the snapshot needs {slots} of {nbytes} bytes, arena_limit_bytes is {limit}, which is too little for "
        "segments of it too; raise the limit",
        nbytes=several * nbytes,
        limit=limit,
    )


def no_room_beside_kept(what: str, limit: int | None, kept_nbytes: int) -> InsufficientMemoryError:
    """Return the error of a save, `what`, that would need a slot beside the one that is kept."""
    text = (
        f"{what}: the snapshot does not fit into arena_limit_bytes={limit} beside the one of {kept_nbytes} bytes "
        "that keep_in_memory='latest' keeps; raise the limit"
    )
    return InsufficientMemoryError(text, limit=limit)

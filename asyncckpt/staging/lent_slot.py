"""One slot of this process."""

from __future__ import annotations

from dataclasses import dataclass

from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import Mapping
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.staging.room import Room


@dataclass(eq=False, kw_only=True)
class LentSlot(Room):
    """A slot of this process; closed by the pool only.

    Attributes:
        number: The worker's name for it.
        memory: Its mapping.
        session: The session that it was lent to, or handed to.
        generation: Of the snapshot that it holds or receives.
        user: The save that uses it, or None.
        used: Grows with every use of a slot of this pool.
        staging: The training thread is copying into it; nobody else unmaps it.
        orphaned: Its worker is gone, and no other one takes it over; it is closed instead of reused.
        committed: The last save from it that was committed, and its generation; None: none yet.
        handovers: To how many workers in turn it was handed since a save in it has ended.
        is_ring: What it holds passes through it, and is never whole in it.
    """

    number: int
    memory: SlotMemory
    session: str = ""
    generation: int = 0
    user: SaveId | None = None
    used: int = 0
    staging: bool = False
    orphaned: bool = False
    committed: tuple[SaveId, int] | None = None
    handovers: int = 0
    is_ring: bool = False

    def committed_of(self, generation: int) -> str:
        """Return the save id of the snapshot of `generation` if that was committed, else ""."""
        return str(self.committed[0]) if self.committed is not None and self.committed[1] == generation else ""

    def knows(self, plan: SavePlan) -> bool:
        """Whether there are views for `plan`, or for one of the same layout."""
        return any(views is not None and views.plan.layout is plan.layout for views in (self.views, *self.kept))

    @property
    def mapping(self) -> Mapping:
        """Its memory."""
        return self.memory.mapping

    @property
    def free(self) -> bool:
        """Whether no save uses it, and nothing writes to it."""
        return self.user is None and self.is_quiet()

    def _unmap(self) -> None:
        self.memory.close()


def what_is_saved(save_id: SaveId, step: int | None) -> str:
    """Return how errors name a save; `step` is None where only rank 0 will know it."""
    return f"save {save_id}" if step is None else f"step {step}"

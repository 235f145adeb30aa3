"""Memory that a state is copied into: a slot of this process, or private memory of a save without a worker.

It is torn down in this order: copies end, memory is unpinned, views are dropped, memory is unmapped.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Protocol

from asyncckpt.format.names import SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import Mapping
from asyncckpt.planning.save_plan import SavePlan

_log = logging.getLogger("asyncckpt")


class Views(Protocol):
    """Views into the memory, made for `plan`. They are dropped before it is unmapped."""

    @property
    def plan(self) -> SavePlan:
        """The plan that the views were made for."""

    def lay_out(self) -> None:
        """Write the parts of the image that are the same in all saves, after other views were used for the memory."""

    def settle(self) -> None:
        """Wait until no thread copies into the views."""


class Pinned(Protocol):
    """The pinning of the memory."""

    @property
    def held(self) -> bool:
        """Whether the memory is pinned; the driver may have refused."""

    def close(self) -> bool:
        """Unpin the memory; False: it is still pinned, and must stay mapped."""


class InFlight(Protocol):
    """Copies by devices, which run without a thread of this process."""

    def ended(self) -> bool:
        """Whether all copies have ended. Does not wait.

        Raises:
            RuntimeError: A device does not answer.
        """

    def settle(self) -> bool:
        """Wait, for a limited time, until all copies have ended; returns whether they have."""


@dataclass(eq=False, kw_only=True)
class StagingBuffer(ABC):
    """Memory that a state is copied into. It has one owner.

    Attributes:
        views: Views for the plan that the memory was last used for.
        cached_views: Views for other plans, the latest last.
        pin: Its pinning, once a tensor of a device was copied into it.
        in_flight: Copies by devices that may still run.
        device_state_unknown: A device does not say whether they still run.
    """

    views: Views | None = None
    cached_views: list[Views] = field(default_factory=list)
    pin: Pinned | None = None
    in_flight: InFlight | None = None
    device_state_unknown: bool = False

    @property
    @abstractmethod
    def mapping(self) -> Mapping:
        """The memory."""

    @abstractmethod
    def _unmap(self) -> None:
        """Unmap the memory."""

    def is_quiet(self) -> bool:
        """Whether no device writes to it. Does not wait."""
        try:
            if self.in_flight is not None and self.in_flight.ended():
                self.in_flight = None
        except RuntimeError as error:
            if not self.device_state_unknown:
                _log.error(
                    "%d bytes of staging memory are not reused, since a device does not say whether it still copies "
                    "into them: %s",
                    self.mapping.nbytes,
                    error,
                )
            self.device_state_unknown = True
        return self.in_flight is None

    def settle(self) -> None:
        """Wait until nothing writes to it. Blocks for a limited time; if that is over, `is_quiet` stays False."""
        if self.views is not None:
            self.views.settle()
        if self.in_flight is not None:
            self.in_flight.settle()

    def close(self) -> None:
        """Unpin and unmap.

        IMPORTANT: memory that a device may still write to, or that the driver still has pinned, stays mapped until the
        process ends. If it were unmapped, the kernel could give its pages to others, and the device would overwrite
        them.
        """
        if not self.is_quiet() or (self.pin is not None and not self.pin.close()):
            _log.error("%d bytes stay mapped, since a device may still copy into them", self.mapping.nbytes)
            return
        self.pin = self.views = None  # views must be dropped before the memory is unmapped
        self.cached_views.clear()
        self._unmap()


@dataclass(eq=False, kw_only=True)
class PrivateStagingBuffer(StagingBuffer):
    """Memory of this process only, for a save without a worker."""

    memory: Mapping

    @property
    def mapping(self) -> Mapping:
        """The memory."""
        return self.memory

    def _unmap(self) -> None:
        self.memory.close()


@dataclass(eq=False, kw_only=True)
class Slot(StagingBuffer):
    """A slot of this process. Only the pool closes it.

    Attributes:
        number: The worker's number for it.
        memory: Its mapping.
        session: Name of the session that it was lent to, or handed over to.
        generation: Generation of the snapshot that it holds or receives.
        user: ID of the save that uses it, or None.
        used: The pool's count of uses at its last use: the smallest is the least recently used slot.
        staging: The training thread is copying into it; no other thread may unmap it.
        orphaned: Its worker is gone, and no other one adopts it: it is closed instead of reused.
        committed: The last save from it that was committed, and its generation; None: none yet.
        handovers: To how many workers in turn it was handed over since a save in it ended.
        is_ring: The state is larger than the slot, and passes through it in segments.
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
        """Return the save id of the snapshot of `generation` if it was committed, else ""."""
        return str(self.committed[0]) if self.committed is not None and self.committed[1] == generation else ""

    def has_views_for(self, plan: SavePlan) -> bool:
        """Whether there are views for `plan`, or for one of the same layout."""
        return any(views is not None and views.plan.layout is plan.layout for views in (self.views, *self.cached_views))

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


def describe_save(save_id: SaveId, step: int | None) -> str:
    """Return how error messages name a save; `step` is None if only rank 0 knows it."""
    return f"save {save_id}" if step is None else f"step {step}"

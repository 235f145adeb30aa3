"""How a save's id reaches every rank: in the plan that the coordinator sends it, even where a cached one is used.

A planner with `enable_plan_caching` puts its plan of an earlier save in the place of the one that was sent, and with it
what the storage had written into that. So a ticket makes itself known to the thread that receives it.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.names import SaveId


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A rank's part in one save: its id, which rank, of how many."""

    save_id: SaveId
    rank: int
    world_size: int

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (str(self.save_id), self.rank, self.world_size)


_here = threading.local()


def _receive(save_id: str, rank: int, world_size: int) -> Ticket:
    _here.ticket = ticket = Ticket(save_id=SaveId.parse(save_id), rank=rank, world_size=world_size)
    return ticket


def forget() -> None:
    """Forget what this thread has received: a save begins."""
    _here.ticket = None


def received() -> Ticket | None:
    """Return the ticket that this thread has received since `forget`."""
    return getattr(_here, "ticket", None)

"""How a save's id reaches every rank, and who has a worker the coordinator: in plans, even where cached ones are used.

A planner with `enable_plan_caching` puts its plan of an earlier save in the place of the one that was sent, and with it
what the storage had written into that. So tickets and offers make themselves known to the thread that receives them.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from asyncckpt.format.names import SaveId


@dataclass(frozen=True, kw_only=True, slots=True)
class Offer:
    """What a rank tells the coordinator before the plan: the `instance` of its worker; "": none, and `why`."""

    rank: int
    instance: str
    why: str

    def __reduce__(self) -> tuple[Any, ...]:
        return _offered, (self.rank, self.instance, self.why)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ticket:
    """A rank's part in one save: its id, which rank, of how many.

    `by_worker`: the workers write, and the coordinator is rank 0. `workers`: every rank's, and `told`: what rank 0 says
    of its own; only where they are several.
    """

    save_id: SaveId
    rank: int
    world_size: int
    by_worker: bool = False
    workers: tuple[str, ...] = ()
    told: bytes = b""

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive, (str(self.save_id), self.rank, self.world_size, self.by_worker, self.workers, self.told)


class _Here(threading.local):
    def __init__(self) -> None:
        self.ticket: Ticket | None = None
        self.offers: dict[int, Offer] = {}


_here = _Here()


def _receive(
    save_id: str, rank: int, world_size: int, by_worker: bool, workers: tuple[str, ...], told: bytes
) -> Ticket:
    _here.ticket = ticket = Ticket(
        save_id=SaveId.parse(save_id),
        rank=rank,
        world_size=world_size,
        by_worker=by_worker,
        workers=workers,
        told=told,
    )
    return ticket


def _offered(rank: int, instance: str, why: str) -> Offer:
    offer = Offer(rank=rank, instance=instance, why=why)
    note(offer)
    return offer


def note(offer: Offer) -> None:
    """Take an offer as received by this thread."""
    _here.offers[offer.rank] = offer


def forget() -> None:
    """Forget what this thread has received: a save begins."""
    _here.ticket = None
    _here.offers = {}


def received() -> Ticket | None:
    """Return the ticket that this thread has received since `forget`."""
    return _here.ticket


def offers() -> dict[int, Offer]:
    """Return the offers that this thread has received since `forget`, by rank."""
    return _here.offers

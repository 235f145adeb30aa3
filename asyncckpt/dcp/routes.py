"""Who reads what of a file for which ranks, and in which order it is sent. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Wish(NamedTuple):
    """An item of a plan: a box of a whole tensor, in elements; or, without offsets, a leaf that is no tensor."""

    fqn: str
    offsets: tuple[int, ...] | None = None
    lengths: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Delivery:
    """A box, and who takes it.

    Attributes:
        fqn, offsets, lengths: As `Wish`'s.
        takers: By rank of the group: the numbers of the items in its plan. Of others' only the reader knows.
        to_all: Broadcast to the whole group; else sent to each taker.
    """

    fqn: str
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    takers: dict[int, tuple[int, ...]]
    to_all: bool


@dataclass(frozen=True, slots=True)
class Route:
    """What one rank sends or takes, in order.

    Attributes:
        world_size: Ranks of the group; 1: nothing is sent.
        reader: The rank of the group that reads for this one; maybe itself.
        served: The reader only: the ranks that it reads for, itself included.
        names: The reader only: the FQNs that they want.
        deliveries: Those in which this rank takes part; of the reader, all.
    """

    world_size: int
    reader: int
    served: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    deliveries: tuple[Delivery, ...] = ()


def plan_routes(wishes: Sequence[Sequence[Wish]], readers: Sequence[int]) -> list[Route]:
    """Return the route of every rank.

    Args:
        wishes: By rank of the group, what it wants.
        readers: By rank, who reads for it.
    """
    found: list[Route] = []
    by_reader = {reader: _deliveries(wishes, readers, reader) for reader in sorted(set(readers))}
    for rank, reader in enumerate(readers):
        if rank == reader:
            served = tuple(r for r, other in enumerate(readers) if other == reader)
            names = tuple(dict.fromkeys(wish.fqn for r in served for wish in wishes[r]))
            found.append(Route(len(readers), reader, served, names, tuple(by_reader[reader])))
        else:
            own = [
                Delivery(d.fqn, d.offsets, d.lengths, {rank: d.takers[rank]}, d.to_all)
                for d in by_reader[reader]
                if rank in d.takers
            ]
            found.append(Route(len(readers), reader, deliveries=tuple(own)))
    return found


def _deliveries(wishes: Sequence[Sequence[Wish]], readers: Sequence[int], reader: int) -> list[Delivery]:
    """Return what one reader sends: what all want first, then by name, in the order in which it wants them itself."""
    names: dict[str, dict[Wish, dict[int, list[int]]]] = {}
    served = [rank for rank, other in enumerate(readers) if other == reader]
    for rank in sorted(served, key=lambda rank: rank != reader):
        for number, wish in enumerate(wishes[rank]):
            if wish.offsets is not None:
                names.setdefault(wish.fqn, {}).setdefault(wish, {}).setdefault(rank, []).append(number)
    found = [
        Delivery(
            wish.fqn,
            wish.offsets or (),
            wish.lengths,
            {rank: tuple(numbers) for rank, numbers in takers.items()},
            to_all=len(takers) == len(wishes) > 1,
        )
        for boxes in names.values()
        for wish, takers in boxes.items()
    ]
    # IMPORTANT: broadcasts first. A rank that was told of a failure leaves, and would be missed by a later broadcast.
    return sorted(found, key=lambda delivery: not delivery.to_all)

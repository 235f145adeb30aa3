"""How a tensor lies on the ranks that have said something of it: on one grid, or scattered in boxes. Pure."""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError, OverlappingShardsError, RanksDisagreeError
from asyncckpt.planning.claims import ShardClaim
from asyncckpt.planning.sharding.grid import Box, Grid, overlapping


class Given(NamedTuple):
    """What these ranks have said, all the same."""

    ranks: tuple[int, ...]
    claim: ShardClaim


class Lie(NamedTuple):
    """A tensor on a grid, all of whose ranks say so."""

    grid: Grid
    shape: tuple[int, ...]
    itemsize: int

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same elements."""
        return self.grid.n_replicas > 1


class Scattered(NamedTuple):
    """A tensor in boxes: which ranks hold each, ascending, and the first of those that call themselves first."""

    holders: dict[Box, tuple[int, ...]]
    firsts: dict[Box, int]
    shape: tuple[int, ...]
    itemsize: int

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same box."""
        return any(len(ranks) > 1 for ranks in self.holders.values())

    def knows(self, rank: int, boxes: Iterable[Box]) -> bool:
        """Whether `rank` is known to hold all of `boxes`."""
        return all(rank in self.holders.get(box, ()) for box in boxes)


def resolve(given: Sequence[Given], world_size: int) -> Lie | Scattered | AsyncCkptError | None:
    """Return how a tensor lies.

    Returns:
        None when not all ranks of its mesh have said so; an error where ranks contradict others.
    """
    first = given[0].claim
    for _, claim in given[1:]:
        if (claim.dtype, claim.shape) != (first.dtype, first.shape):
            return _unlike(given)
    itemsize = DTYPES[first.dtype].itemsize
    grids = [claim.grid for _, claim in given if claim.grid is not None]
    outside = [rank for grid in dict.fromkeys(grids) for rank in grid.ranks if rank >= world_size]
    if outside:
        text = f"{first.fqn!r} lies on a mesh with rank {outside[0]}, the checkpointer has {world_size} ranks"
        return disagreement(text + "; ranks of the mesh must be the checkpointer's", outside)
    if len(grids) == len(given):
        distinct = list(dict.fromkeys(grids))
        said = given[0].ranks if len(given) == 1 else tuple({r for ranks, _ in given for r in ranks})
        members = set(said)
        if not all(members.issuperset(grid.ranks) for grid in distinct):
            return None
        joined = distinct[0] if len(distinct) == 1 else _joined(tuple(distinct))
        if joined is not None:
            return Lie(joined, first.shape, itemsize)
    return _scattered(given, itemsize)


@functools.lru_cache(256)
def _joined(grids: tuple[Grid, ...]) -> Grid | None:
    """Return equal grids of different ranks as one, with one more mesh dimension that replicates; None if unlike.

    The very same one for all tensors that lie alike: what is done for each grid is done once.
    """
    ordered = sorted(grids, key=lambda grid: grid.ranks)
    ranks = tuple(itertools.chain.from_iterable(grid.ranks for grid in ordered))
    alike = len({(grid.mesh, grid.placements) for grid in grids}) == 1
    if not alike or len(set(ranks)) != len(ranks):
        return None
    return Grid((len(grids), *ordered[0].mesh), ranks, ((), *ordered[0].placements))


def _scattered(given: Sequence[Given], itemsize: int) -> Scattered | OverlappingShardsError:
    holders: dict[Box, list[int]] = {}
    firsts: dict[Box, int] = {}
    for ranks, claim in given:
        for rank in ranks:
            for box in claim.of_rank(rank):
                holders.setdefault(box, []).append(rank)
                if claim.is_first:
                    firsts[box] = min(rank, firsts.get(box, rank))
    twice = overlapping(list(holders))
    if twice is None:
        ordered = {box: tuple(sorted(set(holders[box]))) for box in holders}
        return Scattered(ordered, firsts, given[0].claim.shape, itemsize)
    one, other = (f"offsets {list(box[0])} sizes {list(box[1])} on rank {min(holders[box])}" for box in twice)
    fqn = given[0].claim.fqn
    return OverlappingShardsError(
        f"tensor {fqn!r}: two ranks hold some of the same elements in boxes that differ: {one}; {other}; correct "
        "offsets and global shape, or give the tensors different keys",
        fqn=fqn,
        boxes=[one, other],
    )


def _unlike(given: Sequence[Given]) -> RanksDisagreeError:
    kinds = {(c.dtype, c.shape): ranks[0] for ranks, c in reversed(given)}
    said = " but ".join(f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
    return disagreement(
        f"shards of {given[0].claim.fqn!r} are parts of {said}; give one global shape and dtype on all ranks. "
        "Optimizer states with integer keys mean other parameters on other pipeline stages: save what "
        "torch.distributed.checkpoint.state_dict.get_optimizer_state_dict returns, which has their names",
        list(kinds.values()),
    )


def disagreement(text: str, ranks: Sequence[int]) -> RanksDisagreeError:
    """Return the error for ranks that contradict each other about one name."""
    return RanksDisagreeError(text, detail=text, ranks=list(ranks[:8]))


def writer_of(fqn: str, holders: Sequence[int]) -> int:
    """Return which of the ranks that hold a box writes it whole: one replica has all boxes of a name, so to say."""
    return holders[zlib.crc32(fqn.encode()) % len(holders)]

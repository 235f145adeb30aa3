"""Who writes which shard: what the ranks have said of them, the same on all ranks. Pure; no torch.

A tensor on a grid needs no agreement to be stored rightly, since the grid says who holds what, and a hash of its name
which of them writes. What is agreed upon knows of boxes that were given one by one, too. Copies that the ranks have
compared whole, which they do when they meet, are split and balanced; before, one holder writes all of a box, so that
no box is mixed of bytes that were never compared.

Boxes are never stored for one rank only. Ranks that contradict each other about a name can not save it.
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError, OverlappingShardsError, RanksDisagreeError
from asyncckpt.planning.load_balancing import replica_of, spread
from asyncckpt.planning.sample_schedule import SAMPLE_LIMIT, Turn
from asyncckpt.sharding.mesh_layout import Box, Grid, holders_in, nbytes_by_position, overlapping, position_in
from asyncckpt.sharding.shard_claims import ShardClaim


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


Rows = tuple[tuple[int, int], ...]
"""(first row, rows) along the first dimension of a box that is larger than 1."""
_Key = tuple[str, Box]


class BoxDuty(NamedTuple):
    """What a rank writes of one of its boxes; `shared`: others hold it too, `split`: and several of them write it."""

    rows: Rows
    shared: bool = False
    split: bool = False


class ShardDuty(NamedTuple):
    """What a rank writes of a tensor: for each of its boxes; when it is compared; whether the others must be told."""

    boxes: tuple[BoxDuty, ...]
    turn: Turn | None
    is_news: bool


class ShardBook:
    """Immutable. Part of an `Agreement`."""

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._given: dict[str, tuple[Given, ...]] = {}
        self._lies: dict[str, Lie | Scattered] = {}
        self._base: dict[int, int] = {}
        self.conflicts: dict[str, AsyncCkptError] = {}
        self._of_rank: dict[int, dict[_Key, BoxDuty]] = {}

    def extended(
        self,
        groups: Iterable[tuple[tuple[int, ...], tuple[ShardClaim, ...]]],
        base: Mapping[int, int],
        *,
        whole: Collection[str] = (),
    ) -> ShardBook:
        """Return the book after the ranks have met.

        Args:
            groups: Ranks, and what each of them holds now: of a name, all that do.
            base: Bytes that ranks write apart from shards.
            whole: Names under which ranks hold whole tensors now.
        """
        after = ShardBook(self._world_size)
        after._given, after._lies = dict(self._given), dict(self._lies)
        after.conflicts = dict(self.conflicts)
        said: dict[str, list[Given]] = {}
        for ranks, claims in groups:
            for claim in claims:
                said.setdefault(claim.fqn, []).append(Given(ranks, claim))
        for fqn in {*said, *whole}:
            after._given.pop(fqn, None)
            after._lies.pop(fqn, None)
            after.conflicts.pop(fqn, None)
        for fqn, given in said.items():
            after._given[fqn] = tuple(given)
            found = resolve(after._given[fqn], self._world_size)
            if isinstance(found, AsyncCkptError):
                after.conflicts[fqn] = found
            elif found is not None:
                after._lies[fqn] = found
        # What is shared as it was stays spread as it is, so that no layout changes.
        after._base = self._base if after._given == self._given else {**self._base, **base}
        return after

    def contradict(self, names: Iterable[str]) -> None:
        """Note names under which some ranks hold whole tensors, others shards."""
        for fqn in names:
            ranks = [rank for given in self._given[fqn] for rank in given.ranks]
            text = f"ranks {ranks[:4]} hold shards of {fqn!r}, others a plain tensor of that name"
            self.conflicts[fqn] = disagreement(text + "; describe it on all ranks, or give it another key", ranks)

    def check(self) -> None:
        """Check that the ranks do not contradict each other.

        Raises:
            RanksDisagreeError, OverlappingShardsError: They do; about the first such name.
        """
        if self.conflicts:
            raise self.conflicts[min(self.conflicts)]

    @property
    def names(self) -> KeysView[str]:
        """What anything was said of."""
        return self._given.keys()

    def duty(self, rank: int, claim: ShardClaim) -> ShardDuty:
        """Return what `rank` writes of a tensor of which it holds shards.

        Raises:
            AsyncCkptError: The ranks contradict each other about this name.
        """
        if claim.fqn in self.conflicts:
            raise self.conflicts[claim.fqn]
        said = self._said(rank, claim)
        lie = self._lies.get(claim.fqn)
        boxes = claim.of_rank(rank)
        if not said or lie is None or (isinstance(lie, Scattered) and not lie.knows(rank, boxes)):
            duties = tuple(self._unagreed(rank, claim, box) for box in boxes)
            return ShardDuty(duties, Turn(0, 1) if any(duty.shared for duty in duties) else None, not said)
        if isinstance(lie, Lie) and lie.grid.n_replicas == 1:
            return ShardDuty(tuple(BoxDuty(_rows(box)) for box in boxes), None, False)
        agreed = self._duties(rank)
        return ShardDuty(tuple(agreed[claim.fqn, box] for box in boxes), self._turns.get(claim.fqn), False)

    def _unagreed(self, rank: int, claim: ShardClaim, box: Box) -> BoxDuty:
        """What is written of a box that not all ranks have agreed upon: all that can be known without them.

        Whoever holds a box of a mesh is known, but for its like of other ranks. Of these, and of other boxes, it
        is supposed that the ranks hold it which hold the same one of another tensor of that shape: so it is with an
        optimizer's state, which comes after the first save.
        """
        grid = claim.grid and self._wider.get((claim.grid, claim.shape), self._wider.get((claim.grid, None)))
        grid = grid or claim.grid
        if grid is None or position_in(grid, rank) is None:
            writer = self._writers.get((claim.shape, box), rank)
            return BoxDuty(_rows(box) if claim.is_first and writer in (rank, None) else ())
        return _of_one(rank, claim.fqn, holders_in(grid, rank), box)

    @cached_property
    def _writers(self) -> dict[tuple[tuple[int, ...], Box], int | None]:
        """Who comes first of those that hold a box; None where that differs from tensor to tensor."""
        found: dict[tuple[tuple[int, ...], Box], int | None] = {}
        for lie in self._lies.values():
            if isinstance(lie, Scattered):
                for box, first in lie.firsts.items():
                    found[lie.shape, box] = first if found.get((lie.shape, box), first) == first else None
        return found

    @cached_property
    def _wider(self) -> dict[tuple[Grid, tuple[int, ...] | None], Grid | None]:
        """What a mesh of some ranks and its like of others were joined to, of tensors of a shape, and of any shape.

        None where that differs from tensor to tensor.
        """
        found: dict[tuple[Grid, tuple[int, ...] | None], Grid | None] = {}
        seen: set[tuple[int, int, tuple[int, ...]]] = set()  # hashing a grid takes as long as it has ranks
        for fqn, lie in self._lies.items():
            if not isinstance(lie, Lie):
                continue
            for grid in (given.claim.grid for given in self._given[fqn]):
                if grid is None or (id(grid), id(lie.grid), lie.shape) in seen:
                    continue
                seen.add((id(grid), id(lie.grid), lie.shape))
                for key in ((grid, lie.shape), (grid, None)):
                    found[key] = lie.grid if found.setdefault(key, lie.grid) == lie.grid else None
        return found

    def _said(self, rank: int, claim: ShardClaim) -> bool:
        return any(given.claim == claim and rank in given.ranks for given in self._given.get(claim.fqn, ()))

    def loads(self) -> dict[int, int]:
        """Return what each rank writes of shards, replicas taken as evenly spread."""
        return dict(self._loads)

    @cached_property
    def _loads(self) -> dict[int, int]:
        totals: dict[int, int] = {}
        add_grid_loads(totals, [lie for lie in self._lies.values() if isinstance(lie, Lie)])
        for lie in self._lies.values():
            if isinstance(lie, Scattered):
                for (_, sizes), ranks in lie.holders.items():
                    nbytes = replica_of(sizes, lie.itemsize).nbytes // len(ranks)
                    for rank in ranks:
                        totals[rank] = totals.get(rank, 0) + nbytes
        return totals

    def compared(self, claims: Sequence[ShardClaim], rank: int) -> list[tuple[int, int | None]]:
        """Say what of a rank's shards is compared when ranks meet, in the order in which the digests are given.

        Returns:
            (position in `claims`, number of the box; None: all its boxes as one).
        """
        found: list[tuple[int, int | None]] = []
        for position, claim in enumerate(claims):
            lie = self._lies.get(claim.fqn)
            if isinstance(lie, Lie) and lie.grid.n_replicas > 1:
                found.append((position, None))
        for position, claim in enumerate(claims):
            lie = self._lies.get(claim.fqn)
            if isinstance(lie, Scattered):
                found += [(position, n) for n, box in enumerate(claim.of_rank(rank)) if len(lie.holders[box]) > 1]
        return found

    def lie(self, fqn: str) -> Lie | Scattered | None:
        """Return how a tensor is known to lie."""
        return self._lies.get(fqn)

    @cached_property
    def _turns(self) -> dict[str, Turn]:
        shared = sorted(fqn for fqn, lie in self._lies.items() if lie.is_shared)
        period = max(1, -(-len(shared) // SAMPLE_LIMIT))
        return {fqn: Turn(n % period, period) for n, fqn in enumerate(shared)}

    def _duties(self, rank: int) -> dict[_Key, BoxDuty]:
        """Return what `rank` writes of all boxes that it shares with others, or that are scattered."""
        found = self._of_rank.get(rank)
        if found is not None:
            return found
        found = dict(self._scattered.get(rank, {}))
        groups: dict[tuple[int, ...], list[tuple[_Key, int]]] = {}
        sharers: dict[int, tuple[int, ...]] = {}
        for fqn in sorted(self._lies):
            lie = self._lies[fqn]
            if not isinstance(lie, Lie) or lie.grid.n_replicas == 1:
                continue
            at = position_in(lie.grid, rank)
            if at is None:
                continue
            holders = sharers.get(id(lie.grid))
            if holders is None:
                holders = sharers[id(lie.grid)] = lie.grid.replicas(at)
            boxes = lie.grid.boxes(lie.shape, lie.grid.coordinate(at))
            groups.setdefault(holders, []).extend(((fqn, box), lie.itemsize) for box in boxes)
        for holders, keys in groups.items():
            replicas = [replica_of(box[1], itemsize) for (_, box), itemsize in keys]
            loads = {r: self._base.get(r, 0) + self._loads.get(r, 0) for r in holders}
            for (key, _), cut in zip(keys, spread({holders: replicas}, loads)[holders], strict=True):
                found[key] = _duty_of(rank, cut)
        self._of_rank[rank] = found
        return found

    @cached_property
    def _scattered(self) -> dict[int, dict[_Key, BoxDuty]]:
        found: dict[int, dict[_Key, BoxDuty]] = {}
        sets: dict[tuple[int, ...], list[tuple[_Key, int]]] = {}
        for fqn in sorted(self._lies):
            lie = self._lies[fqn]
            if not isinstance(lie, Scattered):
                continue
            for box, ranks in lie.holders.items():
                if len(ranks) == 1:
                    found.setdefault(ranks[0], {})[fqn, box] = BoxDuty(_rows(box))
                else:
                    sets.setdefault(ranks, []).append(((fqn, box), lie.itemsize))
        loads = {rank: self._base.get(rank, 0) + n for rank, n in self._loads.items()}
        replicas = {ranks: [replica_of(box[1], size) for (_, box), size in keys] for ranks, keys in sets.items()}
        for ranks, pieces in spread(replicas, loads).items():
            for (key, _), cut in zip(sets[ranks], pieces, strict=True):
                for rank in ranks:
                    found.setdefault(rank, {})[key] = _duty_of(rank, cut)
        return found


def _rows(box: Box) -> Rows:
    return ((0, replica_of(box[1], 1).n_rows),)


def _duty_of(rank: int, cut: Iterable[tuple[int, int, int]]) -> BoxDuty:
    pieces = tuple(cut)
    return BoxDuty(tuple((first, n) for owner, first, n in pieces if owner == rank), True, len(pieces) > 1)


def _of_one(rank: int, fqn: str, holders: tuple[int, ...], box: Box) -> BoxDuty:
    """Return what `rank` writes of a box that one of its holders writes whole."""
    return BoxDuty(_rows(box) if rank == writer_of(fqn, holders) else (), len(holders) > 1)


def add_grid_loads(totals: dict[int, int], lies: Sequence[Lie]) -> None:
    """Add to `totals`, by rank, the bytes that it holds of each tensor, divided by how many ranks hold the same."""
    counts: dict[tuple[int, tuple[int, ...]], int] = {}
    grids: dict[int, Grid] = {}
    for lie in lies:
        grids[id(lie.grid)] = lie.grid
        key = (id(lie.grid), lie.shape)
        counts[key] = counts.get(key, 0) + lie.itemsize
    for number, grid in grids.items():
        sums = [0] * len(grid.ranks)
        for (one, shape), nbytes in counts.items():
            if one == number and 0 not in shape:
                held = nbytes_by_position(grid, shape, nbytes)
                sums = [total + more for total, more in zip(sums, held, strict=True)]
        for rank, nbytes in zip(grid.ranks, sums, strict=True):
            totals[rank] = totals.get(rank, 0) + nbytes // grid.n_replicas

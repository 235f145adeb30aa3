"""Which rank writes which shard: decided from the ranks' claims, the same on all ranks. Pure; no torch.

A tensor on a grid can be stored without an agreement: the grid determines which ranks hold which part, and a hash of
its name which of these writes it. Boxes that are described one by one need an agreement. Copies that the ranks have
compared as a whole, at a meeting, are split and balanced between the holders. Before that, one holder writes the whole
box, so that no stored box mixes bytes that were never compared.

A shard is never stored per rank, but for one without elements: the other ranks may hold a subclass, of which they store
components under other names. A name about which the ranks contradict each other cannot be saved.
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
from asyncckpt.format.structure import Box, find_overlap
from asyncckpt.planning.load_balancing import divide_replicas, replica_of
from asyncckpt.planning.sample_schedule import SAMPLE_LIMIT, SampleSchedule
from asyncckpt.sharding.mesh_layout import Grid, holders_in, nbytes_by_position, position_in
from asyncckpt.sharding.shard_claims import ShardClaim

Rows = tuple[tuple[int, int], ...]
"""(first row, number of rows) along the first dimension of a box that is larger than 1."""
_Key = tuple[str, Box]


class ReportedClaim(NamedTuple):
    """A claim, and the ranks that have made it."""

    ranks: tuple[int, ...]
    claim: ShardClaim


class MeshSharding(NamedTuple):
    """A tensor on a grid; all ranks of the grid have reported it.

    Attributes:
        grid: The grid, which determines which rank holds which part.
        shape: Global shape, in elements.
        itemsize: Bytes of one element.
    """

    grid: Grid
    shape: tuple[int, ...]
    itemsize: int

    @property
    def is_shared(self) -> bool:
        """Whether several ranks hold the same elements."""
        return self.grid.n_replicas > 1


class BoxSharding(NamedTuple):
    """A tensor whose boxes are described one by one.

    Attributes:
        holders: The ranks that hold each box, ascending.
        firsts: For each box, the lowest rank whose claim has `is_first`; boxes without one are left out.
        shape: Global shape, in elements.
        itemsize: Bytes of one element.
    """

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


class BoxAssignment(NamedTuple):
    """What a rank writes of one of its boxes.

    Attributes:
        rows: The rows that it writes; may be empty.
        shared: Whether other ranks hold the box too.
        split: Whether several ranks write rows of it.
    """

    rows: Rows
    shared: bool = False
    split: bool = False


class ShardAssignment(NamedTuple):
    """What a rank writes of a tensor of which it holds shards.

    Attributes:
        boxes: Aligned with the boxes that the rank holds.
        schedule: The saves at which its shared boxes are compared; None: never.
        is_unagreed: Whether the ranks have not agreed on it yet, so that they must meet.
    """

    boxes: tuple[BoxAssignment, ...]
    schedule: SampleSchedule | None
    is_unagreed: bool


class ShardOwnership:
    """Which rank writes which shard. Part of an `Agreement`; immutable.

    Attributes:
        conflicts: By FQN, the error for a name about which the ranks contradict each other.
    """

    def __init__(self, world_size: int) -> None:
        self._world_size = world_size
        self._reported: dict[str, tuple[ReportedClaim, ...]] = {}
        self._shardings: dict[str, MeshSharding | BoxSharding] = {}
        self._in_components: frozenset[str] = frozenset()
        self._base: dict[int, int] = {}
        self.conflicts: dict[str, AsyncCkptError] = {}
        self._assignments_of_rank: dict[int, dict[_Key, BoxAssignment]] = {}

    def extended(
        self,
        groups: Iterable[tuple[tuple[int, ...], tuple[ShardClaim, ...]]],
        base: Mapping[int, int],
        *,
        whole: Sequence[tuple[tuple[int, ...], Collection[str]]] = (),
    ) -> ShardOwnership:
        """Return the ownership after a meeting.

        Args:
            groups: (ranks, claims that each of them makes). For each name, the claims of all ranks that hold it.
            base: By rank, the bytes that it writes in addition to shards.
            whole: (ranks, FQNs under which they hold whole tensors now). If shards are claimed under one of them, too,
                that is a conflict.
        """
        groups, names = list(groups), {fqn for _, held in whole for fqn in held}
        after = ShardOwnership(self._world_size)
        after._reported, after._shardings = dict(self._reported), dict(self._shardings)
        after.conflicts = dict(self.conflicts)
        reported: dict[str, list[ReportedClaim]] = {}
        for ranks, claims in groups:
            for claim in claims:
                reported.setdefault(claim.fqn, []).append(ReportedClaim(ranks, claim))
        for fqn in {*reported, *names}:
            after._reported.pop(fqn, None)
            after._shardings.pop(fqn, None)
            after.conflicts.pop(fqn, None)
        for fqn, reports in reported.items():
            after._reported[fqn] = tuple(reports)
            found = resolve_sharding(after._reported[fqn], self._world_size)
            if isinstance(found, AsyncCkptError):
                after.conflicts[fqn] = found
            elif found is not None:
                after._shardings[fqn] = found
            if fqn in names:
                holders = [rank for ranks, _ in reports for rank in ranks]
                text = f"ranks {holders[:4]} hold shards of {fqn!r}, other ranks a plain tensor of that name"
                text += "; make it a shard on all ranks, or give it another key"
                after.conflicts[fqn] = contradiction(text, holders)
        lacking = [fqn for fqn in reported if fqn not in after._shardings and fqn not in after.conflicts]
        shards = [(ranks, [claim.fqn for claim in claims]) for ranks, claims in groups] if lacking else []
        below = _holders_below(lacking, [*whole, *shards])
        after._in_components = self._in_components - reported.keys() - names
        for fqn in lacking:
            owners = set[int]().union(*map(_ranks_with_elements, {claim for _, claim in reported[fqn]}))
            plain = owners.intersection(rank for ranks, _ in reported[fqn] for rank in ranks)
            if not plain and owners <= below[fqn]:
                after._in_components |= {fqn}
            elif plain and owners - plain and owners - plain <= below[fqn]:
                after.conflicts[fqn] = _mixed(fqn, plain, owners - plain)
        # IMPORTANT: unchanged claims keep their assignments, so that no layout changes.
        after._base = self._base if after._reported == self._reported else {**self._base, **base}
        return after

    def check(self) -> None:
        """Check that the ranks do not contradict each other.

        Raises:
            RanksDisagreeError, OverlappingShardsError: They do; names the first such FQN.
        """
        if self.conflicts:
            raise self.conflicts[min(self.conflicts)]

    @property
    def names(self) -> KeysView[str]:
        """FQNs of which ranks have claimed shards."""
        return self._reported.keys()

    def sharding_of(self, fqn: str) -> MeshSharding | BoxSharding | None:
        """Return how a tensor is sharded; None: it is not known."""
        return self._shardings.get(fqn)

    def assignment(self, rank: int, claim: ShardClaim) -> ShardAssignment:
        """Return what `rank` writes of a tensor of which it holds shards.

        Raises:
            AsyncCkptError: The ranks contradict each other about this name.
        """
        if claim.fqn in self.conflicts:
            raise self.conflicts[claim.fqn]
        is_reported = self._has_reported(rank, claim)
        sharding = self._shardings.get(claim.fqn)
        boxes = claim.boxes_of_rank(rank)
        is_known = not isinstance(sharding, BoxSharding) or sharding.knows(rank, boxes)
        if not is_reported or sharding is None or not is_known:
            found = tuple(self._default_assignment(rank, claim, box) for box in boxes)
            schedule = SampleSchedule(0, 1) if any(box.shared for box in found) else None
            return ShardAssignment(found, schedule, not is_reported)
        if isinstance(sharding, MeshSharding) and sharding.grid.n_replicas == 1:
            return ShardAssignment(tuple(BoxAssignment(all_rows(box)) for box in boxes), None, False)
        agreed = self._assignments(rank)
        return ShardAssignment(tuple(agreed[claim.fqn, box] for box in boxes), self._schedules.get(claim.fqn), False)

    def _default_assignment(self, rank: int, claim: ShardClaim, box: Box) -> BoxAssignment:
        """Return what a rank writes of a box on which the ranks have not agreed yet.

        The holders of a box of a mesh are known, except for those on equal meshes of other ranks. For these, and for
        boxes that are described one by one, it is assumed that the same ranks hold the box as for another tensor of
        that shape. This is true for an optimizer's state, which appears after the first save.
        """
        joined = self._joined_grids
        grid = claim.grid and joined.get((claim.grid, claim.shape), joined.get((claim.grid, None)))
        grid = grid or claim.grid
        if grid is None or position_in(grid, rank) is None:
            writer = self._first_holders.get((claim.shape, box), rank)
            return BoxAssignment(all_rows(box) if claim.is_first and writer in (rank, None) else ())
        return _written_by_one(rank, claim.fqn, holders_in(grid, rank), box)

    def may_store_empty(self, rank: int, claim: ShardClaim) -> bool:
        """Whether `rank` may store its empty shard for itself, since others may hold components of the tensor only.

        So it is if the ranks have agreed, and none of those with elements holds it, but each holds components
        (`FQN.name`) instead. Then nobody has elements under this name, and it must not be missed.
        """
        if claim.grid is None or 0 in claim.shape:
            return False
        if position_in(claim.grid, rank) is None or claim.boxes_of_rank(rank):
            return False
        return claim.fqn in self._in_components and self._has_reported(rank, claim)

    @cached_property
    def _first_holders(self) -> dict[tuple[tuple[int, ...], Box], int | None]:
        """By (global shape, box), the rank in `BoxSharding.firsts`; None if it differs between tensors."""
        found: dict[tuple[tuple[int, ...], Box], int | None] = {}
        for sharding in self._shardings.values():
            if isinstance(sharding, BoxSharding):
                for box, first in sharding.firsts.items():
                    key = sharding.shape, box
                    found[key] = first if found.get(key, first) == first else None
        return found

    @cached_property
    def _joined_grids(self) -> dict[tuple[Grid, tuple[int, ...] | None], Grid | None]:
        """By (claimed grid, global shape), the grid into which equal grids of several ranks were joined.

        A shape of None stands for tensors of any shape. The value is None if it differs between tensors.
        """
        found: dict[tuple[Grid, tuple[int, ...] | None], Grid | None] = {}
        seen: set[tuple[int, int, tuple[int, ...]]] = set()  # by ID: hashing a grid takes time for each rank
        for fqn, sharding in self._shardings.items():
            if not isinstance(sharding, MeshSharding):
                continue
            for grid in (report.claim.grid for report in self._reported[fqn]):
                if grid is None or (id(grid), id(sharding.grid), sharding.shape) in seen:
                    continue
                seen.add((id(grid), id(sharding.grid), sharding.shape))
                for key in ((grid, sharding.shape), (grid, None)):
                    found[key] = sharding.grid if found.setdefault(key, sharding.grid) == sharding.grid else None
        return found

    def _has_reported(self, rank: int, claim: ShardClaim) -> bool:
        return any(report.claim == claim and rank in report.ranks for report in self._reported.get(claim.fqn, ()))

    @cached_property
    def loads(self) -> Mapping[int, int]:
        """By rank, the bytes of shards that it writes, if replicas were divided evenly."""
        totals: dict[int, int] = {}
        add_grid_loads(totals, [one for one in self._shardings.values() if isinstance(one, MeshSharding)])
        for sharding in self._shardings.values():
            if isinstance(sharding, BoxSharding):
                for (_, sizes), ranks in sharding.holders.items():
                    nbytes = replica_of(sizes, sharding.itemsize).nbytes // len(ranks)
                    for rank in ranks:
                        totals[rank] = totals.get(rank, 0) + nbytes
        return totals

    def compared_shards(self, claims: Sequence[ShardClaim], rank: int) -> list[tuple[int, int | None]]:
        """Return which of a rank's shards are compared at a meeting, in the order of their digests.

        Returns:
            (position in `claims`, number of the box; None: all its boxes as one).
        """
        found: list[tuple[int, int | None]] = []
        for position, claim in enumerate(claims):
            sharding = self._shardings.get(claim.fqn)
            if isinstance(sharding, MeshSharding) and sharding.grid.n_replicas > 1:
                found.append((position, None))
        for position, claim in enumerate(claims):
            sharding = self._shardings.get(claim.fqn)
            if isinstance(sharding, BoxSharding):
                boxes = claim.boxes_of_rank(rank)
                found += [(position, n) for n, box in enumerate(boxes) if len(sharding.holders[box]) > 1]
        return found

    @cached_property
    def _schedules(self) -> dict[str, SampleSchedule]:
        shared = sorted(fqn for fqn, sharding in self._shardings.items() if sharding.is_shared)
        period = max(1, -(-len(shared) // SAMPLE_LIMIT))
        return {fqn: SampleSchedule(n % period, period) for n, fqn in enumerate(shared)}

    def _assignments(self, rank: int) -> dict[_Key, BoxAssignment]:
        """Return what `rank` writes of all boxes that it shares with others or that are described one by one."""
        found = self._assignments_of_rank.get(rank)
        if found is not None:
            return found
        found = dict(self._box_assignments.get(rank, {}))
        groups: dict[tuple[int, ...], list[tuple[_Key, int]]] = {}
        sharers: dict[int, tuple[int, ...]] = {}
        for fqn in sorted(self._shardings):
            sharding = self._shardings[fqn]
            if not isinstance(sharding, MeshSharding) or sharding.grid.n_replicas == 1:
                continue
            at = position_in(sharding.grid, rank)
            if at is None:
                continue
            holders = sharers.get(id(sharding.grid))
            if holders is None:
                holders = sharers[id(sharding.grid)] = sharding.grid.replicas(at)
            boxes = sharding.grid.boxes(sharding.shape, sharding.grid.coordinate(at))
            groups.setdefault(holders, []).extend(((fqn, box), sharding.itemsize) for box in boxes)
        for holders, keys in groups.items():
            replicas = [replica_of(box[1], itemsize) for (_, box), itemsize in keys]
            loads = {r: self._base.get(r, 0) + self.loads.get(r, 0) for r in holders}
            for (key, _), cut in zip(keys, divide_replicas({holders: replicas}, loads)[holders], strict=True):
                found[key] = _assignment_of(rank, cut)
        self._assignments_of_rank[rank] = found
        return found

    @cached_property
    def _box_assignments(self) -> dict[int, dict[_Key, BoxAssignment]]:
        """By rank, what it writes of boxes that are described one by one."""
        found: dict[int, dict[_Key, BoxAssignment]] = {}
        sets: dict[tuple[int, ...], list[tuple[_Key, int]]] = {}
        for fqn in sorted(self._shardings):
            sharding = self._shardings[fqn]
            if not isinstance(sharding, BoxSharding):
                continue
            for box, ranks in sharding.holders.items():
                if len(ranks) == 1:
                    found.setdefault(ranks[0], {})[fqn, box] = BoxAssignment(all_rows(box))
                else:
                    sets.setdefault(ranks, []).append(((fqn, box), sharding.itemsize))
        loads = {rank: self._base.get(rank, 0) + n for rank, n in self.loads.items()}
        replicas = {ranks: [replica_of(box[1], size) for (_, box), size in keys] for ranks, keys in sets.items()}
        for ranks, pieces in divide_replicas(replicas, loads).items():
            for (key, _), cut in zip(sets[ranks], pieces, strict=True):
                for rank in ranks:
                    found.setdefault(rank, {})[key] = _assignment_of(rank, cut)
        return found


def all_rows(box: Box) -> Rows:
    """Return all rows of a box."""
    return ((0, replica_of(box[1], 1).n_rows),)


def _assignment_of(rank: int, cut: Iterable[tuple[int, int, int]]) -> BoxAssignment:
    ranges = tuple(cut)
    return BoxAssignment(tuple((first, n) for owner, first, n in ranges if owner == rank), True, len(ranges) > 1)


def _written_by_one(rank: int, fqn: str, holders: tuple[int, ...], box: Box) -> BoxAssignment:
    """Return what `rank` writes of a box that a single holder writes."""
    return BoxAssignment(all_rows(box) if rank == default_writer(fqn, holders) else (), len(holders) > 1)


def default_writer(fqn: str, holders: Sequence[int]) -> int:
    """Return which holder of a box writes it as a whole; for all boxes of a name it is the same replica."""
    return holders[zlib.crc32(fqn.encode()) % len(holders)]


def resolve_sharding(
    reports: Sequence[ReportedClaim], world_size: int
) -> MeshSharding | BoxSharding | AsyncCkptError | None:
    """Return how a tensor is sharded according to the ranks' claims.

    Args:
        reports: All claims of one FQN; at least one.
        world_size: Number of ranks of the checkpointer.

    Returns:
        None if a rank of its mesh that holds elements has not reported it; an error if ranks contradict each other.
    """
    first = reports[0].claim
    for _, claim in reports[1:]:
        if (claim.dtype, claim.shape) != (first.dtype, first.shape):
            return _unequal_tensors(reports)
    itemsize = DTYPES[first.dtype].itemsize
    grids = [claim.grid for _, claim in reports if claim.grid is not None]
    outside = [rank for grid in dict.fromkeys(grids) for rank in grid.ranks if rank >= world_size]
    if outside:
        text = f"{first.fqn!r} is on a mesh with rank {outside[0]}, but the checkpointer has {world_size} ranks"
        return contradiction(text + "; the mesh must use the checkpointer's ranks", outside)
    if len(grids) == len(reports):
        distinct = list(dict.fromkeys(grids))
        reporters = reports[0].ranks if len(reports) == 1 else tuple({r for ranks, _ in reports for r in ranks})
        members = set(reporters)
        missing = [grid for grid in distinct if not members.issuperset(grid.ranks)]
        holders = [_ranks_with_elements(first._replace(grid=grid)) for grid in missing]
        if not all(found and members.issuperset(found) for found in holders):
            return None
        joined = distinct[0] if len(distinct) == 1 else _joined(tuple(distinct))
        if joined is not None:
            return MeshSharding(joined, first.shape, itemsize)
    return _box_sharding(reports, itemsize)


def _holders_below(
    names: Collection[str], held: Iterable[tuple[tuple[int, ...], Iterable[str]]]
) -> dict[str, set[int]]:
    """Return, for each of some FQNs, which ranks hold tensors whose FQNs begin with it and a dot: its components.

    Args:
        names: The FQNs.
        held: (ranks, FQNs of tensors that each of them holds).
    """
    found: dict[str, set[int]] = {name: set() for name in names}
    for ranks, fqns in held:
        for fqn in fqns:
            at = fqn.find(".")
            while at >= 0:
                if fqn[:at] in found:
                    found[fqn[:at]].update(ranks)
                at = fqn.find(".", at + 1)
    return found


def _mixed(fqn: str, plain: Collection[int], composite: Collection[int]) -> RanksDisagreeError:
    text = (
        f"{fqn!r} is a plain tensor on ranks {_few(plain)}, and a subclass with components, or a container, on ranks "
        f"{_few(composite)}; all ranks with elements of it must hold the same class. torchao quantizes a shard only if "
        "it has at least 4096 elements and whole blocks: choose the shape, block_size or the number of ranks so that "
        "it quantizes all shards or none, or train that parameter with another optimizer"
    )
    return contradiction(text, sorted({*plain, *composite}))


def _few(ranks: Collection[int]) -> str:
    shown = ", ".join(map(str, sorted(ranks)[:4]))
    return f"[{shown}{', ...' if len(ranks) > 4 else ''}]"


def _ranks_with_elements(claim: ShardClaim) -> set[int]:
    """Return the ranks of the grid of a claim that hold elements of its tensor."""
    assert claim.grid is not None
    held = nbytes_by_position(claim.grid, claim.shape, 1)
    return {rank for rank, n in zip(claim.grid.ranks, held, strict=True) if n}


@functools.lru_cache(256)
def _joined(grids: tuple[Grid, ...]) -> Grid | None:
    """Join equal grids of different ranks into one, with an additional replicated mesh dimension; None: not equal.

    The cache makes all tensors on equal grids share one object, so that values cached by grid are computed once.
    """
    ordered = sorted(grids, key=lambda grid: grid.ranks)
    ranks = tuple(itertools.chain.from_iterable(grid.ranks for grid in ordered))
    are_equal = len({(grid.mesh, grid.placements) for grid in grids}) == 1
    if not are_equal or len(set(ranks)) != len(ranks):
        return None
    return Grid((len(grids), *ordered[0].mesh), ranks, ((), *ordered[0].placements))


def _box_sharding(reports: Sequence[ReportedClaim], itemsize: int) -> BoxSharding | OverlappingShardsError:
    holders: dict[Box, list[int]] = {}
    firsts: dict[Box, int] = {}
    for ranks, claim in reports:
        for rank in ranks:
            for box in claim.boxes_of_rank(rank):
                holders.setdefault(box, []).append(rank)
                if claim.is_first:
                    firsts[box] = min(rank, firsts.get(box, rank))
    boxes = list(holders)
    overlap = find_overlap(boxes)
    if overlap is None:
        ordered = {box: tuple(sorted(set(holders[box]))) for box in holders}
        return BoxSharding(ordered, firsts, reports[0].claim.shape, itemsize)
    found = [boxes[n] for n in overlap]
    one, other = (f"offsets {list(box[0])} sizes {list(box[1])} on rank {min(holders[box])}" for box in found)
    fqn = reports[0].claim.fqn
    return OverlappingShardsError(
        f"tensor {fqn!r}: two ranks hold boxes that overlap but differ: {one}; {other}; correct offsets and global "
        "shape, or give the tensors different keys",
        fqn=fqn,
        boxes=[one, other],
    )


def _unequal_tensors(reports: Sequence[ReportedClaim]) -> RanksDisagreeError:
    kinds = {(c.dtype, c.shape): ranks[0] for ranks, c in reversed(reports)}
    found = " but ".join(f"{dtype}{list(shape)} on rank {rank}" for (dtype, shape), rank in kinds.items())
    return contradiction(
        f"shards of {reports[0].claim.fqn!r} are parts of {found}; use the same global shape and dtype on all ranks. "
        "In optimizer states, integer keys refer to different parameters on different pipeline stages: save the result "
        "of torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, which has names as keys",
        list(kinds.values()),
    )


def contradiction(text: str, ranks: Sequence[int]) -> RanksDisagreeError:
    """Return the error for ranks that contradict each other about one name."""
    return RanksDisagreeError(text, detail=text, ranks=list(ranks[:8]))


def add_grid_loads(totals: dict[int, int], shardings: Sequence[MeshSharding]) -> None:
    """Add to `totals`, by rank, the bytes that it holds of each tensor, divided by the number of replicas.

    Does not compute the boxes of every rank.
    """
    counts: dict[tuple[int, tuple[int, ...]], int] = {}
    grids: dict[int, Grid] = {}
    for sharding in shardings:
        grids[id(sharding.grid)] = sharding.grid
        key = (id(sharding.grid), sharding.shape)
        counts[key] = counts.get(key, 0) + sharding.itemsize
    for number, grid in grids.items():
        sums = [0] * len(grid.ranks)
        for (one, shape), nbytes in counts.items():
            if one == number and 0 not in shape:
                held = nbytes_by_position(grid, shape, nbytes)
                sums = [total + more for total, more in zip(sums, held, strict=True)]
        for rank, nbytes in zip(grid.ranks, sums, strict=True):
            totals[rank] = totals.get(rank, 0) + nbytes // grid.n_replicas

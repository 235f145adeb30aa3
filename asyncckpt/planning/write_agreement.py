"""Which rank writes which replica: the agreement of the ranks, the same on all of them. Pure; no torch.

An agreement is made at a meeting, from the tensors that all ranks hold at that time. Each name that a rank holds is
decided again:

    one rank holds it                                      `SOLE`
    several hold it, all equal                             `SHARED`: divided among them (`load_balancing`)
    the same ranks share it already, all equal             divided as before, so that no layout changes
    several hold it, all equal, all zeros or all ones      `UNAGREED` at the first such meeting, then `SHARED`
    several hold it, not all equal                         `PER_RANK` on all of them; permanently, if this happens at
                                                           two meetings in a row

*Equal* means equal dtype, shape and digest. `SOLE` and `PER_RANK` apply to any dtype and shape. The agreement about
names that no rank holds at this meeting is kept, since ranks may save several structures in turn.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, TypeVar

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ProtocolError
from asyncckpt.format.checksums import block_digest
from asyncckpt.planning.contributions import Contribution, TensorKey, encode_contributions, is_trivial_value
from asyncckpt.planning.load_balancing import divide_replicas, replica_of
from asyncckpt.planning.sample_schedule import SAMPLE_LIMIT, SampleSchedule, assign_schedules
from asyncckpt.planning.shard_ownership import ShardOwnership
from asyncckpt.sharding.shard_claims import ShardClaim

T = TypeVar("T")

MAX_SHAPES = 8
"""Maximum number of shapes under which a name may be shared. A tensor with more shapes is assumed to change its shape
with every save, and is stored per rank permanently."""


class AssignmentKind(Enum):
    """What a rank does with a tensor that it holds."""

    SHARED = "shared"
    """A replica that was compared. The rows of the assignment are written under the plain name."""
    SOLE = "sole"
    """No other rank holds it. It is written whole under the plain name."""
    PER_RANK = "per_rank"
    """Other ranks hold a different tensor of that name. It is written whole under `FQN@rank{n}`."""
    UNAGREED = "unagreed"
    """The ranks have not agreed on it yet. It is written as `PER_RANK`, and the ranks must meet again."""


class WriteAssignment(NamedTuple):
    """What one rank writes of one tensor.

    Attributes:
        kind: Whether it is written, and under which name.
        rows: For `SHARED`, the ranges of rows to write: (first row, number of rows), along the first dimension that is
            larger than 1.
        split: For `SHARED`, whether several ranks write rows of the tensor.
    """

    kind: AssignmentKind
    rows: tuple[tuple[int, int], ...] = ()
    split: bool = False


_SOLE, _PER_RANK, _UNAGREED = (
    WriteAssignment(AssignmentKind.SOLE),
    WriteAssignment(AssignmentKind.PER_RANK),
    WriteAssignment(AssignmentKind.UNAGREED),
)


class _Shared(NamedTuple):
    """A replica: its holders, the assignments of those that write, and the assignment of all others."""

    holders: frozenset[int]
    assignments: dict[int, WriteAssignment]
    others: WriteAssignment


class _Held(NamedTuple):
    """A tensor, the ranks that hold it, and their common digest; None: their digests differ."""

    ranks: tuple[int, ...]
    key: TensorKey
    digest: bytes | None


class Agreement:
    """Which rank writes which tensor. Immutable; ranks that took part in the same meetings have equal agreements.

    Attributes:
        world_size: Number of ranks. With one rank everything is `SOLE` and nothing is exchanged.
        fingerprint: 16 hex digits. Two agreements are equal if their fingerprints are.
        shards: The ownership of tensors of which ranks hold shards.
    """

    def __init__(self, world_size: int, fingerprint: str) -> None:
        self.world_size, self.fingerprint = world_size, fingerprint
        self._shared: dict[TensorKey, _Shared] = {}
        self._shapes: dict[str, tuple[TensorKey, ...]] = {}
        self._sole: dict[str, int] = {}
        self._per_rank: dict[str, frozenset[int]] = {}
        self._differed: frozenset[str] = frozenset()
        self._permanently_per_rank: frozenset[str] = frozenset()
        self._was_trivial: frozenset[str] = frozenset()
        self.shards = ShardOwnership(world_size)

    @classmethod
    def start(cls, world_size: int) -> Agreement:
        """Return the agreement before the first meeting: everything is `UNAGREED`."""
        return cls(world_size, block_digest(b"asyncckpt agreement 2, %d ranks" % world_size).hex())

    def assignment(self, rank: int, fqn: str, dtype: str, shape: tuple[int, ...]) -> WriteAssignment:
        """Return what `rank` writes of a tensor that it holds and that is not `PerRank`."""
        if self.world_size == 1:
            return _SOLE
        if fqn in self._permanently_per_rank:
            return _PER_RANK
        shared = self._shared.get((fqn, dtype, shape))
        if shared is not None and rank in shared.holders:
            return shared.assignments.get(rank, shared.others)
        if self._sole.get(fqn) == rank:
            return _SOLE
        return _PER_RANK if rank in self._per_rank.get(fqn, ()) else _UNAGREED

    def after(self, contributions: Mapping[int, Contribution], per_rank: Iterable[str] = ()) -> Agreement:
        """Return the agreement after a meeting.

        Args:
            contributions: Contributions of all ranks by rank; empty: only `per_rank` is new.
            per_rank: FQNs of tensors that are stored per rank permanently.

        Raises:
            ProtocolError: The contributions are not those of `world_size` ranks.
        """
        if contributions and sorted(contributions) != list(range(self.world_size)):
            detail = f"an agreement of {self.world_size} ranks got contributions of ranks {sorted(contributions)[:5]}"
            raise ProtocolError(detail, detail=detail)
        names = sorted(per_rank)
        hashed = "\0".join([self.fingerprint, *names]).encode(errors="surrogatepass")
        found = Agreement(self.world_size, block_digest(hashed + encode_contributions(contributions)).hex())
        found._shared, found._shapes = dict(self._shared), dict(self._shapes)
        found._sole, found._per_rank = dict(self._sole), dict(self._per_rank)
        found._permanently_per_rank, found._differed = self._permanently_per_rank.union(names), self._differed
        found._was_trivial, found.shards = self._was_trivial, self.shards
        if self.world_size > 1 and contributions:
            found._decide(contributions)
        return found

    def _decide(self, contributions: Mapping[int, Contribution]) -> None:
        sharers: dict[tuple[int, ...], list[TensorKey]] = {}
        differ: set[str] = set()
        held = self._held_by_fqn(contributions)
        for fqn in sorted(held):
            holders, first = _joined(tuple(h.ranks for h in held[fqn])), held[fqn][0]
            are_equal = all(h.key == first.key and h.digest == first.digest is not None for h in held[fqn])
            if len(holders) == 1:
                self._forget(fqn)
                self._sole[fqn] = holders[0]
            elif not are_equal:
                self._forget(fqn)
                self._per_rank[fqn] = _frozen(holders)
                differ.add(fqn)
            elif first.key in self._shared and self._shared[first.key].holders == _frozen(holders):
                continue
            elif first.digest is not None and is_trivial_value(first.digest) and fqn not in self._was_trivial:
                self._forget(fqn)
                self._was_trivial |= {fqn}
            elif first.key not in self._shared and len(self._shapes.get(fqn, ())) >= MAX_SHAPES:
                self._permanently_per_rank |= {fqn}
            else:
                self._sole.pop(fqn, None)
                self._per_rank.pop(fqn, None)
                sharers.setdefault(holders, []).append(first.key)
        self._permanently_per_rank |= differ & self._differed
        self._differed = (self._differed - held.keys()) | differ
        self._share(sharers, contributions)

    def _held_by_fqn(self, contributions: Mapping[int, Contribution]) -> dict[str, list[_Held]]:
        """Return the tensors that ranks hold, by FQN, except for those that are stored per rank permanently."""
        found: dict[str, list[_Held]] = {}
        for ranks, tensors in _group_by_tensors(contributions):
            columns = zip(*(contributions[rank].digests for rank in ranks), strict=True)
            for key, digests in zip(tensors, columns, strict=True):
                if key[0] not in self._permanently_per_rank:
                    digest = digests[0] if digests.count(digests[0]) == len(digests) else None
                    found.setdefault(key[0], []).append(_Held(ranks, key, digest))
        return found

    def _forget(self, fqn: str) -> None:
        self._sole.pop(fqn, None)
        self._per_rank.pop(fqn, None)
        for key in self._shapes.pop(fqn, ()):
            del self._shared[key]

    def _share(
        self, sharers: Mapping[tuple[int, ...], list[TensorKey]], contributions: Mapping[int, Contribution]
    ) -> None:
        """Divide new replicas among their holders."""
        new = {key for keys in sharers.values() for key in keys}
        replicas = {h: [replica_of(shape, DTYPES[dtype].itemsize) for _, dtype, shape in keys]
                    for h, keys in sharers.items()}  # fmt: skip
        loads = self._loads(contributions, new)
        held = [(ranks, {fqn for fqn, _, _ in tensors}) for ranks, tensors in _group_by_tensors(contributions)]
        self.shards = self.shards.extended(group_by_shards(contributions), loads, whole=held)
        whole = set[str]().union(*(names for _, names in held))
        for fqn in self.shards.names:  # a name is that of whole tensors or of shards, never of both
            if fqn not in whole:
                self._forget(fqn)
        if self.shards.names:
            loads = {rank: nbytes + self.shards.loads.get(rank, 0) for rank, nbytes in loads.items()}
        for holders, pieces in divide_replicas(replicas, loads).items():
            members = frozenset(holders)
            for key, cut in zip(sharers[holders], pieces, strict=True):
                split = len(cut) > 1
                assignments = {
                    p.rank: WriteAssignment(AssignmentKind.SHARED, ((p.first_row, p.n_rows),), split) for p in cut
                }
                if key not in self._shared:
                    self._shapes[key[0]] = (*self._shapes.get(key[0], ()), key)
                self._shared[key] = _Shared(members, assignments, WriteAssignment(AssignmentKind.SHARED, (), split))

    def _loads(self, contributions: Mapping[int, Contribution], new: Collection[TensorKey]) -> dict[int, int]:
        """Return, by rank, the bytes that it writes of the whole tensors it holds now, without the `new` replicas."""
        loads = {rank: c.own_nbytes for rank, c in contributions.items()}
        for ranks, tensors in _group_by_tensors(contributions):
            members, alone = frozenset(ranks), 0
            for key in tensors:
                if key in new:
                    continue
                nbytes, n_rows = replica_of(key[2], DTYPES[key[1]].itemsize)
                shared = None if key[0] in self._permanently_per_rank else self._shared.get(key)
                if shared is None:
                    alone += nbytes
                    continue
                for rank in shared.assignments.keys() & members:
                    loads[rank] += sum(nbytes * n // n_rows for _, n in shared.assignments[rank].rows)
            for rank in ranks:
                loads[rank] += alone
        return loads

    def schedule(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> SampleSchedule:
        """Return the saves at which the holders of a `SHARED` tensor compare it."""
        return self._schedules[fqn, dtype, shape]

    @cached_property
    def _schedules(self) -> dict[TensorKey, SampleSchedule]:
        shared = {key: s.holders for key, s in self._shared.items() if key[0] not in self._permanently_per_rank}
        return assign_schedules(shared, SAMPLE_LIMIT)


@functools.lru_cache(256)
def _joined(groups: tuple[tuple[int, ...], ...]) -> tuple[int, ...]:
    """Return all ranks of disjoint groups, ascending. Cached, since thousands of tensors have the same groups."""
    return tuple(sorted(itertools.chain.from_iterable(groups)))


@functools.lru_cache(256)
def _frozen(ranks: tuple[int, ...]) -> frozenset[int]:
    return frozenset(ranks)


def _grouped(
    contributions: Mapping[int, Contribution], part: Callable[[Contribution], T]
) -> Iterator[tuple[tuple[int, ...], T]]:
    """Yield (ranks, part) for each group of ranks whose contributions share the object `part`: usually few groups."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(contributions):
        groups.setdefault(id(part(contributions[rank])), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), part(contributions[ranks[0]])


def _group_by_tensors(
    contributions: Mapping[int, Contribution],
) -> Iterator[tuple[tuple[int, ...], tuple[TensorKey, ...]]]:
    """Yield (ranks, tensors) for each group of ranks that hold the same tensors."""
    return _grouped(contributions, attrgetter("tensors"))


def group_by_shards(
    contributions: Mapping[int, Contribution],
) -> Iterator[tuple[tuple[int, ...], tuple[ShardClaim, ...]]]:
    """Yield (ranks, claims) for each group of ranks that hold the same shards."""
    return _grouped(contributions, attrgetter("shards"))

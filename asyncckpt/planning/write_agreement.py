"""Who writes which replica: what the ranks have agreed upon, the same on all of them. Pure; no torch.

An agreement is made at a meeting, from what all ranks hold then. Each name that any of them holds is decided anew:

    one rank holds it                                      `SOLE`
    several hold it, all alike                             `SHARED`: spread over them (`assignment`)
    the same ranks share it already, all alike             stays spread as it is, so that no layout changes
    several hold it, all alike, all zeros or all ones      not agreed upon at the first such meeting, then `SHARED`
    several hold it, not alike                             `PER_RANK` on all of them; at two meetings running: for good

*Alike*: equal dtype, shape and digest. `SOLE` and `PER_RANK` hold for any dtype and shape. Names that no rank holds at
this meeting stay as they were agreed upon: ranks may save several structures in turn.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ProtocolError
from asyncckpt.format.checksums import block_digest
from asyncckpt.planning.contributions import Contribution, TensorKey, encode_contributions, is_weak
from asyncckpt.planning.load_balancing import replica_of, spread
from asyncckpt.planning.sample_schedule import SAMPLE_LIMIT, Turn, turns_of
from asyncckpt.planning.shard_ownership import ShardBook
from asyncckpt.sharding.shard_claims import ShardClaim

MAX_SHAPES = 8
"""Shapes under which one name may be shared; then it changes with every save, and is stored per rank from there on."""


class DutyKind(Enum):
    """What a rank does with a tensor that it holds."""

    SHARED = "shared"
    """A replica, claimed and compared: the pieces of the duty are written under the plain name."""
    SOLE = "sole"
    """No other rank holds it: written whole under the plain name."""
    PER_RANK = "per_rank"
    """Other ranks hold another one of that name: written whole under `FQN@rank{n}`."""
    NEWS = "news"
    """Not agreed upon: written as `PER_RANK`, and the ranks must meet again."""


class Duty(NamedTuple):
    """What one rank writes of one tensor; `pieces` as (first row, rows) and `split` only matter for `SHARED`.

    Rows count along the first dimension that is larger than 1. `split`: several ranks write rows of it.
    """

    kind: DutyKind
    pieces: tuple[tuple[int, int], ...] = ()
    split: bool = False


_SOLE, _PER_RANK, _NEWS = Duty(DutyKind.SOLE), Duty(DutyKind.PER_RANK), Duty(DutyKind.NEWS)


class _Shared(NamedTuple):
    holders: frozenset[int]
    duties: dict[int, Duty]  # of those that write
    others: Duty


class _Held(NamedTuple):
    """A tensor that these ranks hold, and the digest that they gave; None: unequal ones."""

    ranks: tuple[int, ...]
    key: TensorKey
    digest: bytes | None


class Agreement:
    """Immutable. All ranks that were at the same meetings hold equal ones.

    Attributes:
        world_size: Number of ranks. With one rank everything is `SOLE` and there is nothing to exchange.
        fingerprint: 16 hex digits; equal where the agreements are.
    """

    def __init__(self, world_size: int, fingerprint: str) -> None:
        self.world_size, self.fingerprint = world_size, fingerprint
        self._shared: dict[TensorKey, _Shared] = {}
        self._shapes: dict[str, tuple[TensorKey, ...]] = {}
        self._sole: dict[str, int] = {}
        self._per_rank: dict[str, frozenset[int]] = {}
        self._differed: frozenset[str] = frozenset()
        self._for_good: frozenset[str] = frozenset()
        self._was_weak: frozenset[str] = frozenset()
        self.shards = ShardBook(world_size)

    @classmethod
    def start(cls, world_size: int) -> Agreement:
        """Return the agreement of ranks that have not met: everything is `NEWS`."""
        return cls(world_size, block_digest(b"asyncckpt agreement 2, %d ranks" % world_size).hex())

    def duty(self, rank: int, fqn: str, dtype: str, shape: tuple[int, ...]) -> Duty:
        """Return what `rank` writes of a tensor that it holds and that is not `PerRank`."""
        if self.world_size == 1:
            return _SOLE
        if fqn in self._for_good:
            return _PER_RANK
        shared = self._shared.get((fqn, dtype, shape))
        if shared is not None and rank in shared.holders:
            return shared.duties.get(rank, shared.others)
        if self._sole.get(fqn) == rank:
            return _SOLE
        return _PER_RANK if rank in self._per_rank.get(fqn, ()) else _NEWS

    def after(self, contributions: Mapping[int, Contribution], per_rank: Iterable[str] = ()) -> Agreement:
        """Return the agreement after a meeting.

        Args:
            contributions: Of all ranks of the world, or of none: then only `per_rank` is new.
            per_rank: FQNs that are stored for each rank for good.

        Raises:
            ProtocolError: Contributions of other ranks than those of the world.
        """
        if contributions and sorted(contributions) != list(range(self.world_size)):
            detail = f"contributions of ranks {sorted(contributions)[:5]} to the agreement of {self.world_size} ranks"
            raise ProtocolError(detail, detail=detail)
        names = sorted(per_rank)
        said = "\0".join([self.fingerprint, *names]).encode(errors="surrogatepass")
        found = Agreement(self.world_size, block_digest(said + encode_contributions(contributions)).hex())
        found._shared, found._shapes = dict(self._shared), dict(self._shapes)
        found._sole, found._per_rank = dict(self._sole), dict(self._per_rank)
        found._for_good, found._differed = self._for_good.union(names), self._differed
        found._was_weak, found.shards = self._was_weak, self.shards
        if self.world_size > 1 and contributions:
            found._decide(contributions)
        return found

    def _decide(self, contributions: Mapping[int, Contribution]) -> None:
        sharers: dict[tuple[int, ...], list[TensorKey]] = {}
        differ: set[str] = set()
        held, sets = self._held(contributions), _RankSets()
        for fqn in sorted(held):
            holders, first = sets.joined(held[fqn]), held[fqn][0]
            alike = all(h.key == first.key and h.digest == first.digest is not None for h in held[fqn])
            if len(holders) == 1:
                self._forget(fqn)
                self._sole[fqn] = holders[0]
            elif not alike:
                self._forget(fqn)
                self._per_rank[fqn] = sets.frozen(holders)
                differ.add(fqn)
            elif first.key in self._shared and self._shared[first.key].holders == sets.frozen(holders):
                continue
            elif first.digest is not None and is_weak(first.digest) and fqn not in self._was_weak:
                self._forget(fqn)
                self._was_weak |= {fqn}
            elif first.key not in self._shared and len(self._shapes.get(fqn, ())) >= MAX_SHAPES:
                self._for_good |= {fqn}
            else:
                self._sole.pop(fqn, None)
                self._per_rank.pop(fqn, None)
                sharers.setdefault(holders, []).append(first.key)
        self._for_good |= differ & self._differed
        self._differed = (self._differed - held.keys()) | differ
        self._share(sharers, contributions)

    def _held(self, contributions: Mapping[int, Contribution]) -> dict[str, list[_Held]]:
        """Return what the ranks hold, by FQN, but for what is stored per rank for good."""
        found: dict[str, list[_Held]] = {}
        for ranks, tensors in _by_tensors(contributions):
            columns = zip(*(contributions[rank].digests for rank in ranks), strict=True)
            for key, digests in zip(tensors, columns, strict=True):
                if key[0] not in self._for_good:
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
        """Spread new replicas over their holders."""
        new = {key for keys in sharers.values() for key in keys}
        replicas = {h: [replica_of(shape, DTYPES[dtype].itemsize) for _, dtype, shape in keys]
                    for h, keys in sharers.items()}  # fmt: skip
        loads = self._loads(contributions, new)
        whole = {fqn for c in contributions.values() for fqn, _, _ in c.tensors}
        self.shards = self.shards.extended(by_shards(contributions), loads, whole=whole)
        # A name stands for whole tensors or for shards, never for both.
        self.shards.contradict([fqn for fqn in self.shards.names if fqn in whole])
        for fqn in self.shards.names:
            if fqn not in whole:
                self._forget(fqn)
        if self.shards.names:
            of_shards = self.shards.loads()
            loads = {rank: nbytes + of_shards.get(rank, 0) for rank, nbytes in loads.items()}
        for holders, pieces in spread(replicas, loads).items():
            members = frozenset(holders)
            for key, cut in zip(sharers[holders], pieces, strict=True):
                split = len(cut) > 1
                duties = {p.rank: Duty(DutyKind.SHARED, ((p.first_row, p.n_rows),), split) for p in cut}
                if key not in self._shared:
                    self._shapes[key[0]] = (*self._shapes.get(key[0], ()), key)
                self._shared[key] = _Shared(members, duties, Duty(DutyKind.SHARED, (), split))

    def _loads(self, contributions: Mapping[int, Contribution], new: Collection[TensorKey]) -> dict[int, int]:
        """Return what each rank writes of the whole tensors that it holds now, without the `new` replicas."""
        loads = {rank: c.own_nbytes for rank, c in contributions.items()}
        for ranks, tensors in _by_tensors(contributions):
            members, alone = frozenset(ranks), 0
            for key in tensors:
                if key in new:
                    continue
                nbytes, n_rows = replica_of(key[2], DTYPES[key[1]].itemsize)
                shared = None if key[0] in self._for_good else self._shared.get(key)
                if shared is None:
                    alone += nbytes
                    continue
                for rank in shared.duties.keys() & members:
                    loads[rank] += sum(nbytes * n // n_rows for _, n in shared.duties[rank].pieces)
            for rank in ranks:
                loads[rank] += alone
        return loads

    def turn(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> Turn:
        """Return when the holders of a `SHARED` tensor compare it."""
        return self._turns[fqn, dtype, shape]

    @cached_property
    def _turns(self) -> dict[TensorKey, Turn]:
        shared = {key: s.holders for key, s in self._shared.items() if key[0] not in self._for_good}
        return turns_of(shared, SAMPLE_LIMIT)


class _RankSets:
    """Sets of ranks, each made and kept once: the same ones come again with thousands of tensors."""

    def __init__(self) -> None:
        self._joined: dict[tuple[tuple[int, ...], ...], tuple[int, ...]] = {}
        self._frozen: dict[tuple[int, ...], frozenset[int]] = {}

    def joined(self, held: list[_Held]) -> tuple[int, ...]:
        """Return all ranks of `held`, ascending."""
        groups = tuple(h.ranks for h in held)
        found = self._joined.get(groups)
        if found is None:
            found = self._joined[groups] = tuple(sorted(rank for ranks in groups for rank in ranks))
        return found

    def frozen(self, ranks: tuple[int, ...]) -> frozenset[int]:
        """Return `ranks` as a set."""
        found = self._frozen.get(ranks)
        if found is None:
            found = self._frozen[ranks] = frozenset(ranks)
        return found


def _by_tensors(
    contributions: Mapping[int, Contribution],
) -> Iterator[tuple[tuple[int, ...], tuple[TensorKey, ...]]]:
    """Yield (ranks, tensors) for each group of ranks that hold the same; of most jobs there are few."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(contributions):
        groups.setdefault(id(contributions[rank].tensors), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), contributions[ranks[0]].tensors


def by_shards(contributions: Mapping[int, Contribution]) -> Iterator[tuple[tuple[int, ...], tuple[ShardClaim, ...]]]:
    """As `_by_tensors`, of shards."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(contributions):
        groups.setdefault(id(contributions[rank].shards), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), contributions[ranks[0]].shards

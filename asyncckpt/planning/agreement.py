"""Who writes which replica: what the ranks have agreed upon, the same on all of them. Pure; no torch.

An agreement grows by changes, which every rank applies in the same order. What a change brings is looked at by name:

    new, one rank holds it              `SOLE`
    new, several hold it, all alike     `SHARED`: spread over them (`assignment`)
    new, several hold it, not alike     `PER_RANK` on all of them
    known as sole, with another holder  unsettled, once: as if the name were new, for all its holders, from then on
    known, with other holders           what was agreed stays; the new holders are `PER_RANK`
    known as shared, now another shape  as if the name were new, for that shape; never `SOLE`

*Alike*: equal dtype, shape and digest, given in this very change. `SOLE` and `PER_RANK` hold for any dtype and shape.
Ranks do not always report a new name in the same save, so that the first to do so looks like its only holder. That is
mended once for each name, since an unsettled one is hashed whole when it is reported again.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ProtocolError
from asyncckpt.format.checksum import block_digest
from asyncckpt.planning.assignment import replica_of, spread
from asyncckpt.planning.claims import ShardClaim
from asyncckpt.planning.contributions import Change, Contribution, TensorKey, is_weak
from asyncckpt.planning.sampling import SAMPLE_LIMIT, Turn, turns_of
from asyncckpt.planning.shard_book import ShardBook

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
    """Not agreed upon: as `PER_RANK`, and the other ranks must be told."""


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
    """A tensor that these ranks newly hold, and the digest that they gave; None: unequal ones."""

    ranks: tuple[int, ...]
    key: TensorKey
    digest: bytes | None


class Agreement:
    """Immutable. All ranks that applied the same changes in the same order hold equal ones.

    Attributes:
        world_size: Number of ranks. With one rank everything is `SOLE` and there is nothing to exchange.
        fingerprint: 16 hex digits; equal where the agreements are.
    """

    def __init__(self, world_size: int, fingerprint: str) -> None:
        self.world_size, self.fingerprint = world_size, fingerprint
        self._shared: dict[TensorKey, _Shared] = {}
        self._n_shapes: dict[str, int] = {}
        self._sole: dict[str, int] = {}
        self._per_rank: dict[str, frozenset[int]] = {}
        self._everywhere: frozenset[str] = frozenset()
        self._was_unsettled: frozenset[str] = frozenset()
        self.shards = ShardBook(world_size)

    @classmethod
    def start(cls, world_size: int) -> Agreement:
        """Return the agreement of ranks that have not exchanged anything: everything is `NEWS`."""
        return cls(world_size, block_digest(b"asyncckpt agreement 1, %d ranks" % world_size).hex())

    def duty(self, rank: int, fqn: str, dtype: str, shape: tuple[int, ...]) -> Duty:
        """Return what `rank` writes of a tensor that it holds and that is not `PerRank`."""
        if self.world_size == 1:
            return _SOLE
        if fqn in self._everywhere:
            return _PER_RANK
        shared = self._shared.get((fqn, dtype, shape))
        if shared is not None and rank in shared.holders:
            return shared.duties.get(rank, shared.others)
        if self._sole.get(fqn) == rank:
            return _SOLE
        return _PER_RANK if rank in self._per_rank.get(fqn, ()) else _NEWS

    def extended(self, change: Change, raw: bytes, *, compared: bool = False) -> Agreement:
        """Return the agreement after `change`.

        Args:
            change: The change.
            raw: Its encoded bytes, for the fingerprint.
            compared: Its shards were compared whole, or are to be taken as equal: the ranks have met.

        Raises:
            ProtocolError: A contribution of a rank outside the world.
        """
        outside = [rank for rank in change.contributions if not 0 <= rank < self.world_size]
        if outside:
            detail = f"contributions of ranks {outside[:5]} to the agreement of {self.world_size} ranks"
            raise ProtocolError(detail, detail=detail)
        after = Agreement(self.world_size, block_digest(self.fingerprint.encode() + raw).hex())
        after._shared, after._n_shapes = dict(self._shared), dict(self._n_shapes)
        after._sole, after._per_rank = dict(self._sole), dict(self._per_rank)
        after._everywhere = self._everywhere.union(change.per_rank)
        after._was_unsettled, after.shards = self._was_unsettled, self.shards
        if self.world_size > 1:
            news = after._news(change)
            sharers: dict[tuple[int, ...], list[TensorKey]] = {}
            sets = _RankSets()
            doubtful = {fqn for fqn, held in news.items() if fqn in self._sole or _is_weak_claim(held)}
            unsettled = doubtful - self._was_unsettled
            after._was_unsettled |= unsettled
            for fqn in unsettled:
                after._sole.pop(fqn, None)
                del news[fqn]
            for fqn in sorted(news):
                holders = after._settle(fqn, news[fqn], sets)
                if holders:
                    sharers.setdefault(holders, []).append(news[fqn][0].key)
            after._share(sharers, change, compared=compared)
            after._check_names()
        return after

    def _check_names(self) -> None:
        """A name stands for whole tensors or for shards, never for both."""
        self.shards.contradict([fqn for fqn in self.shards.names if self._is_known(fqn)])

    def _news(self, change: Change) -> dict[str, list[_Held]]:
        """Return what is not agreed upon, by FQN."""
        news: dict[str, list[_Held]] = {}
        for ranks, tensors in _by_tensors(change):
            columns = zip(*(change.contributions[rank].digests for rank in ranks), strict=True)
            for key, digests in zip(tensors, columns, strict=True):
                new, given = ranks, digests
                if key[0] in self._everywhere or self._is_known(key[0]):
                    pairs = self._new_holders(key, ranks, digests)
                    if not pairs:
                        continue
                    new, given = zip(*pairs, strict=True)
                digest = given[0] if given.count(given[0]) == len(given) else None
                news.setdefault(key[0], []).append(_Held(new, key, digest))
        return news

    def _new_holders(
        self, key: TensorKey, ranks: tuple[int, ...], digests: tuple[bytes, ...]
    ) -> list[tuple[int, bytes]]:
        shared = self._shared.get(key)
        if shared is not None and shared.holders.issuperset(ranks):  # the usual case, of thousands of ranks as well
            return []
        pairs = zip(ranks, digests, strict=True)
        return [(rank, digest) for rank, digest in pairs if self.duty(rank, *key).kind is DutyKind.NEWS]

    def _settle(self, fqn: str, held: list[_Held], sets: _RankSets) -> tuple[int, ...]:
        """Decide about one name; return the ranks that share it, and none when it is not shared."""
        holders, first = sets.joined(held), held[0]
        alike = all(h.key == first.key and h.digest == first.digest is not None for h in held)
        # IMPORTANT: two ranks that write different things under one plain name would cost a whole checkpoint.
        is_free = fqn not in self._sole and first.key not in self._shared
        if len(holders) > 1 and alike and is_free and self._n_shapes.get(fqn, 0) < MAX_SHAPES:
            return holders
        if len(holders) == 1 and not self._is_known(fqn):
            self._sole[fqn] = holders[0]
        else:
            known, more = self._per_rank.get(fqn), sets.frozen(holders)
            self._per_rank[fqn] = more if known is None else known | more
        return ()

    def _is_known(self, fqn: str) -> bool:
        return fqn in self._sole or fqn in self._per_rank or fqn in self._n_shapes

    def _share(self, sharers: Mapping[tuple[int, ...], list[TensorKey]], change: Change, *, compared: bool) -> None:
        """Spread new replicas over their holders."""
        new = {key for keys in sharers.values() for key in keys}
        replicas = {h: [replica_of(shape, DTYPES[dtype].itemsize) for _, dtype, shape in keys]
                    for h, keys in sharers.items()}  # fmt: skip
        loads = self._loads(change, new)
        self.shards = self.shards.extended(by_shards(change.contributions), loads, compared=compared)
        if self.shards.names:
            of_shards = self.shards.loads()
            loads = {rank: nbytes + of_shards.get(rank, 0) for rank, nbytes in loads.items()}
        for holders, pieces in spread(replicas, loads).items():
            members = frozenset(holders)
            for key, cut in zip(sharers[holders], pieces, strict=True):
                split = len(cut) > 1
                duties = {p.rank: Duty(DutyKind.SHARED, ((p.first_row, p.n_rows),), split) for p in cut}
                self._shared[key] = _Shared(members, duties, Duty(DutyKind.SHARED, (), split))
                self._n_shapes[key[0]] = self._n_shapes.get(key[0], 0) + 1

    def _loads(self, change: Change, new: set[TensorKey]) -> dict[int, int]:
        """Return what each rank of the change writes of its structure anyway."""
        loads = {rank: c.own_nbytes for rank, c in change.contributions.items()}
        for ranks, tensors in _by_tensors(change):
            members, whole = frozenset(ranks), 0
            for key in tensors:
                if key in new:
                    continue
                nbytes, n_rows = replica_of(key[2], DTYPES[key[1]].itemsize)
                shared = None if key[0] in self._everywhere else self._shared.get(key)
                if shared is None:
                    whole += nbytes
                    continue
                for rank in members - shared.holders:
                    loads[rank] += nbytes
                for rank in members & shared.duties.keys():
                    loads[rank] += sum(nbytes * rows // n_rows for _, rows in shared.duties[rank].pieces)
            for rank in ranks:
                loads[rank] += whole
        return loads

    def turn(self, fqn: str, dtype: str, shape: tuple[int, ...]) -> Turn:
        """Return when the holders of a `SHARED` tensor compare it."""
        return self._turns[fqn, dtype, shape]

    @cached_property
    def _turns(self) -> dict[TensorKey, Turn]:
        shared = {key: s.holders for key, s in self._shared.items() if key[0] not in self._everywhere}
        return turns_of(shared, SAMPLE_LIMIT)


def _is_weak_claim(held: list[_Held]) -> bool:
    return any(h.digest is not None and is_weak(h.digest) for h in held) and sum(len(h.ranks) for h in held) > 1


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


def _by_tensors(change: Change) -> Iterator[tuple[tuple[int, ...], tuple[TensorKey, ...]]]:
    """Yield (ranks, tensors) for each group of ranks that hold the same; of most jobs there are few."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(change.contributions):
        groups.setdefault(id(change.contributions[rank].tensors), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), change.contributions[ranks[0]].tensors


def by_shards(contributions: Mapping[int, Contribution]) -> Iterator[tuple[tuple[int, ...], tuple[ShardClaim, ...]]]:
    """As `_by_tensors`, of shards."""
    groups: dict[int, list[int]] = {}
    for rank in sorted(contributions):
        groups.setdefault(id(contributions[rank].shards), []).append(rank)
    for ranks in groups.values():
        yield tuple(ranks), contributions[ranks[0]].shards

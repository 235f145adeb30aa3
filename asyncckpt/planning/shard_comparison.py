"""Comparing shards that several ranks hold, when the ranks meet. They are declared to be copies, so unequal ones are
an error, whatever they hold. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from asyncckpt.errors import ProtocolError, ReplicaMismatchError
from asyncckpt.format.checksums import DIGEST_NBYTES
from asyncckpt.planning.claims import ShardClaim, position_in
from asyncckpt.planning.contributions import Contribution
from asyncckpt.planning.shard_book import ShardBook
from asyncckpt.planning.shard_lies import Lie, Scattered

_Slot = tuple[tuple[str, ...], tuple[int, ...] | int]


def compare_shards(book: ShardBook, contributions: Mapping[int, Contribution], digests: Mapping[int, bytes]) -> None:
    """Check that ranks that hold the same shards hold equal ones.

    Args:
        book: With what `contributions` say.
        contributions: By rank.
        digests: By rank, 8 bytes for each of `book.compared`, in its order.

    Raises:
        ReplicaMismatchError: Two ranks differ; the same error on all ranks.
        ProtocolError: A rank gave another number of digests.
    """
    first: dict[_Slot, tuple[int, bytes]] = {}
    lists = {id(contribution.shards): contribution.shards for contribution in contributions.values()}
    scattered = {number for number, claims in lists.items() if any(_is_taken_apart(book, claim) for claim in claims)}
    runs: dict[tuple[int, int], list[_Run]] = {}
    for rank, contribution in contributions.items():
        number = id(contribution.shards)
        key = number, rank if number in scattered else -1
        if key not in runs:
            runs[key] = _runs(book, contribution.shards, rank)
    runs = _alike(runs)
    for rank in sorted(contributions):
        number = id(contributions[rank].shards)
        known = runs[number, rank if number in scattered else -1]
        raw, end = digests[rank], known[-1].end if known else 0
        if len(raw) != end:
            detail = f"rank {rank} gave {len(raw)} bytes for the digests of its shards, expected {end}"
            raise ProtocolError(detail, detail=detail)
        for names, lie, begin, stop in known:
            if isinstance(lie, Lie):
                at = position_in(lie.grid, rank)
                if at is None:
                    continue
                holders: tuple[int, ...] | int = lie.grid.replicas(at)[0]
            else:
                holders = ()
            other, expected = first.setdefault((names, holders), (rank, raw[begin:stop]))
            if expected != raw[begin:stop]:
                raise _unequal(names, expected, raw[begin:stop], other, rank)


class _Run(NamedTuple):
    """Digests that lie side by side, and belong to one grid or one box: names, how they lie, first byte, end."""

    names: tuple[str, ...]
    lie: Lie | Scattered
    begin: int
    end: int


def _is_taken_apart(book: ShardBook, claim: ShardClaim) -> bool:
    """Whether a tensor that is on a mesh here lies in boxes all the same: on other ranks it is on another, or none."""
    return claim.grid is not None and isinstance(book.lie(claim.fqn), Scattered)


def _alike(runs: dict[tuple[int, int], list[_Run]]) -> dict[tuple[int, int], list[_Run]]:
    """Take those apart that do not have the same names on all ranks.

    IMPORTANT: a run is compared with runs of the same names. Ranks that hold the same tensors in another order, or one
    between them that others do not have, would else not be compared at all.
    """
    distinct = {run.names for known in runs.values() for run in known if isinstance(run.lie, Lie)}
    counts = Counter(name for names in distinct for name in names)
    broken = {names for names in distinct if len(names) > 1 and any(counts[name] > 1 for name in names)}
    if not broken:
        return runs
    return {
        key: [one for run in known for one in (_singles(run) if run.names in broken else (run,))]
        for key, known in runs.items()
    }


def _singles(run: _Run) -> Iterator[_Run]:
    for n, name in enumerate(run.names):
        begin = run.begin + n * DIGEST_NBYTES
        yield _Run((name,), run.lie, begin, begin + DIGEST_NBYTES)


def _runs(book: ShardBook, claims: Sequence[ShardClaim], rank: int) -> list[_Run]:
    """Return what of a rank's digests belongs together."""
    found: list[_Run] = []
    names: list[str] = []  # of the run that is being gathered
    last: Lie | None = None
    begin = at = 0

    def end_run() -> None:
        if last is not None:
            found.append(_Run(tuple(names), last, begin, at))
        names.clear()

    for position, box in book.compared(claims, rank):
        fqn = claims[position].fqn
        lie = book.lie(fqn)
        assert lie is not None
        if isinstance(lie, Scattered):
            assert box is not None
            end_run()
            last = None
            found.append(_Run((fqn, str(claims[position].of_rank(rank)[box])), lie, at, at + DIGEST_NBYTES))
        else:
            if last is None or lie.grid is not last.grid:
                end_run()
                last, begin = lie, at
            names.append(fqn)
        at += DIGEST_NBYTES
    end_run()
    return found


def _unequal(names: Sequence[str], one: bytes, other: bytes, *ranks: int) -> ReplicaMismatchError:
    at = next(n for n in range(0, len(one), DIGEST_NBYTES) if one[n : n + 8] != other[n : n + 8]) // DIGEST_NBYTES
    fqn = names[min(at, len(names) - 1)] if len(one) > DIGEST_NBYTES else names[0]
    return ReplicaMismatchError(
        f"ranks {ranks[0]} and {ranks[1]} hold the same shard of {fqn!r} by its mesh or its offsets, and its elements "
        "differ; nothing was saved. If they are to be equal, synchronise them before saving; if they are different "
        "tensors, give them different keys, or put them into PerRank as plain tensors; replicated='assume' takes "
        "those of one rank",
        fqn=fqn,
        ranks=list(ranks),
    )

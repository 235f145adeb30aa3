"""Comparing shards that several ranks hold, when the ranks meet. They are declared to be copies, so unequal ones are
an error, whatever they hold. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asyncckpt.errors import ProtocolError, ReplicaMismatchError
from asyncckpt.format.checksum import DIGEST_NBYTES
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
    runs: dict[int, list[tuple[tuple[str, ...], Lie | Scattered, int, int]]] = {}
    for rank in sorted(contributions):
        claims = contributions[rank].shards
        known = runs.get(id(claims))
        if known is None:
            known = runs[id(claims)] = _runs(book, claims)
        raw, end = digests[rank], known[-1][3] if known else 0
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


def _runs(book: ShardBook, claims: Sequence[ShardClaim]) -> list[tuple[tuple[str, ...], Lie | Scattered, int, int]]:
    """Return what of a rank's digests belongs together: (names, how they lie, from which byte, to which)."""
    found: list[tuple[tuple[str, ...], Lie | Scattered, int, int]] = []
    names: list[str] = []
    last: Lie | None = None
    at = 0
    for position, box in book.compared(claims):
        fqn = claims[position].fqn
        lie = book.lie(fqn)
        assert lie is not None
        if isinstance(lie, Scattered):
            assert box is not None
            found.append(((fqn, str(claims[position].boxes[box])), lie, at, at + DIGEST_NBYTES))
        elif last is not None and lie.grid is last.grid and found and found[-1][1] is last:
            names.append(fqn)
            found[-1] = (tuple(names), last, found[-1][2], at + DIGEST_NBYTES)
        else:
            names, last = [fqn], lie
            found.append((tuple(names), lie, at, at + DIGEST_NBYTES))
        at += DIGEST_NBYTES
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

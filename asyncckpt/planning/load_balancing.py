"""Replicas spread over the ranks that hold them, so that every rank writes about as much. Pure and deterministic.

All replicas of one set of holders are one range of bytes. It is cut so that all holders write the same total, together
with what each writes anyway; a holder that writes more than that anyway gets nothing. A replica of more than
`CUT_NBYTES` may be cut between rows, smaller ones never, so each cut is moved to the nearest place where one is
allowed: by half a grain at most. A grain is a small replica, `CUT_NBYTES` of a large one, or one row where that is
more. So no rank writes more than one grain above the common total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CUT_NBYTES = 1 << 20
"""Replicas up to this size stay whole; larger ones are cut in pieces of about this size or more. Chosen, not measured:
a smaller cut gains a millisecond of writing and costs a chunk in every reader."""


class Replica(NamedTuple):
    """A tensor to spread: its bytes, and the number of rows between which it may be cut; 1: it may not be cut."""

    nbytes: int
    n_rows: int


class RowRange(NamedTuple):
    """The rows that one rank writes of a replica."""

    rank: int
    first_row: int
    n_rows: int


def row_dimension(shape: Sequence[int]) -> int | None:
    """Return the first dimension that is larger than 1, whose rows are runs of bytes of a contiguous tensor.

    Returns:
        None if there is nothing to cut: the tensor has one element, or none.
    """
    if 0 in shape:
        return None
    return next((d for d, size in enumerate(shape) if size > 1), None)


def box_of_rows(shape: tuple[int, ...], first_row: int, n_rows: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return offsets and sizes of `n_rows` rows of a tensor of `shape` from `first_row` on, in elements."""
    dimension = row_dimension(shape)
    if dimension is None:
        return (0,) * len(shape), shape
    offsets = tuple(first_row if d == dimension else 0 for d in range(len(shape)))
    return offsets, tuple(n_rows if d == dimension else size for d, size in enumerate(shape))


def replica_of(shape: tuple[int, ...], itemsize: int) -> Replica:
    """Return bytes and rows of a tensor of `shape`."""
    dimension = row_dimension(shape)
    return Replica(math.prod(shape) * itemsize, 1 if dimension is None else shape[dimension])


def spread(
    sets: Mapping[tuple[int, ...], Sequence[Replica]], loads: Mapping[int, int]
) -> dict[tuple[int, ...], list[tuple[RowRange, ...]]]:
    """Divide replicas among their holders, those with the fewest holders first: they have the least choice.

    Args:
        sets: Replicas by their holders, as ascending ranks.
        loads: By rank the bytes that it writes anyway; 0 for ranks that are not in it.

    Returns:
        For each set, and each of its replicas in order, who writes which rows; all rows of it exactly once.
    """
    filled = dict(loads)
    found = {}
    for holders in sorted(sets, key=lambda ranks: (len(ranks), ranks)):
        pieces = found[holders] = _cut(sets[holders], _quotas(holders, filled, sum(r.nbytes for r in sets[holders])))
        for replica, cut in zip(sets[holders], pieces, strict=True):
            for piece in cut:
                nbytes = replica.nbytes * piece.n_rows // replica.n_rows
                filled[piece.rank] = filled.get(piece.rank, 0) + nbytes
    return found


def _quotas(holders: Iterable[int], loads: Mapping[int, int], nbytes: int) -> list[tuple[int, int]]:
    """Return (rank, byte at which its share ends) of the ranks that get a share, ascending; the last is `nbytes`."""
    by_load = sorted((loads.get(rank, 0), rank) for rank in holders)
    count, below = 0, 0  # the `count` least loaded ranks share: their own bytes are `below`
    for load, _ in by_load:
        if count and load * count - below >= nbytes:
            break
        count, below = count + 1, below + load
    total = nbytes + below
    ends, own = [], 0
    for n, (rank, load) in enumerate(sorted((rank, load) for load, rank in by_load[:count])):
        own += load
        ends.append((rank, (n + 1) * total // count - own))
    return ends


def _cut(replicas: Sequence[Replica], ends: Sequence[tuple[int, int]]) -> list[tuple[RowRange, ...]]:
    found = []
    owner, start = 0, 0
    for nbytes, n_rows in replicas:
        pieces, row = [], 0
        cuttable = nbytes > CUT_NBYTES and n_rows > 1
        grain = max(1, CUT_NBYTES * n_rows // nbytes) if cuttable else n_rows
        while ends[owner][1] < start + nbytes and owner + 1 < len(ends):
            # The share of `owner` ends in here: at the nearest grain.
            rank, end = ends[owner]
            grains = (2 * (end - start) * n_rows + grain * nbytes) // (2 * grain * nbytes)
            stop = min(n_rows, max(row, grains * grain))
            if stop > row:
                pieces.append(RowRange(rank, row, stop - row))
            row = stop
            owner += 1
        if row < n_rows:
            pieces.append(RowRange(ends[owner][0], row, n_rows - row))
        found.append(tuple(pieces))
        start += nbytes
    return found

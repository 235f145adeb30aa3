"""Divides replicas among the ranks that hold them, so that all ranks write about the same. Pure and deterministic.

All replicas with the same holders are treated as one range of bytes. It is cut so that all holders write the same
total, including what each writes in any case; a holder whose own bytes exceed that total gets no share. Only a replica
of more than `CUT_NBYTES` may be cut, and only between rows. So each cut is moved to the nearest allowed position, by at
most half a grain. A grain is a whole small replica, or `CUT_NBYTES` of a large one, or one row if a row is larger. So
no rank writes more than one grain above the common total.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

CUT_NBYTES = 1 << 20
"""Replicas up to this size are not cut; larger ones are cut into pieces of about this size or more. Chosen, not
measured: a smaller piece saves a millisecond of writing and costs one more chunk in every read."""


class Replica(NamedTuple):
    """A replica to divide: its bytes, and its number of rows, between which it may be cut; 1: it may not be cut."""

    nbytes: int
    n_rows: int


class RowRange(NamedTuple):
    """The rows that one rank writes of a replica."""

    rank: int
    first_row: int
    n_rows: int


def row_dimension(shape: Sequence[int]) -> int | None:
    """Return the first dimension that is larger than 1. In a contiguous tensor, its rows are runs of bytes.

    Returns:
        None if the tensor has at most one element, so that it cannot be cut.
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


def divide_replicas(
    sets: Mapping[tuple[int, ...], Sequence[Replica]], loads: Mapping[int, int]
) -> dict[tuple[int, ...], list[tuple[RowRange, ...]]]:
    """Divide replicas among their holders. Replicas with few holders come first, since they have the least choice.

    Args:
        sets: Replicas by their holders; holders are ascending ranks.
        loads: By rank, the bytes that it writes in any case; 0 for ranks that are not in it.

    Returns:
        For each set of holders, and each of its replicas in order, which rank writes which rows; each row once.
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
    """Return (rank, byte at which its share ends) for the ranks that get a share, ascending; the last is `nbytes`."""
    by_load = sorted((loads.get(rank, 0), rank) for rank in holders)
    count, below = 0, 0  # the `count` ranks with the smallest loads get shares; `below` is the sum of their loads
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
            # The share of `owner` ends in this replica: cut it at the nearest grain.
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

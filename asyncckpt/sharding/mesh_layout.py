"""Which elements of a global tensor each rank of a device mesh holds. Pure index arithmetic; no torch.

A placement is a tuple: `()` replicates over its mesh dimension, `(d,)` shards dimension d, `(d, factor)` shards it as
torch's `_StridedShard` does. They are applied in the order of the mesh's dimensions, each to the part that the
placements before it have left.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from asyncckpt.format.structure import Box

Run = tuple[int, int]
"""(first index, number of indices)"""


class Grid(NamedTuple):
    """How a tensor is sharded and replicated over a mesh. Equal on all ranks of the mesh.

    Attributes:
        mesh: Shape of the mesh.
        ranks: Global ranks in row-major order of the mesh.
        placements: For each dimension of the mesh: `()` replicates, `(d,)` and `(d, factor)` shard dimension d.
    """

    mesh: tuple[int, ...]
    ranks: tuple[int, ...]
    placements: tuple[tuple[int, ...], ...]

    @property
    def n_replicas(self) -> int:
        """Number of ranks that hold each element."""
        sizes = zip(self.mesh, self.placements, strict=True)
        return math.prod(size for size, placement in sizes if not placement)

    def coordinate(self, position: int) -> tuple[int, ...]:
        """Return the coordinate on the mesh of the rank at index `position` of `ranks`."""
        found = []
        for size in reversed(self.mesh):
            position, at = divmod(position, size)
            found.append(at)
        return tuple(reversed(found))

    def boxes(self, shape: tuple[int, ...], coordinate: tuple[int, ...]) -> tuple[Box, ...]:
        """Return the boxes that the rank at `coordinate` holds of a tensor of `shape`, in row-major order."""
        return _boxes(self.mesh, self.placements, shape, coordinate)

    def replicas(self, position: int) -> tuple[int, ...]:
        """Return the ranks that hold the same elements as the rank at `position`, itself included, ascending."""
        base, step, free = position, 1, []
        for size, placement in zip(reversed(self.mesh), reversed(self.placements), strict=True):
            if not placement:
                free.append(range(0, size * step, step))
                base -= position // step % size * step
            step *= size
        return tuple(sorted(self.ranks[base + sum(offsets)] for offsets in itertools.product(*free)))


@functools.lru_cache(4096)
def _boxes(
    mesh: tuple[int, ...], placements: tuple[tuple[int, ...], ...], shape: tuple[int, ...], coordinate: tuple[int, ...]
) -> tuple[Box, ...]:
    by_dimension = [
        index_runs(
            length,
            [
                (size, at, placement[1] if len(placement) > 1 else 1)
                for size, at, placement in zip(mesh, coordinate, placements, strict=True)
                if placement and placement[0] == d
            ],
        )
        for d, length in enumerate(shape)
    ]
    return tuple((tuple(r[0] for r in runs), tuple(r[1] for r in runs)) for runs in itertools.product(*by_dimension))


def index_runs(length: int, shards: Sequence[tuple[int, int, int]]) -> tuple[Run, ...]:
    """Return the indices that a rank holds of a sharded dimension.

    Args:
        length: Length of the dimension.
        shards: (number of shards, number of this shard, split factor; 1 for a plain shard), in the order of the mesh.
    """
    runs: list[Run] = [(0, length)]
    for n_shards, at, factor in shards:
        total = sum(n for _, n in runs)
        pieces = []
        for start, stop in _chunks(total, factor):
            chunk = -(-(stop - start) // n_shards)
            first = min(start + chunk * at, stop)
            pieces.append((first, min(first + chunk, stop) - first))
        runs = _joined(itertools.chain.from_iterable(_taken(runs, start, n) for start, n in pieces if n))
    return tuple(runs)


def count_indices(length: int, shards: Sequence[tuple[int, int, int]]) -> tuple[int, int]:
    """Return how many indices `index_runs` returns, and a bound of its steps, without making any.

    Args:
        length, shards: See `index_runs`.
    """
    n_runs = n_steps = 1
    for n_shards, at, factor in shards:
        size = -(-length // factor)
        n_full, rest = divmod(length, size or 1)
        n_chunks = n_full + bool(rest)
        n_steps += n_chunks * n_runs  # it looks for each chunk in all runs
        n_runs += n_chunks
        length = n_full * _nth(size, n_shards, at) + _nth(rest, n_shards, at)
    return length, n_steps


def _nth(length: int, n_shards: int, at: int) -> int:
    """Return how many of `length` indices are in shard number `at`."""
    shard = -(-length // n_shards)
    return min(shard, max(0, length - shard * at))


def _chunks(length: int, n_chunks: int) -> Iterator[tuple[int, int]]:
    """Yield start and end of each chunk with elements, of equal length except for the last, as `torch.chunk` does."""
    size = -(-length // n_chunks)
    for start in range(0, length, size or 1):
        yield start, min(start + size, length)


def _taken(runs: Sequence[Run], start: int, n: int) -> Iterator[Run]:
    """Yield `n` of the indices in `runs`, from the `start`-th on, as runs."""
    for first, length in runs:
        if start < length and n > 0:
            here = min(length - start, n)
            yield first + start, here
            n -= here
            start = length
        start -= length


def _joined(runs: Iterator[Run]) -> list[Run]:
    found: list[Run] = []
    for first, n in runs:
        if found and sum(found[-1]) == first:
            found[-1] = (found[-1][0], found[-1][1] + n)
        else:
            found.append((first, n))
    return found


_positions: dict[int, tuple[tuple[int, ...], Mapping[int, int]]] = {}


def position_in(grid: Grid, rank: int) -> int | None:
    """Return the index of `rank` in `grid.ranks`; None: it is not in the grid."""
    known = _positions.get(id(grid.ranks))
    if known is None or known[0] is not grid.ranks:
        if len(_positions) > 256:
            _positions.clear()
        known = _positions[id(grid.ranks)] = (grid.ranks, {r: n for n, r in enumerate(grid.ranks)})
    return known[1].get(rank)


_holders: dict[tuple[int, int], tuple[Grid, tuple[int, ...]]] = {}


def holders_in(grid: Grid, rank: int) -> tuple[int, ...]:
    """Return the ranks of `grid` that hold the same elements as `rank`, ascending; empty if `rank` is not in the grid.

    Cached by the identity of `grid`.
    """
    known = _holders.get((id(grid), rank))
    if known is None or known[0] is not grid:
        if len(_holders) > 256:
            _holders.clear()
        at = position_in(grid, rank)
        known = _holders[id(grid), rank] = (grid, () if at is None else grid.replicas(at))
    return known[1]


def nbytes_by_position(grid: Grid, shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Return, for each index of `grid.ranks`, the bytes that this rank holds of a tensor.

    The number of indices that a rank holds of a dimension depends only on the mesh dimensions that shard it, so few
    values are computed and multiplied.
    """
    sharded = sorted({placement[0] for placement in grid.placements if placement})
    fixed = itemsize * math.prod(length for d, length in enumerate(shape) if d not in sharded)
    held = [fixed] * len(grid.ranks)
    for d in sharded:
        mesh_dims = tuple(m for m, placement in enumerate(grid.placements) if placement and placement[0] == d)
        lengths = _lengths(grid, shape[d], mesh_dims)
        if len(lengths) == len(held) and len(sharded) == 1:  # in the order of the mesh
            return [fixed * n for n in lengths]
        held = [nbytes * lengths[n] for nbytes, n in zip(held, _numbers(grid.mesh, mesh_dims), strict=True)]
    return held


@functools.lru_cache(64)
def _numbers(mesh: tuple[int, ...], mesh_dims: tuple[int, ...]) -> tuple[int, ...]:
    """Return, for each position of a mesh, the row-major number of its coordinates in `mesh_dims`."""
    found = []
    for at in itertools.product(*map(range, mesh)):
        number = 0
        for m in mesh_dims:
            number = number * mesh[m] + at[m]
        found.append(number)
    return tuple(found)


def _lengths(grid: Grid, length: int, mesh_dims: Sequence[int]) -> list[int]:
    """Return how many indices of a dimension are held, by the row-major number of the coordinates in `mesh_dims`."""
    if len(mesh_dims) == 1 and len(grid.placements[mesh_dims[0]]) == 1:
        n = grid.mesh[mesh_dims[0]]
        chunk = -(-length // n) or 1
        full, rest = divmod(length, chunk)
        return ([chunk] * full + [rest] + [0] * n)[:n]
    found = []
    for number in range(math.prod(grid.mesh[m] for m in mesh_dims)):
        shards = []
        for m in reversed(mesh_dims):
            number, at = divmod(number, grid.mesh[m])
            placement = grid.placements[m]
            shards.append((grid.mesh[m], at, placement[1] if len(placement) > 1 else 1))
        found.append(sum(n for _, n in index_runs(length, shards[::-1])))
    return found


def boxes_of_range(shape: tuple[int, ...], start: int, numel: int) -> list[tuple[Box, int]]:
    """Return elements [start, start + numel) of a row-major tensor of `shape` as boxes, in order.

    Returns:
        (box, index in the range at which its elements begin). Each is one run of the range; there are at most
        2 * dimensions - 1.
    """
    if not numel:
        return []
    if not shape:
        return [(((), ()), 0)]
    row = math.prod(shape[1:])
    first, head = divmod(start, row)
    last, tail = divmod(start + numel, row)
    if first == last:  # inside one row
        return [_within(first, box, at) for box, at in boxes_of_range(shape[1:], head, numel)]
    found: list[tuple[Box, int]] = []
    at = 0
    if head:
        found += [_within(first, box, n) for box, n in boxes_of_range(shape[1:], head, row - head)]
        first, at = first + 1, row - head
    if last > first:
        zeros = (0,) * (len(shape) - 1)
        found.append((((first, *zeros), (last - first, *shape[1:])), at))
        at += (last - first) * row
    if tail:
        found += [_within(last, box, at + n) for box, n in boxes_of_range(shape[1:], 0, tail)]
    return found


def _within(row: int, box: Box, at: int) -> tuple[Box, int]:
    offsets, sizes = box
    return ((row, *offsets), (1, *sizes)), at

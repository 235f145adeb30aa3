"""How many bytes each rank holds of what lies on grids, worked out without the boxes of every rank. Pure."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence

from asyncckpt.planning.shard_lies import Lie
from asyncckpt.planning.sharding.grid import Grid, runs_of


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
                held = _held(grid, shape, nbytes)
                sums = [total + more for total, more in zip(sums, held, strict=True)]
        for rank, nbytes in zip(grid.ranks, sums, strict=True):
            totals[rank] = totals.get(rank, 0) + nbytes // grid.n_replicas


def _held(grid: Grid, shape: tuple[int, ...], itemsize: int) -> list[int]:
    """Return the bytes that each position of the grid holds.

    The length of a dimension depends on those mesh dimensions only that shard it: few values, multiplied out.
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
    """Return for each position of a mesh which combination of coordinates in those dimensions it has, row-major."""
    found = []
    for at in itertools.product(*map(range, mesh)):
        number = 0
        for m in mesh_dims:
            number = number * mesh[m] + at[m]
        found.append(number)
    return tuple(found)


def _lengths(grid: Grid, length: int, mesh_dims: Sequence[int]) -> list[int]:
    """Return how long a dimension is at each combination of coordinates in those mesh dimensions, row-major."""
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
        found.append(sum(n for _, n in runs_of(length, shards[::-1])))
    return found

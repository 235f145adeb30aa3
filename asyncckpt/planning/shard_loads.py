"""How many bytes each rank holds of what lies on grids, worked out without the boxes of every rank. Pure."""

from __future__ import annotations

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
    mesh_dims = {d: [m for m, p in enumerate(grid.placements) if p and p[0] == d] for d in sharded}
    lengths = {d: _lengths(grid, shape[d], mesh_dims[d]) for d in sharded}
    if len(sharded) == 1 and len(mesh_dims[sharded[0]]) == len(grid.mesh):
        return [fixed * n for n in lengths[sharded[0]]]
    found = []
    for position in range(len(grid.ranks)):
        at, nbytes = grid.coordinate(position), fixed
        for d in sharded:
            number = 0
            for m in mesh_dims[d]:
                number = number * grid.mesh[m] + at[m]
            nbytes *= lengths[d][number]
        found.append(nbytes)
    return found


def _lengths(grid: Grid, length: int, mesh_dims: Sequence[int]) -> list[int]:
    """Return how long a dimension is at each combination of coordinates in those mesh dimensions, row-major."""
    if len(mesh_dims) == 1 and len(grid.placements[mesh_dims[0]]) == 1:
        n = grid.mesh[mesh_dims[0]]
        chunk = -(-length // n)
        return [min(chunk, max(0, length - chunk * at)) for at in range(n)]
    found = []
    for number in range(math.prod(grid.mesh[m] for m in mesh_dims)):
        shards = []
        for m in reversed(mesh_dims):
            number, at = divmod(number, grid.mesh[m])
            placement = grid.placements[m]
            shards.append((grid.mesh[m], at, placement[1] if len(placement) > 1 else 1))
        found.append(sum(n for _, n in runs_of(length, shards[::-1])))
    return found

"""Shards without process groups: what each rank of a mesh would hold of a tensor, for tests that simulate ranks."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch

from asyncckpt.sharding import registry
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.shard_types import LocalShard, Sharded


class OnGrid:
    """What one rank holds of `whole` on a grid; stands for a DTensor."""

    def __init__(self, whole: torch.Tensor, grid: Grid, rank: int) -> None:
        self.whole, self.grid = whole, grid
        boxes = grid.boxes(tuple(whole.shape), grid.coordinate(grid.ranks.index(rank))) if rank in grid.ranks else ()
        cuts = [(tuple(slice(o, o + s) for o, s in zip(*box, strict=True)), box[0]) for box in boxes]
        self.shards = tuple(LocalShard(whole[cut].clone(), offsets) for cut, offsets in cuts)


def described(value: OnGrid) -> Sharded:
    """What `sharded` returns for one."""
    return Sharded(value.whole.dtype, tuple(value.whole.shape), value.shards, value.grid, "OnGrid")


@pytest.fixture
def grids(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Lets `OnGrid` be saved."""
    monkeypatch.setattr(registry, "_OF_TORCH", ((__name__, "OnGrid", described), *registry._OF_TORCH))
    yield


def grid_of(mesh: Sequence[int], *placements: Any, ranks: Sequence[int] | None = None) -> Grid:
    """A grid; a placement is None, a dimension, or (dimension, split factor)."""
    kinds = tuple(() if p is None else p if isinstance(p, tuple) else (p,) for p in placements)
    return Grid(tuple(mesh), tuple(range(math.prod(mesh)) if ranks is None else ranks), kinds)


def random_grid(rng: random.Random, world_size: int, n_dims: int) -> Grid:
    """A mesh of all ranks of up to three dimensions, and placements for a tensor of `n_dims`."""
    mesh, left = [], world_size
    while left > 1 and len(mesh) < 2:
        divisors = [n for n in range(1, left + 1) if left % n == 0]
        mesh.append(rng.choice(divisors))
        left //= mesh[-1]
    mesh.append(left)
    kinds: list[Any] = []
    for _ in mesh:
        kind, d = rng.random(), rng.randrange(n_dims)
        kinds.append(None if kind < 0.3 else d if kind < 0.75 else (d, rng.randint(1, 3)))
    return grid_of(mesh, *kinds)

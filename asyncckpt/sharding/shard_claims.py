"""Shard claims: which parts of a tensor a rank holds, by a grid that is equal on all ranks of a mesh, or box by box.

A rank sends its claims to the others at a meeting. Pure; no torch.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgpack

from asyncckpt.basics.limits import MAX_RANKS
from asyncckpt.basics.safe_msgpack import unpack_strict
from asyncckpt.dtypes import DTYPES
from asyncckpt.format.structure import MAX_DIMS, MAX_INT, MAX_TENSORS, Box
from asyncckpt.sharding.mesh_layout import Grid, position_in

MAX_MESH_DIMS = 16


class ShardClaim(NamedTuple):
    """A tensor of which a rank holds parts.

    Attributes:
        fqn: FQN of the tensor's first path.
        dtype: Name of the dtype.
        shape: Global shape, in elements.
        grid: The grid that determines which parts each rank holds; None: see `boxes`.
        boxes: The parts; empty if there is a grid.
        is_first: Whether this rank's copy of the boxes has `replica_id` 0.
    """

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    grid: Grid | None
    boxes: tuple[Box, ...]
    is_first: bool = True

    def boxes_of_rank(self, rank: int) -> tuple[Box, ...]:
        """Return the boxes that `rank` holds."""
        if self.grid is None:
            return self.boxes
        at = position_in(self.grid, rank)
        return () if at is None else self.grid.boxes(self.shape, self.grid.coordinate(at))


def encode_claims(claims: Sequence[ShardClaim]) -> bytes:
    """Return claims as msgpack of [grids, claims].

    A claim is [FQN, dtype, shape, number of its grid or list of boxes, `is_first`].
    """
    grids: dict[Grid, int] = {}
    numbers: dict[int, int] = {}  # hashing a grid takes as long as it has ranks
    rows = []
    for claim in claims:
        where: Any = claim.boxes
        if claim.grid is not None:
            number = numbers.get(id(claim.grid))
            if number is None:
                number = numbers[id(claim.grid)] = grids.setdefault(claim.grid, len(grids))
            where = number
        rows.append((claim.fqn, claim.dtype, claim.shape, where, claim.is_first))
    return bytes(msgpack.packb([[(g.mesh, _packed(g), g.placements) for g in grids], rows]))


def _packed(grid: Grid) -> Any:
    """Return the ranks of a grid; if evenly spaced, as nearly always, as [[first], [step of each mesh dimension]]."""
    steps, step = [], len(grid.ranks)
    for size in grid.mesh:
        step //= size
        steps.append(grid.ranks[step] - grid.ranks[0] if size > 1 else 0)
    return [[grid.ranks[0]], steps] if _spaced(grid.ranks[0], grid.mesh, steps) == grid.ranks else grid.ranks


def _spaced(first: int, mesh: Sequence[int], steps: Sequence[int]) -> tuple[int, ...]:
    ranges = [range(0, size * step, step) if step else [0] * size for size, step in zip(mesh, steps, strict=True)]
    return tuple(first + sum(parts) for parts in itertools.product(*ranges))


def decode_claims(data: bytes) -> tuple[ShardClaim, ...]:
    """Return the claims that `encode_claims` gave these bytes for.

    Raises:
        ValueError, TypeError, IndexError: The bytes are not encoded claims.
    """
    raw_grids, rows = unpack_strict(data)
    grids = [_grid(*raw) for raw in raw_grids]
    if len(rows) > MAX_TENSORS:
        raise ValueError("too many shards")
    found, seen = [], set()
    for fqn, dtype, shape, where, is_first in rows:
        if type(fqn) is not str or fqn in seen or type(dtype) is not str or dtype not in DTYPES:
            raise ValueError(f"the claim of {fqn!r}, dtype {dtype!r}, is malformed, or occurs twice")
        if not _are_lengths(shape) or len(shape) > MAX_DIMS:
            raise ValueError(f"the claim of {fqn!r} has the invalid global shape {shape!r}")
        seen.add(fqn)
        if type(where) is int:
            grid = grids[where] if 0 <= where < len(grids) else None
            if grid is None or any(placement and placement[0] >= len(shape) for placement in grid.placements):
                raise ValueError(f"the claim of {fqn!r} has no valid grid")
            found.append(ShardClaim(fqn, dtype, shape, grid, ()))
        else:
            boxes = tuple(_box(fqn, shape, box) for box in where)
            found.append(ShardClaim(fqn, dtype, shape, None, boxes, bool(is_first)))
    return tuple(found)


def _are_lengths(value: Any) -> bool:
    return isinstance(value, tuple) and all(type(n) is int and 0 <= n <= MAX_INT for n in value)


def _box(fqn: str, shape: tuple[int, ...], raw: Any) -> Box:
    offsets, sizes = raw
    fits = _are_lengths(offsets) and _are_lengths(sizes) and len(offsets) == len(sizes) == len(shape)
    if not fits or any(o + s > n for o, s, n in zip(offsets, sizes, shape, strict=True)):
        raise ValueError(f"a box of {fqn!r} at {offsets!r} of sizes {sizes!r} is outside of shape {shape!r}")
    return offsets, sizes


def _grid(mesh: Any, ranks: Any, placements: Any) -> Grid:
    if not _are_lengths(mesh) or not 0 < len(mesh) <= MAX_MESH_DIMS or not 0 < math.prod(mesh) <= MAX_RANKS:
        raise ValueError(f"invalid shape of a mesh: {mesh!r}")
    if ranks and type(ranks[0]) is tuple:
        (first,), steps = ranks
        if len(steps) != len(mesh) or not all(type(n) is int for n in (first, *steps)):
            raise ValueError("invalid ranks of a mesh")
        ranks = _spaced(first, mesh, steps)
    if not _are_lengths(ranks) or not len(ranks) == math.prod(mesh) == len(set(ranks)) or max(ranks) >= MAX_RANKS:
        raise ValueError("invalid ranks of a mesh")
    fits = isinstance(placements, tuple) and len(placements) == len(mesh)
    if not fits or not all(_are_lengths(p) and len(p) <= 2 and (len(p) < 2 or p[1] > 0) for p in placements):
        raise ValueError("invalid placements on a mesh")
    return Grid(mesh, ranks, placements)

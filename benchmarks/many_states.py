"""States and contributions of jobs with thousands of ranks, as each of those ranks would make them."""

from __future__ import annotations

import torch

from asyncckpt.format.checksum import block_digest
from asyncckpt.planning.claims import ShardClaim
from asyncckpt.planning.contributions import Contribution
from asyncckpt.planning.flattened import Flattened
from asyncckpt.planning.shard_leaves import ShardLeaf
from asyncckpt.planning.sharding.grid import Grid

SHAPES = ((4096, 4096), (4096, 11008), (11008, 4096), (4096,), (32000, 4096), (1024, 4096), (128,), (50257, 768))
LAYOUTS = ("plain", "fsdp", "hsdp")
REPLICATE = 8
"""Copies of each shard with "hsdp"."""


def shapes(n_tensors: int) -> list[tuple[int, ...]]:
    """Return the shapes of a model, with a few hundred different ones among a thousand."""
    return [tuple(size + n // 16 for size in SHAPES[n % len(SHAPES)]) for n in range(n_tensors)]


def grid_of(layout: str, n_ranks: int) -> Grid | None:
    """Return how tensors lie on the ranks."""
    ranks = tuple(range(n_ranks))
    if layout == "fsdp":
        return Grid((n_ranks,), ranks, ((0,),))
    if layout == "hsdp":
        return Grid((REPLICATE, n_ranks // REPLICATE), ranks, ((), (0,)))
    return None


def state_of(layout: str, n_ranks: int, n_tensors: int, rank: int) -> Flattened:
    """Return a rank's flattened state; its tensors have no memory of their own."""
    grid = grid_of(layout, n_ranks)
    names = [f"model.layers.{n // 8}.part{n % 8}.weight" for n in range(n_tensors)]
    tree = ("d", tuple(item for n, name in enumerate(names) for item in (name, ("T", n))))
    tensors, shards = [], {}
    for n, shape in enumerate(shapes(n_tensors)):
        held = shape
        if grid is not None:
            boxes = grid.boxes(shape, grid.coordinate(rank))
            shards[n] = ShardLeaf(shape, grid, boxes, (n,) * len(boxes), True)
            held = boxes[0][1] if boxes else (0,)
        tensors.append(torch.empty(1, dtype=torch.bfloat16).expand(held))
    return Flattened(tree, tensors, [], shards=shards)


def contributions_of(layout: str, n_ranks: int, n_tensors: int) -> tuple[dict[int, bytes], dict[int, bytes]]:
    """Return what all ranks send in the first exchange: contributions, then digests."""
    grid, sizes = grid_of(layout, n_ranks), shapes(n_tensors)
    names = [f"model.layers.{n // 8}.part{n % 8}.weight" for n in range(n_tensors)]
    keys = tuple((name, "bfloat16", shape) for name, shape in zip(names, sizes, strict=True))
    if grid is None:
        data = Contribution(tensors=keys, own_nbytes=0, digests=(b"",) * n_tensors).encode()
        equal = b"".join(block_digest(name.encode()) for name in names)
        return dict.fromkeys(range(n_ranks), data), dict.fromkeys(range(n_ranks), equal)
    claims = tuple(ShardClaim(*key, grid, ()) for key in keys)
    data = Contribution(tensors=(), own_nbytes=0, digests=(), shards=claims).encode()
    digests = dict.fromkeys(range(n_ranks), b"")
    if grid.n_replicas > 1:
        n_shards = n_ranks // REPLICATE
        each = [b"".join(block_digest(f"{name}{s}".encode()) for name in names) for s in range(n_shards)]
        digests = {rank: bytes(bytearray(each[rank % n_shards])) for rank in range(n_ranks)}  # no object is shared
    return {rank: bytes(bytearray(data)) for rank in range(n_ranks)}, digests

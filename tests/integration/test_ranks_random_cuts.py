"""Random tensors, cut in every way that there is: saved, changed on some ranks only, and loaded in other cuts."""

from __future__ import annotations

import pathlib
import random
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import AsyncCheckpointer, FlatShard, ShardedSlice, SyncCheckpointer, register_shard_type
from asyncckpt.sharding.registry import shards_of
from asyncckpt.sharding.shard_types import Sharded

DEADLINE_S = 120.0
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8, torch.float64, torch.bool)
MESHES = {
    2: [(2,), (2, 1), (1, 2)],
    3: [(3,), (3, 1), (1, 3, 1)],
    4: [(4,), (2, 2), (4, 1), (2, 1, 2), (1, 2, 2)],
}
Box = tuple[tuple[int, ...], tuple[int, ...]]


class Tiles:
    """A framework's tensor in several padded parts: (tensor, offsets, sizes); `told` how often they were all in."""

    def __init__(self, shape: tuple[int, ...], parts: list[Any]) -> None:
        self.shape, self.parts, self.told = shape, parts, 0

    def take(self, parts: Any) -> None:
        self.told += 1


class What(NamedTuple):
    """A tensor: `numbers` makes its values."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    numbers: int

    def whole(self, step: int) -> torch.Tensor:
        """Return all of it, as it is at a step."""
        generator = torch.Generator().manual_seed(self.numbers + step)
        values = torch.randint(0, 2 if self.dtype is torch.bool else 250, self.shape, generator=generator)
        return values.to(self.dtype)


def what(rng: random.Random, name: str) -> What:
    shape = tuple(rng.choice([0, 1, 2, 3, 5, 7, 13, 64]) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3])))
    return What(name, shape, rng.choice(DTYPES), rng.randrange(1 << 30))


def boxes(rng: random.Random, shape: Sequence[int], n: int) -> list[Box]:
    """Cut a shape into `n` boxes, some of them empty, in no order."""
    found: list[Box] = [((0,) * len(shape), tuple(shape))]
    while len(found) < n:
        offsets, sizes = found.pop(rng.randrange(len(found)))
        d = rng.randrange(len(shape))
        at = rng.randint(0, sizes[d])
        found.append((offsets, (*sizes[:d], at, *sizes[d + 1 :])))
        found.append(((*offsets[:d], offsets[d] + at, *offsets[d + 1 :]), (*sizes[:d], sizes[d] - at, *sizes[d + 1 :])))
    rng.shuffle(found)
    return found


def cut(rng: random.Random, shape: tuple[int, ...], ranks: int) -> tuple[Any, ...]:
    """Return how a tensor lies on the ranks, equal on all of them."""
    kind = rng.choice(["mesh", "mesh", "mesh", "slices", "flat", "tiles", "plain"])
    if kind == "plain" or not shape:
        return ("plain",)
    if kind == "mesh":
        mesh = rng.choice(MESHES[ranks])
        choices = [(), (rng.randrange(len(shape)),), (rng.randrange(len(shape)),), (rng.randrange(len(shape)), 2)]
        return (kind, mesh, [rng.choice(choices) for _ in mesh])
    if kind == "flat":
        n = torch.Size(shape).numel()
        return (kind, [0, *sorted(rng.randint(0, n) for _ in range(ranks - 1)), n])
    n_boxes = ranks * 3 if kind == "tiles" else rng.choice([ranks, max(1, ranks // 2)])
    return (kind, boxes(rng, shape, n_boxes))


def part(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    for d, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        whole = whole.narrow(d, offset, size)
    return whole


def made(whole: torch.Tensor, how: tuple[Any, ...], meshes: dict[Any, Any]) -> Any:
    """Return what this rank holds of a tensor."""
    rank, ranks, shape = dist.get_rank(), dist.get_world_size(), tuple(whole.shape)
    if how[0] == "mesh":
        return on_mesh(whole, meshes[how[1]], how[2])
    if how[0] == "slices":
        offsets, sizes = how[1][rank % len(how[1])]
        mine = part(whole, offsets, sizes).clone()
        mine = mine.t().contiguous().t() if mine.dim() == 2 and rank % 2 else mine
        return ShardedSlice(mine, shape, offsets, replica_id=rank // len(how[1]))
    if how[0] == "flat":
        return FlatShard(whole.reshape(-1)[how[1][rank] : how[1][rank + 1]].clone(), shape, how[1][rank])
    if how[0] == "tiles":
        parts = []
        for offsets, sizes in how[1][rank::ranks]:
            padded = torch.zeros([n + 1 for n in sizes], dtype=whole.dtype)
            part(padded, (0,) * len(sizes), sizes).copy_(part(whole, offsets, sizes))
            parts.append((padded, offsets, sizes))
        return Tiles(shape, parts)
    return whole.clone()


def on_mesh(whole: torch.Tensor, mesh: Any, kinds: Sequence[tuple[int, ...]]) -> Any:
    from torch.distributed.tensor import DTensor, Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    local, placements = whole, []
    for d, kind in enumerate(kinds):
        strided = len(kind) == 2
        placements.append(
            _StridedShard(kind[0], split_factor=2) if strided else Shard(kind[0]) if kind else Replicate()
        )
        if kind:  # torch's own arithmetic says what a rank holds
            local = placements[-1]._split_tensor(local, mesh.size(d), with_padding=False)[0][mesh.get_coordinate()[d]]
    size = {"shape": whole.shape, "stride": whole.stride()}
    return DTensor.from_local(local.clone().contiguous(), mesh, placements, run_check=False, **size)


def holds(value: Any, wanted: torch.Tensor) -> bool:
    found = shards_of(value)
    if not isinstance(found, Sharded):
        return bool(torch.equal(value, wanted)) and value.dtype == wanted.dtype
    boxes = ((mine, part(wanted, offsets, mine.shape)) for mine, offsets in found.shards)
    return found.dtype == wanted.dtype and all(torch.equal(mine, other) for mine, other in boxes)


def rounds(rank: int, root: str, seed: str, n_rounds: int) -> list[str]:
    """Return what came back otherwise than it was saved."""
    from torch.distributed.device_mesh import init_device_mesh

    ranks, wrong = dist.get_world_size(), []
    meshes = {shape: init_device_mesh("cpu", shape) for shape in MESHES[ranks]}
    register_shard_type(Tiles, lambda value: (value.shape, value.parts), Tiles.take)
    for n in range(n_rounds):
        rng = random.Random(f"{seed}-{n}")
        all_of_it = [what(rng, f"w{k}") for k in range(rng.randint(1, 10))]
        cuts = [cut(rng, one.shape, ranks) for one in all_of_it]
        options = {"max_shard_bytes": rng.choice([None, 65536]), "files_per_rank": rng.choice([1, 2])}
        paths: list[tuple[str, int]] = []
        with SyncCheckpointer(**options) if rng.random() < 0.3 else AsyncCheckpointer(**options) as checkpointer:
            for step in range(rng.choice([1, 4])):
                state = {one.name: made(one.whole(step), how, meshes) for one, how in zip(all_of_it, cuts, strict=True)}
                if rank == rng.randrange(ranks) and step:
                    state[f"late{step}"] = torch.full((5,), float(step))  # on this rank only
                paths.append((f"{root}/{n}-{step}", step))
                handle = checkpointer.save(state, paths[-1][0])
                if handle is not None:
                    handle.written.result(DEADLINE_S)
        dist.barrier()
        for path, step in paths:
            others = [cut(rng, one.shape, ranks) for one in all_of_it]
            target = {
                one.name: made(torch.zeros_like(one.whole(0)), how, meshes)
                for one, how in zip(all_of_it, others, strict=True)
            }
            reads = rng.choice(["each", "broadcast"])
            asyncckpt.load(path, target, strict=True, verify=rng.random() < 0.5, redundant_reads=reads)
            found = asyncckpt.load(path) if rank == 0 else {}
            for one, how, other in zip(all_of_it, cuts, others, strict=True):
                wanted, told = one.whole(step), getattr(target[one.name], "told", 1)
                if not holds(target[one.name], wanted) or told != 1:
                    wrong.append(f"{path}: {one} from {how} in {other}")
                if rank == 0 and not holds(found[one.name], wanted):
                    wrong.append(f"{path}: {one} from {how} whole")
    return wrong


@pytest.mark.parametrize(
    ("ranks", "n_rounds"), [(4, 1), *(pytest.param(n, 8, marks=pytest.mark.matrix) for n in (2, 3, 4))]
)
def test_whatever_is_cut_in_any_way_comes_back_in_any_other(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, rng: random.Random, ranks: int, n_rounds: int
) -> None:
    environ, seed = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}, str(rng.random())
    found = rank_processes.run(ranks, rounds, str(tmp_path), seed, n_rounds, environ=environ, timeout_s=2 * DEADLINE_S)
    assert [wrong[:3] for wrong in found] == [[]] * ranks

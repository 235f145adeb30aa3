"""What a process holds of a sharded tensor: compared with torch's own functions, and with the elements themselves."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded_states import grid_of, random_grid
from xla_stand_in import XLAShardedTensor, from_shards, to_shards

import asyncckpt
from asyncckpt import FlatShard, ShardedSlice, describe_tp, register_shard_type
from asyncckpt.dcp.write_plan import described
from asyncckpt.errors import ConfigError, OverlappingShardsError, ShardOutOfRangeError, UnsupportedLeafError
from asyncckpt.format.structure import find_overlap
from asyncckpt.sharding import registry
from asyncckpt.sharding.mesh_layout import Grid
from asyncckpt.sharding.registry import notify_filled, shards_of
from asyncckpt.sharding.shard_types import Sharded
from asyncckpt.state_dict.flatten import flatten


class Framework:
    """A type of which nothing is known."""


def rng_of() -> random.Random:
    seed = random.randrange(1 << 32)
    print("seed", seed)
    return random.Random(seed)


def of_torch(grid: Grid) -> list[Any]:
    placements = pytest.importorskip("torch.distributed.tensor.placement_types")
    kinds = {0: lambda p: placements.Replicate(), 1: lambda p: placements.Shard(p[0])}
    kinds[2] = lambda p: placements._StridedShard(p[0], split_factor=p[1])
    return [kinds[len(p)](p) for p in grid.placements]


def test_boxes_of_random_meshes_hold_what_torch_gives_each_rank() -> None:
    rng = rng_of()
    for _ in range(300):
        world_size, n_dims = rng.choice([1, 2, 3, 4, 6, 8, 12]), rng.randint(1, 3)
        grid, shape = random_grid(rng, world_size, n_dims), tuple(rng.randint(0, 13) for _ in range(n_dims))
        whole = torch.arange(math.prod(shape)).view(shape)
        held = torch.zeros(shape, dtype=torch.int)
        for position in range(world_size):
            at, local = grid.coordinate(position), whole
            for dimension, placement in enumerate(of_torch(grid)):
                if not placement.is_replicate():
                    split = placement._split_tensor(local, grid.mesh[dimension], with_padding=False)[0]
                    local = split[at[dimension]]
            boxes = grid.boxes(shape, at)
            cuts = [tuple(slice(o, o + s) for o, s in zip(*box, strict=True)) for box in boxes]
            assert sorted(int(n) for cut in cuts for n in whole[cut].reshape(-1)) == sorted(local.reshape(-1).tolist())
            for cut in cuts:
                held[cut] += 1
        assert bool((held == grid.n_replicas).all())


def test_the_offset_of_a_single_box_is_the_one_that_torch_computes() -> None:
    utils = pytest.importorskip("torch.distributed.tensor._utils")
    if not hasattr(utils, "_compute_local_shape_and_global_offset"):
        pytest.skip("this torch has no such function")
    rng = rng_of()
    for _ in range(300):
        mesh, shape = (rng.randint(1, 4), rng.randint(1, 4)), (rng.randint(1, 13), rng.randint(1, 13))
        grid = grid_of(mesh, rng.choice([None, 0, 1]), rng.choice([None, 0, 1]))
        for position in range(len(grid.ranks)):
            at = grid.coordinate(position)
            sizes, offsets = utils._compute_local_shape_and_global_offset(shape, mesh, list(at), of_torch(grid))
            boxes = grid.boxes(shape, at)
            assert boxes == (((tuple(offsets), tuple(sizes)),) if math.prod(sizes) else ())


def test_replicas_are_the_ranks_that_hold_the_same() -> None:
    rng = rng_of()
    for _ in range(100):
        grid = random_grid(rng, rng.choice([2, 4, 6, 8, 12]), 2)
        for position, rank in enumerate(grid.ranks):
            fixed = [n for n, placement in enumerate(grid.placements) if placement]
            at = grid.coordinate(position)
            same = [r for n, r in enumerate(grid.ranks) if all(grid.coordinate(n)[d] == at[d] for d in fixed)]
            assert list(grid.replicas(position)) == same and rank in same and len(same) == grid.n_replicas


def test_flat_ranges_are_few_boxes_that_are_views() -> None:
    rng = rng_of()
    for _ in range(500):
        shape = tuple(rng.randint(1, 5) for _ in range(rng.randint(0, 4)))
        n_elements = math.prod(shape)
        whole = torch.arange(n_elements)
        start = rng.randint(0, n_elements)
        stop = rng.randint(start, n_elements)
        local = whole[start:stop].clone()
        found = shards_of(FlatShard(local, global_shape=shape, start=start))
        assert isinstance(found, Sharded) and len(found.shards) <= max(1, 2 * len(shape) - 1)
        target = torch.full(shape, -1)
        for tensor, offsets in found.shards:
            target[tuple(slice(o, o + s) for o, s in zip(offsets, tensor.shape, strict=True))] = tensor
            tensor.neg_()
        assert target.reshape(-1).tolist() == [n if start <= n < stop else -1 for n in range(n_elements)]
        assert torch.equal(local, -whole[start:stop])


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: ShardedSlice(torch.ones(2, 3), (4, 3), (-1, 0)), "are not a box"),
        (lambda: ShardedSlice(torch.ones(2, 3), (4,), (0, 0)), "are not a box"),
        (lambda: ShardedSlice(torch.ones(2), (4.0,), (0,)), "global shape"),  # type: ignore[arg-type]
        (lambda: ShardedSlice(torch.ones(1), (1 << 70,), (1 << 69,)), "global shape"),
        (lambda: ShardedSlice(torch.ones(0, 1 << 40), (1 << 40, 1 << 40), (0, 0)), "global shape"),
        (lambda: ShardedSlice([1, 2], (4,), (0,)), "list"),  # type: ignore[arg-type]
        (lambda: ShardedSlice(torch.ones(2), (4,), (0,), replica_id=-1), "replica_id"),
        (lambda: FlatShard(torch.ones(2, 3), (6,), 0), "one dimension"),
        (lambda: FlatShard(torch.ones(3), (2, 2), -1), "start"),
        (lambda: FlatShard(torch.ones(3), (2, 2), 0.0), "start"),  # type: ignore[arg-type]
        (lambda: FlatShard(torch.ones(3), (2, -2), 0), "global shape"),
    ],
)
def test_what_is_no_shard_of_any_tensor_is_refused_when_it_is_made(make: Any, word: str) -> None:
    with pytest.raises(UnsupportedLeafError, match=word):
        make()


WHOLE = "offsets [0, 0] sizes [4, 3]"
OUTSIDE: list[tuple[Any, list[str]]] = [
    (lambda: ShardedSlice(torch.ones(2, 3), (4, 3), (3, 0)), ["offsets [3, 0] sizes [2, 3]", WHOLE]),
    (lambda: ShardedSlice(torch.ones(0, 3), (4, 3), (5, 0)), ["offsets [5, 0] sizes [0, 3]", WHOLE]),
    (lambda: FlatShard(torch.ones(3), (2, 2), 2), ["elements [2, 5)", "elements [0, 4)"]),
    (Framework, ["offsets [3] sizes [2]", "offsets [0] sizes [4]"]),
]


@pytest.mark.parametrize(("make", "boxes"), OUTSIDE)
def test_a_shard_outside_of_its_tensor_is_refused_by_name_with_both_boxes(
    make: Any, boxes: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_shard_type(Framework, lambda v: ((4,), [(torch.ones(2), (3,))]), lambda value, parts: None)
    alone = asyncckpt.RankInfo(0, 1)
    with asyncckpt.SyncCheckpointer(rank_info=alone) as checkpointer:
        checkpointer.save({"a": {"w": torch.zeros(4, 3)}}, tmp_path / "there")
        ways = [
            lambda: flatten({"a": {"w": make()}}),
            lambda: checkpointer.save({"a": {"w": make()}}, tmp_path / "new"),
            lambda: asyncckpt.load(tmp_path / "there", {"a": {"w": make()}}, source="disk"),
            lambda: asyncckpt.plan_load(tmp_path / "there", {"a": {"w": make()}}),
            lambda: described({"a.w": make()}),
        ]
        for way in ways:
            with pytest.raises(ShardOutOfRangeError) as caught:
                way()
            error = caught.value
            assert (error.fqn, error.leaf, error.boxes) == ("a.w", "a.w", boxes)
            assert "'a.w'" in error.message and isinstance(error, UnsupportedLeafError)
            for box in boxes:
                assert box.replace("] sizes", "] and sizes") in error.message
    assert not (tmp_path / "new").exists()


def test_a_shard_that_is_moved_out_of_its_tensor_after_a_save_is_refused_by_name(tmp_path: Path) -> None:
    part = ShardedSlice(torch.ones(2, 3), (2, 3), (0, 0))
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({"w": part}, tmp_path / "1")
        part.offsets = (1, 0)
        with pytest.raises(ShardOutOfRangeError) as caught:
            checkpointer.save({"w": part}, tmp_path / "2")
    assert caught.value.fqn == "w" and not (tmp_path / "2").exists()


def test_tensor_parallel_slices_are_found_by_their_shapes() -> None:
    state = {"w": torch.ones(2, 6), "column": torch.ones(4, 3), "norm": torch.ones(6), "n": 3, "own": torch.ones(5)}
    found = describe_tp(state, {"w": (4, 6), "column": (4, 6), "norm": (6,)}, tp_rank=1, tp_size=2)
    assert found["w"].offsets == (2, 0) and found["column"].offsets == (0, 3)
    assert all(found[name] is state[name] for name in ("norm", "n", "own"))


@pytest.mark.parametrize(("local", "whole"), [((2, 3), (4, 6)), ((3,), (7,)), ((2,), (4, 1)), ((4, 2), (2, 2))])
def test_tensor_parallel_slices_that_no_single_dimension_explains_are_refused(local: Any, whole: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="ShardedSlice of your own") as caught:
        describe_tp({"a.w": torch.ones(local)}, {"a.w": whole}, tp_rank=0, tp_size=2)
    assert (
        caught.value.leaf == "a.w" and str(list(local)) in str(caught.value) and str(list(whole)) in str(caught.value)
    )


@pytest.mark.parametrize(
    ("state", "shapes"),
    [
        ({"q": torch.ones(4, 4)}, {"Q": (8, 4)}),
        ({"q": torch.ones(4, 4)}, {}),
        ({"m": {"q": torch.ones(4)}}, {"m.q": (8,)}),
    ],
)
def test_shapes_that_name_no_tensor_are_refused(state: dict[str, Any], shapes: dict[str, tuple[int, ...]]) -> None:
    with pytest.raises(ConfigError, match="names no tensor of the state dict"):
        describe_tp(state, shapes, tp_rank=0, tp_size=2)
    stage = describe_tp({"q": torch.ones(4, 4)}, {"q": (8, 4), "other stage": (3,)}, tp_rank=1, tp_size=2)
    assert stage["q"].offsets == (4, 0)


@pytest.fixture
def xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_shard_type(XLAShardedTensor, to_shards, from_shards)


@pytest.mark.usefixtures("xla")
def test_padded_shards_of_a_registered_type_are_stored_without_their_padding(tmp_path: Any) -> None:
    whole = torch.arange(35.0).view(7, 5)
    state = {
        "w": XLAShardedTensor(whole, 4),
        "copies": XLAShardedTensor(whole, 3, 2),
        "r": XLAShardedTensor(whole, 1, 4),
    }
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        for step in range(2):  # the second one by the plan of the first
            checkpointer.save(state, tmp_path / f"{step}")
    for step in range(2):
        found = asyncckpt.load(tmp_path / f"{step}")
        assert all(torch.equal(found[name], whole) for name in state)


@pytest.mark.usefixtures("xla")
def test_a_registered_type_is_told_once_when_all_its_parts_are_in() -> None:
    value = XLAShardedTensor(torch.arange(35.0).view(7, 5), 4, 2)
    found = shards_of(value)
    assert isinstance(found, Sharded) and len(found.shards) == 4
    for tensor, _ in found.shards:
        tensor.add_(100)
    assert value.n_loaded == 0
    notify_filled(value, found.shards)
    assert value.n_loaded == 1
    last = value.local_shards[-1]
    assert last.data.tolist() == [[130.0, 131.0, 132.0, 133.0, 134.0], [0.0] * 5], "padding was written"
    notify_filled(torch.ones(2), ())
    notify_filled(ShardedSlice(torch.ones(2), (4,), (0,)), ())


@pytest.mark.parametrize(
    ("shards", "error", "word"),
    [
        (
            lambda v: ((4,), [(torch.ones(2), (0,)), (torch.ones(3), (1,))]),
            OverlappingShardsError,
            "'a.w'.*sizes.*sizes",
        ),
        (lambda v: ((4,), [(torch.ones(2), (3,))]), ShardOutOfRangeError, "'a.w'.*is not inside"),
        (lambda v: ((4,), [(torch.ones(2), (0,), (3,))]), UnsupportedLeafError, "'a.w'.*box of sizes"),
        (lambda v: ((4,), [(torch.ones(2), (0,)), (torch.ones(2).half(), (2,))]), UnsupportedLeafError, "dtypes"),
        (lambda v: ((4,), []), UnsupportedLeafError, "no part"),
        (lambda v: ((4,), [([1, 2], (0,))]), UnsupportedLeafError, "part of type list"),
        (lambda v: 3, UnsupportedLeafError, "to_shards"),
    ],
)
def test_nonsense_of_a_registered_type_is_refused_by_leaf(
    shards: Any, error: Any, word: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registered", {})
    register_shard_type(Framework, shards, lambda value, parts: None)
    with pytest.raises(error, match=word):
        flatten({"a": {"w": Framework()}})


def test_a_type_that_is_none_cannot_be_registered() -> None:
    with pytest.raises(TypeError):
        register_shard_type("Framework", to_shards, print)  # type: ignore[arg-type]


def test_overlapping_boxes_are_found_whatever_their_order() -> None:
    boxes = [((0, 0), (2, 2)), ((2, 0), (1, 2)), ((0, 2), (3, 1)), ((1, 1), (0, 0))]
    assert find_overlap(boxes) is None
    assert find_overlap([*boxes, ((2, 1), (1, 1))]) == (1, len(boxes))
    assert find_overlap([((), ()), ((), ())]) is not None

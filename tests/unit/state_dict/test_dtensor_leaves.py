"""DTensors as leaves: real ones, of a process group that is none."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt import FlatShard, ShardedSlice
from asyncckpt.config import RankInfo
from asyncckpt.errors import AliasMismatchError, UnsupportedLeafError
from asyncckpt.planning.planner import PlanCache
from asyncckpt.sharding.registry import shards_of
from asyncckpt.sharding.shard_types import Sharded
from asyncckpt.state_dict.flatten import flatten

pytest.importorskip("torch.testing._internal.distributed.fake_pg")
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore


@pytest.fixture
def mesh() -> Iterator[Any]:
    """Rank 3 of four."""
    dist.init_process_group("fake", store=FakeStore(), rank=3, world_size=4)
    try:
        yield init_device_mesh("cpu", (2, 2))
    finally:
        dist.destroy_process_group()


def dtensor(local: torch.Tensor, mesh: Any, *placements: Any, shape: tuple[int, ...]) -> Any:
    size = {"shape": torch.Size(shape), "stride": torch.empty(shape).stride()}
    return DTensor.from_local(local, mesh, placements, run_check=False, **size)


def test_a_dtensor_is_its_local_tensor_and_where_it_lies(mesh: Any) -> None:
    local = torch.arange(6.0).view(2, 3)
    found = shards_of(dtensor(local, mesh, Replicate(), Shard(0), shape=(5, 3)))
    assert isinstance(found, Sharded)
    (shard,) = found.shards
    assert shard.offsets == (3, 0) and shard.tensor.data_ptr() == local.data_ptr()
    assert found.grid is not None and found.grid == ((2, 2), (0, 1, 2, 3), ((), (0,)))
    other = shards_of(dtensor(torch.ones(2), mesh, Replicate(), Shard(0), shape=(5,)))
    assert isinstance(other, Sharded) and other.grid is found.grid


@pytest.mark.parametrize("kind", [ShardedSlice, FlatShard])
def test_a_dtensor_inside_a_description_by_hand_is_refused_by_its_name(mesh: Any, kind: Any) -> None:
    inner = dtensor(torch.arange(2.0), mesh, Shard(0), Shard(0), shape=(8,))
    described = kind(inner, (8,), (0,) if kind is ShardedSlice else 0)
    with pytest.raises(UnsupportedLeafError, match=r"'w'.*its tensor is a DTensor.*to_local\(\)") as caught:
        flatten({"w": described})
    assert caught.value.leaf == "w"


@pytest.mark.parametrize("rows", [8, 2])
def test_tied_targets_of_two_saved_tensors_are_compared_in_what_this_rank_holds(
    tmp_path: Path, mesh: Any, rows: int
) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False, rank_info=RankInfo(0, 1)) as checkpointer:
        state = {"x": torch.ones(rows), "y": torch.zeros(rows), "z": torch.ones(rows)}
        state["z"][0] = 5  # which is another rank's
        checkpointer.save(state, tmp_path / "c")
    local = torch.full((rows // 4,), 7.0)  # of rank 3
    tied = dtensor(local, mesh, Shard(0), Shard(0), shape=(rows,))
    if rows == 8:
        with pytest.raises(AliasMismatchError, match="nothing was changed"):
            asyncckpt.load(tmp_path / "c", {"x": tied, "y": tied})
        assert local.tolist() == [7, 7]
    asyncckpt.load(tmp_path / "c", {"x": tied, "z": tied})
    assert local.tolist() == [1] * (rows // 4)


def test_what_is_a_partial_sum_is_refused_by_leaf(mesh: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match="Partial") as caught:
        flatten({"a": [{"w": dtensor(torch.ones(2, 3), mesh, Partial(), Shard(0), shape=(4, 3))}, torch.ones(1)]})
    assert caught.value.leaf == "a.0.w"


def test_a_local_tensor_that_is_not_what_the_placements_say_is_refused(mesh: Any) -> None:
    with pytest.raises(UnsupportedLeafError, match=r"shape \[4, 3\], which is not this rank's part of \[4, 3\]"):
        flatten({"w": dtensor(torch.ones(4, 3), mesh, Replicate(), Shard(0), shape=(4, 3))})
    with pytest.raises(UnsupportedLeafError, match=r"shape \[1, 3\]"):
        flatten({"w": dtensor(torch.ones(1, 3), mesh, Shard(0), Shard(0), shape=(2, 3))})


def test_a_rank_outside_of_the_mesh_holds_nothing(mesh: Any) -> None:
    other = DeviceMesh("cpu", [0, 1])
    found = shards_of(dtensor(torch.ones(0), other, Shard(0), shape=(4, 3)))
    assert isinstance(found, Sharded) and found.shards == () and found.global_shape == (4, 3)


@pytest.mark.parametrize("rows", [8, 2])
def test_tied_dtensors_are_one_also_where_this_rank_holds_none_of_it(mesh: Any, rows: int) -> None:
    buffer = torch.zeros(24)
    local = buffer[: 6 if rows == 8 else 0].view(-1, 3)
    tied = dtensor(local, mesh, Shard(0), Shard(0), shape=(rows, 3))
    plans = PlanCache(files_per_rank=1)
    for _ in range(2):  # a state dict has new tensor objects each time
        plan, flat = plans.plan_for({"a": tied.detach(), "b": tied.detach(), "c": torch.ones(2)})
        assert flat.fqns == ["a", "c"] and len(flat.tensors) == 2
    assert plans.n_plans_made == 1 and len(plan.boxes) == (2 if rows == 8 else 1)


def test_the_plan_is_found_again_for_equal_placements_only(mesh: Any) -> None:
    plans = PlanCache(files_per_rank=1)
    state = {"w": dtensor(torch.ones(2, 3), mesh, Replicate(), Shard(0), shape=(4, 3))}
    plans.plan_for(state)
    assert plans.plan_for({"w": state["w"].detach()})[1].tensors[0].data_ptr() == state["w"]._local_tensor.data_ptr()
    assert plans.n_plans_made == 1
    plans.plan_for({"w": dtensor(torch.ones(2, 3), mesh, Shard(0), Replicate(), shape=(4, 3))})
    assert plans.n_plans_made == 2
    plans.plan_for({"w": torch.ones(2, 3)})
    assert plans.n_plans_made == 3


def test_what_an_optimizer_owns_of_a_dtensor_is_its_local_tensor(mesh: Any) -> None:
    from asyncckpt.staging.optimizer_ownership import AttachedOptimizers, storage_ptrs

    local = torch.ones(2, 3)
    weight = torch.nn.Parameter(dtensor(local, mesh, Replicate(), Shard(0), shape=(4, 3)))
    assert storage_ptrs([weight, torch.ones(0).to_sparse()]) == [local.untyped_storage().data_ptr(), 0]
    optimizer = torch.optim.SGD([weight])
    owners = AttachedOptimizers()
    owners.add(optimizer)
    flat = flatten({"w": weight.detach(), "other": torch.ones(3)})
    numbers, own = owners.owned(flat.tensors)
    assert numbers == {0} and [t.data_ptr() for t in own] == [local.data_ptr()]

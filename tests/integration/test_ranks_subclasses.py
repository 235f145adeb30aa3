"""DTensors whose local tensors are subclasses, in a process group: saved on some ranks, loaded on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import LeafTypeMismatchError, PerRankUnavailableError, UnsupportedLeafError
from tests.composite_samples import (
    Blocks,
    OneScale,
    Packed,
    Rounding,
    Sample,
    Settings,
    blocks,
    one_scale,
    packed,
    same,
)

ROWS = 12


def _part(whole: Sample, rank: int, n: int) -> Any:
    """Return the rows of one rank: whole blocks, and of a `OneScale` the codes and a scale of the rank's own."""
    rows = ROWS // n
    if isinstance(whole, (Blocks, Packed)):
        return whole.slice(0, rank * rows, (rank + 1) * rows).changed(torch.clone)
    scale = whole.scale + rank
    return OneScale(
        whole.codes[rank * rows : (rank + 1) * rows].clone(), scale, *(getattr(whole, n) for n in whole.context)
    )


def _sharded(local: Any) -> Any:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=torch.Size((ROWS, 8)), stride=(8, 1))


def _state(rank: int, seed: int) -> dict[str, Any]:
    n = dist.get_world_size()
    return {"w": _sharded(_part(blocks(seed), rank, n)), "b": _sharded(_part(blocks(seed + 1), rank, n))}


def _save(rank: int, path: str) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(_state(rank, 0), path)


def _load(rank: int, path: str) -> bool:
    target = _state(rank, 50)
    locals_ = {name: value._local_tensor for name, value in target.items()}
    asyncckpt.load(path, target)
    expected = _state(rank, 0)
    assert all(target[name]._local_tensor is local for name, local in locals_.items())
    return all(same(target[name]._local_tensor, expected[name]._local_tensor) for name in target)


@pytest.mark.parametrize("n", [1, 2, 3])
def test_components_that_are_cut_with_the_tensor_are_loaded_at_any_world_size(n: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save, path)
    assert rank_processes.run(n, _load, path) == [True] * n


def test_one_process_gets_the_whole_tensor(tmp_path: Path, registered: None) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save, path)
    found = asyncckpt.load(path)
    assert same(found, {"w": blocks(0), "b": blocks(1)})
    with asyncckpt.open_checkpoint(path) as opened:
        assert opened.tensors["w.scale"].shape == (ROWS * 8 // 4,)
        assert opened.tensors["w.table"].stored_name == "w.table"  # equal on all ranks, so written once


def _save_one_scale(rank: int, path: str) -> None:
    state = {"w": _sharded(_part(one_scale(0), rank, dist.get_world_size()))}
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)


def _load_one_scale(rank: int, path: str) -> bool:
    n = dist.get_world_size()
    target = {"w": _sharded(_part(one_scale(9), rank, n))}
    asyncckpt.load(path, target)
    return same(target["w"]._local_tensor, _part(one_scale(0), rank, n))


def _refused_one_scale(rank: int, path: str) -> bool:
    n = dist.get_world_size()
    target = {"w": _sharded(_part(one_scale(9), rank, n))}
    with pytest.raises(PerRankUnavailableError, match=r"'w', a .*OneScale, .*'w.scale' was not cut"):
        asyncckpt.load(path, target)
    return same(target["w"]._local_tensor, _part(one_scale(9), rank, n))


def test_a_component_that_is_not_cut_is_each_ranks_own(tmp_path: Path, registered: None) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_one_scale, path)
    assert rank_processes.run(2, _load_one_scale, path) == [True, True]
    assert rank_processes.run(3, _refused_one_scale, path) == [True] * 3
    with pytest.raises(PerRankUnavailableError, match=r"'w.scale' was not cut"):
        asyncckpt.load(path)


class Momentum(torch.optim.Optimizer):
    """An optimizer whose state is a subclass, sharded like its parameter."""

    def __init__(self, params: Any, whole: Sample) -> None:
        super().__init__(params, {"lr": 0.1})
        self._whole = whole

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, n = self.state[p], dist.get_world_size()
                if not state:
                    state["m"] = _sharded(_part(self._whole, dist.get_rank(), n))
                state["m"]._local_tensor.codes.add_(1)


def _optimizer(whole: Sample) -> tuple[torch.nn.Parameter, Momentum]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(ROWS, 8), mesh, [Shard(0)]))
    return parameter, Momentum([parameter], whole)


def _save_optimizer(rank: int, path: str, whole: Sample) -> None:
    _, optimizer = _optimizer(whole)
    optimizer.step()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"optim": optimizer}, path)


def _load_optimizer(rank: int, path: str, whole: Sample) -> bool:
    n = dist.get_world_size()
    for kind in (Blocks, Packed, Settings, Rounding):
        asyncckpt.register_subclass(kind)
    parameter, optimizer = _optimizer(whole)
    asyncckpt.load(path, {"optim": optimizer})
    expected = _part(whole, rank, n)
    expected.codes.add_(1)
    found = optimizer.state[parameter]["m"]
    assert type(found) is type(parameter.data) and found.placements == parameter.placements
    assert same(found._local_tensor, expected)
    optimizer.step()
    expected.codes.add_(1)
    kept = found._local_tensor
    assert same(kept, expected)
    asyncckpt.load(path, {"optim": optimizer})  # it has a state now, which is filled
    expected.codes.sub_(1)
    return optimizer.state[parameter]["m"]._local_tensor is kept and same(kept, expected)


WHOLE = {"blocks": blocks, "packed": packed}


@pytest.mark.parametrize("n", [1, 2, 3])
@pytest.mark.parametrize("what", WHOLE)
def test_a_fresh_optimizer_gets_a_state_that_is_sharded_like_its_parameters(what: str, n: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path, WHOLE[what](0))
    assert rank_processes.run(n, _load_optimizer, path, WHOLE[what](0)) == [True] * n


def _load_unregistered(rank: int, path: str) -> None:
    _, optimizer = _optimizer(blocks(0))
    with pytest.raises(UnsupportedLeafError, match=r"call asyncckpt.register_subclass\(Blocks\)"):
        asyncckpt.load(path, {"optim": optimizer})
    assert not optimizer.state


def test_a_fresh_optimizer_needs_the_class_to_be_registered(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path, blocks(0))
    rank_processes.run(2, _load_unregistered, path)


# ---- Contexts that contain the size of a shard


def _save_packed(rank: int, path: str, whole: Packed) -> None:
    state = {"w": _sharded(_part(whole, rank, dist.get_world_size()))}
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)


def _load_packed(rank: int, path: str, whole: Packed, other: Packed) -> bool:
    n = dist.get_world_size()
    target = {"w": _sharded(_part(other, rank, n))}
    local = target["w"]._local_tensor
    asyncckpt.load(path, target)
    return target["w"]._local_tensor is local and same(local, _part(whole, rank, n))


@pytest.mark.parametrize("n", [1, 2, 3])
def test_the_size_of_a_shard_in_a_context_is_that_of_each_shard(n: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_packed, path, packed(0))
    assert rank_processes.run(n, _load_packed, path, packed(0), packed(9)) == [True] * n


def test_the_size_of_a_shard_in_a_context_is_that_of_the_whole_tensor_in_one_process(
    tmp_path: Path, registered: None
) -> None:
    path, whole = str(tmp_path / "c"), str(tmp_path / "whole")
    rank_processes.run(2, _save_packed, path, packed(0))
    target = {"w": packed(9)}
    assert same(asyncckpt.load(path, target), {"w": packed(0)}) and same(target, {"w": packed(0)})
    assert same(asyncckpt.load(path), {"w": packed(0)})
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(target, whole)
    assert rank_processes.run(2, _load_packed, whole, packed(0), packed(9)) == [True, True]


def _refused_optimizer(rank: int, path: str, whole: Packed, why: str) -> bool:
    asyncckpt.register_subclass(Packed)
    _, optimizer = _optimizer(whole)
    with pytest.raises(UnsupportedLeafError, match=rf"'optim.state.0.m', a .*Packed, .*{why}.*nothing was changed"):
        asyncckpt.load(path, {"optim": optimizer})
    return not optimizer.state


def test_a_cut_within_a_block_is_refused_by_name(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path, packed(0))
    why = r"its component scale of shape \[6\] cannot be cut like it"
    assert rank_processes.run(4, _refused_optimizer, path, packed(0), why) == [True] * 4


def _refused_packed(rank: int, path: str, other: Packed) -> bool:
    target = {"w": _sharded(_part(other, rank, dist.get_world_size()))}
    with pytest.raises(LeafTypeMismatchError, match=r"'w', a .*Packed, was saved with the context"):
        asyncckpt.load(path, target)
    return same(target["w"]._local_tensor, _part(other, rank, dist.get_world_size()))


def test_a_value_in_a_context_that_only_equals_the_size_of_a_shard_is_not_taken_for_it(tmp_path: Path) -> None:
    path, whole, other = str(tmp_path / "c"), *(packed(seed, (6, 8)) for seed in (0, 9))
    rank_processes.run(2, _save_packed, path, whole)
    assert rank_processes.run(2, _load_packed, path, whole, other) == [True, True]
    assert rank_processes.run(1, _refused_packed, path, other) == [True]


def test_a_fresh_optimizer_does_not_take_such_a_value_for_the_size_of_a_shard(tmp_path: Path) -> None:
    path, whole, why = str(tmp_path / "c"), packed(0, (6, 8)), r"of shape \[6, 8\], not \[12, 8\]"
    rank_processes.run(2, _save_optimizer, path, whole)
    assert rank_processes.run(2, _load_optimizer, path, whole) == [True, True]
    assert rank_processes.run(1, _refused_optimizer, path, whole, why) == [True]


def _save_packed_as_before(rank: int, tensor: str, optimizer: str) -> None:
    """Save as versions did that stored the size of the shard like any other value: here its class hides that it is."""
    state = {"w": _sharded(_part(packed(0), rank, dist.get_world_size()))}
    _, trained = _optimizer(packed(0))
    trained.step()
    sliced = Packed.slice

    def with_own_size(self: Packed, *args: int) -> Packed:
        found: Any = sliced(self, *args)
        found.size_ = self.shape
        return found

    Packed.slice = with_own_size  # type: ignore[method-assign]
    for value, path in ((state, tensor), ({"optim": trained}, optimizer)):
        with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save(value, path)


def test_older_checkpoints_are_loaded_by_as_many_ranks_as_saved_them(tmp_path: Path) -> None:
    tensor, optimizer = str(tmp_path / "tensor"), str(tmp_path / "optimizer")
    rank_processes.run(2, _save_packed_as_before, tensor, optimizer)
    assert rank_processes.run(2, _load_packed, tensor, packed(0), packed(9)) == [True, True]
    assert rank_processes.run(2, _load_optimizer, optimizer, packed(0)) == [True, True]
    assert rank_processes.run(1, _refused_packed, tensor, packed(9)) == [True]

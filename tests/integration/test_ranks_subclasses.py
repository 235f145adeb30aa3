"""DTensors whose local tensors are subclasses, in a process group: saved on some ranks, loaded on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import PerRankUnavailableError, UnsupportedLeafError
from tests.composite_samples import Blocks, OneScale, Rounding, Sample, Settings, blocks, one_scale, same

ROWS = 12


def _part(whole: Sample, rank: int, n: int) -> Any:
    """Return the rows of one rank: whole blocks, and of a `OneScale` the codes and a scale of the rank's own."""
    rows = ROWS // n
    if isinstance(whole, Blocks):
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
    with pytest.raises(PerRankUnavailableError, match=r"'w', a .*OneScale, .*'w.scale', which is not sharded,"):
        asyncckpt.load(path, target)
    return same(target["w"]._local_tensor, _part(one_scale(9), rank, n))


def test_a_component_that_is_not_cut_is_each_ranks_own(tmp_path: Path, registered: None) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_one_scale, path)
    assert rank_processes.run(2, _load_one_scale, path) == [True, True]
    assert rank_processes.run(3, _refused_one_scale, path) == [True] * 3
    with pytest.raises(PerRankUnavailableError, match=r"'w.scale', which is not sharded,"):
        asyncckpt.load(path)


class Momentum(torch.optim.Optimizer):
    """An optimizer whose state is a subclass, sharded like its parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                state, n = self.state[p], dist.get_world_size()
                if not state:
                    state["m"] = _sharded(_part(blocks(0), dist.get_rank(), n))
                state["m"]._local_tensor.codes.add_(1)


def _optimizer() -> tuple[torch.nn.Parameter, Momentum]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(ROWS, 8), mesh, [Shard(0)]))
    return parameter, Momentum([parameter])


def _save_optimizer(rank: int, path: str) -> None:
    _, optimizer = _optimizer()
    optimizer.step()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"optim": optimizer}, path)


def _load_optimizer(rank: int, path: str) -> bool:
    n = dist.get_world_size()
    for kind in (Blocks, Settings, Rounding):
        asyncckpt.register_subclass(kind)
    parameter, optimizer = _optimizer()
    asyncckpt.load(path, {"optim": optimizer})
    expected = _part(blocks(0), rank, n)
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


@pytest.mark.parametrize("n", [1, 2, 3])
def test_a_fresh_optimizer_gets_a_state_that_is_sharded_like_its_parameters(n: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path)
    assert rank_processes.run(n, _load_optimizer, path) == [True] * n


def _load_unregistered(rank: int, path: str) -> None:
    _, optimizer = _optimizer()
    with pytest.raises(UnsupportedLeafError, match=r"call asyncckpt.register_subclass\(Blocks\)"):
        asyncckpt.load(path, {"optim": optimizer})
    assert not optimizer.state


def test_a_fresh_optimizer_needs_the_class_to_be_registered(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_optimizer, path)
    rank_processes.run(2, _load_unregistered, path)


def _save_four_rows(rank: int, path: str) -> None:
    globals()["ROWS"] = 4
    _save_optimizer(rank, path)


def _load_one_row(rank: int, path: str) -> None:
    globals()["ROWS"] = 4
    for kind in (Blocks, Settings, Rounding):
        asyncckpt.register_subclass(kind)
    _, optimizer = _optimizer()
    with pytest.raises(UnsupportedLeafError, match="in the whole is unknown; nothing was changed"):
        asyncckpt.load(path, {"optim": optimizer})
    assert not optimizer.state


def test_a_fresh_optimizer_gets_no_whole_tensor_where_its_part_cannot_be_sliced(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_four_rows, path)
    rank_processes.run(4, _load_one_row, path)

"""DTensors whose local tensors are plain on some ranks and of a subclass on others."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import SaveFailedError, UnsupportedLeafError
from tests.composite_samples import Blocks, Rounding, Settings, blocks, parts, same

ROWS = 4
"""Three ranks hold 2, 2 and 0 of them."""


def _mesh(is_reversed: bool = False) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    ranks = list(range(dist.get_world_size()))
    return DeviceMesh("cpu", ranks[::-1] if is_reversed else ranks)


def _rows(rank: int, rows: int = ROWS, is_reversed: bool = False) -> tuple[int, int]:
    n = dist.get_world_size()
    at = n - 1 - rank if is_reversed else rank
    step = -(-rows // n)
    return min(at * step, rows), min((at + 1) * step, rows)


def _sharded(local: Any, rows: int = ROWS, is_reversed: bool = False) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    shape = torch.Size((rows, 8))
    mesh = _mesh(is_reversed)
    return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=(8, 1))


def _part(rank: int, seed: int, is_reversed: bool = False) -> Any:
    """Return a rank's part: `Blocks`, or a plain tensor where that has no elements."""
    first, end = _rows(rank, is_reversed=is_reversed)
    return blocks(seed, (ROWS, 8)).slice(0, first, end).changed(torch.clone) if first < end else torch.zeros(0, 8)


def _state(rank: int, seed: int, is_reversed: bool = False) -> dict[str, Any]:
    made = {name: _sharded(_part(rank, seed + n, is_reversed), is_reversed=is_reversed) for n, name in enumerate("wb")}
    return {"in": [made["w"], torch.arange(3.0)], "b": made["b"]}


def _save(rank: int, path: str, endpoint: str | None, is_reversed: bool) -> None:
    state = _state(rank, 0, is_reversed)
    if endpoint is None:
        with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
            checkpointer.save(state, path)
        return
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        checkpointer.save(state, path).written.result(60)


def _load(rank: int, path: str) -> bool:
    target, expected = _state(rank, 50), _state(rank, 0)
    kept = [target["in"][0]._local_tensor, target["b"]._local_tensor]
    found = [part for one in kept for part in parts(one)]
    asyncckpt.load(path, target)
    locals_ = [target["in"][0]._local_tensor, target["b"]._local_tensor]
    assert all(one is other for one, other in zip(kept, locals_, strict=True))
    assert all(a is b for a, b in zip(found, [part for one in locals_ for part in parts(one)], strict=True))
    return same(locals_, [expected["in"][0]._local_tensor, expected["b"]._local_tensor])


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_rank_without_elements_takes_part_with_a_plain_tensor(
    way: str, is_reversed: bool, tmp_path: Path, shared_worker: real_worker.RealWorker, registered: None
) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(3, _save, path, shared_worker.endpoint if way == "async" else None, is_reversed)
    for n in (1, 2, *([] if is_reversed else [3])):
        assert rank_processes.run(n, _load, path) == [True] * n, n
    found = asyncckpt.load(path)
    assert same([found["in"][0], found["b"]], [blocks(0, (ROWS, 8)), blocks(1, (ROWS, 8))])
    with asyncckpt.open_checkpoint(path) as opened:
        assert opened.tensors["b.scale"].shape == (ROWS * 8 // 4,)


def test_a_rank_without_elements_fills_nothing_where_every_saving_rank_had_some(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save, path, None, False)
    assert rank_processes.run(3, _load, path) == [True] * 3


def _resume_reversed(rank: int, path: str) -> bool:
    target, expected = _state(rank, 50, True), _state(rank, 0, True)
    asyncckpt.load(path, target)
    return same(target["b"]._local_tensor, expected["b"]._local_tensor)


def test_ranks_of_a_reversed_mesh_resume_too(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(3, _save, path, None, True)
    assert rank_processes.run(3, _resume_reversed, path) == [True] * 3


class Momentum(torch.optim.Optimizer):
    """An optimizer whose state is a subclass on the ranks that hold elements of the parameter."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        state = self.state[self.param_groups[0]["params"][0]]
        if not state:
            state["m"] = _sharded(_part(dist.get_rank(), 0))
        for part in parts(state["m"]._local_tensor)[:1]:
            part.add_(1)


def _optimizer() -> tuple[torch.nn.Parameter, Momentum]:
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(ROWS, 8), _mesh(), [Shard(0)]))
    return parameter, Momentum([parameter])


def _save_optimizer(rank: int, path: str) -> None:
    _, optimizer = _optimizer()
    optimizer.step()
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"optim": optimizer}, path)


def _load_optimizer(rank: int, path: str) -> bool:
    for kind in (Blocks, Settings, Rounding):
        asyncckpt.register_subclass(kind)
    parameter, optimizer = _optimizer()
    expected = _part(rank, 0)
    for part in parts(expected)[:1]:
        part.add_(1)
    for _ in range(2):  # without a state, and with one
        asyncckpt.load(path, {"optim": optimizer})
        found = optimizer.state[parameter]["m"]
        assert type(found) is type(parameter.data) and found.placements == parameter.placements
        assert found.shape == parameter.shape and same(found._local_tensor, expected)
        optimizer.step()
    return True


@pytest.mark.parametrize(("saved", "n"), [(3, 1), (3, 2), (3, 3), (2, 3)])
def test_ranks_without_elements_resume_an_optimizer(saved: int, n: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(saved, _save_optimizer, path)
    assert rank_processes.run(n, _load_optimizer, path) == [True] * n


def _mixed(rank: int) -> Any:
    """Return the part of a tensor of 5 rows: ranks 0 and 1 have two of them, as `Blocks`; rank 2 has a plain one."""
    local = blocks(rank, (2, 8)) if rank < 2 else torch.ones(1, 8)
    return _sharded(local, 5)


def _save_mixed(rank: int, path: str, endpoint: str | None) -> list[str]:
    errors = []
    if endpoint is None:
        checkpointer: Any = asyncckpt.SyncCheckpointer(fsync=False)
    else:
        checkpointer = asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False)
    with checkpointer:

        def save(state: Any, name: str) -> None:
            handle = checkpointer.save(state, os.path.join(path, name))
            if endpoint is not None:
                handle.written.result(60)

        for name in "ab":
            with pytest.raises(UnsupportedLeafError) as caught:
                save({"w": {"m": _mixed(rank)}}, name)
            assert caught.value.leaf == "w.m" and caught.value.type_name.endswith(".Blocks")
            errors.append(str(caught.value))
        save({"w": {"m": _sharded(torch.ones(_rows(rank, 5)[1] - _rows(rank, 5)[0], 8), 5)}}, "c")
    return errors


@pytest.mark.parametrize("way", ["sync", "async"])
def test_plain_parts_beside_parts_of_a_subclass_are_refused_on_all_ranks(
    way: str, tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    found = rank_processes.run(3, _save_mixed, str(tmp_path), shared_worker.endpoint if way == "async" else None)
    assert len({error for errors in found for error in errors}) == 1
    assert (
        "'w.m', a DTensor, are plain tensors on rank 2, but tests.composite_samples.Blocks on ranks 0, 1" in found[0][0]
    )
    assert os.listdir(tmp_path) == ["c"]


def _save_later(rank: int, path: str, endpoint: str) -> list[str]:
    errors = []
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n in range(4):
            state = {"x": torch.ones(2), **(_state(rank, 0) if n else {})}
            try:
                checkpointer.save(state, os.path.join(path, f"{n}")).written.result(60)
            except SaveFailedError as error:
                errors.append(error.code)
    return errors


def test_a_state_that_appears_after_the_first_save_is_saved_once_the_ranks_have_met(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    assert rank_processes.run(3, _save_later, str(tmp_path), shared_worker.endpoint) == [["coverage"]] * 3
    for name in "23":
        assert rank_processes.run(3, _load, str(tmp_path / name)) == [True] * 3


def _hybrid(rank: int, seed: int) -> dict[str, Any]:
    """Return a tensor of one row on a mesh of 2 by 2: ranks 0 and 2 hold it, ranks 1 and 3 nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard

    local: Any = torch.zeros(0, 8) if rank % 2 else blocks(seed, (1, 8))
    mesh = init_device_mesh("cpu", (2, 2))
    shape, placements = torch.Size((1, 8)), [Replicate(), Shard(0)]
    return {"w": DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=(8, 1))}


def _save_and_load_hybrid(rank: int, path: str, endpoint: str) -> bool:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(_hybrid(rank, 0), os.path.join(path, "sync"))
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for name in "ab":
            checkpointer.save(_hybrid(rank, 0), os.path.join(path, name)).written.result(60)
    found = [_hybrid(rank, 9) for _ in range(3)]
    for name, target in zip(("sync", "a", "b"), found, strict=True):
        asyncckpt.load(os.path.join(path, name), target)
    return all(same(target["w"]._local_tensor, _hybrid(rank, 0)["w"]._local_tensor) for target in found)


def test_replicas_of_ranks_without_elements_resume(tmp_path: Path, shared_worker: real_worker.RealWorker) -> None:
    assert rank_processes.run(4, _save_and_load_hybrid, str(tmp_path), shared_worker.endpoint) == [True] * 4

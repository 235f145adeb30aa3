"""DTensors of a subclass of which some ranks hold no elements, and a plain tensor in its place."""

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
from asyncckpt.errors import LeafTypeMismatchError, RanksDisagreeError, SaveFailedError, UnsupportedLeafError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.composite_samples import Blocks, OneScale, Range, Rounding, Settings, blocks, parts, same

ROWS = 4
"""Three ranks hold 2, 2 and 0 of them."""


def _mesh(is_reversed: bool = False, ranks: Any = None) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    ranks = list(range(dist.get_world_size())) if ranks is None else ranks
    return DeviceMesh("cpu", ranks[::-1] if is_reversed else ranks)


def _rows(rank: int, rows: int = ROWS, is_reversed: bool = False) -> tuple[int, int]:
    n = dist.get_world_size()
    at = n - 1 - rank if is_reversed else rank
    step = -(-rows // n)
    return min(at * step, rows), min((at + 1) * step, rows)


def _dtensor(local: Any, mesh: Any, rows: int, placements: Any = None) -> Any:
    from torch.distributed.tensor import DTensor, Shard

    placements = placements or [Shard(0)]
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size((rows, 8)), stride=(8, 1))


def _part(rank: int, seed: int, is_reversed: bool = False, rows: int = ROWS) -> Any:
    """Return a rank's part: `Blocks`, or a plain tensor where that has no elements."""
    first, end = _rows(rank, rows, is_reversed)
    return blocks(seed, (rows, 8)).slice(0, first, end).changed(torch.clone) if first < end else torch.zeros(0, 8)


def _state(rank: int, seed: int, is_reversed: bool = False) -> dict[str, Any]:
    mesh = _mesh(is_reversed)
    made = {name: _dtensor(_part(rank, seed + n, is_reversed), mesh, ROWS) for n, name in enumerate("wb")}
    return {"in": [made["w"], torch.arange(3.0)], "b": made["b"], "rank": rank}


def _locals(state: Any) -> list[Any]:
    return [state["in"][0]._local_tensor, state["b"]._local_tensor]


def _save_to(path: str, state: Any, **options: Any) -> None:
    with asyncckpt.SyncCheckpointer(fsync=False, **options) as checkpointer:
        checkpointer.save(state, path)


def _save(rank: int, path: str, endpoint: str | None, is_reversed: bool) -> None:
    state = _state(rank, 0, is_reversed)
    if endpoint is None:
        _save_to(path, state)
        return
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        checkpointer.save(state, path).written.result(60)


def _register() -> None:
    for kind in (Blocks, OneScale, Settings, Rounding, Range):
        asyncckpt.register_subclass(kind)


def _load(rank: int, path: str, is_reversed: bool = False) -> bool:
    _register()
    target, expected = _state(rank, 50, is_reversed), _state(rank, 0, is_reversed)
    kept = _locals(target)
    found = [part for one in kept for part in parts(one)]
    asyncckpt.load(path, target)
    assert all(one is other for one, other in zip(kept, _locals(target), strict=True))
    assert all(a is b for a, b in zip(found, [p for one in _locals(target) for p in parts(one)], strict=True))
    new = asyncckpt.load(path)
    assert same([new["in"][0], new["b"]], [blocks(0, (ROWS, 8)), blocks(1, (ROWS, 8))])
    return same(_locals(target), _locals(expected))


@pytest.mark.parametrize("is_reversed", [False, True], ids=["in order", "reversed"])
@pytest.mark.parametrize("way", ["sync", "async"])
def test_a_rank_without_elements_takes_part_with_a_plain_tensor(
    way: str, is_reversed: bool, tmp_path: Path, shared_worker: real_worker.RealWorker, registered: None
) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(3, _save, path, shared_worker.endpoint if way == "async" else None, is_reversed)
    for n in (2, 3):
        assert rank_processes.run(n, _load, path, is_reversed) == [True] * n, n
    found = asyncckpt.load(path)
    assert same([found["in"][0], found["b"]], [blocks(0, (ROWS, 8)), blocks(1, (ROWS, 8))])
    with asyncckpt.open_checkpoint(path) as opened:
        assert opened.tensors["b.scale"].shape == (ROWS * 8 // 4,)
        assert "b" not in opened.tensors
    assert verify_checkpoint(path, Files()).faults == []


def test_a_rank_without_elements_fills_nothing_where_every_saving_rank_had_some(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save, path, None, False)
    assert rank_processes.run(3, _load, path) == [True] * 3


class Momentum(torch.optim.Optimizer):
    """An optimizer whose states are a subclass on the ranks that hold elements of the parameters."""

    def __init__(self, params: Any, table: Any = None) -> None:
        super().__init__(params, {"lr": 0.1})
        self.table = table

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for number, p in enumerate(self.param_groups[0]["params"]):
            state, rows = self.state[p], p.shape[0]
            if not state:
                part = _part(dist.get_rank(), number, rows=rows)
                if self.table is not None and isinstance(part, Blocks):
                    part.table = self.table
                state["m"] = _dtensor(part, _mesh(), rows)
            for part in parts(state["m"]._local_tensor)[:1]:
                part.add_(1)


def _optimizer(table: Any = None) -> Momentum:
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = _mesh()
    shapes = (ROWS, 12)  # all ranks have elements of the second parameter
    return Momentum([torch.nn.Parameter(distribute_tensor(torch.zeros(n, 8), mesh, [Shard(0)])) for n in shapes], table)


def _save_optimizer(rank: int, path: str, is_shared: bool) -> None:
    optimizer = _optimizer(torch.arange(16.0) if is_shared else None)
    optimizer.step()
    _save_to(path, {"optim": optimizer})


def _load_optimizer(rank: int, path: str, has_state: bool, is_shared: bool) -> bool:
    _register()
    optimizer = _optimizer()
    if has_state:
        optimizer.step()
        for state in optimizer.state.values():
            for part in parts(state["m"]._local_tensor):
                part.fill_(7)
    for _ in range(2):
        asyncckpt.load(path, {"optim": optimizer})
        tables = []
        for number, parameter in enumerate(optimizer.param_groups[0]["params"]):
            expected = _part(rank, number, rows=parameter.shape[0])
            for part in parts(expected)[:1]:
                part.add_(1)
            found = optimizer.state[parameter]["m"]
            assert type(found) is type(parameter.data) and found.placements == parameter.placements
            assert found.shape == parameter.shape and same(found._local_tensor, expected), number
            tables += parts(found._local_tensor)[2:]
        optimizer.step()
    return len({table.data_ptr() for table in tables}) == (1 if is_shared else len(tables))


@pytest.mark.parametrize("is_shared", [False, True], ids=["", "one table"])
@pytest.mark.parametrize(("saved", "n"), [(3, 1), (3, 3), (2, 3)])
def test_ranks_without_elements_resume_an_optimizer(saved: int, n: int, is_shared: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(saved, _save_optimizer, path, is_shared)
    for has_state in (False, True):
        assert rank_processes.run(n, _load_optimizer, path, has_state, is_shared) == [True] * n


def _save_two_optimizers(rank: int, path: str) -> None:
    table = torch.arange(16.0)
    optimizers = [_optimizer(table), _optimizer(table)]
    for optimizer in optimizers:
        optimizer.step()
    _save_to(path, dict(zip("ab", optimizers, strict=True)))


def _load_two_optimizers(rank: int, path: str, has_state: bool) -> bool:
    _register()
    optimizers = [_optimizer(), _optimizer()]
    for optimizer in optimizers if has_state else ():
        optimizer.step()
        for state in optimizer.state.values():
            for part in parts(state["m"]._local_tensor):
                part.fill_(7)
    asyncckpt.load(path, dict(zip("ab", optimizers, strict=True)))
    states = [state["m"]._local_tensor for optimizer in optimizers for state in optimizer.state.values()]
    tables = [table for one in states for table in parts(one)[2:]]
    return bool(tables) and all(torch.equal(table, torch.arange(16.0)) for table in tables)


@pytest.mark.parametrize("has_state", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_a_component_that_two_optimizers_share_is_filled_in_both(n: int, has_state: bool, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_two_optimizers, path)
    assert rank_processes.run(n, _load_two_optimizers, path, has_state) == [True] * n


def _mixed(rank: int) -> Any:
    """Return the part of a tensor of 5 rows: ranks 0 and 1 have two of them, as `Blocks`; rank 2 has a plain one."""
    return _dtensor(blocks(rank, (2, 8)) if rank < 2 else torch.ones(1, 8), _mesh(), 5)


def _save_switching(rank: int, path: str, endpoint: str | None) -> list[str]:
    errors = []
    options: dict[str, Any] = {"fsync": False} if endpoint is None else {"fsync": False, "endpoint": endpoint}
    kind: Any = asyncckpt.SyncCheckpointer if endpoint is None else asyncckpt.AsyncCheckpointer
    first, end = _rows(rank, 5)
    plain = {"w": {"m": _dtensor(torch.full((end - first, 8), 3.0), _mesh(), 5)}}
    empty = {"w": {"m": _dtensor(_part(rank, 4), _mesh(), ROWS)}}
    states = {"a": plain, "b": {"w": {"m": _mixed(rank)}}, "c": empty, "d": plain, "e": empty, "f": empty}
    with kind(**options) as checkpointer:
        for name, state in states.items():
            try:
                handle = checkpointer.save(state, os.path.join(path, name))
                if endpoint is not None:
                    handle.written.result(60)
            except (RanksDisagreeError, SaveFailedError) as error:
                errors.append(f"{name}: {error}")
    _register()
    for name in "ef":
        target = {"w": {"m": _dtensor(_part(rank, 60), _mesh(), ROWS)}}
        asyncckpt.load(os.path.join(path, name), target)
        assert same(target["w"]["m"]._local_tensor, _part(rank, 4)), name
    target = {"w": {"m": _dtensor(torch.zeros(end - first, 8), _mesh(), 5)}}
    asyncckpt.load(os.path.join(path, "d"), target)
    assert torch.equal(target["w"]["m"]._local_tensor, plain["w"]["m"]._local_tensor)
    return errors


@pytest.mark.parametrize("way", ["sync", "async"])
def test_plain_parts_beside_parts_of_a_subclass_are_refused_and_a_state_may_be_either_in_turn(
    way: str, tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    found = rank_processes.run(3, _save_switching, str(tmp_path), shared_worker.endpoint if way == "async" else None)
    for errors in found:
        if way == "sync":
            (error,) = errors
            assert "b: " in error and "'w.m' is a plain tensor on ranks [2], and a subclass with components" in error
        else:  # in these saves the ranks have not met
            assert [error[:3] for error in errors] == ["b: ", "c: "], errors
            assert "tensor 'w.m.codes': 32 of 40 elements are stored" in errors[0]
            assert "tensor 'w.m': 0 of 32 elements are stored" in errors[1]
    assert not (tmp_path / "b" / "manifest.json").exists()


def _save_later(rank: int, path: str, endpoint: str) -> list[bool]:
    ends = []
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n in range(6):
            state = {"x": torch.ones(2), **(_state(rank, 0) if n else {})}
            error = checkpointer.save(state, os.path.join(path, f"{n}")).written.exception(60)
            assert error is None or (isinstance(error, SaveFailedError) and error.code == "coverage"), error
            ends.append(error is None)
    return ends


def test_a_state_that_appears_after_the_first_save_is_saved_once_the_ranks_have_met(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    ends = rank_processes.run(3, _save_later, str(tmp_path), shared_worker.endpoint)
    assert ends[0] == ends[1] == ends[2] and ends[0].count(False) <= 3 and ends[0][-2:] == [True, True], ends
    assert rank_processes.run(3, _load, str(tmp_path / "5")) == [True] * 3


def _hybrid(rank: int, seed: int, is_joined: bool) -> dict[str, Any]:
    """Return a tensor of one row on a mesh of 2 by 2, or two of 2: ranks 0 and 2 hold it, ranks 1 and 3 nothing."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard

    local: Any = torch.zeros(0, 8) if rank % 2 else blocks(seed, (1, 8))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("r", "s"))
    if is_joined:
        return {"w": _dtensor(local, mesh["s"], 1)}
    return {"w": _dtensor(local, mesh, 1, [Replicate(), Shard(0)])}


def _save_and_load_hybrid(rank: int, path: str, endpoint: str, is_joined: bool) -> bool:
    _save_to(os.path.join(path, "sync"), _hybrid(rank, 0, is_joined))
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for name in "ab":
            checkpointer.save(_hybrid(rank, 0, is_joined), os.path.join(path, name)).written.result(60)
    found = [_hybrid(rank, 9, is_joined) for _ in range(3)]
    for name, target in zip(("sync", "a", "b"), found, strict=True):
        asyncckpt.load(os.path.join(path, name), target)
    expected = _hybrid(rank, 0, is_joined)["w"]._local_tensor
    return all(same(target["w"]._local_tensor, expected) for target in found)


@pytest.mark.parametrize("is_joined", [False, True], ids=["one mesh", "two meshes"])
def test_replicas_of_ranks_without_elements_resume(
    is_joined: bool, tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    found = rank_processes.run(4, _save_and_load_hybrid, str(tmp_path), shared_worker.endpoint, is_joined)
    assert found == [True] * 4


def _save_others(rank: int, path: str) -> bool:
    """Ranks 0 and 1 shard a `Blocks`; under its name, ranks 2 and 3 have something else."""
    _register()
    meshes = [_mesh(ranks=[0, 1]), _mesh(ranks=[2, 3])]
    half = blocks(0, (4, 8)).slice(0, 2 * (rank % 2), 2 * (rank % 2) + 2).changed(torch.clone)
    sharded = _dtensor(half, meshes[0], 4) if rank < 2 else None

    def state(value: float) -> dict[str, Any]:
        if rank < 2:
            return {"x": _dtensor(half.changed(torch.zeros_like), meshes[0], 4)}
        if rank == 2:  # rows of another tensor, on another mesh of as many ranks
            return {"x": _dtensor(torch.full((2, 8), value), meshes[1], 4), "o": torch.zeros(0, 8)}
        return {"x": _dtensor(torch.full((2, 8), value), meshes[1], 4), "o": torch.full((1,), value)}

    if rank < 2:
        _save_to(path, {"x": sharded, "o": sharded})
    else:
        _save_to(path, state(2.0 + rank))
    target = state(9.0)
    if rank < 2:
        target["o"] = target["x"]
    asyncckpt.load(path, target)
    new = asyncckpt.load(path)
    if rank < 2:
        return same(target["x"]._local_tensor, half) and same(new["o"], blocks(0, (4, 8)))
    expected = state(2.0 + rank)
    whole = torch.cat([torch.full((2, 8), 4.0), torch.full((2, 8), 5.0)])
    assert torch.equal(new["x"], whole) and same(new["o"], expected["o"])
    assert type(target["o"]) is torch.Tensor and same(target["o"], expected["o"])
    return torch.equal(target["x"]._local_tensor, expected["x"]._local_tensor)


def test_other_tensors_of_the_same_name_stay_what_they_were(tmp_path: Path) -> None:
    assert rank_processes.run(4, _save_others, str(tmp_path / "c")) == [True] * 4


def _load_whole(rank: int, path: str) -> None:
    empty = torch.zeros(0, 8)
    if rank == 0:
        return
    for name, error in (("whole", LeafTypeMismatchError), ("longer", LeafTypeMismatchError)):
        target = {name: _dtensor(empty, _mesh(ranks=[0, 1]), 1)}
        with pytest.raises(error, match=f"'{name}' was saved as a tests.composite_samples.Blocks"):
            asyncckpt.load(path, target, keys=[name])
        assert target[name]._local_tensor.shape == (0, 8)


def _save_whole(rank: int, path: str) -> None:
    _save_to(path, {"whole": blocks(0, (1, 8)), "longer": _dtensor(blocks(1, (2, 8)), _mesh(), 2)})


def test_an_empty_part_takes_nothing_of_a_whole_tensor_or_of_one_of_another_size(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(1, _save_whole, path)
    rank_processes.run(2, _load_whole, path)


def _one_storage(rank: int, seed: int) -> dict[str, Any]:
    """Return two tensors whose empty parts are one tensor."""
    empty, mesh = torch.zeros(0, 8), _mesh()
    return {name: _dtensor(_part(rank, seed + n) if rank < 2 else empty, mesh, ROWS) for n, name in enumerate("wv")}


def _save_one_storage(rank: int, path: str) -> bool:
    _register()
    _save_to(path, _one_storage(rank, 0))
    target, new = _one_storage(rank, 50), asyncckpt.load(path)
    asyncckpt.load(path, target)
    assert same(new, {"w": blocks(0, (ROWS, 8)), "v": blocks(1, (ROWS, 8))})
    return all(same(target[k]._local_tensor, v._local_tensor) for k, v in _one_storage(rank, 0).items())


def test_empty_parts_that_are_one_tensor_stand_for_two(tmp_path: Path) -> None:
    assert rank_processes.run(3, _save_one_storage, str(tmp_path / "c")) == [True] * 3


def _save_as_dcp(rank: int, path: str) -> str:
    with pytest.raises((SaveFailedError, UnsupportedLeafError)) as caught:
        _save_to(path, {"b": _state(rank, 0)["b"]}, layout="dcp")
    return str(caught.value)


def test_layout_dcp_refuses_them_on_all_ranks_by_name(tmp_path: Path) -> None:
    assert all("'b'" in error for error in rank_processes.run(3, _save_as_dcp, str(tmp_path / "c")))
    assert not os.listdir(tmp_path)


def _save_what_one_rank_has(rank: int, path: str) -> str:
    """Rank 2 has a tensor without elements of which the others hold neither elements nor components."""
    state = {"a": torch.ones(2), **({"w": _dtensor(torch.zeros(0, 8), _mesh(), ROWS)} if rank == 2 else {})}
    with pytest.raises(SaveFailedError) as caught:
        _save_to(path, state)
    return f"{caught.value.code}: {caught.value}"


def test_elements_that_no_rank_has_are_missed(tmp_path: Path) -> None:
    for error in rank_processes.run(3, _save_what_one_rank_has, str(tmp_path / "c")):
        assert error.startswith("coverage: ") and "'w'" in error, error


def _save_as_replica(rank: int, path: str) -> str:
    """Rank 1 has elements of a tensor of which rank 0, which would write them, has components instead."""
    from torch.distributed.tensor import Replicate

    local = torch.ones(ROWS, 8) if rank else blocks(0, (ROWS, 8))
    with pytest.raises(RanksDisagreeError) as caught:
        _save_to(path, {"w": _dtensor(local, _mesh(), ROWS, [Replicate()])})
    return str(caught.value)


def test_elements_are_never_taken_for_an_empty_part(tmp_path: Path) -> None:
    for error in rank_processes.run(2, _save_as_replica, str(tmp_path / "c")):
        assert "'w' is a plain tensor on ranks [1], and a" in error


def test_such_a_checkpoint_is_converted_and_inspected(tmp_path: Path, registered: None, command: Any) -> None:
    path, copy = str(tmp_path / "c"), str(tmp_path / "copy")
    rank_processes.run(3, _save, path, None, False)
    asyncckpt.convert(path, copy, to="asyncckpt")
    found = asyncckpt.load(copy)
    assert same([found["in"][0], found["b"]], [blocks(0, (ROWS, 8)), blocks(1, (ROWS, 8))])
    code, shown, _ = command("inspect", path)
    assert code == 0 and "b@rank2" in shown
    assert command("verify", path, copy)[0] == 0
    with asyncckpt.open_checkpoint(path) as opened:
        assert [opened.objects_of(rank)["rank"] for rank in range(3)] == [0, 1, 2]


def _save_one_row_each(rank: int, path: str) -> None:
    _save_to(path, {"w": _one_row_each(rank, 0)})


def _one_row_each(rank: int, seed: int) -> Any:
    """Return a tensor of two rows on three ranks: where its scales are cut is not known, as one row has no half."""
    return _dtensor(_part(rank, seed, rows=2), _mesh(), 2)


def _load_one_row_each(rank: int, path: str) -> bool:
    target = {"w": _one_row_each(rank, 50)}
    asyncckpt.load(path, target)
    return same(target["w"]._local_tensor, _part(rank, 0, rows=2))


def test_a_rank_without_elements_does_not_join_the_components_of_others(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(3, _save_one_row_each, path)
    assert rank_processes.run(3, _load_one_row_each, path) == [True] * 3


def _sgd(state: Any) -> torch.optim.Optimizer:
    """Return an optimizer of a parameter of two rows; `state` makes an entry of its state, of the local rows."""
    from torch.distributed.tensor import Shard, distribute_tensor

    parameter = torch.nn.Parameter(distribute_tensor(torch.zeros(2, 8), _mesh(), [Shard(0)]))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    if state is not None:
        optimizer.state[parameter]["m"] = state(parameter.to_local().detach())
    return optimizer


ENTRIES = {
    "a whole subclass": lambda local: blocks(3, (4, 8)),
    "a local tensor": lambda local: torch.full_like(local, 5.0),
}


def _resume_sgd(rank: int, path: str, entry: str) -> bool:
    _register()
    _save_to(path, {"optim": _sgd(ENTRIES[entry])})
    optimizer = _sgd(None)
    asyncckpt.load(path, {"optim": optimizer})
    (state,), (parameter,) = optimizer.state.values(), optimizer.param_groups[0]["params"]
    expected = ENTRIES[entry](parameter.to_local().detach())
    return type(state["m"]) is type(expected) and same(state["m"], expected)


@pytest.mark.parametrize("entry", ENTRIES)
def test_states_that_are_not_sharded_like_an_empty_parameter_come_back_as_they_were(entry: str, tmp_path: Path) -> None:
    assert rank_processes.run(3, _resume_sgd, str(tmp_path / "c"), entry) == [True] * 3


def _uneven(rank: int, value: float) -> dict[Any, Any]:
    """Return a state as of an optimizer, with numbers of parameters: two rows on three ranks."""
    first, end = _rows(rank, 2)
    moment = _dtensor(torch.full((end - first, 8), value), _mesh(), 2)
    return {"state": {0: {"m": moment}}, "param_groups": [{"params": [0]}]}


def _save_uneven_later(rank: int, path: str, endpoint: str) -> None:
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n in range(2):  # the second without a meeting
            state = {"x": torch.ones(2), **({"optim": _uneven(rank, 3.0)} if n else {})}
            checkpointer.save(state, os.path.join(path, f"{n}")).written.result(60)


def _load_uneven(rank: int, path: str) -> bool:
    new = asyncckpt.load(path)["optim"]["state"][0]["m"]
    target = {"optim": _uneven(rank, 0.0)}
    asyncckpt.load(path, target)
    held = target["optim"]["state"][0]["m"]._local_tensor
    return torch.equal(new, torch.full((2, 8), 3.0)) and bool((held == 3.0).all())


def test_empty_shards_of_plain_tensors_are_stored_as_before_also_without_a_meeting(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    rank_processes.run(3, _save_uneven_later, str(tmp_path), shared_worker.endpoint)
    assert rank_processes.run(3, _load_uneven, str(tmp_path / "1")) == [True] * 3

"""DTensors whose parts are unequal: of a subclass on some ranks, and plain, or of another class, on others."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.errors import (
    LeafTypeMismatchError,
    PerRankUnavailableError,
    SaveFailedError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.composite_samples import Blocks, OneScale, Range, Rounding, Sample, Settings, blocks, one_scale, parts, same

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
            except SaveFailedError as error:
                assert error.code == "coverage", error
                errors.append(f"{name}: {error}")
    _register()
    for name in "cef":
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
    assert all(len(errors) == 1 for errors in found)
    kind = "tests.composite_samples.Blocks"
    for (error,) in found:
        assert error.startswith("b: ")
        assert "tensor 'w.m'" in error
        assert f": its parts are plain tensors on rank 2, but {kind} on ranks 0, 1; all ranks with" in error
        assert "block_size or the number of ranks" in error
    assert not (tmp_path / "b" / "manifest.json").exists()


def _save_later(rank: int, path: str, endpoint: str) -> None:
    with asyncckpt.AsyncCheckpointer(endpoint=endpoint, fsync=False) as checkpointer:
        for n in range(3):
            state = {"x": torch.ones(2), **(_state(rank, 0) if n else {})}
            checkpointer.save(state, os.path.join(path, f"{n}")).written.result(60)


def test_a_state_that_appears_after_the_first_save_is_saved_at_once(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    rank_processes.run(3, _save_later, str(tmp_path), shared_worker.endpoint)
    for name in "12":
        assert rank_processes.run(3, _load, str(tmp_path / name)) == [True] * 3


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


def _save_empty_blocks(rank: int, path: str) -> str:
    first, end = _rows(rank)
    state = {"w": _dtensor(blocks(0, (ROWS, 8)).slice(0, first, end), _mesh(), ROWS)}
    with pytest.raises((UnsupportedLeafError, SaveFailedError)) as caught:
        _save_to(path, state)
    return str(caught.value)


def test_an_empty_part_of_the_subclass_is_refused_on_all_ranks_by_name(tmp_path: Path) -> None:
    for error in rank_processes.run(3, _save_empty_blocks, str(tmp_path / "c")):
        assert "'w'" in error and "is a Blocks without elements; use a plain empty tensor there" in error
    assert not os.listdir(tmp_path)


def _save_as_dcp(rank: int, path: str) -> str:
    with pytest.raises((SaveFailedError, UnsupportedLeafError)) as caught:
        _save_to(path, {"b": _state(rank, 0)["b"]}, layout="dcp")
    return str(caught.value)


def test_layout_dcp_refuses_them_on_all_ranks_by_name(tmp_path: Path) -> None:
    assert all("'b'" in error for error in rank_processes.run(3, _save_as_dcp, str(tmp_path / "c")))
    assert not os.listdir(tmp_path)


class Other(OneScale):
    """A class with the same components."""


def _unlike(rank: int, seed: int, what: str, n: int = 2) -> Any:
    """Return a part of a tensor of 12 rows whose ranks differ in what is not sharded."""
    rows = 12 // n
    whole = one_scale(seed, note=rank if what == "context" else "")
    codes = whole.codes[rank * rows : (rank + 1) * rows].clone()
    scale = whole.scale + rank if what == "component" else whole.scale
    kind = Other if what == "class" and rank else OneScale
    return _dtensor(kind(codes, scale.clone(), *(getattr(whole, name) for name in whole.context)), _mesh(), 12)


def _save_unlike(rank: int, path: str) -> bool:
    _register()
    asyncckpt.register_subclass(Other)
    kinds = ("class", "context", "component")
    _save_to(path, {what: _unlike(rank, n, what) for n, what in enumerate(kinds)})
    target = {what: _unlike(rank, 50, what) for what in kinds}
    asyncckpt.load(path, target)
    for n, what in enumerate(kinds):
        assert same(target[what]._local_tensor, _unlike(rank, n, what)._local_tensor), what
        with pytest.raises(PerRankUnavailableError, match=f"'{what}', a .*: ?.* between ranks|its {what}"):
            asyncckpt.load(path, keys=[what])
    return True


def _load_unlike(rank: int, path: str) -> bool:
    for what in ("class", "context", "component"):
        target = {what: _unlike(0, 50, what, dist.get_world_size())}
        with pytest.raises(PerRankUnavailableError, match=f"its {what} .*differs between ranks 0 and 1"):
            asyncckpt.load(path, target)
    return True


def test_parts_that_are_not_alike_are_each_ranks_own(tmp_path: Path, registered: None) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_unlike, path)
    assert rank_processes.run(1, _load_unlike, path) == [True]
    for what in ("class", "context", "component"):
        with pytest.raises(PerRankUnavailableError, match=f"its {what} .*differs between ranks 0 and 1"):
            asyncckpt.load(path, keys=[what])
        with pytest.raises(PerRankUnavailableError, match=what):
            asyncckpt.convert(path, path + what, to="asyncckpt", keys=[what])


class Flat(Sample):
    """Codes in one dimension, a scale for each row, and the shape in the context, as torchao's 4-bit states have it."""

    components = ("codes", "scale")
    context = ("size_",)

    @staticmethod
    def __new__(cls: Any, codes: Any, scale: Any, size_: Any) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, size_, dtype=torch.float32)

    def slice(self, dim: int, start: int, end: int) -> Flat:
        if dim:
            raise ValueError("only rows")
        return Flat(self.codes[8 * start : 8 * end], self.scale[start:end], torch.Size((end - start, 8)))


def _flat(rank: int, seed: int, rows: int) -> Any:
    codes = torch.arange(rows * 8, dtype=torch.float32) + seed
    first, end = _rows(rank, rows)
    whole = Flat(codes, torch.arange(float(rows)) + seed, torch.Size((rows, 8)))
    return _dtensor(whole.slice(0, first, end).changed(torch.clone), _mesh(), rows)


class Flats(Momentum):
    """An optimizer with such states."""

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.state[p]["m"] = _flat(dist.get_rank(), 5, p.shape[0])


def _flats(rows: int) -> Flats:
    from torch.distributed.tensor import Shard, distribute_tensor

    return Flats([torch.nn.Parameter(distribute_tensor(torch.zeros(rows, 8), _mesh(), [Shard(0)]))])


def _save_flat(rank: int, path: str, rows: int) -> bool:
    asyncckpt.register_subclass(Flat)
    optimizer = _flats(rows)
    optimizer.step()
    _save_to(path, {"w": _flat(rank, 0, rows), "optim": optimizer})
    target = {"w": _flat(rank, 50, rows), "optim": _flats(rows)}
    asyncckpt.load(path, target)
    (state,) = target["optim"].state.values()
    with pytest.raises((StateLoadError, PerRankUnavailableError), match=r"'w', a .*oad it with as many ranks as"):
        asyncckpt.load(path, keys=["w"])
    found = [target["w"]._local_tensor, state["m"]._local_tensor]
    return same(found, [_flat(rank, 0, rows)._local_tensor, _flat(rank, 5, rows)._local_tensor])


def _load_flat(rank: int, path: str, rows: int) -> bool:
    asyncckpt.register_subclass(Flat)
    target = {"w": _flat(rank, 50, rows)}
    before = target["w"]._local_tensor.changed(torch.clone)
    with pytest.raises((LeafTypeMismatchError, PerRankUnavailableError), match=r"'w', a .*Flat.*ranks") as caught:
        asyncckpt.load(path, target)
    assert getattr(caught.value, "fqn", "w") == "w"
    optimizer = _flats(rows)
    with pytest.raises(
        (UnsupportedLeafError, PerRankUnavailableError), match=r"'optim.state.0.m', a .*Flat.*as many ra"
    ):
        asyncckpt.load(path, {"optim": optimizer})
    return not optimizer.state and same(target["w"]._local_tensor, before)


@pytest.mark.parametrize("rows", [4, 2], ids=["two rows each", "one row each"])
def test_a_class_that_says_how_large_a_part_is_is_refused_at_another_world_size(rows: int, tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    assert rank_processes.run(2, _save_flat, path, rows) == [True] * 2
    assert rank_processes.run(1, _load_flat, path, rows) == [True]


class Axis(Sample):
    """Codes with a scale for each row or for each column."""

    components = ("codes", "scale")
    context = ("axis",)

    def slice(self, dim: int, start: int, end: int) -> Axis:
        if dim:
            raise ValueError("only rows")
        return Axis(self.codes[start:end], self.scale if self.axis else self.scale[start:end], self.axis)


def _axes(rank: int, seed: float) -> dict[str, Any]:
    """Return tensors of 16 rows: each of two ranks has parts of 8 by 8."""
    first, end = _rows(rank, 16)
    codes = torch.arange(128.0).reshape(16, 8) + seed
    columns, rows = Axis(codes, torch.arange(8.0) + seed, 1), Axis(codes, torch.arange(16.0) - seed, 0)
    made = {"columns": columns, "rows": rows}
    return {name: _dtensor(one.slice(0, first, end).changed(torch.clone), _mesh(), 16) for name, one in made.items()}


def _save_axes(rank: int, path: str) -> None:
    _save_to(path, _axes(rank, 0))


def _load_axes(rank: int, path: str) -> bool:
    target = _axes(rank, 50)
    asyncckpt.load(path, target)
    return all(same(target[k]._local_tensor, v._local_tensor) for k, v in _axes(rank, 0).items())


def test_which_components_are_cut_depends_on_the_context(tmp_path: Path) -> None:
    path = str(tmp_path / "c")
    rank_processes.run(2, _save_axes, path)
    assert rank_processes.run(1, _load_axes, path) == [True]


def _local_of(what: str) -> torch.Tensor:
    whole = torch.eye(3, 8)
    if what == "sparse_coo":
        return whole.to_sparse()
    if what == "sparse_csr":
        return whole.to_sparse_csr()
    if what == "per_tensor_affine":
        return torch.quantize_per_tensor(whole, 0.1, 0, torch.qint8)
    return torch.nested.nested_tensor([torch.ones(2, 8), torch.ones(3, 8)], layout=torch.jagged)


def _refuse_locals(rank: int, path: str) -> list[str]:
    warnings.simplefilter("ignore")  # torch's, of sparse and quantized tensors
    _save_to(path, {"a": {"w": _dtensor(torch.ones(3, 8), _mesh(), 6)}})
    errors = []
    for what in ("sparse_coo", "sparse_csr", "per_tensor_affine", "jagged"):
        state = {"a": {"w": _dtensor(torch.ones(3, 8), _mesh(), 6)}}
        state["a"]["w"]._local_tensor = _local_of(what)
        for refused in (lambda state: _save_to(path + "2", state), lambda state: asyncckpt.load(path, state)):
            with pytest.raises(UnsupportedLeafError) as caught:
                refused(state)
            assert caught.value.leaf == "a.w" and "DTensor" in str(caught.value)
            errors.append(str(caught.value))
    return errors


def test_sparse_quantized_and_jagged_parts_of_dtensors_are_refused_by_name(tmp_path: Path) -> None:
    for errors in rank_processes.run(2, _refuse_locals, str(tmp_path / "c")):
        assert len(errors) == 8
    assert not os.path.exists(tmp_path / "c2")

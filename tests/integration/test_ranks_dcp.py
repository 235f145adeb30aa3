"""Stock `dcp.save`, `dcp.async_save`, `dcp.load` on ranks through `asyncckpt.dcp`: resharded, failing, dying."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pathlib
import signal
import subprocess
import time
import warnings
from typing import Any

import dcp_calls
import pytest
import rank_processes
import real_worker
import storage_samples
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import asyncckpt
from asyncckpt.dcp import ShardedLoadPlanner, ShardedSavePlanner, StorageReader
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
)
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint


def whole(value: Any) -> Any:
    """Return a state with every DTensor put together."""
    if isinstance(value, DTensor):
        return value.full_tensor().detach().clone()
    if isinstance(value, dict):
        return {key: whole(member) for key, member in value.items()}
    return value


def trained(mesh: Any = None) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a sharded model and its optimizer after one step: the same on any number of ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Linear(31, 5), torch.nn.LayerNorm(5))
    fully_shard(model, mesh=mesh) if mesh is not None else fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(1)
    model(torch.randn(3, 9)).sum().backward()
    optimizer.step()
    return model, optimizer


class Counter:
    """A Stateful."""

    def __init__(self, count: int) -> None:
        self.count = count

    def state_dict(self) -> dict[str, Any]:
        return {"count": self.count}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["count"]


def grid_tensors(value: torch.Tensor) -> dict[str, DTensor]:
    """Return DTensors of `value` on a mesh with two dimensions."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("a", "b"))
    kinds = {"ss": (Shard(0), Shard(1)), "same": (Shard(0), Shard(0)), "rs": (Replicate(), Shard(1))}
    return {name: distribute_tensor(value.clone(), mesh, placements) for name, placements in kinds.items()}


class FailsOnRankTwo(DefaultSavePlanner):
    """One rank's planner raises."""

    def lookup_object(self, index: Any) -> Any:
        if dist.get_rank() == 2:
            raise ZeroDivisionError("rank 2")
        return super().lookup_object(index)


GRID = torch.arange(9 * 6.0).view(9, 6)


Endpoints = tuple[str, ...] | None
"""Of the workers, of as many nodes; None: every rank writes by itself."""


def writer_to(path: str, endpoints: Endpoints, **kw: Any) -> asyncckpt.dcp.StorageWriter:
    """Return this rank's writer."""
    if endpoints is None:
        return StorageWriter(path, **kw)
    node = dist.get_rank() * len(endpoints) // dist.get_world_size()
    return asyncckpt.dcp.StorageWriter(path, endpoint=endpoints[node], **kw)


def save_in_every_way(rank: int, root: str, endpoints: Endpoints) -> Any:
    model, optimizer = trained()
    weights, moments = get_state_dict(model, optimizer)
    state = {"m": weights, "o": moments, "grid": grid_tensors(GRID), "counter": Counter(4), "step": 9}
    dcp.save(state, storage_writer=writer_to(f"{root}/sync", endpoints, thread_count=2))
    future = dcp.async_save(state, storage_writer=writer_to("elsewhere", endpoints), checkpoint_id=f"{root}/async")
    future.result(60)
    for number in range(2):
        cached = {"x": grid_tensors(GRID + number)["ss"], "number": number}
        planner = DefaultSavePlanner(enable_plan_caching=True)
        dcp.save(cached, storage_writer=writer_to(f"{root}/cached-{number}", endpoints), planner=planner)
    failure = fail_on_rank_two(root, endpoints)
    half = dist.new_group([0, 1])
    if rank < 2:
        part = {"x": torch.arange(4), "of": rank}
        dcp.save(part, storage_writer=writer_to(f"{root}/group", endpoints), process_group=half)
    dist.barrier()
    return whole({"m": weights, "o": moments}), failure


def left_over(path: str, endpoints: Endpoints = None) -> bool:
    """Whether anything of a save is there; a worker lets the directory itself stand."""
    return os.path.exists(path) and (endpoints is None or bool(os.listdir(path)))


def ended_by_rank_two(error: BaseException) -> bool:
    """Whether a rank heard from its worker that rank 2 had failed while it was still staging itself."""
    return isinstance(error, SaveFailedError) and "ZeroDivisionError" in error.message


def fail_on_rank_two(root: str, endpoints: Endpoints) -> Any:
    writer = writer_to(f"{root}/failed", endpoints)
    try:
        dcp.save({"x": grid_tensors(GRID)["ss"], "n": 1}, storage_writer=writer, planner=FailsOnRankTwo())
    except CheckpointException as error:
        causes = {rank: found[0] for rank, found in error.failures.items()}
    kinds = {rank: type(cause).__name__ for rank, cause in causes.items() if not ended_by_rank_two(cause)}
    dist.barrier()
    if dist.get_rank() == 0:
        writer.reset()
        deadline = time.monotonic() + 30
        while left_over(f"{root}/failed", endpoints) and time.monotonic() < deadline:
            time.sleep(0.01)  # a worker removes files when it hears of it
    dist.barrier()
    return kinds, left_over(f"{root}/failed", endpoints)


def load_in_another_arrangement(rank: int, root: str, expected: Any, name: str) -> None:
    model, optimizer = trained()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    weights, moments = get_state_dict(model, optimizer)
    counter = Counter(0)
    grid = grid_tensors(torch.zeros_like(GRID))
    state = {"m": weights, "o": moments, "grid": grid, "counter": counter, "step": 0}
    dcp.load(state, storage_reader=StorageReader(f"{root}/{name}"))
    set_state_dict(model, optimizer, model_state_dict=state["m"], optim_state_dict=state["o"])
    found, fresh = get_state_dict(model, optimizer)
    same(whole({"m": found, "o": fresh}), expected)
    for placed in grid.values():
        assert torch.equal(placed.full_tensor(), GRID)
    assert counter.count == 4 and state["step"] == 9
    part = {"m": {"1.weight": torch.zeros(5, 31)}}
    dcp.load(part, storage_reader=StorageReader(f"{root}/{name}"))
    assert torch.equal(part["m"]["1.weight"], expected["m"]["1.weight"])
    damaged = dict(m=whole(get_state_dict(model, optimizer)[0]))
    try:
        dcp.load(damaged, storage_reader=StorageReader(f"{root}/damaged"))
    except CheckpointException as error:
        assert {type(found[0]) for found in error.failures.values()} == {CorruptCheckpointError}
    else:
        raise AssertionError("damage went unseen")


def same(found: Any, expected: Any) -> None:
    assert type(found) is type(expected)
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key in expected:
            same(found[key], expected[key])
    else:
        assert torch.equal(found, expected) if isinstance(expected, torch.Tensor) else found == expected


@pytest.mark.parametrize("n_workers", [0, 2])
def test_what_four_ranks_save_others_load_in_other_arrangements(
    tmp_path: pathlib.Path, request: pytest.FixtureRequest, n_workers: int
) -> None:
    root = str(tmp_path)
    workers = request.getfixturevalue("workers")[:n_workers] if n_workers else []
    endpoints = tuple(worker.endpoint for worker in workers) or None
    results = rank_processes.run(4, save_in_every_way, root, endpoints)
    for worker in workers:
        assert worker.status()["counters"]["saves_committed"] >= 3
    expected, failure = results[0]
    assert all(result[1] == ({2: "ZeroDivisionError"}, False) for result in results), failure
    for name in ("sync", "async"):
        found = asyncckpt.load(f"{root}/{name}")
        same(found["m"], expected["m"])
        same(found["grid"], dict.fromkeys(("ss", "same", "rs"), GRID))
        assert found["counter"] == {"count": 4} and found["step"] == 9
        verdict = verify_checkpoint(f"{root}/{name}", Files())
        assert verdict.state == "ok" and verdict.contents is not None and verdict.contents.manifest.world_size == 4
        ranks = [record.nbytes for record in verdict.contents.manifest.ranks]
        assert min(ranks) > 4096, "every rank wrote its part"
    for number in range(2):
        same(asyncckpt.load(f"{root}/cached-{number}"), {"x": GRID + number, "number": number})
    assert asyncckpt.open_checkpoint(f"{root}/group").world_size == 2
    same(asyncckpt.load(f"{root}/group"), {"x": torch.arange(4), "of": asyncckpt.load(f"{root}/group")["of"]})
    damage(f"{root}/sync", f"{root}/damaged")
    rank_processes.run(2, load_in_another_arrangement, root, expected, "sync")
    alone = {"m": {name: torch.zeros_like(tensor) for name, tensor in expected["m"].items()}, "step": 0}
    same(dcp_calls.load(alone, StorageReader(f"{root}/async")), {"m": expected["m"], "step": 9})


def damage(source: str, target: str) -> None:
    subprocess.run(["cp", "-r", source, target], check=True)
    for name in os.listdir(target):
        if name.endswith(".safetensors"):
            path = pathlib.Path(target, name)
            path.write_bytes(path.read_bytes()[:-4096] + b"\x55" * 4096)


# ---- sharded planners -----------------------------------------------------------------------------------------------


def save_strided(rank: int, root: str) -> Any:
    """FSDP2 and tensor parallelism on one dimension: a local tensor of several boxes, which stock planners refuse."""
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 16), torch.nn.Linear(16, 10))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    rows = torch.full((1, 3), float(rank))
    state = {"model": dict(model.state_dict()), "rows": asyncckpt.ShardedSlice(rows, (4, 3), (rank, 0)), "n": rank}
    dcp.save(state, storage_writer=StorageWriter(f"{root}/ours"), planner=ShardedSavePlanner())
    dcp.save(state, checkpoint_id=f"{root}/stock", planner=ShardedSavePlanner())
    found = asyncckpt.load(f"{root}/ours")  # with as many ranks as saved
    same(found["model"], whole(state["model"]))
    assert torch.equal(found["rows"], torch.arange(4.0)[:, None].expand(4, 3)) and found["n"] in range(4)
    filled = {"model": {name: torch.zeros_like(tensor) for name, tensor in state["model"].items()}, "n": -1}
    dcp.load(filled, storage_reader=StorageReader(f"{root}/ours"), planner=ShardedLoadPlanner())
    same(whole(filled["model"]), found["model"])
    return whole(state["model"])


def load_strided(rank: int, root: str, expected: dict[str, torch.Tensor]) -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, reader in (("ours", StorageReader(f"{root}/ours")), ("stock", dcp.FileSystemReader(f"{root}/stock"))):
        model = {n: distribute_tensor(torch.zeros_like(t), mesh, [Shard(t.dim() - 1)]) for n, t in expected.items()}
        mine = asyncckpt.ShardedSlice(torch.zeros(3, 3), (4, 3), (rank, 0))
        state = {"model": model, "rows": mine}
        dcp.load(state, storage_reader=reader, planner=ShardedLoadPlanner())
        same(whole(model), expected)
        assert torch.equal(mine.tensor, torch.arange(4.0)[rank : rank + 3, None].expand(3, 3)), name


def test_sharded_planners_save_and_load_what_lies_in_several_boxes(tmp_path: pathlib.Path) -> None:
    root = str(tmp_path)
    expected = rank_processes.run(4, save_strided, root)[0]
    found = asyncckpt.load(f"{root}/ours")
    same(found["model"], expected)
    assert torch.equal(found["rows"], torch.arange(4.0)[:, None].expand(4, 3))
    rank_processes.run(2, load_strided, root, expected)


def several_shards(owners: list[int], cuts: list[int], value: torch.Tensor) -> Any:
    """Return a ShardedTensor of rows `cuts[i]` to `cuts[i + 1]`, on rank `owners[i]` each, and its local memory."""
    from torch.distributed._shard import sharded_tensor

    local = []
    for owner, first, last in zip(owners, cuts, cuts[1:], strict=False):
        if owner == dist.get_rank():
            metadata = sharded_tensor.ShardMetadata([first, 0], [last - first, 3], placement=f"rank:{owner}/cpu")
            local.append(sharded_tensor.Shard(value[first:last].clone(), metadata))
    return sharded_tensor.init_from_local_shards(local, 11, 3)


SEVERAL = {
    "several on each rank, uneven": ([0, 1, 0, 1, 0], [0, 1, 4, 5, 9, 11]),
    "none on rank 0": ([1, 1, 1], [0, 3, 4, 11]),
    "none on rank 1": ([0, 0], [0, 10, 11]),
    "one on each": ([0, 1], [0, 6, 11]),
}


class Held:
    """The whole of a tensor, shown as such or in two parts: copies, as XLA's are."""

    def __init__(self, memory: torch.Tensor, *, in_parts: bool) -> None:
        self.memory, self.in_parts, self.told = memory, in_parts, 0

    def shown(self) -> Any:
        if not self.in_parts:
            return self.memory.clone()
        return (11, 3), [(self.memory[:4].clone(), (0, 0)), (self.memory[4:].clone(), (4, 0))]

    def take(self, parts: Any) -> None:
        self.told += 1
        for part, (row, _) in parts:
            self.memory[row : row + len(part)] = part


def several_and_whole(rank: int, root: str) -> None:
    value = torch.arange(33.0).view(11, 3)
    asyncckpt.register_shard_type(Held, Held.shown, Held.take)
    zeros = torch.zeros_like(value)
    for number, (owners, cuts) in enumerate(SEVERAL.values()):
        state = {"t": [several_shards(owners, cuts, value), 1], "held": Held(value.clone(), in_parts=number % 2 == 0)}
        path = f"{root}/{number}"
        dcp.save(state, storage_writer=StorageWriter(path), planner=ShardedSavePlanner())
        for name, (others, more) in SEVERAL.items():
            target, held = several_shards(others, more, zeros), Held(zeros.clone(), in_parts=rank == 0)
            dcp.load({"t": [target, 0], "held": held}, storage_reader=StorageReader(path), planner=ShardedLoadPlanner())
            for shard in target.local_shards():
                first, n = shard.metadata.shard_offsets[0], shard.metadata.shard_sizes[0]
                assert torch.equal(shard.tensor, value[first : first + n]), name
            assert torch.equal(held.memory, value) and held.told == 1, name


@pytest.mark.filterwarnings("ignore:Please use DTensor instead")
def test_sharded_tensors_of_several_shards_or_none_and_whole_values_go_by_the_sharded_planners(
    tmp_path: pathlib.Path,
) -> None:
    rank_processes.run(2, several_and_whole, str(tmp_path))
    assert torch.equal(asyncckpt.load(tmp_path / "1")["t"][0], torch.arange(33.0).view(11, 3))


# ---- tensors that give their chunks ---------------------------------------------------------------------------------


TABLE = torch.arange(11 * 6.0).view(11, 6)
LAYOUTS: dict[str, dict[int, list[tuple[int, int, int, int]]]] = {  # by rank: first row, first column, rows, columns
    "columns on each": {0: [(0, 0, 7, 2), (0, 2, 7, 4)], 1: [(7, 0, 4, 5), (7, 5, 4, 1)]},
    "columns of the other": {0: [(0, 0, 2, 3), (0, 3, 2, 3)], 1: [(2, 0, 9, 6)]},
    "none on rank 0": {1: [(0, 0, 11, 1), (0, 1, 11, 5)]},
}


def local_shards(value: torch.Tensor, boxes: list[tuple[int, int, int, int]], *, is_target: bool) -> DTensor:
    """Return a DTensor over what this rank holds: boxes of a matrix, or, of a vector, their rows."""
    from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

    starts = [(row, column)[: value.dim()] for row, column, _, _ in boxes]
    shards = [value[row : row + n, column : column + m] for row, column, n, m in boxes if value.dim() == 2]
    shards += [value[row : row + n] for row, _, n, _ in boxes if value.dim() == 1]
    shards = [torch.zeros_like(shard) if is_target else shard.clone() for shard in shards]
    mesh, wrapper = init_device_mesh("cpu", (dist.get_world_size(),)), LocalShardsWrapper(shards, starts)
    return DTensor.from_local(
        wrapper,
        mesh,
        [Shard(0)],
        run_check=False,
        shape=value.shape,
        stride=value.stride(),  # type: ignore[arg-type]
    )


def tables(name: str, *, is_target: bool = False) -> dict[str, Any]:
    """Return a state of an embedding and its optimizer's, which has a row for each of the embedding's rows."""
    boxes = LAYOUTS[name].get(dist.get_rank(), []) if dist.get_world_size() == 2 else [(0, 0, 11, 4), (0, 4, 11, 2)]
    vector = local_shards(TABLE[:, 0].bfloat16().contiguous(), boxes[:1], is_target=is_target)
    return {
        "e": {"table": local_shards(TABLE, boxes, is_target=is_target)},
        "o": {"sum": vector},
        "n": 0 if is_target else 7,
    }


def assert_filled(state: dict[str, Any]) -> None:
    assert state["n"] == 7
    expected_of = {"table": TABLE, "sum": TABLE[:, 0].bfloat16()}
    for name, value in {**state["e"], **state.get("o", {})}.items():
        local, expected = value._local_tensor, expected_of[name]
        for shard, chunk in zip(local.local_shards(), local.local_chunks, strict=bool(local.local_shards())):
            box = tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))
            assert torch.equal(shard, expected[box]) and shard.dtype == expected.dtype


def save_and_load_tables(rank: int, root: str, endpoints: Endpoints) -> None:
    for number, name in enumerate(LAYOUTS):
        planner = ShardedSavePlanner() if number % 2 else None
        dcp.save(tables(name), storage_writer=writer_to(f"{root}/{name}", endpoints), planner=planner)
        future = dcp.async_save(
            tables(name), storage_writer=writer_to(f"{root}/async {name}", endpoints), planner=planner
        )
        future.result(60)  # type: ignore[union-attr]
        dcp.save(tables(name), checkpoint_id=f"{root}/stock {name}", planner=ShardedSavePlanner())
    load_tables(rank, root)


def load_tables(rank: int, root: str) -> None:
    for name, other in zip(LAYOUTS, [*LAYOUTS][1:] + [*LAYOUTS][:1], strict=True):
        for path in (name, f"async {name}"):
            state = tables(other, is_target=True)
            dcp.load(state, storage_reader=StorageReader(f"{root}/{path}"), planner=ShardedLoadPlanner())
            assert_filled(state)
        state = tables(other, is_target=True)
        dcp.load(state, storage_reader=dcp.FileSystemReader(f"{root}/stock {name}"), planner=ShardedLoadPlanner())
        assert_filled(state)
        state = tables(other, is_target=True)
        if other == "none on rank 0" and dist.get_world_size() == 2:
            del state["o"]  # an empty part has two dimensions, of a vector too, for which torch's planner fails
        dcp.load(state, storage_reader=StorageReader(f"{root}/{name}"))
        assert_filled(state)


@pytest.mark.parametrize("n_workers", [0, 1])
def test_dtensors_over_local_shards_are_saved_and_loaded_by_their_chunks_on_any_number_of_ranks(
    tmp_path: pathlib.Path, request: pytest.FixtureRequest, n_workers: int
) -> None:
    endpoints = (request.getfixturevalue("worker").endpoint,) if n_workers else None
    root = str(tmp_path)
    rank_processes.run(2, save_and_load_tables, root, endpoints)
    rank_processes.run(1, load_tables, root)
    for name in LAYOUTS:
        found = asyncckpt.load(f"{root}/{name}")
        same(found, {"e": {"table": TABLE}, "o": {"sum": TABLE[:, 0].bfloat16()}, "n": 7})


# ---- what cannot be stored ------------------------------------------------------------------------------------------


class Coded(torch.Tensor):
    """A tensor without memory of its own."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.view.default, torch.ops.aten.detach.default):
            return cls(args[0].codes)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def save_wrappers(rank: int, root: str, endpoints: Endpoints, who: tuple[int, ...]) -> Any:
    """Return what each of three saves failed with: by rank, kind of error, FQN, type."""
    coded = Coded(torch.ones(4))
    mesh = init_device_mesh("cpu", (2,))
    states = (
        {"o": {"m": [coded if rank in who else torch.ones(4)]}},
        {"o": {"m": [DTensor.from_local(coded if rank in who else torch.ones(4), mesh, [Shard(0)], run_check=False)]}},
    )
    found = []
    for number, (state, planner) in enumerate(
        [(states[0], None), (states[1], None), (states[0], ShardedSavePlanner())]
    ):
        for save in (dcp.save, dcp.async_save):
            writer = writer_to(f"{root}/{number}", endpoints)
            with pytest.raises(CheckpointException) as caught:
                future = save(state, storage_writer=writer, planner=planner)
                future.result(60)  # type: ignore[union-attr]
            errors = {at: error for at, (error, _) in caught.value.failures.items()}
            found.append({at: (type(e).__name__, e.leaf, e.type_name) for at, e in errors.items()})
            dist.barrier()
    return found


@pytest.mark.parametrize(("who", "n_workers"), [((0, 1), 0), ((1,), 1), ((0,), 1)])
def test_a_wrapper_subclass_on_any_rank_is_refused_by_name_on_all_and_nothing_is_begun(
    tmp_path: pathlib.Path, request: pytest.FixtureRequest, n_workers: int, who: tuple[int, ...]
) -> None:
    workers = request.getfixturevalue("workers")[:n_workers] if n_workers else []
    begun = [worker.status()["counters"].get("saves_begun", 0) for worker in workers]
    endpoints = tuple(worker.endpoint for worker in workers) or None
    for found in rank_processes.run(2, save_wrappers, str(tmp_path), endpoints, who):
        assert found == [{rank: ("UnsupportedLeafError", "o.m.0", "Coded") for rank in who}] * 6
    assert not os.listdir(tmp_path)
    assert [worker.status()["counters"].get("saves_begun", 0) for worker in workers] == begun


# ---- deaths ---------------------------------------------------------------------------------------------------------


class Dies(DefaultSavePlanner):
    """Rank 1 is killed while it writes."""

    def lookup_object(self, index: Any) -> Any:
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().lookup_object(index)


def save_and_die(rank: int, path: str) -> str:
    state = {"x": distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])}
    try:
        dcp.save(state, storage_writer=StorageWriter(path, sync_files=False), planner=Dies())
    except Exception as error:
        return type(error).__name__
    return "saved"


@pytest.mark.parametrize("older", [False, True])
def test_a_killed_rank_commits_nothing_and_the_next_save_cleans_up(tmp_path: pathlib.Path, older: bool) -> None:
    path = tmp_path / "c"
    if older:
        dcp_calls.save({"x": torch.zeros(8)}, StorageWriter(path))
    with rank_processes.running(2, save_and_die, str(path)) as ranks:
        assert ranks.receive(0) != "saved"
    if older:
        assert torch.equal(asyncckpt.load(path)["x"], torch.zeros(8))
    else:
        with pytest.raises((CheckpointNotCommittedError, CheckpointNotFoundError)):
            asyncckpt.load(path)
    dcp_calls.save({"x": torch.ones(8)}, StorageWriter(path))
    assert torch.equal(asyncckpt.load(path)["x"], torch.ones(8))
    assert len(os.listdir(path)) == 4


# ---- async saves that fail, and alone ------------------------------------------------------------------------------


def save_async_and_fail(rank: int, root: str) -> Any:
    x = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (2,)), [Shard(0)])
    writer = StorageWriter(f"{root}/1", sync_files=False, cache_staged_state_dict=True)
    if rank == 1:
        writer._files = storage_samples.failing("pwrite", errno.EIO)
    error = dcp.async_save({"x": x, "step": 1}, storage_writer=writer).exception(60)
    assert isinstance(error, CheckpointException)
    failures = {number: found[0] for number, found in error.failures.items()}
    listed = asyncckpt.latest_checkpoint(root)
    writer._files = Files()
    dist.barrier()
    dcp.async_save({"x": x, "step": 2}, storage_writer=writer, checkpoint_id=f"{root}/2").result(60)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")
        alone = {"mine": torch.full((3,), float(rank)), "step": 3}
        dcp.async_save(alone, storage_writer=StorageWriter(f"{root}/alone-{rank}"), no_dist=True).result(60)
    return failures, listed


def test_an_async_save_that_fails_on_one_rank_fails_on_all_and_lists_nothing(tmp_path: pathlib.Path) -> None:
    for failures, listed in rank_processes.run(2, save_async_and_fail, str(tmp_path)):
        assert list(failures) == [1] and isinstance(failures[1], SaveFailedError)
        assert (failures[1].code, failures[1].rank, listed) == ("EIO", 1, None)
    same(asyncckpt.load(tmp_path / "2"), {"x": torch.arange(8.0), "step": 2})
    for rank in range(2):
        same(asyncckpt.load(tmp_path / f"alone-{rank}"), {"mine": torch.full((3,), float(rank)), "step": 3})


# ---- another process ------------------------------------------------------------------------------------------------


def save_in_another_process(rank: int, root: str, endpoint: str) -> None:
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined] # may have children
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    by_worker, by_itself = (writer_to(f"{root}/0", where, sync_files=False) for where in ((endpoint,), None))
    for number, writer in enumerate((by_worker, by_worker, by_itself)):
        x = distribute_tensor(torch.arange(8.0) + number, init_device_mesh("cpu", (2,)), [Shard(0)])
        future = dcp.async_save(
            {"x": x, "step": number},
            storage_writer=writer,
            checkpoint_id=f"{root}/{number}",
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
        )
        future.result(90)


def test_async_save_writes_in_another_process_by_a_worker_and_by_itself(
    tmp_path: pathlib.Path, worker: real_worker.RealWorker
) -> None:
    rank_processes.run(2, save_in_another_process, str(tmp_path), worker.endpoint, timeout_s=120)
    for number in range(3):
        found = asyncckpt.load(tmp_path / str(number))
        same(found, {"x": torch.arange(8.0) + number, "step": number})
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "2")


# ---- another coordinator --------------------------------------------------------------------------------------------


def save_coordinated_by_the_last(rank: int, root: str, endpoints: Endpoints) -> None:
    from torch.distributed.checkpoint.state_dict_saver import _save_state_dict

    writer = writer_to(f"{root}/0", endpoints)
    for number in range(2):
        writer.reset(f"{root}/{number}")
        state = {"x": distribute_tensor(torch.arange(9.0) + number, init_device_mesh("cpu", (3,)), [Shard(0)])}
        planner = DefaultSavePlanner(flatten_state_dict=False)
        _save_state_dict({**state, "step": number}, writer, coordinator_rank=2, planner=planner)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_any_rank_may_coordinate(tmp_path: pathlib.Path, request: pytest.FixtureRequest, n_workers: int) -> None:
    workers = request.getfixturevalue("workers")[:n_workers] if n_workers else []
    endpoints = tuple(worker.endpoint for worker in workers) or None
    rank_processes.run(3, save_coordinated_by_the_last, str(tmp_path), endpoints)
    for number in range(2):
        same(asyncckpt.load(tmp_path / str(number)), {"x": torch.arange(9.0) + number, "step": number})
        assert asyncckpt.open_checkpoint(tmp_path / str(number)).world_size == 3

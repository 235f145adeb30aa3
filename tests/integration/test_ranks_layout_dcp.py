"""layout="dcp" through a worker, of one rank and several: stock DCP loads, and reshards, what they saved."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, ShardedSlice, SyncCheckpointer
from asyncckpt.cli import main
from asyncckpt.errors import AsyncCkptError, RanksDisagreeError
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

dcp = pytest.importorskip("torch.distributed.checkpoint")
pytestmark = pytest.mark.filterwarnings("ignore")


def state_of(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(9000, 500, generator=generator),
        "small": torch.arange(5),
        "statistics": torch.full((4,), float(rank)),
        "slice": ShardedSlice(torch.full((2, 3), float(rank)), (4, 3), (2 * rank, 0)),
        "rng": PerRank(torch.tensor([rank])),
        "own": PerRank({"name": f"rank {rank}"}),
        f"stage{rank}": {"step": rank},
        "epoch": 3,
    }


def save(rank: int, path: str, kind: str) -> None:
    kinds: dict[str, Any] = {"async": AsyncCheckpointer, "sync": SyncCheckpointer}
    with kinds[kind](layout="dcp", files_per_rank=2) as checkpointer:
        handle = checkpointer.save(state_of(rank), path, step=1)
        if handle is not None:
            handle.written.result(60)


@pytest.mark.parametrize("kind", ["async", "sync"])
def test_stock_dcp_finds_what_two_ranks_saved_each_rank_s_own_by_its_name(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, kind: str
) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    path = tmp_path / "step-1"
    rank_processes.run(2, save, str(path), kind, environ={"ASYNCCKPT_ENDPOINT": shared_worker.endpoint})
    dcp_to_torch_save(str(path), tmp_path / "all.pt")
    found, whole = torch.load(tmp_path / "all.pt", weights_only=True), state_of(0)
    assert found.pop("slice").tolist() == [[0.0] * 3] * 2 + [[1.0] * 3] * 2
    assert {name: found.pop(name).tolist() for name in ("rng@rank0", "rng@rank1")} == {
        "rng@rank0": [0],
        "rng@rank1": [1],
    }
    for rank in range(2):
        assert found.pop(f"own.name@rank{rank}") == f"rank {rank}"
        assert found.pop(f"stage{rank}") == {"step": rank}
        assert torch.equal(found.pop(f"statistics@rank{rank}"), torch.full((4,), float(rank)))
    assert sorted(found) == ["epoch", "small", "weight"] and found["epoch"] == 3
    assert torch.equal(found["weight"], whole["weight"]) and torch.equal(found["small"], whole["small"])
    assert verify_checkpoint(str(path), Files()).state == "ok"


def save_by_two(rank: int, places: list[str], path: str) -> str:
    with AsyncCheckpointer(endpoint=places[rank % 2], layout="dcp") as checkpointer:
        return repr(checkpointer.save(state_of(rank), path, step=1).written.exception(60))


def test_the_ranks_of_two_workers_make_one_directory_for_stock_dcp(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, worker: real_worker.RealWorker
) -> None:
    path = tmp_path / "a"
    found = rank_processes.run(2, save_by_two, [shared_worker.endpoint, worker.endpoint], str(path))
    assert found == ["None"] * 2
    target = {"weight": torch.zeros(9000, 500), "rng@rank1": torch.zeros(1, dtype=torch.int64), "own.name@rank1": ""}
    dcp.load(target, checkpoint_id=str(path), no_dist=True)
    assert torch.equal(target["weight"], state_of(0)["weight"])
    assert (target["rng@rank1"].tolist(), target["own.name@rank1"]) == ([1], "rank 1")
    assert verify_checkpoint(str(path), Files()).state == "ok"


def save_fsdp2(rank: int, path: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Linear(31, 5), torch.nn.LayerNorm(1))
    fully_shard(model)
    with AsyncCheckpointer(layout="dcp", max_shard_bytes=65536) as checkpointer:
        checkpointer.save({"model": dict(model.state_dict())}, path).written.result(60)
    return {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}


def load_stock(rank: int, path: str, expected: dict[str, torch.Tensor]) -> bool:
    """Let stock DCP reshard it to a mesh of this many ranks."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    target = {name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)]) for name, t in expected.items()}
    dcp.load({"model": target}, checkpoint_id=path)
    return all(torch.equal(target[name].full_tensor(), tensor) for name, tensor in expected.items())


def load_ours(rank: int, path: str, expected: dict[str, torch.Tensor]) -> bool:
    found = asyncckpt.load(path)["model"]
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize("saved_by", [1, 2])
def test_stock_dcp_reshards_an_uneven_fsdp2_checkpoint(
    saved_by: int, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    path = str(tmp_path / "a")
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    expected = rank_processes.run(saved_by, save_fsdp2, path, environ=environ)[0]
    for world_size in (1, 4):
        assert all(rank_processes.run(world_size, load_stock, path, expected))
    assert load_ours(0, path, expected)


def save_unlike(rank: int, path: str) -> str:
    with AsyncCheckpointer(layout=("dcp", "safetensors")[rank]) as checkpointer:
        error = checkpointer.save({"epoch": 1}, path).written.exception(60)
    return type(error).__name__


def test_ranks_that_ask_for_unlike_layouts_are_told(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    found = rank_processes.run(2, save_unlike, str(tmp_path / "a"), environ=environ)
    assert found == [RanksDisagreeError.__name__] * 2


def test_a_worker_writes_it_and_every_command_knows_it(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker, capsys: pytest.CaptureFixture[str]
) -> None:
    state = {"model": {"w": torch.randn(3000, 100)}, "epoch": 1}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, layout="dcp", overwrite=True) as checkpointer:
        for step in (1, 2, 3):
            state["epoch"] = step
            checkpointer.save(state, tmp_path / "a", step=step).written.result(60)
    target = {"model": {"w": torch.zeros(3000, 100)}, "epoch": 0}
    dcp.load(target, checkpoint_id=str(tmp_path / "a"), no_dist=True)
    states.assert_same(target, state)
    states.assert_same(asyncckpt.load(tmp_path / "a"), state)
    assert asyncckpt.latest_checkpoint(tmp_path) == str(tmp_path / "a")
    assert len(list((tmp_path / "a").iterdir())) == 6
    for command in ("ls", "inspect", "verify"):
        where = tmp_path if command == "ls" else tmp_path / "a"
        assert main([command, str(where)]) == 0
    assert "dcp" in capsys.readouterr().out


def test_a_worker_that_is_killed_leaves_nothing_that_anybody_takes_for_a_checkpoint(
    tmp_path: pathlib.Path, worker: real_worker.RealWorker
) -> None:
    path = tmp_path / "a"
    checkpointer = AsyncCheckpointer(endpoint=worker.endpoint, layout="dcp", worker_timeout_s=2)
    handle = checkpointer.save({"w": torch.randn(4_000_000)}, path)
    os.kill(worker.pid, signal.SIGKILL)
    error = handle.written.exception(60)
    if error is None:  # it was faster
        assert verify_checkpoint(str(path), Files()).state == "ok"
    else:
        assert not (path / ".metadata").exists()
        with pytest.raises(AsyncCkptError):
            asyncckpt.load(path)
    checkpointer.leave()

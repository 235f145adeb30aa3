"""Sharded states of real ranks: one checkpoint, every byte stored once, equal to the full state bit for bit."""

from __future__ import annotations

import math
import pathlib
import sys
import threading
from collections import Counter
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S, manifest_of
from torch import nn

import asyncckpt
from asyncckpt import AsyncCheckpointer, FlatShard, ShardedSlice, SyncCheckpointer, describe_tp
from asyncckpt.errors import ReplicaMismatchError, SaveFailedError

pytestmark = pytest.mark.filterwarnings("ignore")


def run(worker: real_worker.RealWorker, world_size: int, function: Any, *arguments: Any) -> Any:
    return rank_processes.run(world_size, function, *arguments, environ={"ASYNCCKPT_ENDPOINT": worker.endpoint})


class Model(nn.Module):
    """Odd sizes, so that shards are uneven, and a tensor with fewer rows than there are ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(10, 22), nn.Linear(22, 7, bias=False)
        self.norm = nn.LayerNorm(7)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x).relu())) * self.scale


def mesh_of(*shape: int) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")[: len(shape)])


def parallel(kind: str) -> nn.Module:
    """The model, laid out over all ranks."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    model: nn.Module = Model()
    if kind == "FSDP2":
        fully_shard(model)
    elif kind == "HSDP":
        fully_shard(model, mesh=mesh_of(2, 2))
    elif kind in ("TP", "FSDP2 x TP"):
        whole = mesh_of(2) if kind == "TP" else mesh_of(2, 2)
        tp = whole if kind == "TP" else whole["b"]
        parallelize_module(model, tp, {"first": ColwiseParallel(), "second": RowwiseParallel()})
        if kind == "FSDP2 x TP":
            fully_shard(model, mesh=whole["a"])
    return model


def full(state: Any) -> Any:
    """The state with whole tensors; a collective."""
    from torch.distributed.tensor import DTensor

    if isinstance(state, DTensor):
        return state.full_tensor()
    if isinstance(state, dict):
        return {key: full(value) for key, value in state.items()}
    return [full(value) for value in state] if isinstance(state, list) else state


def trains(rank: int, kind: str, root: str) -> Any:
    model = parallel(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    with AsyncCheckpointer() as checkpointer:
        checkpointer.attach(optimizer)
        for step in (1, 2, 3):
            model(torch.randn(4, 10, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}
            handle = checkpointer.save(state, f"{root}/step-{step}")
            expected = full({"model": dict(state["model"]), "optim": state["optim"]})  # the copies may still run
            assert handle.written.exception(DEADLINE_S) is None
    return expected if rank == 0 else None


@pytest.mark.parametrize(("kind", "world_size"), [("FSDP2", 2), ("TP", 2), ("HSDP", 4), ("FSDP2 x TP", 4)])
def test_a_sharded_model_and_its_optimizer_are_stored_once_and_load_whole(
    kind: str, world_size: int, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    expected = run(shared_worker, world_size, trains, kind, str(tmp_path))[0]
    found = asyncckpt.load(tmp_path / "step-3", keys=["model", "optim"])
    states.assert_same({**found, "model": dict(found["model"])}, expected)
    assert stored_nbytes(tmp_path / "step-3") == whole_nbytes(expected)


def whole_nbytes(state: Any) -> int:
    if isinstance(state, torch.Tensor):
        return state.numel() * state.element_size()
    values = state.values() if isinstance(state, dict) else state if isinstance(state, list) else ()
    return sum(map(whole_nbytes, values))


def stored_nbytes(path: pathlib.Path) -> int:
    """Bytes of tensors in the shard files, from their headers."""
    import json

    total = 0
    for file in path.glob("*.safetensors"):
        data = file.read_bytes()
        header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
        total += sum(e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n != "__metadata__")
    return total

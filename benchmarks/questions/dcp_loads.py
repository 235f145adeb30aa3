"""How fast are stock DCP directories loaded into other shardings: by us, and by stock `dcp.load`?

Ranks save matrices with stock `dcp.save`; other ranks load them, sharded differently, with the files in the page cache
and without. The slowest rank counts; CPU seconds are added up.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import asyncckpt
from benchmarks import machine, processes
from benchmarks.figures import Row, in_turn
from benchmarks.runner import Context, Question

CASES = ((4, 0, 2, 1), (2, 0, 4, 1), (4, 1, 2, 0))
"""(ranks that saved, the dimension that they sharded, ranks that load, the dimension that they want sharded)."""


def run(context: Context) -> Row:
    """Save and load every case."""
    size = context.options.size
    n_tensors = max(1, (context.options.mib << 20) // (4 * size * size))
    context.facts["nbytes"] = n_tensors * size * size * 4
    row: Row = {}
    path = context.directory / "checkpoint"
    for saved_by, saved_dim, loaded_by, loaded_dim in context.in_turn(CASES):
        given = (str(path), n_tensors, size)
        processes.call(save, *given, saved_dim, ranks=saved_by)
        found = processes.call(load, *given, loaded_dim, context.number, ranks=loaded_by)
        row[f"{saved_by} x Shard({saved_dim}) to {loaded_by} x Shard({loaded_dim})"] = found
        machine.remove(path)
    return row


def _state(n_tensors: int, size: int, dim: int, fill: bool) -> dict[str, Any]:
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))
    shape = [size // ranks if d == dim else size for d in range(2)]
    return {
        f"w{n}": DTensor.from_local(torch.full(shape, float(n) if fill else -1.0), mesh, [Shard(dim)])
        for n in range(n_tensors)
    }


def save(path: str, n_tensors: int, size: int, dim: int) -> None:
    """Save on one of the ranks."""
    state_dict_saver.save(_state(n_tensors, size, dim, True), checkpoint_id=path)
    dist.barrier()


def load(path: str, n_tensors: int, size: int, dim: int, number: int) -> Row:
    """Load on one of the ranks in both ways; return the figures of the slowest rank."""
    state = _state(n_tensors, size, dim, False)
    ways: dict[str, Callable[[], Any]] = {
        "stock": lambda: state_dict_loader.load(state, checkpoint_id=path),
        "ours": lambda: asyncckpt.load(path, state, strict=True),
    }
    for work in ways.values():  # imports, and what is made once
        for tensor in state.values():
            tensor.to_local().fill_(-1.0)
        work()
        assert all(bool((tensor.to_local() == n).all()) for n, tensor in enumerate(state.values()))
    mine: dict[str, float] = {}
    for heat, prepare in (("cold", machine.drop_cache), ("warm", machine.fill_cache)):
        for name in in_turn(ways, number):
            dist.barrier()
            prepare(Path(path))
            dist.barrier()
            mine |= {f"{name}_{heat}_{key}": value for key, value in machine.timed(ways[name]).items()}
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    return {key: (sum if key.endswith("cpu_s") else max)(row[key] for row in every) for key in mine}


QUESTION = Question(
    run,
    ["*/ours_cold_s", "*/stock_cold_s / */ours_cold_s", "*/ours_warm_s", "*/stock_warm_s / */ours_warm_s"],
    options={"mib": 1024, "size": 4096},
    smallest="--mib 1 --size 128",
)

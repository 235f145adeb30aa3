"""Measure what a save costs the training loop: asyncckpt, torch.save on rank 0, and DCP's async_save, in turn.

    asyncckpt run -- torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.stalls --dir /tmp/stalls

Every rank holds the same state, as in data-parallel training. A stall is the time that the slowest rank spends in the
call that saves; the next save begins when the last one is on disk.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import statistics
import time
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt
from asyncckpt.cli.output import print_table

DEADLINE_S = 60.0
N_TENSORS = 24

Method = Callable[[dict[str, Any], str], Callable[[], Any]]
"""Saves a state at a path; what it returns waits until that is on disk."""


def with_asyncckpt(checkpointer: asyncckpt.AsyncCheckpointer) -> Method:
    """Save with this library."""

    def save(state: dict[str, Any], path: str) -> Callable[[], Any]:
        written = checkpointer.save(state, path).written
        return lambda: written.result(DEADLINE_S)

    return save


def with_torch_save(state: dict[str, Any], path: str) -> Callable[[], Any]:
    """Let rank 0 write one file, and everybody wait: what most training scripts do."""
    if dist.get_rank() == 0:
        with open(path, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
    dist.barrier()
    return lambda: None


def with_dcp(group: Any) -> Method:
    """Save with torch.distributed.checkpoint in a thread, over a process group of its own."""
    import torch.distributed.checkpoint as dcp

    def save(state: dict[str, Any], path: str) -> Callable[[], Any]:
        future = dcp.async_save(state, checkpoint_id=path, process_group=group)
        return lambda: future.result(DEADLINE_S)  # type: ignore[union-attr]

    return save


def measure(save: Method, state: dict[str, Any], path: str) -> tuple[float, float]:
    """Return the seconds of the stall, and until the checkpoint is on disk, both of the slowest rank."""
    for tensor in state["model"].values():
        tensor.add_(1.0)
    state["step"] += 1
    dist.barrier()
    began = time.perf_counter()
    wait = save(state, path)
    stall_s = time.perf_counter() - began
    wait()
    seconds = torch.tensor([stall_s, time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        shutil.rmtree(path, ignore_errors=True) if os.path.isdir(path) else os.unlink(path)
    dist.barrier()
    return float(seconds[0]), float(seconds[1])


def go_on(until: float) -> bool:
    """Whether rank 0's clock leaves time for one more round; the same on all ranks."""
    left = torch.tensor([float(time.monotonic() < until)])
    dist.broadcast(left, 0)
    return bool(left[0])


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="where the checkpoints go, and are removed again")
    parser.add_argument("--nbytes", type=int, default=200_000_000, help="bytes of state per rank")
    parser.add_argument("--rounds", type=int, default=5, help="saves with each method, at least 2")
    parser.add_argument("--budget-s", type=float, default=30.0, help="begin no further round after so many seconds")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")  # DCP's advice is not ours to follow here

    dist.init_process_group("gloo", timeout=timedelta(seconds=DEADLINE_S))
    os.makedirs(args.dir, exist_ok=True)
    shape = (args.nbytes // 4 // N_TENSORS // 1024, 1024)
    model = {f"layer{i}": torch.full(shape, float(i)) for i in range(N_TENSORS)}
    state: dict[str, Any] = {"model": model, "step": 0}
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        methods: dict[str, Method] = {
            "asyncckpt": with_asyncckpt(checkpointer),
            "torch.save on rank 0, fsync": with_torch_save,
        }
        has_numpy = importlib.util.find_spec("numpy") is not None
        if has_numpy:
            methods["dcp.async_save, thread"] = with_dcp(dist.new_group(backend="gloo"))
        until = time.monotonic() + args.budget_s
        seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in methods}
        for n in range(max(2, args.rounds)):
            if n < 2 or go_on(until):
                for number, (name, save) in enumerate(methods.items()):
                    seconds[name].append(measure(save, state, f"{args.dir}/{number}-{n}"))
    if dist.get_rank() == 0:
        rows = [row(name, found) for name, found in seconds.items()]
        rows += [] if has_numpy else [["dcp.async_save, thread", "needs numpy, which is not installed", "", "", ""]]
        print_table(["STALL PER SAVE", "FIRST, s", "LATER, s", "ON DISK AFTER, s", "SAVES"], rows)
    dist.destroy_process_group()


def row(name: str, seconds: list[tuple[float, float]]) -> list[str]:
    """Return a line of the table: the first stall, the median of the later ones, the median until all is on disk."""
    later = statistics.median(stall for stall, _ in seconds[1:])
    return [
        name,
        f"{seconds[0][0]:.3f}",
        f"{later:.3f}",
        f"{statistics.median(s[1] for s in seconds):.2f}",
        str(len(seconds)),
    ]


if __name__ == "__main__":
    main()

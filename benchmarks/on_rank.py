"""One rank of a training whose ranks save together. Part of `benchmarks.ranks`.

    python -m benchmarks.on_rank NAME ARRANGEMENT --saves 4 --dir D

Rank 0 prints one line of JSON: what every rank measured.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
from torch import nn

from benchmarks import contest, machine, states
from benchmarks.contender import remove
from benchmarks.contenders import CONTENDERS
from benchmarks.pss import workers
from benchmarks.training import GPT, Loop, adamw

ARRANGEMENTS = ("ddp", "fsdp2")
QUIET_STEPS = 2
"""Before the saves; one more after each, while its files are removed."""

SHAPE = (1, 64)
"""Sequences of a rank in a step, and tokens of each."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", choices=CONTENDERS)
    parser.add_argument("arrangement", choices=ARRANGEMENTS)
    parser.add_argument("--saves", type=int, default=4)
    parser.add_argument("--dir", type=Path, required=True)
    args = parser.parse_args()
    dist.init_process_group("gloo")
    mine = measure(args.name, args.arrangement, args.saves, args.dir)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, mine)
    if dist.get_rank() == 0:
        print(json.dumps(every), flush=True)
    dist.barrier()
    os._exit(0)  # whatever a peer has left running


def make(arrangement: str) -> Loop:
    """Return the loop of a GPT of 124 M parameters, replicated (`ddp`) or sharded (`fsdp2`) over all ranks."""
    torch.manual_seed(1)
    model = GPT()
    if arrangement == "ddp":
        return Replicated(model)
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return Loop(model, adamw, SHAPE)


class Replicated(Loop):
    """A loop whose model is wrapped for data parallelism; it is saved without the wrapper's prefix."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(nn.parallel.DistributedDataParallel(model), adamw, SHAPE)
        self._saved = model

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return super().state() | {"model": self._saved.state_dict()}


def measure(name: str, arrangement: str, saves: int, directory: Path) -> dict[str, Any]:
    """Return every figure of this rank."""
    at = machine.Steps()
    at.begin("making the state")
    loop = make(arrangement)
    _steps(loop, 1)
    at.begin("making the checkpointer")
    process = psutil.Process()
    fds = process.num_fds()
    contender = CONTENDERS[name](loop)
    prepared_s = contender.prepare()
    at.begin("quiet steps")
    quiet = _steps(loop, QUIET_STEPS)
    rows = []
    for number in range(saves):
        path = directory / f"{number}"
        at.begin("saving", f" {number + 1}")
        dist.barrier()
        rows.append(contest.save(contender, path, _all_done))
        dist.barrier()
        removing = threading.Thread(target=remove, args=(path,))
        if dist.get_rank() == 0:
            removing.start()  # it waits for the disk, and takes no processor from the step
        at.begin("quiet steps")
        quiet += _steps(loop, 1)
        at.begin("removing")
        if dist.get_rank() == 0:
            removing.join()
        dist.barrier()
    at.begin("closing")
    found = {
        "nbytes": states.nbytes(loop.state()),
        "fsyncs": contender.fsyncs,
        "prepare_s": prepared_s,
        "quiet_step_s": quiet,
        "saves": rows,
        "added_fds": process.num_fds() - fds,
        "worker_fds": [worker.num_fds() for worker in workers()],
    }
    contender.close()
    return found | {"phases_s": at.end()}


def _steps(loop: Loop, count: int) -> list[float]:
    """Make steps as they are made while a save runs; returns how long each took."""
    seconds = []
    for _ in range(count):
        began = time.perf_counter()
        loop.step()
        _all_done(True)
        seconds.append(time.perf_counter() - began)
    return seconds


def _all_done(mine: bool) -> bool:
    """Return whether all ranks say yes: they have to make the same number of steps."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())


if __name__ == "__main__":
    main()

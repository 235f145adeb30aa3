"""What a contender costs a training: saves beside the loop, memory, and loads; in a process of its own, or on ranks.

The first save of a process is "cold" (it takes fresh pages from the kernel), the later ones "warm".
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.fsdp import fully_shard

from benchmarks import machine, processes, workloads
from benchmarks.contenders import CONTENDERS, OURS, Contender
from benchmarks.figures import Row
from benchmarks.runner import Context
from benchmarks.workloads import GPT, SAVE_S, Loop

SAMPLE_S = 0.05
MEMORY_SAVES = 2
"""The greatest memory of so many saves counts."""

RANK_SHAPE = (1, 64)
"""(batch, length) of a rank's step."""


def contend(context: Context, place: str, names: Iterable[str], ranks: int = 0) -> Row:
    """Run contenders in turn, each in processes of its own; return the figures of each, or its `error`.

    What has failed in an earlier round is not run again.

    Args:
        context: Of the round; its options have the `state`, and how many `saves` a contender makes.
        place: The figures of a round that these are; with ranks also the arrangement, as for `measure`.
        names: Of the contenders.
        ranks: How many processes for each; 0 for one without ranks.

    Raises:
        processes.ProcessError: One of ours has failed.
    """
    found: Row = {}
    for name in context.in_turn(names):
        if failed := [row[place][name] for row in context.rows if "error" in row[place][name]]:
            found[name] = failed[0]
            continue
        directory = context.directory / "run"
        directory.mkdir(exist_ok=True)
        given = (name, context.options.state, place if ranks else "", context.options.saves, directory)
        try:
            found[name] = processes.call(measure, *given, ranks=ranks, own_worker=True)
        except processes.ProcessError as error:
            if name in OURS:
                raise
            found[name] = {"error": str(error)}
        print(f"{place}, {name}: {found[name].get('error', 'done')}", flush=True)
        machine.remove(directory)
    return found


def measure(name: str, state: str, arrangement: str, saves: int, directory: str) -> Row:
    """Return every figure of one contender, in a process of its own or on one of the ranks.

    Args:
        name: Of the contender.
        state: What is trained and saved.
        arrangement: "ddp" replicates the model on all ranks, "fsdp2" shards it; "" without ranks: then memory and loads
            are measured too.
        saves: How many, the first included.
        directory: Where to write.
    """
    loop = _rank_loop(arrangement, state) if arrangement else workloads.loop(state)
    loop.step()
    process, path = psutil.Process(), Path(directory, "save")
    fds = process.num_fds()
    contender = CONTENDERS[name](loop)
    nbytes = workloads.nbytes_of(loop.state())
    loop.step()
    before = pss()  # the memory of a step is in it, and nothing of a checkpoint
    contender.prepare()
    quiet, rows = save_in_turn(loop, {name: contender}, [name] * saves, path)
    found: Row = {"nbytes": nbytes, "quiet_step_s": quiet, "added_fds": process.num_fds() - fds}
    by_rank = [rows[name]]
    if arrangement:
        every: list[Any] = [None] * _world_size()
        dist.all_gather_object(every, (rows[name], found["added_fds"]))
        by_rank = [one for one, _ in every]
        found |= {"added_fds": [fds for _, fds in every], "worker_fds": [worker.num_fds() for worker in workers()]}
    else:
        found["memory_over_state"] = max(_peak(loop, contender, path) - before for _ in range(MEMORY_SAVES)) / nbytes
        machine.until_discarded(path.parent)
        ways = {"disk": contender.load, "memory": contender.recall}
        found["loads"] = {way: _load(loop, load, path) for way, load in ways.items() if load}
    _meet()
    contender.close()
    slow = slowest(by_rank)
    return found | {"cold": slow[0], "warm": slow[1:]}


def save_in_turn(
    loop: Loop, contenders: Mapping[str, Contender], names: Iterable[str], path: Path, quiet_steps: int = 1
) -> tuple[list[float], dict[str, list[Row]]]:
    """Save beside a loop, and make steps without a save before, between and afterwards: once the disk is quiet again.

    Args:
        loop: What trains.
        contenders: Who saves, by name.
        names: In which order.
        path: Where; each save is removed.
        quiet_steps: How many steps without a save are made at a time.

    Returns:
        The seconds of a step without a save, each time; and the saves of each contender. `lost_s` is what a save cost
        the training beyond as many steps without one, `step_ratio` the ratio of both times.
    """
    quiet, found = [quiet_step_s(loop, quiet_steps)], {name: list[Row]() for name in contenders}
    for name in names:
        print(f"saving: {name}", flush=True)
        found[name].append(save(loop, contenders[name], path))
        _meet()
        if _world_size() == 1 or dist.get_rank() == 0:
            machine.remove(path)
        _meet()
        quiet.append(quiet_step_s(loop, quiet_steps))
    for row in (row for rows in found.values() for row in rows):
        expected_s = len(row["steps_s"]) * statistics.median(quiet)
        row["lost_s"] = row["until_s"] - expected_s
        if expected_s:
            row["step_ratio"] = row["until_s"] / expected_s
    return quiet, found


def quiet_step_s(loop: Loop, count: int) -> float:
    """Make steps that begin and end with an idle GPU, and end on all ranks; return the seconds of one."""
    loop.settle()
    began = time.perf_counter()
    for _ in range(count):
        loop.step()
        _all_done(True)
    loop.settle()
    return (time.perf_counter() - began) / count


def save(loop: Loop, contender: Contender, path: Path) -> Row:
    """Save, and train until everything is on the disk; on a GPU, save behind a step that it has not finished.

    Returns:
        `until_s` is from before the state dict, or that step, until the last of `steps_s`; `save_s` in the call,
        `wait_s` in hooks and before `optimizer.step()`, `stall_s` their sum. Making the state dict is torch's work: it
        is part of what a save costs, not of the stall.
    """
    loop.settle()
    asked = time.perf_counter()
    steps_s = [loop.step()] if loop.device.type == "cuda" else []
    loop.waited_s = 0.0
    state = loop.state()
    began = time.perf_counter()
    saved = contender.save(path, state)
    save_s = time.perf_counter() - began
    del state
    durable_s: Future[float] = Future()
    saved.written.add_done_callback(lambda _: durable_s.set_result(time.perf_counter() - began))
    loop.before_step = partial(concurrent.futures.wait, [saved.staged], SAVE_S)
    try:
        while not _all_done(durable_s.done()):
            steps_s.append(loop.step())
            if time.perf_counter() - began > SAVE_S:
                raise TimeoutError(f"a save took longer than {SAVE_S:.0f} s")
    finally:
        loop.before_step = workloads.nothing
    loop.settle()
    until_s, phases = time.perf_counter() - asked, dict(getattr(saved.written.result(), "seconds", {}))
    row = {"save_s": save_s, "wait_s": loop.waited_s, "stall_s": save_s + loop.waited_s}
    return row | {"durable_s": durable_s.result(), "until_s": until_s, "steps_s": steps_s, "phases_s": phases}


def shown(place: str) -> list[str]:
    """Return what is printed of the contenders of a place."""
    kinds = ("stall_s", "lost_s", "durable_s")
    return [f"{place}/*/{heat}/{figure}" for figure in kinds for heat in ("warm", "cold")]


# ---- memory ----------------------------------------------------------------------------------------------------------


def _peak(loop: Loop, contender: Contender, path: Path) -> int:
    """Save, and return the peak of memory in use meanwhile."""
    shutil.rmtree(path, ignore_errors=True)
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            seen.append(pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        contender.save(path, loop.state()).written.result(SAVE_S)
    finally:
        stop.set()
        watcher.join()
    return max(*seen, pss())


def pss() -> int:
    """Return the memory of this process, its children and our worker; shared pages count once."""
    me, total = psutil.Process(), 0
    for process in {me, *me.children(recursive=True), *workers()}:
        with contextlib.suppress(psutil.Error):  # the process has ended
            total += process.memory_full_info().pss
    return total


def workers() -> list[psutil.Process]:
    """Return the worker processes of this job."""
    found, job = [], os.environ.get("ASYNCCKPT_JOB")
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if "asyncckpt_worker" in " ".join(process.cmdline()) and process.environ().get("ASYNCCKPT_JOB") == job:
                found.append(process)
    return found


# ---- loads -----------------------------------------------------------------------------------------------------------


def _load(loop: Loop, load: Callable[[Path], None], path: Path) -> dict[str, float]:
    """Change the state and load it, with nothing of the files in the page cache ("cold"), and with all ("warm").

    Returns the seconds that a load costs: the call, and how much longer the first write to all tensors takes than a
    later one, as an optimizer writes. A loader that maps a file and returns views of it has not read the file: each
    page is read, and copied since the mapping is private, when the training first changes it.
    """
    seconds: dict[str, float] = {}
    for heat, prepare in (("cold", machine.drop_cache), ("warm", machine.fill_cache)):
        saved = digests_of(workloads.tensors(loop.state()))
        loop.step()
        prepare(path)
        began = time.perf_counter()
        load(path)
        seconds[f"{heat}_s"] = time.perf_counter() - began
        floating = [tensor for tensor in workloads.tensors(loop.state()) if tensor.is_floating_point()]
        writes = []
        with torch.no_grad():
            for _ in range(3):
                began = time.perf_counter()
                torch._foreach_mul_(floating, 1.0)
                writes.append(time.perf_counter() - began)
        seconds[f"{heat}_s"] += writes[0] - min(writes[1:])
        if digests_of(workloads.tensors(loop.state())) != saved:
            raise AssertionError(f"what was loaded by {load} differs from what was saved")
    return seconds


def digests_of(tensors: Iterable[torch.Tensor]) -> list[int]:
    """Return a digest of each tensor."""
    flat = (tensor.detach().contiguous().reshape(-1).view(torch.uint8) for tensor in tensors)
    return [xxhash.xxh3_64_intdigest(tensor.numpy().tobytes()) for tensor in flat]


# ---- ranks -----------------------------------------------------------------------------------------------------------


def _rank_loop(arrangement: str, state: str) -> Loop:
    dist.init_process_group("gloo")
    torch.manual_seed(1)
    model = GPT() if state == "gpt" else GPT(width=16, layers=2, heads=1)
    if arrangement == "ddp":
        return Loop(lambda: nn.parallel.DistributedDataParallel(model), workloads.ADAMW, RANK_SHAPE)
    for module in (*model.blocks.layers, model):
        fully_shard(module)
    return Loop(lambda: model, workloads.ADAMW, RANK_SHAPE)


def slowest(saves: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the saves, each figure that of the slowest rank; `saves` are by rank."""
    if len(saves) == 1:
        return list(saves[0])
    return [
        {key: max(one[key] for one in ranks) for key, value in ranks[0].items() if isinstance(value, float)}
        for ranks in zip(*saves, strict=True)
    ]


def _world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _meet() -> None:
    if _world_size() > 1:
        dist.barrier()


def _all_done(mine: bool) -> bool:
    """Return whether all ranks are done: they have to make the same number of steps."""
    if _world_size() == 1:
        return mine
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())

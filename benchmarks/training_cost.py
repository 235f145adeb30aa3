"""What a contender costs a training: saves beside the loop, memory, and loads; in a process of its own, or on ranks.

The first save of a process is "cold" (it takes fresh pages from the kernel), the later ones "warm".
"""

from __future__ import annotations

import concurrent.futures
import os
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Sequence
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
from benchmarks.contenders import CONTENDERS, OURS, Contender, Saved
from benchmarks.figures import Row
from benchmarks.runner import Context
from benchmarks.workloads import GPT, Loop

SAVE_S = 120.0
"""A save that takes longer is an error of the contender."""

SAMPLE_S = 0.05
MEMORY_SAVES = 2
"""The greatest memory of so many saves counts."""

FEWEST_SAVES = 3
"""How many saves a slow contender makes at least."""

CONTENDER_S, SLOW_S = 180.0, 15.0
"""Deadline of a contender in a round; another library begins no save later after its first, but for the fewest."""

ROUNDS_OF_LOADS = 2
RANK_SHAPE = (1, 64)
"""(batch, length) of a rank's step."""


def contend(context: Context, place: str, names: Iterable[str], ranks: int = 0) -> Row:
    """Run contenders in turn, each in processes of its own; return the figures of each, or its `error`.

    What has failed in an earlier round is not run again. Memory and loads are measured without ranks: of ours in every
    round, of others in the first `ROUNDS_OF_LOADS`.

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
        ours, arrangement = name in OURS, place if ranks else ""
        if failed := [row[place][name] for row in context.rows if "error" in row[place][name]]:
            found[name] = failed[0]
            continue
        directory = context.directory / "run"
        directory.mkdir(exist_ok=True)
        saves_s = CONTENDER_S if ours or ranks else SLOW_S
        loads = not ranks and (ours or context.number < ROUNDS_OF_LOADS)
        given = (name, context.options.state, arrangement, context.options.saves, saves_s, loads, directory)
        try:
            found[name] = processes.call(measure, *given, deadline_s=CONTENDER_S, ranks=ranks, own_worker=True)
        except processes.ProcessError as error:
            if ours:
                raise
            found[name] = {"error": str(error)}
        print(f"{place}, {name}: {found[name].get('error', 'done')}", flush=True)
        machine.remove(directory)
    return found


def measure(name: str, state: str, arrangement: str, saves: int, saves_s: float, loads: bool, directory: str) -> Row:
    """Return every figure of one contender, in a process of its own or on one of the ranks.

    Args:
        name: Of the contender.
        state: What is trained and saved.
        arrangement: "" without ranks; "ddp" replicates the model on all ranks, "fsdp2" shards it.
        saves: How many, the first included.
        saves_s: None begins later than this after the first, unless there are fewer than `FEWEST_SAVES`.
        loads: Measure memory and loads too.
        directory: Where to write.
    """
    all_done: Callable[[bool], bool] = _all_done if arrangement else bool
    meet: Callable[[], object] = dist.barrier if arrangement else workloads.nothing
    loop = _rank_loop(arrangement, state) if arrangement else workloads.loop(state)
    first = not arrangement or dist.get_rank() == 0

    def step() -> float:
        began = time.perf_counter()
        loop.step()
        all_done(True)
        return time.perf_counter() - began

    step()
    process = psutil.Process()
    fds = process.num_fds()
    contender = CONTENDERS[name](loop)
    nbytes = workloads.nbytes_of(loop.state())
    quiet = [step()]
    before = pss()  # the memory of a step is in it, and nothing of a checkpoint
    contender.prepare()
    quiet.append(step())
    rows: list[Row] = []
    began = time.perf_counter()
    while len(rows) < saves and (len(rows) < FEWEST_SAVES or time.perf_counter() - began < saves_s):
        print(f"saving {len(rows) + 1}", flush=True)
        path = Path(directory, f"{len(rows)}")
        meet()
        rows.append(save(contender, path, all_done))
        meet()
        removing = threading.Thread(target=shutil.rmtree, args=(path,))
        if first:
            removing.start()  # beside a step: it waits for the disk, and takes no CPU
        quiet.append(step())
        if first:
            removing.join()
            machine.until_discarded(path.parent)
        meet()
    add_lost(rows, quiet)
    found: Row = {"nbytes": nbytes, "quiet_step_s": quiet, "added_fds": process.num_fds() - fds, "loads": {}}
    if loads:
        path = Path(directory, "kept")
        found["memory_over_state"] = max(_peak(contender, path) - before for _ in range(MEMORY_SAVES)) / nbytes
        machine.until_discarded(path.parent)
        saved = digests_of(workloads.tensors(loop.state()))
        for way, load in contender.loads().items():
            loop.step()
            found["loads"][way] = _load(loop, load, path)
            if digests_of(workloads.tensors(loop.state())) != saved:
                raise AssertionError(f"what was loaded from {way} differs from what was saved")
    if arrangement:
        every: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(every, (rows, found["added_fds"]))
        rows = slowest([one for one, _ in every])
        found |= {"added_fds": [fds for _, fds in every], "worker_fds": [worker.num_fds() for worker in workers()]}
    meet()
    contender.close()
    return found | {"cold": rows[0], "warm": rows[1:]}


def save(contender: Contender, path: Path, all_done: Callable[[bool], bool] = bool) -> Row:
    """Save, and train until everything is on the disk; on a GPU, save behind a step that it has not finished.

    Args:
        contender: Who saves.
        path: Where.
        all_done: Whether every rank is done, from whether this one is.

    Returns:
        `until_s` is from before the state dict, or that step, until the last of `steps_s`; `save_s` in the call,
        `wait_s` in hooks and before `optimizer.step()`, `stall_s` their sum. Making the state dict is torch's work: it
        is part of what a save costs, not of the stall.
    """
    loop = contender.loop
    loop.settle()
    asked = time.perf_counter()
    steps_s = [loop.step()] if loop.device.type == "cuda" else []
    loop.waited_s = 0.0
    state = loop.state()
    began = time.perf_counter()
    saved = contender.save(path, state)
    save_s = time.perf_counter() - began
    del state
    flushed = _on_disk(contender, saved, path, began)
    loop.before_step = partial(concurrent.futures.wait, [saved.staged], SAVE_S)
    try:
        while not all_done(flushed.done()):
            steps_s.append(loop.step())
            if time.perf_counter() - began > SAVE_S:
                raise TimeoutError(f"a save took longer than {SAVE_S:.0f} s")
    finally:
        loop.before_step = workloads.nothing
    loop.settle()
    until_s = time.perf_counter() - asked
    row = {"save_s": save_s, "wait_s": loop.waited_s, "stall_s": save_s + loop.waited_s, "durable_s": flushed.result()}
    phases = dict(getattr(saved.written.result(), "seconds", {}))
    return row | {"until_s": until_s, "steps_s": steps_s, "phases_s": phases}


def add_lost(saves: Iterable[Row], quiet: Sequence[float]) -> None:
    """Add what each save cost the training beyond as many steps without one, and the ratio of both times."""
    for row in saves:
        expected_s = len(row["steps_s"]) * statistics.median(quiet)
        row["lost_s"] = row["until_s"] - expected_s
        if expected_s:
            row["step_ratio"] = row["until_s"] / expected_s


def shown(place: str) -> list[str]:
    """Return what is printed of the contenders of a place."""
    kinds = ("stall_s", "lost_s", "durable_s")
    return [f"{place}/*/{heat}/{figure}" for figure in kinds for heat in ("warm", "cold")]


def _on_disk(contender: Contender, saved: Saved, path: Path, began: float) -> Future[float]:
    """Return a future of the seconds until the checkpoint is flushed: by the contender or, if it does not, by us."""
    found: Future[float] = Future()

    def end() -> None:
        try:
            saved.written.result(SAVE_S)
            for place in [] if contender.fsyncs else [path, *path.rglob("*")]:
                fd = os.open(place, os.O_RDONLY)
                os.fsync(fd)
                os.close(fd)
        except BaseException as error:
            found.set_exception(error)
        else:
            found.set_result(time.perf_counter() - began)

    if saved.written.done():  # the save made the training wait until it was written; so does the fsync
        end()
    else:
        threading.Thread(target=end, daemon=True).start()
    return found


# ---- memory ----------------------------------------------------------------------------------------------------------


def _peak(contender: Contender, path: Path) -> int:
    """Save, and return the peak of memory in use meanwhile."""
    shutil.rmtree(path, ignore_errors=True)
    seen, stop = [0], threading.Event()

    def watch() -> None:
        while not stop.wait(SAMPLE_S):
            seen.append(pss())

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        _on_disk(contender, contender.save(path, contender.loop.state()), path, 0.0).result(SAVE_S)
    finally:
        stop.set()
        watcher.join()
    return max(*seen, pss())


def pss() -> int:
    """Return the memory of this process, its children and our worker; shared pages count once."""
    me = psutil.Process()
    total = 0
    for pid in {process.pid for process in (me, *me.children(recursive=True), *workers())}:
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        total += sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))
    return total


def workers() -> list[psutil.Process]:
    """Return the worker processes of this job."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("asyncckpt_worker" in part for part in process.info["cmdline"] or []):
            try:
                if process.environ().get("ASYNCCKPT_JOB") == os.environ.get("ASYNCCKPT_JOB"):
                    found.append(process)
            except psutil.Error:
                continue
    return found


# ---- loads -----------------------------------------------------------------------------------------------------------


def _load(loop: Loop, load: Callable[[Path], None], path: Path) -> dict[str, float]:
    """Return the seconds of a load with nothing of it in the page cache ("cold"), and with all of it ("warm").

    That is what a load costs: the call, and how much longer the first write to all tensors takes than a later one, as
    an optimizer writes. A loader that maps a file and returns views of it has not read the file: each page is read,
    and copied since the mapping is private, when the training first changes it.
    """
    seconds: dict[str, float] = {}
    for heat, prepare in (("cold", machine.drop_cache), ("warm", machine.fill_cache)):
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
        return Loop(lambda: nn.parallel.DistributedDataParallel(model), workloads.adamw, RANK_SHAPE)
    for module in (*model.blocks, model):
        fully_shard(module)
    return Loop(lambda: model, workloads.adamw, RANK_SHAPE)


def slowest(saves: Sequence[Sequence[Row]]) -> list[Row]:
    """Return the saves, each figure that of the slowest rank; `saves` are by rank."""
    return [
        {key: max(one[key] for one in ranks) for key, value in ranks[0].items() if isinstance(value, float)}
        for ranks in zip(*saves, strict=True)
    ]


def _all_done(mine: bool) -> bool:
    """Return whether all ranks are done: they have to make the same number of steps."""
    flag = torch.tensor([float(mine)])
    dist.all_reduce(flag, dist.ReduceOp.MIN)
    return bool(flag.item())

"""What does a restarted trainer get from the worker's memory: its snapshot back, and a first save into warm pages?

In a round, two trainers save and die; the second one gets the memory of the first. A load from the worker's memory is
measured beside a warm copy of as many bytes out of shared memory, and a load of the same files from the disk.
"""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import asyncckpt
from benchmarks import machine, processes, workloads
from benchmarks.figures import Row
from benchmarks.limits import copy_s, memory
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S


def run(context: Context) -> Row:
    """Let two trainers save and die, and load what each has left."""
    state = context.options.state
    target = workloads.state(state)
    nbytes = context.facts["nbytes"] = workloads.nbytes_of(target)
    mine, shared = memory(nbytes), memory(nbytes, shared=True)
    row: Row = {"loads": [], "stall_s": {}}
    for which in ("fresh", "warm"):
        path = context.directory / which
        row["stall_s"][which] = processes.call(save_and_die, state, str(path))
        deadline = time.monotonic() + SAVE_S
        while not asyncckpt.held_snapshots(path) and time.monotonic() < deadline:
            time.sleep(0.01)  # until the worker has seen its death
        found: Row = {}
        for source in ("memory", "disk"):
            found[f"copy_before_{source}_s"] = copy_s(mine, shared)
            load = partial(asyncckpt.load, path, target, strict=True, source=source)
            found[f"{source}_s"] = machine.timed(load)["s"]
        row["loads"].append(found)
        machine.remove(path)
    return row


def save_and_die(state: str, path: str) -> float:
    """Save, and return the seconds of `save()` once it is committed; the process ends without closing anything."""
    saved = workloads.state(state)
    checkpointer = asyncckpt.AsyncCheckpointer()
    began = time.perf_counter()
    handle = checkpointer.save(saved, Path(path))
    stall_s = time.perf_counter() - began
    handle.written.result(SAVE_S)
    return stall_s


QUESTION = Question(
    run,
    ["loads/*", "loads/memory_s / loads/copy_before_memory_s", "stall_s/*", "stall_s/warm / stall_s/fresh"],
    options={"state": ("gpt", "tiny")},
    smallest="--state tiny",
    suite=("gpt",),
)

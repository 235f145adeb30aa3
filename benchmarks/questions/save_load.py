"""What does a save take in a process that does nothing else, against the machine's limits; and the start of a worker?

`large` (4.3 GB) needs 18 GB of memory: the state, a slot, and as much twice for the limits. "Windowed" are saves with
`arena_limit_bytes` at a quarter of the state: `save()` returns when nearly all is written.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import asyncckpt
from benchmarks import machine, workloads
from benchmarks.figures import Row
from benchmarks.limits import copy_s, measure_apart, memory
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S

STARTS = 3
"""How often a worker is started in a round."""


def run(context: Context) -> Row:
    """Start workers, then save beside the limits."""
    state = workloads.state(context.options.state)
    nbytes = context.facts["nbytes"] = workloads.nbytes_of(state)
    row: Row = {"limits": measure_apart(context.directory, nbytes), "worker": _worker_starts(context.directory)}
    row["saves"], mine, shared = [], memory(nbytes), memory(nbytes, shared=True)
    path = context.directory / "save"
    with asyncckpt.AsyncCheckpointer() as checkpointer:
        row["first_save"] = save(checkpointer, state, path)
        for _ in range(context.options.saves):
            seconds = copy_s(shared, mine)  # beside each save: the speed of a shared machine's memory varies
            row["saves"].append(save(checkpointer, state, path) | {"copy_s": seconds})
    with asyncckpt.AsyncCheckpointer(arena_limit_bytes=max(nbytes // 4, 1 << 20)) as checkpointer:
        checkpointer.prepare(state)
        row["windowed"] = [save(checkpointer, state, path) for _ in range(context.options.saves)]
    return row


def save(checkpointer: asyncckpt.AsyncCheckpointer, state: Any, path: Path) -> Row:
    """Save, wait until it is written, and remove the checkpoint."""
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    stall_s = time.perf_counter() - began
    report = handle.written.result(SAVE_S)
    row = {"stall_s": stall_s, "written_s": time.perf_counter() - began, "phases_s": dict(report.seconds)}
    machine.remove(path)
    return row


def _worker_starts(directory: Path) -> dict[str, list[float]]:
    """Measure workers from their start until they answer, and their memory without slots."""
    found: dict[str, list[float]] = {"ready_s": [], "rss_nbytes": []}
    sockets = directory / "w"
    sockets.mkdir(mode=0o700)
    for number in range(STARTS):
        endpoint = f"ipc://{sockets}/{number}.sock"
        began = time.perf_counter()
        command = [sys.executable, "-m", "asyncckpt_worker", "--endpoint", endpoint, "--detach"]
        subprocess.run([*command, "--log-file", str(sockets / "log")], check=True, timeout=SAVE_S)
        with asyncckpt.AsyncCheckpointer(endpoint=endpoint):
            found["ready_s"].append(time.perf_counter() - began)
            found["rss_nbytes"].append(machine.worker_status("--endpoint", endpoint)["process"]["rss_nbytes"])
        machine.stop_worker("--endpoint", endpoint)
    return found | {"ready_max_s": [max(found["ready_s"])]}


QUESTION = Question(
    run,
    ["limits/*", "saves/*", "first_save/*", "windowed/*", "windowed/written_s / saves/written_s", "worker/*"],
    options={"state": ("gpt", "small", "large", "tiny"), "saves": {"": 6, "large": 3}},
    smallest="--state tiny --saves 2",
    suite=("gpt", "small", "large"),
)

"""CPU time of one save: of the training thread, of the trainer beyond the copy itself, and of the worker.

    python -m benchmarks.cpu [--state gpt small many] [--saves 8] [--dir D]

`many` are 100,000 tensors of 1 KiB. Nothing trains meanwhile, so that whatever the trainer's process uses between
`save()` and `written` is the save's. CPU time bears a machine that is not quiet better than seconds do.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

import asyncckpt
from asyncckpt.staging import copy_cpu, moving
from benchmarks import machine, quiet, sources, states, training

RESULTS = Path(__file__).parent / "results"
STATES = ("gpt", "small", "many")
STAGINGS = ("overlap", "blocking")
TARGETS_MS = {"gpt": 20.0, "small": 60.0, "many": 300.0}
"""Of the trainer's CPU time beyond the copy: 3 microseconds a tensor."""


class CopyClock:
    """CPU time that threads spend in moving bytes, as opposed to finding out which."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        moving.careful_move = self._timed(moving.careful_move)
        moving.ctypes.memmove = self._timed(moving.ctypes.memmove)  # type: ignore[attr-defined]
        copy_cpu._copy_batch = self._timed(copy_cpu._copy_batch)

    def _timed(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return move(*arguments)
            finally:
                self.seconds.append(time.thread_time() - began)

        return run


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", nargs="+", choices=STATES, default=STATES)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu.json")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    torch.set_num_threads(1)  # no thread of torch's waits for work while it is measured
    clock = CopyClock()
    try:
        result: dict[str, Any] = {"benchmark": "cpu", "machine": machine.describe(directory)}
        result |= {"code": sources.code_of("cpu"), **quiet.until_idle(), "states": {}}
        for state in args.state:
            loop = training.make(state)
            loop.step()
            result["states"][state] = {
                "nbytes": states.nbytes(loop.state()),
                "tensors": len(states.tensors(loop.state())),
                **{staging: measure(loop, staging, args.saves, directory, clock) for staging in STAGINGS},
            }
            del loop
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def measure(loop: training.Loop, staging: str, saves: int, directory: Path, clock: CopyClock) -> list[dict[str, float]]:
    """Return the CPU seconds of each save but the first."""
    found = []
    with asyncckpt.AsyncCheckpointer(staging=staging) as checkpointer:
        loop.attach(checkpointer.attach)
        checkpointer.prepare(loop.state())
        worker = psutil.Process(worker_pid())
        for number in range(saves + 1):
            state, path, written = loop.state(), directory / f"{staging}-{number}", threading.Event()
            clock.seconds.clear()
            before, thread_s, worker_s = _process_s(), time.thread_time(), _worker_s(worker)
            handle = checkpointer.save(state, path)
            row = {"save_s": time.thread_time() - thread_s}
            handle.written.add_done_callback(lambda _, written=written: written.set())
            written.wait()
            handle.written.result()
            row["trainer_s"], row["copy_s"] = _process_s() - before, sum(clock.seconds)
            row["worker_s"] = _worker_s(worker) - worker_s
            found.append(row)
            shutil.rmtree(path)
    return found[1:]


def worker_pid() -> int:
    """Return the pid of this job's worker."""
    command = [sys.executable, "-m", "asyncckpt", "worker", "status", "--json"]
    return int(json.loads(subprocess.run(command, capture_output=True, check=True).stdout)["pid"])


def _process_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _worker_s(worker: psutil.Process) -> float:
    times = worker.cpu_times()
    return times.user + times.system


def summary(result: dict[str, Any], state: str, staging: str) -> dict[str, float]:
    """Return medians in milliseconds."""
    rows = result["states"][state][staging]
    figures = {name: 1e3 * statistics.median(row[f"{name}_s"] for row in rows) for name in ("save", "copy", "worker")}
    beyond = 1e3 * statistics.median(row["trainer_s"] - row["copy_s"] for row in rows)
    return {"save()": figures["save"], "copy": figures["copy"], "beyond": beyond, "worker": figures["worker"]}


def report(result: dict[str, Any]) -> None:
    """Print the medians, and each target as reached or missed."""
    for state in result["states"]:
        for staging in STAGINGS:
            found = summary(result, state, staging)
            verdict = "reached" if found["beyond"] <= TARGETS_MS[state] else "MISSED"
            figures = ", ".join(f"{name} {value:.1f}" for name, value in found.items())
            print(f"{state:6s} {staging:9s} CPU ms: {figures}   target beyond {TARGETS_MS[state]:.0f}: {verdict}")


if __name__ == "__main__":
    main()

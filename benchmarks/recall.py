"""What a restarted trainer gets from the worker's memory: its snapshot back, and a first save into warm pages.

    python -m benchmarks.recall [--rounds 5] [--dir D]

Each round kills a trainer that has saved. Behind the first save the worker is left alone for a while, as it is between
saves, and puts its memory on huge pages. A load from the worker's memory is timed beside a warm copy of as many bytes
out of such memory, mapped and touched before (the best of several numbers of threads), and a load of the same files
from the disk: they were written directly, past the page cache. Every trainer but the first gets the
memory of the one before it.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import asyncckpt
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.mapping import Mapping
from benchmarks import machine, quiet, sources, states
from benchmarks.limits import THREADS, copy_s

RESULTS = Path(__file__).parent / "results"
IDLE_S = 20.0
"""After the first save: between saves a worker has time to put its memory on huge pages (ADR 0042)."""

TARGETS = {"load from memory / warm copy": 1.5, "first save stall, warm / fresh": 1.0}


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--trainer", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.trainer is not None:
        return train_and_die(args.trainer)
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        result = {"benchmark": "recall", "machine": machine.describe(directory), "code": sources.code_of("recall")}
        result |= measure(directory, args.rounds)
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "recall.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return None


def train_and_die(path: Path) -> None:
    """Save once, say how long that held the training, and be killed once it is committed."""
    state = states.gpt()
    checkpointer = asyncckpt.AsyncCheckpointer()
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    print(json.dumps({"stall_s": time.perf_counter() - began}), flush=True)
    handle.written.result(300)
    os.kill(os.getpid(), signal.SIGKILL)


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Return every round's figures."""
    target = _zeros_like(states.gpt())
    nbytes = states.nbytes(target) // 4096 * 4096
    found: list[dict[str, float]] = []
    slot = SlotMemory.create(nbytes + 2 * 4096)  # as the worker's memory is: shared, and of small pages
    with Mapping(-1, nbytes) as one, contextlib.closing(slot):
        other = slot.mapping
        for memory in (one, other):
            ctypes.memset(memory.address, 1, nbytes)
        for number in range(rounds + 1):  # the first one finds no memory
            path = directory / str(number)
            idle = quiet.until_idle()
            row = idle | {"stall_s": _saved_and_killed(path)}
            if not number:
                time.sleep(IDLE_S)
            for name, where in (("memory_s", "memory"), ("disk_s", "disk")):
                row[f"copy_before_{name}"] = min(copy_s(one.address, other.address, nbytes, n) for n in THREADS)
                began = time.perf_counter()
                asyncckpt.load(path, target, strict=True, source=where)
                row[name] = time.perf_counter() - began
            shutil.rmtree(path)
            found.append(row)
    return {"nbytes": nbytes, "rounds": found}


def _saved_and_killed(path: Path) -> float:
    command = [sys.executable, "-m", "benchmarks.recall", "--trainer", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    while not asyncckpt.held_snapshots(path):  # its death is noticed within milliseconds
        time.sleep(0.01)
    return float(json.loads(done.stdout)["stall_s"])


def _zeros_like(state: Any) -> Any:
    if isinstance(state, dict):
        return {k: _zeros_like(v) for k, v in state.items()}
    if isinstance(state, list):
        return [_zeros_like(v) for v in state]
    return state.clone().zero_() if hasattr(state, "clone") else state


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return medians; ratios are of figures that were taken one after the other."""
    rounds = result["rounds"]

    def median(*names: str) -> float:
        return float(statistics.median(r[names[0]] / (r[names[1]] if len(names) > 1 else 1) for r in rounds))

    warm = statistics.median(r["stall_s"] for r in rounds[1:])
    return {
        "load from memory s": median("memory_s"),
        "warm copy s": median("copy_before_memory_s"),
        "load from disk s": median("disk_s"),
        "load from memory / warm copy": median("memory_s", "copy_before_memory_s"),
        "load from disk / warm copy": median("disk_s", "copy_before_disk_s"),
        "first save stall, fresh s": rounds[0]["stall_s"],
        "first save stall, warm s": warm,
        "first save stall, warm / fresh": warm / rounds[0]["stall_s"],
    }


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    print(f"gpt: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds']) - 1} rounds")
    for name, value in summary(result).items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:34s} {value:8.3f}{verdict}")


if __name__ == "__main__":
    main()

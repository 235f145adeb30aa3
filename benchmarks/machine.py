"""The machine that a benchmark runs on: what it is, whether it is idle, its page cache and its disk."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

IDLE_SHARE, OVER_S = 0.10, 2.0
"""A machine counts as idle if less of its CPU time was in use over the last seconds."""

DISCARDED_S, DISCARD_WAIT_S = 0.3, 5.0
"""A disk has finished discarding if its counters have not changed for 0.3 s; it is waited for 5 s at most."""


def describe(directory: Path) -> dict[str, Any]:
    """Return date, machine and versions; `directory` is where checkpoints are written."""
    names = {"torch", "pyzmq", "msgpack", "xxhash", "psutil", "safetensors", "torch_checkpointing"}
    installed = importlib.metadata.distributions()
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda p: len(p.mountpoint))
    inside = [p.fstype for p in mounts if directory.is_relative_to(p.mountpoint)]
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "date": now(),
        "cpu": models[0] if models else platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "kernel": platform.release().split("-")[0],
        "file_system": inside[-1] if inside else "unknown",
        "python": platform.python_version(),
        "versions": {name: one.version for one in installed if (name := one.name.replace("-", "_")) in names},
    }


def commit(checkout: Path) -> str:
    """Return the commit of a checkout, with `-dirty` appended if files differ from it."""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    done = subprocess.run(command, cwd=checkout, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def now() -> str:
    """Return the date and time in UTC."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


# ---- is it idle? -----------------------------------------------------------------------------------------------------


def until_idle(wait_s: float) -> dict[str, float]:
    """Wait until the CPUs are idle; return `busy_before`, the share in use at the end, and `idle_wait_s`.

    The share is measured over the last `OVER_S` seconds (the load average covers minutes), and over less if that is
    longer than `wait_s`. Time that a hypervisor took away counts as busy, waiting for a disk does not.

    Blocks:
        For at most `wait_s` plus `OVER_S`.
    """
    began = time.monotonic()
    while True:
        share = psutil.cpu_percent(min(OVER_S, wait_s + 0.1)) / 100
        waited_s = time.monotonic() - began
        if share < IDLE_SHARE or waited_s > wait_s:
            return {"busy_before": share, "idle_wait_s": waited_s}


def how_busy(result: dict[str, Any]) -> str:
    """Return what a result says about other load on the machine."""
    rounds = result["rounds"]
    shares = [row["busy_before"] for row in rounds]
    busy = f"at most {100 * max(shares):.0f} % of the CPU in use before {'every round' if len(rounds) > 1 else 'it'}"
    return busy if max(shares) < IDLE_SHARE else f"{busy}: not a quiet machine"


# ---- files and their disk --------------------------------------------------------------------------------------------


def remove(path: Path) -> None:
    """Remove a checkpoint, and wait until the disk has discarded it."""
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    until_discarded(path.parent)


def until_discarded(directory: Path) -> None:
    """Wait until the disk has discarded what was removed below `directory`.

    A file system passes discards to its disk with a transaction after the `unlink`. The disk may take a second per GB,
    which would slow down what is measured next. If the disk has no counters, only the transaction is waited for.

    Blocks:
        For at most `DISCARD_WAIT_S` after the transaction.
    """
    fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
        device = os.fstat(fd).st_dev
    finally:
        os.close(fd)
    deadline = time.monotonic() + DISCARD_WAIT_S
    while (before := _discards(device)) and time.monotonic() < deadline:
        time.sleep(DISCARDED_S)
        if _discards(device) == before:
            break


def _discards(device: int) -> list[str]:
    try:
        return Path(f"/sys/dev/block/{os.major(device)}:{os.minor(device)}/stat").read_text().split()[11:15]
    except OSError:
        return []


def timed(work: Callable[[], Any]) -> dict[str, float]:
    """Return the seconds of a call, and its CPU seconds."""
    began, cpu = time.perf_counter(), time.process_time()
    work()
    return {"s": time.perf_counter() - began, "cpu_s": time.process_time() - cpu}


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint, which may be a file itself."""
    return sorted(file for file in path.rglob("*") if file.is_file()) if path.is_dir() else [path]


def largest_file(path: Path) -> Path:
    """Return the largest file of a checkpoint; of several ones a shard."""
    return max(files_of(path), key=lambda file: file.stat().st_size)


def drop_cache(path: Path) -> None:
    """Flush the files of a checkpoint, and evict them from the page cache."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def fill_cache(path: Path) -> None:
    """Read the files of a checkpoint into the page cache."""
    for file in files_of(path):
        shutil.copyfile(file, os.devnull)


# ---- the worker of this job ------------------------------------------------------------------------------------------


def stop_worker(*options: str, **more: Any) -> None:
    """Stop the worker of this job, if one runs."""
    command = [sys.executable, "-m", "asyncckpt", "worker", "stop", *options]
    subprocess.run(command, capture_output=True, check=False, timeout=120, **more)


def worker_status(*options: str) -> dict[str, Any]:
    """Return what `asyncckpt worker status --json` prints for this job's worker."""
    command = [sys.executable, "-m", "asyncckpt", "worker", "status", "--json", *options]
    return dict(json.loads(subprocess.run(command, capture_output=True, check=True).stdout))

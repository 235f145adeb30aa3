"""What a result was measured on, and how long calls take."""

from __future__ import annotations

import datetime
import gc
import importlib.metadata
import os
import platform
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil


def describe(directory: Path) -> dict[str, Any]:
    """Return date, machine and versions; `directory` is where the files were written."""
    names = ("torch", "pyzmq", "msgpack", "xxhash", "psutil", "safetensors", "torch_checkpointing")
    return {
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_nbytes": psutil.virtual_memory().total,
        "kernel": platform.release().split("-")[0],
        "file_system": _file_system(directory),
        "load_before": os.getloadavg()[0],
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in names},
    }


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def _file_system(directory: Path) -> str:
    mounts = sorted(psutil.disk_partitions(all=True), key=lambda p: len(p.mountpoint))
    inside = [p.fstype for p in mounts if directory.is_relative_to(p.mountpoint)]
    return inside[-1] if inside else "unknown"


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


class Steps:
    """What a contender's process does, one thing after the other: says it, and keeps how long each took."""

    def __init__(self) -> None:
        self.took_s: dict[str, float] = {}
        self._now = "starting"
        self._began = time.perf_counter() - (time.time() - psutil.Process().create_time())

    def begin(self, what: str, detail: str = "") -> None:
        """Say what begins, for whoever has to end it."""
        self.end()
        self._now = what
        print(f"{what}{detail}", flush=True)

    def end(self) -> dict[str, float]:
        """Count what has run; returns all seconds so far."""
        now = time.perf_counter()
        self.took_s[self._now] = self.took_s.get(self._now, 0.0) + now - self._began
        self._began = now
        return self.took_s


def timed(call: Callable[[], Any], repeats: int) -> tuple[list[float], Any]:
    """Return seconds of each call, and what the last returned."""
    seconds, found = [], None
    for _ in range(repeats):
        gc.collect()
        began = time.perf_counter()
        found = call()
        seconds.append(time.perf_counter() - began)
    return seconds, found


def files_of(path: Path) -> list[Path]:
    """Return the files of a checkpoint, which may be one itself."""
    return [file for file in path.iterdir() if file.is_file()] if path.is_dir() else [path]


def drop_cache(path: Path) -> None:
    """Flush the files of a checkpoint, and take them out of the page cache."""
    for file in files_of(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

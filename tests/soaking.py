"""A trainer that saves many times, and says what it and its worker hold meanwhile. A program for the soak tests.

Arguments: ENDPOINT ("" for a worker of its own), ROOT, how many saves, how many apart a sample is taken, and how many
apart the worker is killed (0: never). Each sample is one JSON line.
"""

from __future__ import annotations

import json
import os
import pathlib
import shutil
import signal
import sys
import time
from typing import Any

import torch

from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import AsyncCkptError

KEPT = 5
KILLED = -1


def held(pid: int) -> dict[str, int]:
    """Return what a process holds: fds, threads, mappings, of them of slots, and memory in KB."""
    status = dict(line.split(":", 1) for line in pathlib.Path(f"/proc/{pid}/status").read_text().splitlines())
    maps = pathlib.Path(f"/proc/{pid}/maps").read_text()
    return {
        "fds": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": int(status["Threads"]),
        "mappings": maps.count("\n"),
        "slots": maps.count("memfd:asyncckpt"),
        "rss_kb": int(status["VmRSS"].split()[0]),
        "shared_kb": int(status["RssShmem"].split()[0]),
    }


def worker_pid(checkpointer: AsyncCheckpointer) -> int:
    """Return the pid of the worker that a checkpointer talks to."""
    from real_worker import status_of

    return int(status_of(checkpointer._process.endpoint)["pid"])  # type: ignore[attr-defined]


def main(endpoint: str, root: pathlib.Path, saves: int, every: int, kill_every: int) -> None:
    """Save, count, report."""
    fields: dict[str, Any] = {"endpoint": endpoint} if endpoint else {}
    state = {"w": torch.randn(50_000), "b": [torch.arange(1000), {"step": 0}], "step": 0}
    written = failed = 0
    slowest_s = 0.0
    with AsyncCheckpointer(**fields) as checkpointer:
        pid, due, serving = 0, False, checkpointer._process.endpoint  # type: ignore[attr-defined]
        for n in range(saves):
            state["w"].add_(1)
            state["step"] = n
            handle = checkpointer.save(state, root / f"step-{n}")
            killing = bool(kill_every) and n % kill_every == kill_every - 1
            if killing:
                os.kill(worker_pid(checkpointer), signal.SIGKILL)
                pid = KILLED
            started = time.monotonic()
            error = handle.written.exception(60.0)
            slowest_s = max(slowest_s, time.monotonic() - started)
            assert error is None or isinstance(error, AsyncCkptError), error
            written, failed = written + (error is None), failed + (error is not None)
            if pid == KILLED and not killing:
                pid = 0
            shutil.rmtree(root / f"step-{n - KEPT}", ignore_errors=True)
            due = due or n % every == every - 1
            if due and error is None and pid >= 0:  # else there may be no worker until the next save
                pid, due = pid or worker_pid(checkpointer), False
                sample = {"endpoint": serving, "n": n + 1, "trainer": held(os.getpid()), "worker": held(pid)}
                print(json.dumps({**sample, "written": written, "failed": failed, "slowest_s": slowest_s}), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], pathlib.Path(sys.argv[2]), *(int(word) for word in sys.argv[3:6]))

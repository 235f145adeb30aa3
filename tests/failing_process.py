"""Processes that are killed, failed or held at a failpoint: a worker, and a nursery of trainers. For tests.

As a program: `worker ENDPOINT ACTION VISIT POINT` is a worker whose fsync does nothing; ACTION is `kill`, `raise`,
`sleep` or `none`, and meets the VISIT-th time that POINT is reached. `trainers` forks one trainer per line of stdin, a
JSON object with the same words, which saves once, or loads what `load` says; how it ended is one JSON line.
"""

from __future__ import annotations

import errno
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from asyncckpt.basics.failpoints import POINTS, observed

SLEEP_S = 0.05


def kill() -> None:
    """End this process as the kernel's OOM killer would."""
    os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def fail(code: int = errno.EIO) -> None:
    """Fail as a file call does."""
    raise OSError(code, os.strerror(code))


class At:
    """An observer that does something once, the `visit`-th time (from 1) that `point` is reached."""

    def __init__(self, point: str, do: Callable[[], None], visit: int = 1) -> None:
        assert point in POINTS, point
        self.point, self.do, self.left = point, do, visit
        self.trace: list[str] = []
        self._lock = threading.Lock()

    def __call__(self, point: str) -> None:
        with self._lock:
            self.trace.append(point)
            self.left -= point == self.point
            meets = point == self.point and self.left == 0
        if meets:
            self.do()

    @property
    def met(self) -> bool:
        """Whether it was done."""
        return self.left <= 0


ACTIONS: dict[str, Callable[[], None]] = {
    "kill": kill,
    "raise": fail,
    "sleep": lambda: time.sleep(SLEEP_S),
    "none": lambda: None,
}


def killed(work: Callable[[], object], point: str, visit: int = 1) -> None:
    """Do `work` in a child that dies at `point`; mapped memory is not there."""
    pid = os.fork()
    if pid == 0:
        try:
            with observed(At(point, kill, visit)):
                work()
        finally:
            os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL, f"{point} was not reached"


def serve(endpoint: str, action: str, visit: int, point: str) -> None:
    """Be that worker."""
    from asyncckpt_worker.config import WorkerConfig
    from asyncckpt_worker.service.daemon import Daemon
    from tests.storage_samples import RecordingFiles

    daemon = Daemon(WorkerConfig(endpoint=endpoint), RecordingFiles())
    signal.signal(signal.SIGTERM, lambda *_: daemon.stop(immediately=True))
    with observed(At(point, ACTIONS[action], visit)):
        daemon.run()


def streamed(way: str, put: Callable[[object, str, Any], None] = setattr) -> dict[str, Any]:
    """Return the fields of a checkpointer whose states are written while they are staged: "early", or by a "ring"."""
    from asyncckpt.client import slot_stream
    from asyncckpt.staging import cpu_copy, overlap

    if way == "ring":
        return {"arena_limit_bytes": 1_500_000}
    put(slot_stream, "MIN_STREAMED_NBYTES", 1)
    put(cpu_copy, "MIN_DEFERRED_NBYTES", 0)
    put(overlap, "has_idle_core", lambda: True)
    return {"staging": "overlap"}


def train(order: dict[str, Any]) -> None:
    """Be a trainer that saves once; ends with 0 when the save is written, 3 when it failed with a typed error."""
    import torch

    from asyncckpt import AsyncCheckpointer
    from asyncckpt.errors import AsyncCkptError

    state = {"w": torch.full((order.get("length", 1000),), float(order["seed"])), "seed": order["seed"]}
    fields = streamed(order["way"]) if "way" in order else {}
    with AsyncCheckpointer(endpoint=order["endpoint"], on_worker_loss="fail", **fields) as checkpointer:
        with observed(At(order["point"], ACTIONS[order["action"]], order["visit"])):
            handle = checkpointer.save(state, order["path"], step=order["seed"])
            error = handle.written.exception(60)
        assert error is None or isinstance(error, AsyncCkptError), error
    os._exit(0 if error is None else 3)


def recall(order: dict[str, Any]) -> None:
    """Be a process that loads once, out of a worker's memory."""
    import asyncckpt

    with observed(At(order["point"], ACTIONS[order["action"]])):
        asyncckpt.load(order["load"], source="memory")
    os._exit(0)


def nursery() -> None:
    """Fork a trainer for every line of stdin."""
    import torch  # noqa: F401

    import asyncckpt.async_checkpointer  # noqa: F401

    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                order = json.loads(line)
                (recall if "load" in order else train)(order)
            finally:
                os._exit(1)
        print(json.dumps({"code": os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])}), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        serve(sys.argv[2], sys.argv[3], int(sys.argv[4]), sys.argv[5])
    else:
        nursery()

"""Ranks whose workers are several, as on several nodes: one checkpoint, one commit, and an end for all in every loss."""

from __future__ import annotations

import contextlib
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import msgpack
import pytest
import rank_processes
import real_worker
import torch
from rank_processes import talk
from real_worker import DEADLINE_S, manifest_of, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, SaveHandle
from asyncckpt.errors import (
    CommitTimeoutError,
    CommitUnknownError,
    EndpointError,
    SaveFailedError,
    WorkerUnavailableError,
)
from asyncckpt.links import Links

Workers = tuple[real_worker.RealWorker, real_worker.RealWorker]


@contextlib.contextmanager
def two_workers(*options: str) -> Iterator[Workers]:
    """Two workers, each as if it were a node's; `options` for the first."""
    directory = tempfile.mkdtemp(prefix="ackpt-", dir="/tmp")
    try:
        with (
            real_worker.running(f"ipc://{directory}/a.sock", *options) as first,
            real_worker.running(f"ipc://{directory}/b.sock") as second,
        ):
            yield first, second
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def workers() -> Iterator[Workers]:
    """Workers of this test alone."""
    with two_workers() as found:
        yield found


def endpoints(workers: Workers) -> tuple[str, ...]:
    """Where the ranks find their workers: the second one has the odd ranks."""
    return tuple(worker.endpoint for worker in workers)


def checkpointer_of(rank: int, places: tuple[str, ...], **settings: Any) -> AsyncCheckpointer:
    return AsyncCheckpointer(endpoint=places[rank % 2], **settings)


def state_of(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    large = torch.randn(3000, 400, generator=generator)
    return {"large": large, "own": PerRank(torch.full((5,), float(rank + step))), "step": step}


def ended(handle: SaveHandle, seconds: float = DEADLINE_S) -> Any:
    """Wait for the end of a save; returns its error, or None."""
    return handle.written.exception(seconds)


def listeners(pid: int) -> list[str]:
    """Return the local addresses at which a process listens on TCP, as /proc/net has them."""
    sockets = set()
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(f"/proc/{pid}/fd/{name}"))
    found = []
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError):
            rows = [line.split() for line in pathlib.Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]]
            found += [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]
    return found


# ---- one checkpoint


def saves(rank: int, places: tuple[str, ...], root: str) -> list[str]:
    with checkpointer_of(rank, places) as checkpointer:
        handles = []
        for step in (1, 2, 3):
            handles.append(checkpointer.save(state_of(rank, step), f"{root}/step-{step}"))
            assert ended(handles[-1]) is None
    return [str(handle.save_id) for handle in handles]


def test_ranks_of_two_workers_make_one_checkpoint_and_all_of_them_hear_of_it(
    tmp_path: pathlib.Path, workers: Workers
) -> None:
    found = rank_processes.run(3, saves, endpoints(workers), str(tmp_path))
    assert found[0] == found[1] == found[2]
    for step in (1, 2, 3):
        loaded = asyncckpt.load(tmp_path / f"step-{step}", keys=["large", "step"])
        assert torch.equal(loaded["large"], state_of(0, step)["large"]) and loaded["step"] == step
        ranks = manifest_of(tmp_path / f"step-{step}")["ranks"]
        assert [row["nbytes"] > 0 for row in ranks] == [True] * 3
    first, second = (worker.status() for worker in workers)
    assert first["counters"]["followers_linked"] == 1 and second["counters"]["runs_followed"] == 1
    assert first["saves"][-1]["ranks"] == {"0": "committed", "1": "committed", "2": "committed"}
    assert second["saves"][-1]["ranks"] == {"1": "committed"}


def test_one_worker_listens_nowhere_and_of_two_the_first_on_the_loopback_only(
    tmp_path: pathlib.Path, workers: Workers
) -> None:
    first, second = workers
    rank_processes.run(2, saves, (first.endpoint, first.endpoint), str(tmp_path / "one"))
    assert listeners(first.pid) == []
    rank_processes.run(2, saves, endpoints(workers), str(tmp_path / "two"))
    (address,) = listeners(first.pid)
    assert address.startswith("0100007F:") and listeners(second.pid) == []

"""Stock saves of several ranks by the worker: room for what other ranks say, and ranks whose worker is lost."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import asyncckpt
from asyncckpt.dcp import StorageWriter
from asyncckpt.dcp.desk import Desk
from asyncckpt.errors import WorkerUnavailableError

N = 10_000_000


def state_of(rank: int, text_nbytes: int) -> dict[str, Any]:
    """Tensors of 40 MB on each rank; a text on the last one alone."""
    mine: dict[str, Any] = {f"w{rank}": torch.full((N,), float(rank))}
    return {**mine, "text": "x" * text_nbytes} if rank == dist.get_world_size() - 1 else mine


def save_twice(rank: int, path: str, endpoint: str, limit: int | None, text_nbytes: int) -> list[Any]:
    writer = StorageWriter(path, endpoint=endpoint, arena_limit_bytes=limit)
    ends = []
    for _ in range(2):
        began = time.monotonic()
        try:
            dcp.save(state_of(rank, text_nbytes), storage_writer=writer)
            error = None
        except CheckpointException as failed:
            error = type(failed.failures[0][0]).__name__
        ends.append((error, time.monotonic() - began < 60))  # slot_timeout_s is 600
    writer.close()
    return ends


@pytest.mark.parametrize(
    ("limit", "text_nbytes", "first"),
    [
        (None, 8_000_000, None),
        (60_000_000, 3_000_000, None),
        (60_000_000, 8_000_000, "InsufficientMemoryError"),
        (40_000_000, 3_000_000, None),
        (40_000_000, 8_000_000, "SaveFailedError"),
    ],
)
def test_what_other_ranks_say_has_room_or_the_save_ends_at_once_and_the_next_one_has(
    tmp_path: Path, shared_worker: real_worker.RealWorker, limit: int | None, text_nbytes: int, first: str | None
) -> None:
    path = str(tmp_path / "c")
    for ends in rank_processes.run(2, save_twice, path, shared_worker.endpoint, limit, text_nbytes):
        assert ends == [(first, True), (None, True)]
    found = asyncckpt.load(path)
    assert found["text"] == "x" * text_nbytes
    assert torch.equal(found["w1"], torch.full((N,), 1.0))


def save_where_one_cannot_join(rank: int, path: str, endpoint: str) -> Any:
    writer = StorageWriter(path, endpoint=endpoint)
    if rank == 1:

        def lost(desk: Desk, ticket: Any, config: Any) -> Any:
            raise WorkerUnavailableError("the worker is gone", endpoint=endpoint)

        Desk._join = lost
    try:
        dcp.save({f"w{rank}": torch.ones(1000)}, storage_writer=writer)
    except CheckpointException as error:
        kinds = {number: type(found[0]).__name__ for number, found in error.failures.items()}
    freed = True
    if rank == 2:  # it has sealed its part; nobody resets the coordinator's writer
        pool = writer._by_worker._desk._process.pool
        deadline = time.monotonic() + 30
        while not (freed := all(slot.free for slot in pool.held())) and time.monotonic() < deadline:
            time.sleep(0.01)
    dist.barrier()
    return kinds.get(1), freed


def test_a_rank_that_cannot_join_its_worker_ends_the_save_on_all_ranks(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    results = rank_processes.run(3, save_where_one_cannot_join, str(tmp_path / "c"), shared_worker.endpoint)
    assert results == [("WorkerUnavailableError", True)] * 3

"""Stock saves of several ranks by the worker: room for what other ranks say, and ranks whose worker is lost."""

from __future__ import annotations

import threading
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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import SavePlan

import asyncckpt
from asyncckpt.client.pending_saves import Withdrawals
from asyncckpt.dcp import StorageWriter
from asyncckpt.dcp.worker_session import WorkerSession
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


def wait_until_freed(writer: StorageWriter) -> None:
    pool = writer._by_worker._session._client.pool  # type: ignore[union-attr]
    real_worker.wait_until(lambda: all(slot.free for slot in pool.held()), "its slots are free")


def save_where_one_cannot_join(rank: int, path: str, endpoint: str) -> Any:
    writer = StorageWriter(path, endpoint=endpoint)
    if rank == 1:

        def lost(session: WorkerSession, task: Any, config: Any) -> Any:
            raise WorkerUnavailableError("the worker is gone", endpoint=endpoint)

        WorkerSession._join = lost
    try:
        dcp.save({f"w{rank}": torch.ones(1000)}, storage_writer=writer)
    except CheckpointException as error:
        kinds = {number: type(found[0]).__name__ for number, found in error.failures.items()}
    if rank == 2:  # it has sealed its part; nobody resets the coordinator's writer
        wait_until_freed(writer)
    dist.barrier()
    return kinds.get(1)


def test_a_rank_that_cannot_join_its_worker_ends_the_save_on_all_ranks(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    results = rank_processes.run(3, save_where_one_cannot_join, str(tmp_path / "c"), shared_worker.endpoint)
    assert results == ["WorkerUnavailableError"] * 3


def save_texts(rank: int, path: str, endpoint: str, lengths: list[dict[int, int]]) -> list[Any]:
    writer = StorageWriter(path, endpoint=endpoint, arena_limit_bytes=60_000_000)
    ends = []
    for texts in lengths:
        state = {f"w{rank}": torch.full((1000,), float(rank))} | ({"text": "x" * texts[rank]} if rank in texts else {})
        try:
            dcp.save(state, storage_writer=writer)
            ends.append(None)
        except CheckpointException as error:
            ends.append(type(error.failures[0][0]).__name__)
    writer.close()
    return ends


@pytest.mark.parametrize(
    ("world_size", "lengths", "expected"),
    [
        (2, [{1: 80_000_000}, {1: 10}, {1: 3_000_000}], ["InsufficientMemoryError", None, None]),
        (3, [{0: 20_000_000}, {0: 20_000_000}], [None, None]),
        (3, [{0: 20_000_000}, {0: 10}, {0: 20_000_000}], [None, None, None]),
    ],
)
def test_room_that_is_only_likely_to_be_wanted_fails_no_save(
    tmp_path: Path,
    shared_worker: real_worker.RealWorker,
    world_size: int,
    lengths: list[dict[int, int]],
    expected: list[str | None],
) -> None:
    path = str(tmp_path / "c")
    for ends in rank_processes.run(world_size, save_texts, path, shared_worker.endpoint, lengths):
        assert ends == expected
    ((_, length),) = lengths[-1].items()
    assert asyncckpt.load(path)["text"] == "x" * length


class FailingBeforeTheWrite(DefaultSavePlanner):
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        raise ValueError("between the plan and the write")


def say_late_that_a_save_has_failed() -> None:
    """Send this process's withdrawals half a second late, as if the worker were busy."""
    send = Withdrawals._send_withdraw

    def send_late(self: Withdrawals, save: str, reason: str, skipped: bool) -> None:
        threading.Timer(0.5, send, (self, save, reason, skipped)).start()

    Withdrawals._send_withdraw = send_late  # type: ignore[method-assign]


def save_where_the_coordinator_fails(rank: int, path: str, endpoint: str, same: bool, late: bool) -> list[Any]:
    if late and rank == 0:
        say_late_that_a_save_has_failed()
    writer = StorageWriter(path + "/c", endpoint=endpoint, slot_timeout_s=8.0)
    found = []
    for number in range(5):
        planner = FailingBeforeTheWrite() if rank == 0 and number in (1, 2) else DefaultSavePlanner()
        state = {f"w{rank}": torch.full((1000,), float(number))}
        try:
            dcp.save(state, checkpoint_id=path + f"/{0 if same else number}", storage_writer=writer, planner=planner)
            found.append("saved")
        except CheckpointException as error:
            found.append({number: type(failure[0]).__name__ for number, failure in error.failures.items()})
    wait_until_freed(writer)
    writer.close()
    return found


@pytest.mark.parametrize(("same", "late"), [(True, False), (False, False), (True, True)])
def test_a_coordinator_that_fails_between_plan_and_write_ends_the_save_on_all_ranks(
    tmp_path: Path, shared_worker: real_worker.RealWorker, same: bool, late: bool
) -> None:
    failed = {0: "ValueError"}
    args = str(tmp_path), shared_worker.endpoint, same, late
    found = rank_processes.run(2, save_where_the_coordinator_fails, *args)
    assert found == [["saved", failed, failed, "saved", "saved"]] * 2
    assert torch.equal(asyncckpt.load(tmp_path / ("0" if same else "4"))["w1"], torch.full((1000,), 4.0))

"""Writing begins before staging ends: what is committed is the snapshot, and what is never sealed leaves nothing."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import threading
from collections.abc import Iterator
from typing import Any

import overlapping
import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, slots_of, stop_whoever_serves, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.client import slot_stream
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    SaveFailedError,
    SnapshotTornError,
)
from asyncckpt.memory.slot import STATE_STREAMED
from asyncckpt.staging import memcopy
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

NOT_THERE = (CheckpointNotFoundError, CheckpointNotCommittedError)
ROWS = 3_000_000


class Middle:
    """Holds the copier up in the middle of each copy, while it is closed.

    Attributes:
        reached: It has come there.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reached, self.open = threading.Event(), threading.Event()
        self.open.set()
        self.moved, move = 0, memcopy.fault_safe_copy

        def held(target: int, source: int, nbytes: int) -> None:
            self.moved += nbytes
            if self.moved > 20 << 20 and not self.open.is_set():
                self.reached.set()
                assert self.open.wait(DEADLINE_S)
            move(target, source, nbytes)

        monkeypatch.setattr(memcopy, "fault_safe_copy", held)

    def close(self) -> None:
        self.moved = 0
        self.reached.clear()
        self.open.clear()

    def wait(self) -> None:
        assert self.reached.wait(DEADLINE_S)


@pytest.fixture
def middle(monkeypatch: pytest.MonkeyPatch) -> Middle:
    monkeypatch.setattr(slot_stream, "MIN_STREAMED_NBYTES", 1)
    overlapping.copy_all_behind(monkeypatch.setattr)
    return Middle(monkeypatch)


def state_of(step: int) -> dict[str, Any]:
    """Return a state of 50 MB: four writes of the worker."""
    generator = torch.Generator().manual_seed(step)
    return {
        **{f"w{n}": torch.randn(ROWS, generator=generator) for n in range(4)},
        "columns": torch.randn(900, 700, generator=generator).t(),
        "small": [torch.randn(5, generator=generator) for _ in range(9)],
        "step": step,
    }


def parts_at(path: pathlib.Path) -> list[str]:
    """Return the files of tensors that lie at `path`."""
    return [n for n in (os.listdir(path) if path.exists() else []) if "-part-" in n]


def is_being_written(path: pathlib.Path) -> bool:
    return any(os.stat(path / name).st_blocks for name in parts_at(path))


@contextlib.contextmanager
def own_worker(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Iterator[AsyncCheckpointer]:
    """A checkpointer that starts its workers; they are ended after it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    checkpointer = AsyncCheckpointer(staging="overlap", worker_start_timeout_s=DEADLINE_S, **fields)
    try:
        with checkpointer:
            yield checkpointer
    finally:
        stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "fields", [{}, {"layout": "dcp", "files_per_rank": 2}, {"overlap_check": "hash"}, {"fsync": False}], ids=str
)
def test_files_are_written_while_the_state_is_still_being_copied(
    shared_worker: RealWorker, tmp_path: pathlib.Path, middle: Middle, fields: dict[str, Any]
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap", **fields) as checkpointer:
        for step in range(2):
            middle.close()
            handle = checkpointer.save(state_of(step), tmp_path / str(step), step=step)
            middle.wait()
            (slot,) = slots_of(checkpointer)
            assert slot.memory.control.state == STATE_STREAMED
            wait_until(lambda step=step: is_being_written(tmp_path / str(step)), "the worker has begun")  # type: ignore[misc]
            with pytest.raises(NOT_THERE):
                asyncckpt.load(tmp_path / str(step), source="disk")
            middle.open.set()
            written(handle)
    for step in range(2):
        states.assert_same(asyncckpt.load(tmp_path / str(step), source="disk"), state_of(step))


def test_a_torn_snapshot_leaves_nothing_and_the_next_save_takes_its_slot(
    shared_worker: RealWorker, tmp_path: pathlib.Path, middle: Middle
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap", slots=1) as checkpointer:
        middle.close()
        state = state_of(1)
        torn = checkpointer.save(state, tmp_path / "torn")
        middle.wait()
        wait_until(lambda: is_being_written(tmp_path / "torn"), "the worker has begun")
        state["w0"].add_(1)
        middle.open.set()
        assert isinstance(torn.written.exception(DEADLINE_S), SnapshotTornError)
        written(checkpointer.save(state_of(2), tmp_path / "next"))
        wait_until(lambda: not parts_at(tmp_path / "torn"), "what was written of it is removed")
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "torn")
    states.assert_same(asyncckpt.load(tmp_path / "next"), state_of(2))


def test_a_worker_that_dies_in_the_middle_is_followed_by_one_that_writes_everything(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, middle: Middle
) -> None:
    with own_worker(endpoint_dir, monkeypatch) as checkpointer:
        middle.close()
        handle = checkpointer.save(state_of(1), tmp_path / "a")
        middle.wait()
        wait_until(lambda: is_being_written(tmp_path / "a"), "the worker has begun")
        RealWorker(checkpointer._process.endpoint).kill()  # type: ignore[attr-defined]
        middle.open.set()
        report = written(handle)
        assert report.details["resubmitted"] >= 0
        assert verify_checkpoint(str(tmp_path / "a"), Files()).state == "ok"
        states.assert_same(asyncckpt.load(tmp_path / "a", source="disk"), state_of(1))
        written(checkpointer.save(state_of(2), tmp_path / "b"))
    states.assert_same(asyncckpt.load(tmp_path / "b"), state_of(2))


def test_storage_that_refuses_before_the_seal_leaves_the_snapshot_in_memory(
    worker: RealWorker, tmp_path: pathlib.Path, middle: Middle
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, staging="overlap") as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "a"))
        limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
        middle.close()
        handle = checkpointer.save(state_of(1), tmp_path / "b")
        middle.wait()
        wait_until(lambda: not parts_at(tmp_path / "b"), "it has failed, or not begun")
        middle.open.set()
        handle.staged.result(DEADLINE_S)
        error = handle.written.exception(DEADLINE_S)
        assert isinstance(error, SaveFailedError)
        assert error.code == "EFBIG"
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
        written(checkpointer.save(state_of(2), tmp_path / "c"))
    states.assert_same(asyncckpt.load(tmp_path / "c"), state_of(2))

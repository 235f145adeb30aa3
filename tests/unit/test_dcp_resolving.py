"""With one thread the planner is called by the thread that saves, in the order of the files, while others write."""

from __future__ import annotations

import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import dcp_calls
import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import asyncckpt
from asyncckpt.dcp import StorageWriter
from asyncckpt.dcp.resolving import CallersResolves
from asyncckpt.storage import rank_files

STATE = {f"w{n:02}": torch.full((300, 1000), float(n)) for n in range(20)}


class Noting(DefaultSavePlanner):
    """Notes which thread resolves which tensor, and does something at one of them."""

    def __init__(self, at: str = "", act: Callable[[], None] = lambda: None) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.threads: set[threading.Thread] = set()
        self._at, self._act = at, act

    def resolve_data(self, write_item: WriteItem) -> Any:
        self.seen.append(write_item.index.fqn)
        self.threads.add(threading.current_thread())
        if write_item.index.fqn == self._at:
            self._act()
        return super().resolve_data(write_item)


@pytest.fixture(autouse=True)
def small_extents(monkeypatch: pytest.MonkeyPatch) -> None:
    """Extents that hold half a tensor, so that several threads write."""
    monkeypatch.setattr(rank_files, "EXTENT_NBYTES", 1 << 19)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncckpt-write")]


def test_the_calling_thread_alone_calls_the_planner_and_others_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = set()
    write_extent = rank_files.ShardWriter.write_extent

    def noted(self: Any, *arguments: Any) -> None:
        writers.add(threading.current_thread())
        time.sleep(0.002)
        write_extent(self, *arguments)

    monkeypatch.setattr(rank_files.ShardWriter, "write_extent", noted)
    planner = Noting()
    dcp_calls.save(STATE, StorageWriter(tmp_path / "a"), planner=planner)
    assert planner.threads == {threading.current_thread()}
    assert planner.seen == sorted(STATE), "in the order of the file"
    assert len(writers) == 3
    assert threading.current_thread() not in writers
    found = asyncckpt.load(tmp_path / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    assert not our_threads()


def test_what_the_planner_raises_ends_the_save(tmp_path: pathlib.Path) -> None:
    def fail() -> None:
        raise ValueError("no such thing")

    with pytest.raises(CheckpointException, match="no such thing"):
        dcp_calls.save(STATE, StorageWriter(tmp_path / "a"), planner=Noting("w07", fail))
    assert not our_threads()
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("late", [False, True], ids=["in the planner", "while the disk is written"])
def test_ctrl_c_leaves_no_thread(tmp_path: pathlib.Path, late: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def soon() -> None:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()

    write_extent = rank_files.ShardWriter.write_extent

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(0.03)
        write_extent(self, *arguments)

    monkeypatch.setattr(rank_files.ShardWriter, "write_extent", slow)
    planner = Noting("w05", soon if late else interrupt)
    with pytest.raises((KeyboardInterrupt, CheckpointException)) as caught:
        dcp_calls.save(STATE, StorageWriter(tmp_path / "a"), planner=planner)
    assert caught.type is KeyboardInterrupt or "KeyboardInterrupt" in str(caught.value)
    assert not our_threads()
    assert len(planner.seen) < len(STATE)


def test_tensors_are_made_in_order_whoever_asks_first() -> None:
    made: list[int] = []

    def make(number: int) -> Callable[[], torch.Tensor]:
        return lambda: made.append(number) or torch.tensor(number)  # type: ignore[func-returns-value]

    resolving = CallersResolves([make(n) for n in range(6)])
    asked = resolving.resolves()
    found: list[int] = []

    def work() -> None:
        found.extend(int(asked[n]()) for n in (3, 0, 1, 3, 5))

    resolving.serve(work)
    assert found == [3, 0, 1, 3, 5]
    assert made == [0, 1, 2, 3, 3, 4, 5], "the second time it is made again"


def test_an_error_of_the_work_is_raised() -> None:
    def work() -> None:
        raise OSError("disk")

    with pytest.raises(OSError, match="disk"):
        CallersResolves([]).serve(work)
    assert not our_threads()

"""With one thread the planner is called by the thread that saves, in the order of the files, while others write."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import dcp_calls
import pytest
import torch
from in_process_writer import StorageWriter
from real_worker import DEADLINE_S, wait_until
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.planner import WriteItem

import asyncckpt
from asyncckpt.dcp import in_process_save, tensor_stream
from asyncckpt.dcp.in_process_save import CallingThreadResolver
from asyncckpt.storage import rank_writer, shard_writer
from tests.simulated_device import SimulatedDevice

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
    monkeypatch.setattr(rank_writer, "EXTENT_NBYTES", 1 << 19)


def our_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("asyncckpt-write")]


def test_the_calling_thread_alone_calls_the_planner_and_others_write(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    writers = set()
    all_write = threading.Barrier(3)
    write_extent = shard_writer.ShardWriter.write_extent

    def noted(self: Any, *arguments: Any) -> None:
        if threading.current_thread() not in writers:
            writers.add(threading.current_thread())
            all_write.wait(DEADLINE_S)  # else one may have written everything before another has started
        write_extent(self, *arguments)

    monkeypatch.setattr(shard_writer.ShardWriter, "write_extent", noted)
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
    due: list[int] = []

    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def soon() -> None:
        due.append(signal.SIGINT)

    write_extent = shard_writer.ShardWriter.write_extent

    def slow(self: Any, *arguments: Any) -> None:
        time.sleep(0.03)
        with contextlib.suppress(IndexError):
            os.kill(os.getpid(), due.pop())  # most is still to be written, however slow the machine is
        write_extent(self, *arguments)

    monkeypatch.setattr(shard_writer.ShardWriter, "write_extent", slow)
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

    serving = CallingThreadResolver([make(n) for n in range(6)])
    asked = serving.resolves()
    found: list[int] = []

    def work() -> None:
        found.extend(int(asked[n]()) for n in (3, 0, 1, 3, 5))

    serving.serve(work)
    assert found == [3, 0, 1, 3, 5]
    assert made == [0, 1, 2, 3, 3, 4, 5], "the second time it is made again"


class Interrupt:
    """Ctrl-C before the nth line of `in_process_save` that this thread comes to, from 0."""

    def __init__(self, nth: int) -> None:
        self.left = nth

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename != in_process_save.__file__:
            return None
        if event == "line":
            self.left -= 1
            if self.left == -1:
                raise KeyboardInterrupt
        return self


def test_ctrl_c_before_any_line_ends_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(in_process_save, "CHECK_INTERVAL_S", 0.005)
    outcomes: list[bool] = []
    before = sys.gettrace()
    for nth in range(1000):
        serving = CallingThreadResolver([partial(torch.full, (1,), float(n)) for n in range(3)])
        asked = serving.resolves()
        found: list[float] = []

        def work(asked: Any = asked, found: list[float] = found) -> None:
            found.extend(float(asked[n]()) for n in (1, 0, 2))

        interrupt = Interrupt(nth)
        sys.settrace(interrupt)
        try:
            serving.serve(work)
            outcomes.append(False)
        except KeyboardInterrupt:
            outcomes.append(True)
        finally:
            sys.settrace(before)
        wait_until(lambda: not our_threads(), f"no thread is left, line {nth}", 10.0)
        if interrupt.left >= 0:
            break
        assert outcomes[-1], f"line {nth}: the interruption is lost"
    assert found == [1.0, 0.0, 2.0], "not interrupted"
    assert len(outcomes) > 30


def test_two_signals_at_once_leave_no_thread() -> None:
    """As a scheduler sends them: the second one is handled while the first one's exception is on its way."""

    def end(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    def both() -> torch.Tensor:
        # To this thread, which blocks them: sent to the process they would come by way of another thread at once, and
        # what they raise would leave them blocked here for good.
        signals = {signal.SIGINT, signal.SIGTERM}
        signal.pthread_sigmask(signal.SIG_BLOCK, signals)
        for number in signals:
            signal.pthread_kill(threading.get_ident(), number)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, signals)
        return torch.ones(1)

    before = signal.signal(signal.SIGTERM, end)
    # A collection between the two would free an earlier turn's thread, by a callback of threading's in which the second
    # signal is handled: what that raises, Python only prints.
    gc.disable()
    try:
        for _ in range(20):
            serving = CallingThreadResolver([both, lambda: torch.zeros(1)])
            asked = serving.resolves()

            def work(asked: Any = asked) -> None:
                asked[0]()
                asked[1]()

            left: list[list[str]] = []
            try:
                serving.serve(work)
            except (KeyboardInterrupt, SystemExit):
                left.append(our_threads())
            assert left == [[]]
    finally:
        gc.enable()
        signal.signal(signal.SIGTERM, before)


def test_a_planner_that_has_failed_is_asked_no_more() -> None:
    made: list[int] = []

    def make(number: int) -> Callable[[], torch.Tensor]:
        def resolve() -> torch.Tensor:
            made.append(number)
            if number == 2:
                raise ValueError("no such thing")
            return torch.tensor(number)

        return resolve

    serving = CallingThreadResolver([make(n) for n in range(6)])
    asked = serving.resolves()
    errors: list[str] = []

    def work() -> None:
        for number in (1, 4, 2, 5):
            try:
                asked[number]()
            except ValueError as error:
                errors.append(str(error))

    serving.serve(work)
    assert made == [0, 1, 2]
    assert errors == ["no such thing"] * 3


def test_a_save_waits_for_the_kernels_of_its_planner(
    tmp_path: pathlib.Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, kept = SimulatedDevice(rng), list[torch.Tensor]()

    def pinned(like: torch.Tensor) -> torch.Tensor:
        kept.append(torch.zeros_like(like))
        device.registered[kept[-1].data_ptr()] = kept[-1].numel()
        return kept[-1]

    monkeypatch.setattr(tensor_stream, "pinned", pinned)
    monkeypatch.setattr(in_process_save, "CudaDevice", lambda: device)

    class Computing(DefaultSavePlanner):
        def resolve_data(self, write_item: WriteItem) -> Any:
            made = device.put(torch.zeros(300, 1000), 0)
            device.launch(0, lambda: made.copy_(STATE[write_item.index.fqn]))
            return made

    with device.on_stream(device.new_stream(0)):
        dcp_calls.save(STATE, StorageWriter(tmp_path / "a"), planner=Computing())
    assert kept, "fetched ahead"
    found = asyncckpt.load(tmp_path / "a")
    assert all(torch.equal(found[name], tensor) for name, tensor in STATE.items())
    assert not device.violations

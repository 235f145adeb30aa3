"""SIGKILL of the worker while a state goes through a ring: the save ends by a typed error, the next one works."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import threading
import time
from typing import Any

import overlapping
import pytest
import rank_processes
import states
import torch
from own_worker import dying_worker, own_worker, worker_of
from real_worker import (
    DEADLINE_S,
    manifest_of,
    saved_at_last,
    slots_of,
    wait_until,
    written,
)
from test_bounded_memory import NOT_THERE, state_of

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank
from asyncckpt.client import launcher
from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.errors import (
    CheckpointerClosedError,
    SaveFailedError,
    WorkerUnavailableError,
)
from asyncckpt.memory.streaming import Counters
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

pytestmark = pytest.mark.usefixtures("default_dir")
LIMIT = 4_000_000
LAST = 66
"""The last segment of the state, which has 67."""
N_CELLS = 14
SOAK = pytest.mark.soak


def assert_saved(path: pathlib.Path, step: int) -> None:
    assert verify_checkpoint(str(path), Files()).state == "ok"
    states.assert_same(asyncckpt.load(path, source="disk"), state_of(step))


def parts_at(path: pathlib.Path) -> list[str]:
    return [n for n in (os.listdir(path) if path.exists() else []) if "-part-" in n]


class Held:
    """Holds the copies up before they fill the segments `stops`, one after the other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.stops: list[int] = []
        self.reached, self._open = threading.Semaphore(0), threading.Semaphore(0)
        await_cell = SlotStream.await_cell

        def held(stream: SlotStream, number: int) -> None:
            if number in self.stops:
                self.reached.release()
                assert self._open.acquire(timeout=DEADLINE_S)
            await_cell(stream, number)

        monkeypatch.setattr(SlotStream, "await_cell", held)

    def wait(self) -> None:
        assert self.reached.acquire(timeout=DEADLINE_S)

    def go_on(self) -> None:
        self._open.release()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    overlapping.copy_all_behind(monkeypatch.setattr)
    return Held(monkeypatch)


class Saving:
    """A `save()` in a thread of its own: blocking, it returns when all is staged."""

    def __init__(self, checkpointer: AsyncCheckpointer, path: pathlib.Path, step: int) -> None:
        self._handles: list[Any] = []
        self._thread = threading.Thread(
            target=lambda: self._handles.append(checkpointer.save(state_of(step), path, step=step))
        )
        self._thread.start()

    def handle(self) -> Any:
        self._thread.join(DEADLINE_S)
        return self._handles[0]


def counted(checkpointer: AsyncCheckpointer) -> tuple[int, int]:
    """Return how many segments are filled, and written."""
    (slot,) = slots_of(checkpointer)
    counters, ring = Counters(slot.memory, slot.generation), slot.views.ring
    return ring.count_in(counters.filled), ring.count_in(counters.freed)


def kill_when_freed(checkpointer: AsyncCheckpointer, count: int) -> None:
    """Kill the worker once it has written so many segments, and waits for more."""
    worker = worker_of(checkpointer)
    wait_until(lambda: counted(checkpointer)[1] == count, f"{count} segments are written")
    worker.kill()


def assert_lost(handle: Any, path: pathlib.Path) -> None:
    """Its futures end by the typed error that names it, nothing is listed, and none of its files stays."""
    error = handle.written.exception(DEADLINE_S)
    assert isinstance(error, SaveFailedError)
    assert error.code == "stream_lost"
    assert (error.rank, error.path) == (0, str(path))
    assert f"step {handle.step}" in str(error) and "arena_limit_bytes" in str(error)
    assert handle.durable.exception(0) is error
    wait_until(lambda: not parts_at(path), "what was written is removed")
    with pytest.raises(NOT_THERE):
        asyncckpt.load(path)


@pytest.mark.parametrize(
    ("staging", "stop", "fields"),
    [
        ("blocking", 1, {}),
        ("overlap", 30, {}),
        ("blocking", 30, {"files_per_rank": 3, "layout": "dcp"}),
        pytest.param("overlap", LAST, {"files_per_rank": 2}, marks=SOAK),
        pytest.param("blocking", LAST, {}, marks=SOAK),
        pytest.param("overlap", 40, {"fsync": False}, marks=SOAK),
    ],
    ids=str,
)
def test_a_worker_that_dies_while_a_window_is_filled_ends_the_save_and_the_next_one_works(
    tmp_path: pathlib.Path, held: Held, staging: str, stop: int, fields: dict[str, Any]
) -> None:
    with own_worker(arena_limit_bytes=LIMIT, staging=staging, on_error="warn", **fields) as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "0", step=0))
        held.stops = [stop]
        saving = Saving(checkpointer, tmp_path / "1", 1)
        held.wait()
        kill_when_freed(checkpointer, stop)
        held.go_on()
        handle = saving.handle()
        assert_lost(handle, tmp_path / "1")
        # What was held up before its last segment may be staged before anybody knows that the worker has died.
        lasts = (None,) if stop == LAST else ()
        assert handle.staged.exception(DEADLINE_S) in (handle.written.exception(), *lasts)
        held.stops = []
        written(checkpointer.save(state_of(2), tmp_path / "2", step=2))
        assert [slot.handovers for slot in slots_of(checkpointer)] == [0]
    assert_saved(tmp_path / "0", 0)
    assert_saved(tmp_path / "2", 2)


def test_the_futures_of_a_lost_window_end_within_five_seconds_of_the_next_worker_s_start(
    tmp_path: pathlib.Path, held: Held
) -> None:
    took_s = []
    with own_worker(arena_limit_bytes=LIMIT, staging="blocking", on_error="warn") as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "0", step=0))
        for attempt in range(1, 4):  # on a machine on which others work, one of these is not held up by them
            held.stops = [20]
            saving = Saving(checkpointer, tmp_path / str(attempt), attempt)
            held.wait()
            kill_when_freed(checkpointer, 20)
            held.go_on()
            started_at: list[float] = []
            after = threading.Thread(
                target=lambda at=started_at: (worker_of(checkpointer), at.append(time.monotonic()))
            )
            after.start()
            assert_lost(saving.handle(), tmp_path / str(attempt))
            ended_at = time.monotonic()
            after.join(DEADLINE_S)
            took_s.append(ended_at - min(ended_at, *started_at))
            held.stops = []
            written(checkpointer.save(state_of(0), tmp_path / f"after-{attempt}", step=0))
            if took_s[-1] < 5.0:
                return
    raise AssertionError(f"they ended after {took_s} s")


@pytest.mark.parametrize("staging", [pytest.param("blocking", marks=SOAK), "overlap"])
def test_on_worker_loss_fail_fails_the_save_and_the_next_one_works(
    tmp_path: pathlib.Path, held: Held, staging: str
) -> None:
    with own_worker(arena_limit_bytes=LIMIT, staging=staging, on_worker_loss="fail") as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "0", step=0))
        held.stops = [20]
        saving = Saving(checkpointer, tmp_path / "1", 1)
        held.wait()
        kill_when_freed(checkpointer, 20)
        held.go_on()
        handle = saving.handle()
        error = handle.written.exception(DEADLINE_S)
        assert isinstance(error, WorkerUnavailableError)
        assert handle.staged.exception(DEADLINE_S) is error
        held.stops = []
        written(checkpointer.save(state_of(2), tmp_path / "2", step=2))
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "1")
    assert_saved(tmp_path / "2", 2)


@pytest.mark.parametrize("staging", ["blocking", pytest.param("overlap", marks=SOAK)])
def test_where_no_other_worker_can_be_started_the_save_fails_with_a_typed_error(
    tmp_path: pathlib.Path, held: Held, monkeypatch: pytest.MonkeyPatch, staging: str
) -> None:
    def refuse(endpoint: str, **_: object) -> None:
        raise WorkerUnavailableError("no more processes", endpoint=endpoint)

    with own_worker(arena_limit_bytes=LIMIT, staging=staging) as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "0", step=0))
        held.stops = [20]
        saving = Saving(checkpointer, tmp_path / "1", 1)
        held.wait()
        with monkeypatch.context() as patch:
            patch.setattr("asyncckpt.client.launcher.start_worker", refuse)
            kill_when_freed(checkpointer, 20)
            held.go_on()
            error = saving.handle().written.exception(DEADLINE_S)
        assert isinstance(error, WorkerUnavailableError)
        assert "no more processes" in str(error)
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "1")


@pytest.mark.parametrize("how", ["interrupted", "closed"])
def test_who_waits_for_another_worker_can_be_interrupted_or_closed(
    tmp_path: pathlib.Path, held: Held, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    start, opened = launcher.start_worker, threading.Event()

    def waits(endpoint: str, **fields: Any) -> None:
        assert opened.wait(DEADLINE_S)
        start(endpoint, **fields)

    with contextlib.ExitStack() as stack:
        checkpointer = stack.enter_context(own_worker(arena_limit_bytes=LIMIT, staging="blocking"))
        stack.callback(opened.set)
        process: Any = checkpointer._process  # type: ignore[attr-defined]
        written(checkpointer.save(state_of(0), tmp_path / "0", step=0))
        held.stops = [20]

        def disturb() -> None:
            held.wait()
            monkeypatch.setattr("asyncckpt.client.launcher.start_worker", waits)
            kill_when_freed(checkpointer, 20)
            held.go_on()
            wait_until(lambda: counted(checkpointer)[0] == 20 + N_CELLS, "no cell is free")
            wait_until(lambda: process._failover.is_under_way, "another worker is being found")
            if how == "interrupted":
                os.kill(os.getpid(), signal.SIGINT)
            else:
                checkpointer.close(timeout_s=0.1)

        other = threading.Thread(target=disturb)
        other.start()
        if how == "interrupted":
            with pytest.raises(KeyboardInterrupt):
                checkpointer.save(state_of(1), tmp_path / "1", step=1)
        else:
            handle = checkpointer.save(state_of(1), tmp_path / "1", step=1)
            assert isinstance(handle.written.exception(0), CheckpointerClosedError)
        opened.set()
        other.join(DEADLINE_S)
        process._failover.join(DEADLINE_S)
        held.stops = []
        if how == "interrupted":
            written(checkpointer.save(state_of(2), tmp_path / "2", step=2))
            assert_saved(tmp_path / "2", 2)
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "1")


def test_a_worker_that_only_hangs_is_not_taken_over_and_commits_nothing_when_it_wakes_up(
    tmp_path: pathlib.Path,
) -> None:
    with own_worker(arena_limit_bytes=LIMIT, staging="blocking", worker_timeout_s=2.0, on_error="warn") as checkpointer:
        saved_at_last(lambda name: checkpointer.save(state_of(0), tmp_path / f"0-{name}", step=0))
        worker = worker_of(checkpointer)
        with worker.frozen():
            error = checkpointer.save(state_of(1), tmp_path / "1", step=1).written.exception(DEADLINE_S)
            assert isinstance(error, WorkerUnavailableError)
        wait_until(lambda: worker.status()["jobs"] == 0, "it has done what it was told")
        wait_until(lambda: not parts_at(tmp_path / "1"), "it has removed what it had begun")
        assert worker_of(checkpointer).status()["pid"] == worker.status()["pid"]
        name = saved_at_last(lambda name: checkpointer.save(state_of(2), tmp_path / name, step=2))
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "1")
    assert_saved(tmp_path / name, 2)


# ---- at a call of its storage


def ranked(rank: int, step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    own = torch.full((700_000,), float(100 * step + rank))
    return {"large": torch.randn(2000, 1500, generator=generator), "own": PerRank(own), "step": step}


def saves(rank: int, root: str) -> list[str]:
    """Save three steps; returns how each ended: "whole", or the error's code."""
    limit, ended = None if rank else 2_000_000, []
    with AsyncCheckpointer(commit_timeout_s=DEADLINE_S, arena_limit_bytes=limit, on_error="warn") as checkpointer:
        for step in range(3):
            error = checkpointer.save(ranked(rank, step), f"{root}/{step}").written.exception(2 * DEADLINE_S)
            assert error is None or isinstance(error, SaveFailedError), error
            ended.append("whole" if error is None else error.code)
    return ended


@pytest.mark.parametrize(
    ("world_size", "kill", "first"),
    [
        pytest.param(2, "pwrite:12:9:0", "stream_lost", id="in the middle"),
        pytest.param(1, "link:1:9:0", "whole", id="before the manifest is put"),
        pytest.param(1, "link:1:9:1", "whole", id="after the manifest is put", marks=SOAK),
        *(
            pytest.param(world_size, kill, "", marks=SOAK)
            for world_size in (1, 2)
            for kill in ("open:2:9:1", "pwrite:20:9:1", "ftruncate:1:9:0", "fsync:1:9:1", "fsync:2:9:1")
        ),
    ],
)
def test_ranks_hear_alike_that_a_save_through_a_window_is_whole_or_lost_and_the_next_ones_work(
    kill: str, world_size: int, first: str, endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(endpoint_dir), "ASYNCCKPT_JOB": "dies"}
    with dying_worker(kill, environ):
        ends = rank_processes.run(world_size, saves, str(tmp_path), environ=environ)
    assert ends[0][0] in ([first] if first else ["whole", "stream_lost"])
    assert all(end == ends[0] for end in ends), "all ranks hear the same"
    assert ends[0][1:] == ["whole", "whole"]
    for step, end in enumerate(ends[0]):
        path = tmp_path / str(step)
        assert (path / "manifest.json").exists() is (end == "whole")
        if end == "whole":
            assert manifest_of(path)["world_size"] == world_size
            assert verify_checkpoint(str(path), Files()).state == "ok"
        else:
            wait_until(lambda path=path: not parts_at(path), "what was written is removed")  # type: ignore[misc]

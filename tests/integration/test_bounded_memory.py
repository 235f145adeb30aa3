"""`arena_limit_bytes` below the state's size: saved all the same, never beyond the limit, whoever dies meanwhile."""

from __future__ import annotations

import contextlib
import os
import pathlib
import resource
import signal
import threading
from collections.abc import Iterator
from typing import Any

import overlapping
import pytest
import states
import torch
from real_worker import DEADLINE_S, RealWorker, manifest_of, slots_of, stop_whoever_serves, wait_until, written

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    SaveFailedError,
    SaveSkippedError,
    SlotTimeoutError,
    SnapshotTornError,
)
from tests.warm_python import WarmPython

LIMIT = 4_000_000
NOT_THERE = (CheckpointNotFoundError, CheckpointNotCommittedError)


def state_of(step: int) -> dict[str, Any]:
    """Return a state of 20 MB: one tensor alone is larger than the limit."""
    generator = torch.Generator().manual_seed(step)
    return {
        "large": torch.randn(3_000_000, generator=generator),
        "columns": torch.randn(900, 700, generator=generator).t(),
        "double": torch.randn(500, 700, generator=generator, dtype=torch.float64),
        "small": [torch.randn(5, generator=generator) for _ in range(40)],
        "step": step,
    }


class Memory:
    """Looks at the memfds of a worker all the time. A context manager."""

    def __init__(self, pid: int) -> None:
        self._pid, self._ended = pid, threading.Event()
        self.most = 0
        self._thread = threading.Thread(target=self._watch)

    def now(self) -> int:
        """Return how many bytes of shared memory lie in the worker's slots."""
        found = 0
        for fd in os.listdir(f"/proc/{self._pid}/fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(f"/proc/{self._pid}/fd/{fd}").startswith("/memfd:asyncckpt-slot"):
                    found += os.stat(f"/proc/{self._pid}/fd/{fd}").st_blocks * 512
        return found

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, self.now())

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(DEADLINE_S)


def is_left(path: pathlib.Path) -> list[str]:
    """Return the files of tensors that lie at `path`."""
    return [n for n in (os.listdir(path) if path.exists() else []) if "-part-" in n]


# ---- the bound


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"layout": "dcp"},
        {"files_per_rank": 3, "slots": 2},
        {"staging": "overlap", "layout": "dcp", "files_per_rank": 2},
        {"max_shard_bytes": 5_000_000, "write_threads": 2},
        {"fsync": False, "slots": 1},
    ],
    ids=str,
)
def test_a_state_larger_than_the_limit_is_saved_within_it(
    shared_worker: RealWorker, tmp_path: pathlib.Path, fields: dict[str, Any]
) -> None:
    with (
        AsyncCheckpointer(endpoint=shared_worker.endpoint, arena_limit_bytes=LIMIT, **fields) as checkpointer,
        Memory(shared_worker.pid) as memory,
    ):
        reports = [written(checkpointer.save(state_of(step), tmp_path / str(step), step=step)) for step in range(3)]
        (slot,) = slots_of(checkpointer)
        assert slot.memory.nbytes <= LIMIT
        wait_until(lambda: memory.most > LIMIT / 4, "somebody has looked at the slot")
    assert LIMIT / 4 < memory.most <= LIMIT
    assert all(LIMIT / 2 < report.details["ring_nbytes"] < LIMIT for report in reports)
    for step in range(3):
        states.assert_same(asyncckpt.load(tmp_path / str(step)), state_of(step))
    assert manifest_of(tmp_path / "2")["fsync"] == fields.get("fsync", True)


def test_structures_that_fit_and_that_do_not_share_the_limit(worker: RealWorker, tmp_path: pathlib.Path) -> None:
    few = {"w": torch.arange(200_000.0), "step": 1}
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=LIMIT) as checkpointer:
        for n in range(3):
            small, large = checkpointer.save(few, tmp_path / f"s{n}"), None
            large = checkpointer.save(state_of(n), tmp_path / f"l{n}")
            assert "ring_nbytes" not in written(small).details
            assert "ring_nbytes" in written(large).details
            assert sum(s.memory.nbytes for s in slots_of(checkpointer)) <= LIMIT
    for n in range(3):
        states.assert_same(asyncckpt.load(tmp_path / f"s{n}"), few)
        states.assert_same(asyncckpt.load(tmp_path / f"l{n}"), state_of(n))


def test_prepare_makes_the_ring_and_nothing_more(shared_worker: RealWorker, tmp_path: pathlib.Path) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, arena_limit_bytes=LIMIT) as checkpointer:
        checkpointer.prepare(state_of(0))
        (slot,) = slots_of(checkpointer)
        assert slot.memory.nbytes <= LIMIT
        written(checkpointer.save(state_of(1), tmp_path / "a"))
        assert slots_of(checkpointer) == [slot]
    states.assert_same(asyncckpt.load(tmp_path / "a"), state_of(1))


def test_nothing_of_a_ring_is_kept_in_memory_or_offered(
    shared_worker: RealWorker, tmp_path: pathlib.Path, caplog: pytest.LogCaptureFixture
) -> None:
    fields: dict[str, Any] = {"arena_limit_bytes": 2 * LIMIT, "keep_in_memory": "latest"}
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, **fields) as checkpointer:
        for step in range(2):
            report = written(checkpointer.save(state_of(step), tmp_path / str(step)))
            assert report.details["ring_nbytes"] < LIMIT
        assert asyncckpt.held_snapshots(tmp_path, endpoint=shared_worker.endpoint) == []
        assert sum(s.memory.nbytes for s in slots_of(checkpointer)) <= 2 * LIMIT
    assert any("is not kept in memory" in record.getMessage() for record in caplog.records)
    states.assert_same(asyncckpt.load(tmp_path / "1"), state_of(1))


# ---- behind the training


def test_a_training_goes_on_as_without_saves_and_every_checkpoint_is_what_it_was(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    torch.manual_seed(7)
    model, optimizer = overlapping.linear(700)
    wanted = []
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, arena_limit_bytes=2_000_000) as checkpointer:
        checkpointer.attach(optimizer)
        for step in range(4):
            overlapping.backward(model)
            optimizer.step()
            state = overlapping.state_of(model, optimizer, step=step)
            wanted.append({name: tensor.detach().clone() for name, tensor in model.state_dict().items()})
            handle = checkpointer.save(state, tmp_path / str(step))
        assert "ring_nbytes" in written(handle).details
        checkpointer.wait(DEADLINE_S)
    for step in range(4):
        found = asyncckpt.load(tmp_path / str(step))
        states.assert_same(dict(found["model"]), wanted[step])


def test_the_step_waits_for_the_ring_and_a_write_behind_its_back_fails_that_save_only(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    model, optimizer = overlapping.linear(700)
    overlapping.backward(model)
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=2_000_000) as checkpointer:
        checkpointer.attach(optimizer)
        written(checkpointer.save(overlapping.state_of(model, optimizer), tmp_path / "a"))
        with worker.frozen():
            torn = checkpointer.save(overlapping.state_of(model, optimizer), tmp_path / "b")
            with torch.no_grad():
                next(iter(model.parameters())).add_(1)
            assert not torn.staged.done(), "most of it waits for the worker"
        assert isinstance(torn.written.exception(DEADLINE_S), SnapshotTornError)
        with worker.frozen():
            waits = checkpointer.save(overlapping.state_of(model, optimizer), tmp_path / "c")
            assert not waits.staged.done()
        optimizer.step()
        assert waits.staged.done()
        written(waits)
    wait_until(lambda: not is_left(tmp_path / "b"), "what was written of it is removed")
    with pytest.raises(NOT_THERE):
        asyncckpt.load(tmp_path / "b")


@pytest.mark.parametrize(("policy", "kind"), [("skip", SaveSkippedError), ("wait", SlotTimeoutError)])
def test_a_save_that_comes_while_the_ring_is_in_use_is_treated_as_the_policy_says(
    worker: RealWorker, tmp_path: pathlib.Path, policy: str, kind: type[Exception]
) -> None:
    timeout_s = 0.3 if policy == "wait" else 3.0  # the first save must not run out of it before the second comes
    fields: dict[str, Any] = {"staging": "overlap", "on_busy": policy, "slot_timeout_s": timeout_s, "slots": 2}
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=LIMIT, **fields) as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "a"))
        with worker.frozen():
            first = checkpointer.save(state_of(1), tmp_path / "b")
            assert isinstance(checkpointer.save(state_of(2), tmp_path / "c").written.exception(DEADLINE_S), kind)
            ended = first.written.exception(DEADLINE_S) if policy == "wait" else None
        if policy == "wait":  # the worker wrote nothing for so long
            assert isinstance(ended, SlotTimeoutError)
        else:
            first.written.exception(DEADLINE_S)  # by chance within its time or not
        checkpointer.wait(DEADLINE_S)
        wait_until(
            lambda: checkpointer.save(state_of(3), tmp_path / "d").written.exception(DEADLINE_S) is None, "goes on"
        )
    states.assert_same(asyncckpt.load(tmp_path / "d"), state_of(3))


# ---- what goes wrong


def test_storage_that_refuses_fails_the_save_with_its_error_and_the_next_one_works(
    worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=LIMIT) as checkpointer:
        written(checkpointer.save(state_of(0), tmp_path / "a"))
        limits = resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, (3_000_000, resource.RLIM_INFINITY))
        error = checkpointer.save(state_of(1), tmp_path / "b").written.exception(DEADLINE_S)
        assert isinstance(error, SaveFailedError)
        assert error.code == "EFBIG"
        resource.prlimit(worker.pid, resource.RLIMIT_FSIZE, limits)
        written(checkpointer.save(state_of(2), tmp_path / "c"))
        assert len(slots_of(checkpointer)) == 1
    assert not is_left(tmp_path / "b")
    states.assert_same(asyncckpt.load(tmp_path / "c"), state_of(2))


@contextlib.contextmanager
def own_worker(directory: pathlib.Path, monkeypatch: pytest.MonkeyPatch, **fields: Any) -> Iterator[AsyncCheckpointer]:
    """A checkpointer that starts its workers; they are ended after it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(directory))
    checkpointer = AsyncCheckpointer(arena_limit_bytes=LIMIT, worker_start_timeout_s=DEADLINE_S, **fields)
    try:
        with checkpointer:
            yield checkpointer
    finally:
        stop_whoever_serves(checkpointer._process.endpoint)  # type: ignore[attr-defined]


@pytest.mark.parametrize("left", ["all", "no index"])
def test_a_worker_that_dies_with_a_sealed_ring_costs_the_save_unless_it_had_finished_its_files(
    endpoint_dir: pathlib.Path, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    fields: dict[str, Any] = {"staging": "overlap", "commit_hook": _Hook()}
    with own_worker(endpoint_dir, monkeypatch, **fields) as checkpointer:
        _Hook.held.clear()
        handle = checkpointer.save(state_of(0), tmp_path / "a")
        handle.durable.result(DEADLINE_S)  # all is written; the commit waits for the hook
        if left != "all":  # as if it had died a moment before
            next((tmp_path / "a").glob("*index*")).unlink()
        RealWorker(checkpointer._process.endpoint).kill()  # type: ignore[attr-defined]
        _Hook.held.set()
        error = handle.written.exception(DEADLINE_S)
        if left == "all":
            assert error is None
        else:
            assert isinstance(error, SaveFailedError)
            assert error.code == "stream_lost"
        written(checkpointer.save(state_of(1), tmp_path / "b"))
    if left == "all":
        states.assert_same(asyncckpt.load(tmp_path / "a"), state_of(0))
    else:
        assert not is_left(tmp_path / "a")
    states.assert_same(asyncckpt.load(tmp_path / "b"), state_of(1))


class _Hook:
    """Holds a commit back."""

    held = threading.Event()

    def pre_commit(self, *_: Any, **__: Any) -> None:
        assert self.held.wait(DEADLINE_S)


TRAINER = """
import os, signal, sys, time
import torch
from asyncckpt import AsyncCheckpointer
from asyncckpt.memory.slot import SlotControl
from asyncckpt.client.slot_stream import SlotStream
endpoint, path, when, limit = sys.argv[1:]
def die(*_):
    print("dies", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if when == "midway":
    await_cell = SlotStream.await_cell
    SlotStream.await_cell = lambda self, number: die() if number == 20 else await_cell(self, number)
else:
    finish = SlotControl.finish
    SlotControl.finish = lambda self: (finish(self), die())
checkpointer = AsyncCheckpointer(endpoint=endpoint, arena_limit_bytes=int(limit))
checkpointer.save({"large": torch.arange(3_000_000.0), "step": 1}, path)
"""


@pytest.mark.parametrize(("when", "survives"), [("midway", False), ("sealed", True)])
def test_a_trainer_that_dies_leaves_a_whole_checkpoint_or_none_and_others_go_on(
    worker: RealWorker, tmp_path: pathlib.Path, warm_python: WarmPython, when: str, *, survives: bool
) -> None:
    path = tmp_path / "a"
    with AsyncCheckpointer(endpoint=worker.endpoint, arena_limit_bytes=LIMIT) as other:
        written(other.save(state_of(0), tmp_path / "before"))
        done = warm_python.run(TRAINER, worker.endpoint, str(path), when, str(LIMIT), timeout_s=DEADLINE_S)
        assert (done.returncode, done.stdout) == (-signal.SIGKILL, "dies\n"), done.stderr
        written(other.save(state_of(1), tmp_path / "after"))
        wait_until(lambda: len(worker.status()["sessions"]) == 1, "the dead one is forgotten")
        if survives:
            wait_until((path / "manifest.json").exists, "it is committed")
        wait_until(lambda: len(worker.status()["slots"]) == 1, "its memory is free, and nothing of it is kept")
    if survives:
        states.assert_same(asyncckpt.load(path), {"large": torch.arange(3_000_000.0), "step": 1})
    else:
        assert not is_left(path)
        with pytest.raises(NOT_THERE):
            asyncckpt.load(path)
    states.assert_same(asyncckpt.load(tmp_path / "after"), state_of(1))

"""SIGKILL, an error, a long wait at every named instant of a save that is written while it is being staged.

Either ahead of the seal, out of a slot that holds everything (docs/adr/0036), or through a ring (docs/adr/0027).
Promises P2, P3, P4 and P6: it loads bit for bit or is not listed; it is never said to be written when it is not; what
was never sealed leaves nothing; the next save works.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from real_worker import DEADLINE_S, running, wait_until
from worker_here import Here

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.basics.failpoints import observed
from asyncckpt.errors import AsyncCkptError
from asyncckpt.memory.slot import SlotControl
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint
from tests.failing_process import ACTIONS, At, streamed
from tests.failpoint_groups import STREAMED_BY_TRAINER, STREAMED_BY_WORKER, cases
from tests.saving import ENVIRONMENT, ROOT

pytestmark = pytest.mark.fault

LENGTH = 1_000_000
BY_TRAINER, BY_WORKER = cases(STREAMED_BY_TRAINER), cases(STREAMED_BY_WORKER)


def state_of(n: int) -> dict[str, Any]:
    return {"w": torch.full((LENGTH,), float(n)), "n": n}


class Seals:
    """Holds the trainer up before it seals, while it is closed: so the worker is not overtaken by the seal."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open, finish = threading.Event(), SlotControl.finish

        def held(control: SlotControl) -> None:
            assert self._open.wait(DEADLINE_S)
            finish(control)

        self.open()
        monkeypatch.setattr(SlotControl, "finish", held)

    def open(self) -> None:
        self._open.set()

    def close(self) -> None:
        self._open.clear()


@pytest.fixture
def seals(monkeypatch: pytest.MonkeyPatch) -> Seals:
    return Seals(monkeypatch)


def saved(checkpointer: AsyncCheckpointer, n: int, path: pathlib.Path) -> None:
    checkpointer.save(state_of(n), path).written.result(DEADLINE_S)
    assert torch.equal(asyncckpt.load(path, source="disk")["w"], state_of(n)["w"])


def parts_at(path: pathlib.Path) -> list[str]:
    return [name for name in (os.listdir(path) if path.exists() else []) if name.startswith("rank-")]


@pytest.mark.parametrize("action", ["raise", "sleep"])
@pytest.mark.parametrize(("way", "point"), BY_TRAINER + BY_WORKER)
def test_an_error_or_a_wait_costs_the_save_at_most(
    endpoint: str,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    seals: Seals,
    way: str,
    point: str,
    action: str,
) -> None:
    path, observer = tmp_path / "x", At(point, ACTIONS[action])
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.closing(Here(endpoint)))
        fields = streamed(way, monkeypatch.setattr)
        checkpointer = stack.enter_context(AsyncCheckpointer(endpoint=endpoint, **fields))
        saved(checkpointer, 1, tmp_path / "before")
        if (way, point) in BY_WORKER and way == "early":
            seals.close()
        with observed(observer):
            handle = checkpointer.save(state_of(2), path)
            wait_until(lambda: observer.met, f"{point!r} is reached")
            seals.open()
            error = handle.written.exception(DEADLINE_S)
        assert error is None or (action == "raise" and isinstance(error, AsyncCkptError)), error
        if error is None:
            assert torch.equal(asyncckpt.load(path, source="disk")["w"], state_of(2)["w"])
            assert verify_checkpoint(str(path), Files()).faults == []
        else:
            assert not (path / "manifest.json").exists()
            wait_until(lambda: not parts_at(path), "nothing of it is left")
        if (way, point) == ("early", "stream: begun"):
            assert error is None, "it is written anew, since it is sealed"
        saved(checkpointer, 3, tmp_path / "after")


@pytest.mark.parametrize(("way", "point"), BY_WORKER)
def test_a_worker_that_is_killed_lists_nothing_and_the_next_one_works(
    endpoint: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch, seals: Seals, way: str, point: str
) -> None:
    path, fields = tmp_path / "x", streamed(way, monkeypatch.setattr)
    command = [sys.executable, "-m", "tests.failing_process", "worker", endpoint, "kill", "1", point]
    seals.close()
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: os.path.exists(endpoint.removeprefix("ipc://")), "the worker listens")
        with AsyncCheckpointer(endpoint=endpoint, on_worker_loss="fail", **fields) as checkpointer:
            handle = checkpointer.save(state_of(1), path)
            assert process.wait(DEADLINE_S) == -signal.SIGKILL
            seals.open()
            assert isinstance(handle.written.exception(DEADLINE_S), AsyncCkptError)
    assert not (path / "manifest.json").exists()
    with contextlib.closing(Here(endpoint)), AsyncCheckpointer(endpoint=endpoint, **fields) as checkpointer:
        saved(checkpointer, 2, path)
        assert len(parts_at(path)) == 3, "what the dead worker has left goes with the next commit there"


@pytest.fixture
def nursery() -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-W", "ignore", "-m", "tests.failing_process", "trainers"]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, env=ENVIRONMENT, cwd=ROOT, **pipes) as process:
        yield process
        assert process.stdin
        process.stdin.close()


def test_a_trainer_that_is_killed_before_the_seal_leaves_nothing(
    endpoint: str, tmp_path: pathlib.Path, nursery: subprocess.Popen[str]
) -> None:
    assert nursery.stdin and nursery.stdout
    with running(endpoint) as worker:
        for seed, (way, point) in enumerate(BY_TRAINER):
            path = tmp_path / str(seed)
            order = {"endpoint": endpoint, "path": str(path), "seed": seed, "point": point, "action": "kill"}
            nursery.stdin.write(json.dumps({**order, "visit": 1, "way": way, "length": LENGTH}) + "\n")
            nursery.stdin.flush()
            assert json.loads(nursery.stdout.readline())["code"] == -signal.SIGKILL, point
            wait_until(lambda: not worker.status()["sessions"] and not worker.status()["slots"], "the dead is gone")
            wait_until(lambda: not worker.status()["jobs"], "its save has ended")
            assert not (path / "manifest.json").exists(), point
            wait_until(lambda path=path: not parts_at(path), "nothing of it is left")  # type: ignore[misc]
        with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
            saved(checkpointer, 9, tmp_path / "next")

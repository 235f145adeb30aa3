"""The worker is killed again and again, at random moments, under a trainer that saves all the time.

Promises P6, P9, P11 and P12 of the guarantees: every save is committed, or fails with a typed error in time; fds,
threads, mappings and memory of the trainer stay as they were; no worker is left.
"""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import random
import shutil
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import torch

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import AsyncCkptError, CheckpointNotCommittedError, CheckpointNotFoundError
from tests import states
from tests.real_worker import RealWorker, slots_of, stop_whoever_serves

pytestmark = [pytest.mark.fault, pytest.mark.soak, pytest.mark.timeout(900)]

KILLS = int(os.environ.get("ASYNCCKPT_TEST_RESTARTS", "100"))
SAVE_DEADLINE_S = 60.0
RSS_SLACK_NBYTES = 16 << 20
"""Anonymous memory, over all kills: less than half a state. What is mapped of slots is counted apart: one, or two."""


STATE_NBYTES = 1024 * 1024 * 10 * 4


def state_of(step: int) -> dict[str, Any]:
    return {"w": torch.full((1024, 1024, 10), float(step)), "step": step}


def held() -> dict[str, int]:
    """What this process holds, garbage apart."""
    gc.collect()
    maps = pathlib.Path("/proc/self/maps").read_text()
    process = psutil.Process()
    return {
        "fds": process.num_fds(),
        "threads": threading.active_count(),
        "slots": maps.count("memfd:asyncckpt"),
        "anonymous": rss_of("RssAnon"),
        "shared": rss_of("RssShmem"),
    }


def rss_of(kind: str) -> int:
    """Resident bytes of a kind, as the kernel has them. What is shared is the touched pages of mapped slots."""
    status = pathlib.Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{kind}:")[1].split()[0])


class Killer(threading.Thread):
    """Kills whoever serves, so many times, at random moments."""

    def __init__(self, process: Any, rng: random.Random) -> None:
        super().__init__(daemon=True)
        self._process, self._rng = process, rng
        self.pids: list[int] = []

    def run(self) -> None:
        while len(self.pids) < KILLS:
            time.sleep(self._rng.choice((0.0, 0.05, 0.3, 0.8)) * self._rng.random())
            session = self._process._connection.session
            if session is None or session.error is not None or session.worker.pid in self.pids:
                continue
            self.pids.append(session.worker.pid)
            with contextlib.suppress(ProcessLookupError):
                os.kill(session.worker.pid, signal.SIGKILL)


@pytest.mark.parametrize("keep_in_memory", ["none", "latest"])
def test_a_trainer_outlives_a_hundred_workers(
    keep_in_memory: str,
    endpoint_dir: pathlib.Path,
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
    rng: random.Random,
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(endpoint_dir))
    committed = failed = resubmitted = step = 0
    with AsyncCheckpointer(keep_in_memory=keep_in_memory, commit_timeout_s=SAVE_DEADLINE_S) as checkpointer:
        process: Any = checkpointer._process
        try:
            for step in range(4):
                checkpointer.save(state_of(step), tmp_path / str(step)).written.result(SAVE_DEADLINE_S)
                states.assert_same(asyncckpt.load(tmp_path / str(step)), state_of(step))  # as below, before measuring
            before, killer = held(), Killer(process, rng)
            killer.start()
            while killer.is_alive():
                step += 1
                path = tmp_path / str(step)
                handle = checkpointer.save(state_of(step), path)
                error = handle.written.exception(SAVE_DEADLINE_S)
                if error is None:
                    committed += 1
                    resubmitted += handle.written.result(0).details.get("resubmitted", 0)
                    states.assert_same(asyncckpt.load(path), state_of(step))
                else:
                    failed += 1
                    assert isinstance(error, AsyncCkptError), error
                    # The last worker may have committed it just before it died.
                    with contextlib.suppress(CheckpointNotCommittedError, CheckpointNotFoundError):
                        states.assert_same(asyncckpt.load(path), state_of(step))
                shutil.rmtree(path, ignore_errors=True)
            killer.join()
            for _ in range(3):  # after a failure each save tries for a second only
                step += 1
                checkpointer.save(state_of(step), tmp_path / str(step)).written.exception(SAVE_DEADLINE_S)
            checkpointer.save(state_of(step), tmp_path / "last").written.result(SAVE_DEADLINE_S)
            after = held()
            print(
                f"{KILLS} kills: {committed} committed, {failed} failed, {resubmitted} resubmissions; {before} {after}"
            )
            assert committed >= KILLS // 10  # a save that meets three kills fails
            assert resubmitted > 0
            assert after["fds"] <= before["fds"] + 1
            assert after["threads"] <= before["threads"]
            assert after["slots"] <= 2
            assert after["anonymous"] <= before["anonymous"] + RSS_SLACK_NBYTES
            assert after["shared"] <= after["slots"] * (STATE_NBYTES + (4 << 20))
            serves = RealWorker(process.endpoint)
            assert len(serves.status()["slots"]) == len(slots_of(checkpointer))
            assert not any(psutil.pid_exists(pid) and _is_worker(pid) for pid in killer.pids)
        finally:
            checkpointer.close()  # else it finds another worker for what it keeps, as soon as this one has ended
            stop_whoever_serves(process.endpoint)


def _is_worker(pid: int) -> bool:
    try:
        return "asyncckpt_worker" in " ".join(psutil.Process(pid).cmdline())
    except psutil.Error:
        return False

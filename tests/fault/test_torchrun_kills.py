"""The whole of a torchrun is killed, agent and ranks: another one beside the same worker goes on from what was staged.

Promise P5. That one rank dies and torchrun starts all of them again: tests/integration/test_run_elastic.py.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator

import psutil
import pytest
from real_worker import DEADLINE_S, manifest_of, running, wait_until

import asyncckpt
from tests.saving import ENVIRONMENT

pytestmark = [pytest.mark.fault, pytest.mark.soak]

RANKS = 2

TRAINING = """
import json, os, pathlib, sys, time
import torch
import asyncckpt

root, run, rank = pathlib.Path(sys.argv[1]), sys.argv[2], int(os.environ["RANK"])
torch.distributed.init_process_group("gloo")

def state_of(step):
    own = asyncckpt.PerRank(torch.full((500,), float(10 * step + rank)))
    return {"w": torch.full((100_000,), float(step)), "own": own, "step": step}

def say(what):
    (root / f"{run}-{rank}.tmp").write_text(what)
    os.replace(root / f"{run}-{rank}.tmp", root / f"{run}-{rank}")

with asyncckpt.AsyncCheckpointer() as checkpointer:
    newest = asyncckpt.latest_checkpoint(root / "steps")
    if newest is None:
        checkpointer.save(state_of(0), root / "steps" / "0").written.result(60)
        say("saved")
        while not (root / "worker stands still").exists():
            time.sleep(0.01)
        handle = checkpointer.save(state_of(1), root / "steps" / "1")
        handle.staged.result(60)
        say("written" if handle.written.done() else "staged")
        time.sleep(600)
    found = checkpointer.load(newest)
    wanted = state_of(found["step"])
    assert torch.equal(found["w"], wanted["w"]) and torch.equal(found["own"], wanted["own"].value)
    checkpointer.save(state_of(2), root / "steps" / "2").written.result(60)
    say(f"went on from {found['step']}")
"""


@contextlib.contextmanager
def torchrun(endpoint: str, root: pathlib.Path, run: str) -> Iterator[subprocess.Popen[bytes]]:
    """A torchrun in a session of its own; what is left of it in the end is killed."""
    (root / "train.py").write_text(TRAINING)
    options = ("--standalone", f"--nproc-per-node={RANKS}", "--max-restarts=0", f"--log-dir={root}/log")
    command = [sys.executable, "-m", "torch.distributed.run", *options, str(root / "train.py"), str(root), run]
    environment = {**ENVIRONMENT, "ASYNCCKPT_ENDPOINT": endpoint}
    with (
        open(root / f"{run}.log", "wb") as log,
        subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True) as process,
    ):
        try:
            yield process
        finally:
            kill_all(process)


def kill_all(process: subprocess.Popen[bytes]) -> None:
    """SIGKILL to its process group, and to those of its ranks, each of which torchrun gives one of its own."""
    groups = {process.pid}
    with contextlib.suppress(psutil.NoSuchProcess):
        for child in psutil.Process(process.pid).children(recursive=True):
            with contextlib.suppress(ProcessLookupError):
                groups.add(os.getpgid(child.pid))
    for group in groups:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)


def terminate(process: subprocess.Popen[bytes]) -> None:
    """SIGTERM to its process group; torchrun ends its ranks itself, with killpg."""
    os.killpg(process.pid, signal.SIGTERM)


def said(root: pathlib.Path, run: str) -> list[str]:
    files = [root / f"{run}-{rank}" for rank in range(RANKS)]
    return [file.read_text() if file.exists() else "" for file in files]


def wait_for(root: pathlib.Path, run: str, what: str) -> None:
    wait_until(lambda: said(root, run) == [what] * RANKS, f"{run}: {what}", 2 * DEADLINE_S)


def is_running(root: pathlib.Path) -> bool:
    return any(str(root) in " ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"]))


@pytest.mark.parametrize("end", [kill_all, terminate], ids=["killed", "terminated"])
def test_a_torchrun_that_is_ended_with_its_ranks_is_followed_by_another_beside_the_same_worker(
    endpoint: str, tmp_path: pathlib.Path, end: Callable[[subprocess.Popen[bytes]], None]
) -> None:
    with running(endpoint) as worker:
        pid = worker.pid
        with torchrun(endpoint, tmp_path, "first") as first:
            wait_for(tmp_path, "first", "saved")
            with worker.frozen():
                (tmp_path / "worker stands still").touch()
                wait_for(tmp_path, "first", "staged")
                end(first)
                assert first.wait(2 * DEADLINE_S) != 0
                wait_until(lambda: not is_running(tmp_path), "agent and ranks are gone")
                assert not (tmp_path / "steps" / "1" / "manifest.json").exists()
        wait_until((tmp_path / "steps" / "1" / "manifest.json").exists, "what all had staged is committed")
        with torchrun(endpoint, tmp_path, "second") as second:
            assert second.wait(2 * DEADLINE_S) == 0, (tmp_path / "second.log").read_text()
        assert said(tmp_path, "second") == ["went on from 1"] * RANKS
        assert worker.status()["pid"] == pid
    assert [manifest_of(tmp_path / "steps" / name)["step"] for name in "012"] == [0, 1, 2]
    assert asyncckpt.latest_checkpoint(tmp_path / "steps") == str(tmp_path / "steps" / "2")

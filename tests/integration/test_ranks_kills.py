"""Real trainers of two ranks, killed as a group: what all ranks staged commits, what one did not stage never does."""

from __future__ import annotations

import os
import pathlib
import signal
import time
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
from real_worker import wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer
from asyncckpt.errors import CheckpointNotCommittedError, CheckpointNotFoundError


def state_of(step: int) -> dict[str, Any]:
    return {"weight": torch.full((3000, 400), float(step)), "step": step}


def trains(rank: int, root: str, stages: bool, ignores_term: bool) -> None:
    if ignores_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    checkpointer = AsyncCheckpointer()
    checkpointer.save(state_of(0), f"{root}/step-0").written.result(60)
    rank_processes.talk().say("trains")
    rank_processes.talk().hear()
    if stages or rank == 0:
        handle = checkpointer.save(state_of(1), f"{root}/step-1")
        assert handle.staged.done()
        assert not handle.written.done()
    rank_processes.talk().say("staged")
    time.sleep(60)


def killed_between_staged_and_written(
    root: pathlib.Path, worker: real_worker.RealWorker, *, stages: bool, signals: tuple[int, ...] = (signal.SIGKILL,)
) -> None:
    """Run two trainers, stop the worker, let them stage, kill the group, and let the worker go on."""
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    with rank_processes.running(
        2, trains, str(root), stages, signal.SIGTERM in signals, environ=environ, together=True
    ) as ranks:
        assert [ranks.receive(r) for r in (0, 1)] == ["trains"] * 2
        with worker.frozen():
            for r in (0, 1):
                ranks.send(r, "go")
            assert [ranks.receive(r) for r in (0, 1)] == ["staged"] * 2
            for number in signals:
                os.killpg(ranks.processes[0].pid, number)
                time.sleep(0.05 if len(signals) > 1 else 0)
            for process in ranks.processes:
                process.join(60)
                assert process.exitcode == -signal.SIGKILL
            assert not (root / "step-1" / "manifest.json").exists()


@pytest.mark.parametrize("signals", [(signal.SIGKILL,), (signal.SIGTERM, signal.SIGKILL)], ids=["kill", "term-kill"])
def test_a_killed_group_whose_ranks_all_staged_is_committed(
    tmp_path: pathlib.Path, worker: real_worker.RealWorker, signals: tuple[int, ...]
) -> None:
    for attempt in range(2):
        root = tmp_path / str(attempt)
        killed_between_staged_and_written(root, worker, stages=True, signals=signals)
        wait_until(lambda root=root: (root / "step-1" / "manifest.json").exists(), "the worker commits")  # type: ignore[misc]
        loaded = asyncckpt.load(root / "step-1")
        assert torch.equal(loaded["weight"], state_of(1)["weight"])
    wait_until(lambda: not worker.status()["sessions"] and not worker.status()["slots"], "everything is given back")


def test_a_killed_group_of_which_one_rank_did_not_stage_commits_nothing_and_the_rank_is_named(
    tmp_path: pathlib.Path, worker: real_worker.RealWorker
) -> None:
    killed_between_staged_and_written(tmp_path, worker, stages=False)
    rows = wait_until(
        lambda: [s for s in worker.status()["saves"] if s["path"].endswith("step-1") and s["phase"] == "abandoned"],
        "the save ends",
    )
    assert "rank 1" in rows[0]["error"]
    wait_until(lambda: not worker.status()["jobs"], "the job that makes the directory has ended too")
    with pytest.raises((CheckpointNotCommittedError, CheckpointNotFoundError)):  # a Begin may die with its sender
        asyncckpt.load(tmp_path / "step-1")
    wait_until(lambda: not worker.status()["sessions"] and not worker.status()["slots"], "everything is given back")

"""A rank that is not told how saves have ended: no rank waits in vain, and all are in step again some saves later."""

from __future__ import annotations

import os
import pathlib
import signal
import sys
from dataclasses import replace
from typing import Any

import rank_processes
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S, RealWorker, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, AsyncCkptError
from asyncckpt.client.save_outcomes import SaveOutcomes
from asyncckpt.client.worker_client import WorkerClient
from asyncckpt.protocol.endpoint import default_endpoint, make_directory
from asyncckpt.protocol.fields import MAX_OUTCOMES

N_UNHEARD = MAX_OUTCOMES + 4
SLOTS = 2


def ending(checkpointer: AsyncCheckpointer, state: Any, path: str, step: int) -> str:
    """Save; returns the name of the error, or "", once all ranks are as far."""
    try:
        error = checkpointer.save(state, path, step=step).written.exception(DEADLINE_S)
    except AsyncCkptError as caught:
        error = caught
    dist.barrier()
    return "" if error is None else type(error).__name__


def hears_late(rank: int, root: str) -> list[str]:
    """Rank 1 hears nothing of saves that fail, more of them than the worker tells again."""
    take, found = SaveOutcomes.update, []
    state = {"weight": torch.arange(1000.0)}
    with AsyncCheckpointer(slots=SLOTS, keep_in_memory="none", slot_timeout_s=0.2 if rank else 600) as checkpointer:
        for step in range(N_UNHEARD + 3 * SLOTS):
            if rank and step == 1:
                SaveOutcomes.update = lambda *told: None  # type: ignore[method-assign,assignment]
            elif step == N_UNHEARD:
                SaveOutcomes.update = take  # type: ignore[method-assign]
                checkpointer._process.flush(DEADLINE_S)  # type: ignore[attr-defined]
                checkpointer._stager._config = replace(checkpointer.config, slot_timeout_s=DEADLINE_S)
            found.append(ending(checkpointer, state, f"{root}/{step}", step))
    return found


def test_a_rank_that_was_told_too_late_how_many_saves_have_ended_is_in_step_again_soon(
    tmp_path: pathlib.Path, shared_worker: RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    for found in rank_processes.run(2, hears_late, str(tmp_path), environ=environ):
        assert found[:2] == ["", ""] and "PlanTimeoutError" not in found
        assert "SlotTimeoutError" not in found[N_UNHEARD:], found[N_UNHEARD:]
        assert found[-SLOTS:] == [""] * SLOTS
    last = N_UNHEARD + 3 * SLOTS - 1
    assert torch.equal(asyncckpt.load(tmp_path / f"{last}")["weight"], torch.arange(1000.0))


def worker_dies_between(rank: int, root: str) -> list[str]:
    """Rank 0 grows in save 1 and hears that the ranks meet; rank 1 does not, since the worker is killed."""
    on_saves, found = WorkerClient._on_saves, []
    heard, killed = pathlib.Path(root, "heard"), list[int]()

    def told(self: WorkerClient, reply: Any) -> None:
        session = self._connection.session
        assert session is not None
        if rank == 0:
            on_saves(self, reply)
            if (1, True) in map(tuple, reply.outcomes):
                heard.touch()
        elif not killed and (1, True) in map(tuple, reply.outcomes):
            wait_until(heard.exists, "rank 0 has heard")
            killed.append(session.worker.pid)
            os.kill(session.worker.pid, signal.SIGKILL)
        elif session.worker.pid not in killed:
            on_saves(self, reply)

    WorkerClient._on_saves = told  # type: ignore[method-assign]
    with AsyncCheckpointer(slots=1, keep_in_memory="none", plan_timeout_s=DEADLINE_S) as checkpointer:
        for step in range(5):
            state = {"weight": torch.arange(1000.0)}
            if step and rank == 0:
                state["adapter"] = torch.arange(10.0)
            found.append(ending(checkpointer, state, f"{root}/{step}", step))
    return found


def test_a_worker_that_dies_before_it_has_told_all_ranks_that_they_meet_lets_no_rank_wait(
    tmp_path: pathlib.Path, endpoint_dir: pathlib.Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(endpoint_dir), "ASYNCCKPT_JOB": "dies"}
    found_at = os.environ | environ
    endpoint = default_endpoint(found_at, uid=os.geteuid(), package=asyncckpt.__version__, interpreter=sys.prefix)
    make_directory(endpoint)
    try:
        zero, one = rank_processes.run(2, worker_dies_between, str(tmp_path), environ=environ)
    finally:
        stop_whoever_serves(endpoint)
    assert zero[:2] == one[:2] == ["", ""]
    assert zero[2] == one[2] == "SaveFailedError", "rank 1 tells rank 0 that it does not come"
    assert zero[3:] == one[3:] == ["", ""]
    with asyncckpt.open_checkpoint(tmp_path / "4") as checkpoint:
        assert set(checkpoint.stored_tensors) == {"weight", "adapter"}

"""How the ranks of a checkpointer find each other: by where a save goes, whatever else each has made or saved."""

from __future__ import annotations

import contextlib
import os
import pathlib
import time
from typing import Any

import pytest
import rank_processes
import real_worker
import torch

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, SyncCheckpointer
from asyncckpt.errors import AsyncCkptError, RanksDisagreeError, SaveFailedError, WorkerUnavailableError

DEADLINE_S = 120.0
STATE = {"w": torch.arange(10.0)}


def written(checkpointer: AsyncCheckpointer, path: str, **options: Any) -> str:
    """Save; return the name of the error, or "written"."""
    error = checkpointer.save(STATE, path, **options).written.exception(DEADLINE_S)
    return type(error).__name__ if error else "written"


def run(worker: real_worker.RealWorker, function: Any, *arguments: Any, ranks: int = 2) -> list[Any]:
    return rank_processes.run(ranks, function, *arguments, environ={"ASYNCCKPT_ENDPOINT": worker.endpoint})


def one_more_on_rank_zero(rank: int, root: str) -> list[str]:
    if rank == 0:
        SyncCheckpointer().close()
        side = AsyncCheckpointer()
    with AsyncCheckpointer(plan_timeout_s=20) as checkpointer:
        found = [written(checkpointer, f"{root}/{n}", step=n) for n in range(3)]
    if rank == 0:
        side.close()
    return found


def failed_on_rank_one(rank: int, root: str) -> list[str]:
    if rank == 1:
        with pytest.raises(WorkerUnavailableError):
            AsyncCheckpointer(endpoint=f"ipc://{root}/none/none.sock", worker_start_timeout_s=0.5)
    with AsyncCheckpointer(plan_timeout_s=20) as checkpointer:
        return [written(checkpointer, f"{root}/{n}", step=n) for n in range(3)]


@pytest.mark.parametrize("on_one_rank", [one_more_on_rank_zero, failed_on_rank_one])
def test_a_checkpointer_that_one_rank_alone_has_made_costs_no_save(
    on_one_rank: Any, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    assert run(shared_worker, on_one_rank, str(tmp_path)) == [["written"] * 3] * 2


def closes_and_makes_another(rank: int, root: str, who: int, slots: int) -> list[str]:
    options = {"plan_timeout_s": 5, "commit_timeout_s": 8, "slots": slots}
    checkpointer = AsyncCheckpointer(**options)
    found = []
    for n in range(slots + 5):
        if n == 2 and rank == who:
            checkpointer.close()
            checkpointer = AsyncCheckpointer(**options)
        torch.distributed.barrier()
        found.append(written(checkpointer, f"{root}/{n}", step=n))
    checkpointer.close()
    return found


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("who", [0, 1])
def test_a_rank_that_closes_its_checkpointer_and_makes_another_costs_a_few_saves(
    who: int, slots: int, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for found in run(shared_worker, closes_and_makes_another, str(tmp_path), who, slots):
        assert found[:2] == ["written"] * 2 and found[slots + 3 :] == ["written"] * 2, found


def closes_for_good(rank: int, root: str) -> list[tuple[str, bool]]:
    found = []
    with AsyncCheckpointer(commit_timeout_s=DEADLINE_S, slots=1) as checkpointer:
        assert written(checkpointer, f"{root}/0") == "written"
        real_worker.limit_commits(checkpointer, 8)  # these limits are for the saves that cannot end well
        object.__setattr__(checkpointer.config, "plan_timeout_s", 2)
        if rank == 1:
            checkpointer.close()
        torch.distributed.barrier()
        for n in range(1, 4 if rank == 0 else 1):
            began = time.monotonic()
            found.append((written(checkpointer, f"{root}/{n}"), time.monotonic() - began < 30))
        torch.distributed.barrier()
    return found


def test_a_rank_that_closes_its_checkpointer_for_good_is_waited_for_until_the_deadline(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    found = run(shared_worker, closes_for_good, str(tmp_path))[0]
    assert found == [("SaveFailedError", True), ("PlanTimeoutError", True), ("PlanTimeoutError", True)]


def one_save_more(rank: int, root: str, own_step: bool, slots: int) -> list[str]:
    barrier = torch.distributed.barrier
    with AsyncCheckpointer(plan_timeout_s=8, commit_timeout_s=8, slots=slots) as checkpointer:
        found = [written(checkpointer, f"{root}/0")]
        if rank == 0:
            written(checkpointer, f"{root}/extra", step=100)
        for n in range(1, slots + 4):
            barrier()
            found.append(written(checkpointer, f"{root}/{n}", **({} if own_step else {"step": n})))
    return found


@pytest.mark.parametrize("own_step", [False, True], ids=["steps are given", "saves are counted"])
@pytest.mark.parametrize("slots", [1, 2])
def test_one_save_too_many_on_one_rank_costs_a_few(
    slots: int, own_step: bool, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    first, second = run(shared_worker, one_save_more, str(tmp_path), own_step, slots)
    for found in (first, second):
        assert found[0] == "written" and found[slots + 2 :] == ["written"] * 2, (first, second)


def one_save_more_at_first(rank: int, root: str, same: bool) -> list[str]:
    with AsyncCheckpointer(plan_timeout_s=3, commit_timeout_s=8, overwrite=True) as checkpointer:
        if rank == 0:
            written(checkpointer, f"{root}/last" if same else f"{root}/extra", step=100)
        torch.distributed.barrier()
        found = []
        for n in range(4):
            torch.distributed.barrier()
            found.append(written(checkpointer, f"{root}/last" if same else f"{root}/{n}", step=n))
        return found


@pytest.mark.parametrize("same", [False, True], ids=["a path for each", "one path for all"])
def test_one_save_too_many_before_the_ranks_have_met(
    same: bool, tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for found in run(shared_worker, one_save_more_at_first, str(tmp_path), same):
        assert found[-1] == "written", found


def no_path_on_rank_one(rank: int, root: str, kind: type[Any]) -> list[Any]:
    found: list[Any] = []
    with kind(plan_timeout_s=60) as checkpointer:
        for path in (f"{root}/0" if rank == 0 else "ftp://nowhere/0", f"{root}/1"):
            began = time.monotonic()
            try:
                handle = checkpointer.save(STATE, path, step=1)
                if handle is not None:
                    handle.written.result(DEADLINE_S)
                found.append(("written", True))
            except AsyncCkptError as error:
                rank_named = error.rank if isinstance(error, SaveFailedError) else None
                found.append((type(error).__name__, rank_named, time.monotonic() - began < 30))
            torch.distributed.barrier()
    return found


@pytest.mark.parametrize("kind", [AsyncCheckpointer, SyncCheckpointer])
def test_ranks_do_not_wait_for_one_whose_path_is_none(
    kind: type[Any], tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    first, second = run(shared_worker, no_path_on_rank_one, str(tmp_path), kind)
    assert first == [("SaveFailedError", 1, True), ("written", True)]
    assert second == [("UnsupportedPathError", None, True), ("written", True)]


def syncs_once_more(rank: int, root: str) -> list[str]:
    found = []
    with SyncCheckpointer(plan_timeout_s=3) as checkpointer:
        for n in range(4):
            torch.distributed.barrier()
            if n == 1 and rank == 0:
                with pytest.raises(AsyncCkptError):
                    checkpointer.save(STATE, f"{root}/extra", step=100)
            torch.distributed.barrier()
            with contextlib.suppress(RanksDisagreeError):  # one counts a save more than the other, until they have met
                checkpointer.save(STATE, f"{root}/{n}")
                found.append(f"{n}: {asyncckpt.open_checkpoint(f'{root}/{n}').step}")
    return found


def test_a_synchronous_save_too_many_fails_alone_and_the_ranks_count_alike_after_it(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    first, second = run(shared_worker, syncs_once_more, str(tmp_path))
    assert first == second == ["0: 0", "2: 3", "3: 4"]


def restarted(rank: int, root: str) -> list[str]:
    os.environ |= {"TORCHELASTIC_RESTART_COUNT": str(rank), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    with AsyncCheckpointer(plan_timeout_s=20) as checkpointer:
        found = [written(checkpointer, f"{root}/{n}", step=n) for n in range(2)]
    restored = asyncckpt.restore_latest(root, {"w": torch.zeros(10)})
    return [*found, str(restored and restored.step)]


def test_agents_that_have_restarted_their_ranks_not_equally_often_meet(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    assert run(shared_worker, restarted, str(tmp_path)) == [["written", "written", "1"]] * 2


def a_manager_more(rank: int, root: str) -> list[str]:
    if rank == 0:
        CheckpointManager(f"{root}/other", save_interval_s=3600).close()
    found = []
    with CheckpointManager(f"{root}/main", save_interval_s=0.01) as manager:
        for step in range(1, 30):
            time.sleep(0.02)
            torch.distributed.barrier()
            if manager.should_save(step):
                found.append(str(step))
                manager.save(step, STATE)
        manager.wait(DEADLINE_S)
    return found


def test_a_manager_that_one_rank_alone_has_made_keeps_the_others_in_step(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    first, second = run(shared_worker, a_manager_more, str(tmp_path))
    assert first and first == second

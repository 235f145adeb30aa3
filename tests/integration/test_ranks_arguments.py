"""Arguments that only show with several ranks, or with saves in flight."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import rank_processes
import torch
from overlapping import Gate
from real_worker import DEADLINE_S, RealWorker, written

import asyncckpt
from asyncckpt import AsyncCheckpointer, SyncCheckpointer
from asyncckpt.errors import PlanTimeoutError, SaveFailedError


def saves_unlike(rank: int, root: str, kind: str, replicated: str) -> None:
    state = {"w": torch.arange(3000.0) + rank}
    made: Any = AsyncCheckpointer if kind == "async" else SyncCheckpointer
    with made(replicated=replicated) as checkpointer:
        handle = checkpointer.save(state, f"{root}/a")
        if handle is not None:
            handle.written.result(DEADLINE_S)


@pytest.mark.parametrize("kind", ["async", "sync"])
@pytest.mark.parametrize(("replicated", "names"), [("check", ["w@rank0", "w@rank1"]), ("assume", ["w"])])
def test_replicated_says_whether_replicas_are_compared_or_taken_on_trust(
    shared_worker: RealWorker, tmp_path: pathlib.Path, kind: str, replicated: str, names: list[str]
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    rank_processes.run(2, saves_unlike, str(tmp_path), kind, replicated, environ=environ)
    with asyncckpt.open_checkpoint(tmp_path / "a") as found:
        assert sorted(found.stored_tensors) == names


def writes_late(rank: int, root: str, commit_timeout_s: float) -> str:
    with SyncCheckpointer(commit_timeout_s=DEADLINE_S) as checkpointer:
        checkpointer.save({"w": torch.ones(3)}, f"{root}/before")
        object.__setattr__(checkpointer.config, "commit_timeout_s", commit_timeout_s)
        if rank == 1:
            steps: Any = checkpointer._writer._steps  # type: ignore[attr-defined]
            write_files = steps.write_files

            def late(*arguments: Any) -> Any:
                rank_processes.talk().hear()
                return write_files(*arguments)

            steps.write_files = late
        try:
            checkpointer.save({"w": torch.ones(3)}, f"{root}/late")
        except (PlanTimeoutError, SaveFailedError) as error:
            return type(error).__name__
        return ""


@pytest.mark.parametrize(("commit_timeout_s", "is_saved"), [(0.4, False), (DEADLINE_S, True)])
def test_a_synchronous_save_waits_commit_timeout_s_for_the_other_ranks(
    tmp_path: pathlib.Path, commit_timeout_s: float, is_saved: bool
) -> None:
    with rank_processes.running(2, writes_late, str(tmp_path), commit_timeout_s) as ranks:
        if is_saved:
            ranks.send(1, "go on")
        found = [ranks.receive(0)]
        if not is_saved:
            ranks.send(1, "go on")
        found.append(ranks.receive(1))
    assert [name == "" for name in found] == [is_saved] * 2
    assert (tmp_path / "before" / "manifest.json").exists()
    assert (tmp_path / "late" / "manifest.json").exists() is is_saved


def test_latest_checkpoint_waits_timeout_s_for_saves_in_flight(
    shared_worker: RealWorker, tmp_path: pathlib.Path, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, staging="overlap") as checkpointer:
        gate.open()
        written(checkpointer.save({"w": torch.ones(3)}, tmp_path / "a"))
        gate.close()
        handle = checkpointer.save({"w": torch.ones(3)}, tmp_path / "b")
        for timeout_s in (0.1, 0.6):
            began = time.monotonic()
            assert checkpointer.latest_checkpoint(tmp_path, timeout_s=timeout_s) == str(tmp_path / "a")
            assert timeout_s <= time.monotonic() - began < timeout_s + 50
        assert "are still unfinished" in caplog.text
        gate.open()
        assert checkpointer.latest_checkpoint(tmp_path, timeout_s=DEADLINE_S) == str(tmp_path / "b")
        written(handle)

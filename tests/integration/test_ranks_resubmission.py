"""Two ranks whose worker dies at a call of its storage: the next one gets the memory of both for one checkpoint."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import states
import torch
from own_worker import dying_worker
from real_worker import DEADLINE_S, manifest_of

import asyncckpt
from asyncckpt import AsyncCheckpointer


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"large": torch.randn(2000, 300, generator=generator), "step": step}


def saves(rank: int, root: str) -> list[Any]:
    outcome = []
    with AsyncCheckpointer(commit_timeout_s=30) as checkpointer:
        for step in range(3):
            handle = checkpointer.save(state_of(step), f"{root}/{step}")
            report = handle.written.result(DEADLINE_S)
            outcome.append((report.details.get("resubmitted", 0), report.details.get("kept")))
    return outcome


@pytest.mark.parametrize(
    ("kill", "kept"),
    [
        pytest.param("pwrite:1:9:1", {False}, id="while it writes", marks=pytest.mark.soak),
        pytest.param("close:10:9:1", {False, True}, id="while some files are durable"),
        pytest.param("link:1:9:0", {True}, id="before the manifest stands"),
        pytest.param("link:1:9:1", {None}, id="after the manifest stands"),
    ],
)
def test_both_ranks_go_on_with_the_next_worker(
    kill: str, kept: set[bool | None], endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(endpoint_dir), "ASYNCCKPT_JOB": "dies"}
    with dying_worker(kill, environ):
        results = rank_processes.run(2, saves, str(tmp_path), environ=environ)
    for rank in results:
        # Where the manifest stands the other rank's memory may be enough for the next worker to tell both of it.
        assert rank[0][0] in ({0, 1} if kept == {None} else {1})
        assert [resubmitted for resubmitted, _ in rank[1:]] == [0, 0]
        assert rank[0][1] in kept
    assert any(rank[0][0] for rank in results)
    for step in range(3):
        states.assert_same(asyncckpt.load(tmp_path / str(step)), state_of(step))
        assert manifest_of(tmp_path / str(step))["world_size"] == 2

"""Several ranks with `reuse="auto"`: each links what it has written itself, at any world size, on one node or two."""

from __future__ import annotations

import os
import pathlib
from typing import Any

import pytest
import rank_processes
import states
import torch
from real_worker import DEADLINE_S, RealWorker

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, SyncCheckpointer
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import verify_checkpoint

MIB = 1 << 20


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Return replicas, which the ranks split and of which half never changes, and a tensor that each rank has alone."""
    generator = torch.Generator().manual_seed(0)
    base = {f"layers.{n}.w": torch.randn(1024, 1024, generator=generator) for n in range(4)}
    trained = {"head": torch.full((1024, 1024), float(step)), "own": PerRank(torch.full((30_000,), float(rank)))}
    return {"base": base, **trained, "step": step}


def saves(rank: int, root: str, endpoints: list[str], first: int, is_sync: bool) -> list[int]:
    found = []
    kind: Any = SyncCheckpointer if is_sync else AsyncCheckpointer
    where: dict[str, Any] = {} if is_sync else {"endpoint": endpoints[rank % len(endpoints)]}
    with kind(reuse="auto", **where) as checkpointer:
        for step in range(first, first + 3):
            handle = checkpointer.save(state_of(rank, step), f"{root}/{step}", step=step)
            if handle is not None:
                found.append(handle.written.result(DEADLINE_S).details["reused_nbytes"])
            loaded = asyncckpt.load(f"{root}/{step}", source="disk")
            wanted = state_of(rank, step)
            states.assert_same(loaded, {**wanted, "own": wanted["own"].value})
    return found


def check(root: pathlib.Path, steps: range) -> None:
    """Check that all are sound, and that each but the first shares most of its bytes with the one before."""
    for step in steps:
        verdict = verify_checkpoint(str(root / str(step)), Files())
        assert verdict.faults == [] and verdict.contents is not None
        assert step == steps[0] or verdict.contents.reused_nbytes > 15 * MIB


@pytest.mark.parametrize("is_sync", [False, True])
def test_ranks_link_what_they_have_written_and_so_does_another_number_of_ranks(
    tmp_path: pathlib.Path, worker: RealWorker, is_sync: bool
) -> None:
    for n, world_size in enumerate((2, 3)):
        found = rank_processes.run(world_size, saves, str(tmp_path), [worker.endpoint], 3 * n, is_sync)
        # The worker remembers what ranks of these numbers have written; ranks that write themselves have just started.
        assert all((n > 0 and not is_sync) or reused[0] == 0 for reused in found if reused)
        assert all(min(reused[1:]) > 0 for reused in found if reused)
        check(tmp_path, range(3 * n, 3 * n + 3))
    for step in range(5):
        for name in os.listdir(tmp_path / str(step)):
            os.unlink(tmp_path / str(step) / name)
    verdict = verify_checkpoint(str(tmp_path / "5"), Files())
    assert verdict.faults == []


def test_ranks_of_two_workers_link_too(tmp_path: pathlib.Path, workers: list[RealWorker]) -> None:
    found = rank_processes.run(2, saves, str(tmp_path), [one.endpoint for one in workers], 0, False)
    assert all(reused[0] == 0 and min(reused[1:]) > 0 for reused in found)
    check(tmp_path, range(3))

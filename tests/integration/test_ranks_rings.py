"""Several ranks, some of which have less memory than what they save: one checkpoint all the same, or none."""

from __future__ import annotations

import os
import pathlib
import signal
from typing import Any

import rank_processes
import states
import torch
from real_worker import DEADLINE_S, RealWorker, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank
from asyncckpt.client.slot_stream import SlotStream
from asyncckpt.errors import AsyncCkptError

LIMITS = (1_500_000, None, 2_500_000)


def state_of(rank: int, step: int) -> dict[str, Any]:
    """Return replicas, which the ranks split, and a tensor that each has of its own."""
    generator = torch.Generator().manual_seed(step)
    own = torch.full((700_000,), float(100 * step + rank))
    return {"large": torch.randn(2000, 1500, generator=generator), "own": PerRank(own), "step": step}


def saves(rank: int, root: str, endpoint: str) -> list[Any]:
    found = []
    with AsyncCheckpointer(endpoint=endpoint, arena_limit_bytes=LIMITS[rank]) as checkpointer:
        for step in range(3):
            state = state_of(rank, step)
            report = checkpointer.save(state, f"{root}/{step}").written.result(DEADLINE_S)
            found.append(report.details.get("ring_nbytes", 0))
            states.assert_same(checkpointer.load(f"{root}/{step}"), {**state, "own": state["own"].value})
    return found


def test_ranks_with_rings_and_without_make_one_checkpoint(tmp_path: pathlib.Path, worker: RealWorker) -> None:
    results = rank_processes.run(3, saves, str(tmp_path), worker.endpoint)
    for limit, rings in zip(LIMITS, results, strict=True):
        assert all((0 < ring < limit) if limit else ring == 0 for ring in rings)


def dies_midway(rank: int, root: str, endpoint: str) -> str:
    checkpointer = AsyncCheckpointer(endpoint=endpoint, arena_limit_bytes=LIMITS[rank], on_error="warn")
    checkpointer.save(state_of(rank, 0), f"{root}/0").written.result(DEADLINE_S)
    if rank == 2:
        await_cell = SlotStream.await_cell

        def dies(stream: SlotStream, number: int) -> None:
            if number == 12:
                os.kill(os.getpid(), signal.SIGKILL)
            await_cell(stream, number)

        SlotStream.await_cell = dies  # type: ignore[method-assign]
    error = checkpointer.save(state_of(rank, 1), f"{root}/1").written.exception(DEADLINE_S)
    checkpointer.leave()
    assert isinstance(error, AsyncCkptError)
    return str(error.facts().get("code"))


def test_a_rank_that_dies_in_its_ring_ends_the_save_on_all_and_leaves_nothing(
    tmp_path: pathlib.Path, worker: RealWorker
) -> None:
    with rank_processes.running(3, dies_midway, str(tmp_path), worker.endpoint) as ranks:
        codes = [ranks.receive(rank) for rank in (0, 1)]
    assert codes == ["not_sealed", "not_sealed"]
    wait_until(lambda: not worker.status()["saves"] or worker.status()["jobs"] == 0, "nobody writes any more")
    assert not [name for name in os.listdir(tmp_path / "1") if name == "manifest.json" or "-part-" in name]
    assert asyncckpt.load(tmp_path / "0", keys=["step"])["step"] == 0

"""A worker dies, and then its trainer: what had been committed before is in the next worker's memory all the same."""

from __future__ import annotations

import pathlib
import time
from typing import Any

import pytest
import rank_processes
import torch
from own_worker import lose
from real_worker import DEADLINE_S, RealWorker, stop_whoever_serves, wait_until

import asyncckpt
from asyncckpt import AsyncCheckpointer


def state_of(step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {"w": torch.randn(2000, 300, generator=generator), "step": step}


def loses_its_worker(rank: int, root: str, options: dict[str, Any], saves_again: bool) -> None:
    checkpointer = AsyncCheckpointer(**options)
    checkpointer.save(state_of(1), f"{root}/1").written.result(DEADLINE_S)
    lose(checkpointer)
    if saves_again:
        assert checkpointer.save(state_of(2), f"{root}/2").written.result(DEADLINE_S)
    rank_processes.talk().say(checkpointer._process.endpoint)  # type: ignore[attr-defined]
    time.sleep(DEADLINE_S)


@pytest.mark.parametrize("saves_again", [False, True], ids=["no save since", "a save since"])
def test_a_snapshot_that_is_kept_outlives_worker_and_trainer(
    saves_again: bool, endpoint_dir: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    environ = {"XDG_RUNTIME_DIR": str(endpoint_dir)}
    options = {"keep_in_memory": "latest"}
    newest = 1 + saves_again
    with rank_processes.running(1, loses_its_worker, str(tmp_path), options, saves_again, environ=environ) as ranks:
        endpoint = ranks.receive(0)
        try:

            def held() -> list[int]:
                return [snapshot.step for snapshot in asyncckpt.held_snapshots(tmp_path, endpoint=endpoint)]

            wait_until(lambda: held() == list(range(newest, 0, -1)), "the next worker has what the trainer held")
            ranks.kill()
            wait_until(lambda: not RealWorker(endpoint).status()["sessions"], "the trainer's death is noticed")
            with AsyncCheckpointer(endpoint=endpoint) as restarted:
                found = restarted.load(tmp_path / str(newest), source="memory")
            assert torch.equal(found["w"], state_of(newest)["w"]) and found["step"] == newest
        finally:
            stop_whoever_serves(endpoint)

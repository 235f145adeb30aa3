"""PerRank(reshard=...) with real ranks: four save, two and six load, in every way."""

from __future__ import annotations

import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import rank_processes
import torch
from real_worker import RealWorker

import asyncckpt
from asyncckpt import AsyncCheckpointer, CheckpointManager, PerRank, SyncCheckpointer
from asyncckpt.errors import AsyncCkptError, ReshardError, SharedLoadError

SAVED = 4
ROWS = 12  # of all ranks together


def state_of(rank: int) -> dict[str, Any]:
    """Each rank has its rows of a list and of a tensor, and a common tensor beside them."""
    mine = range(rank * ROWS // SAVED, (rank + 1) * ROWS // SAVED)
    own = {"rows": list(mine), "values": torch.tensor(list(mine), dtype=torch.float32)}
    return {"w": torch.arange(50_000.0), "own": PerRank(own), "step": 3}


def share(values: list[Any], rank: int, world_size: int) -> Any:
    """Return this rank's part of the rows of all ranks."""
    rows = [row for value in values for row in value["rows"]]
    whole = torch.cat([value["values"] for value in values])
    cut = slice(rank * ROWS // world_size, (rank + 1) * ROWS // world_size)
    return {"rows": rows[cut], "values": whole[cut]}


def saves(rank: int, root: str, endpoint: str) -> None:
    with AsyncCheckpointer(endpoint=endpoint) as checkpointer:
        checkpointer.save(state_of(rank), f"{root}/step-00000003", step=3).written.result(60)


def loads(rank: int, root: str, endpoint: str) -> list[list[int]]:
    """Return the rows that this rank gets in each way to load."""
    found = []

    def load_with(call: Callable[[dict[str, Any]], Any]) -> None:
        state = {"w": torch.zeros(50_000), "own": PerRank(None, share), "step": 0}
        assert call(state) is not None
        own = state["own"].value  # type: ignore[union-attr]
        assert state["step"] == 3 and state["w"][-1] == 49_999  # type: ignore[index]
        assert own["values"].tolist() == own["rows"]
        found.append(own["rows"])

    path = f"{root}/step-00000003"
    load_with(lambda state: asyncckpt.load(path, state))
    load_with(lambda state: asyncckpt.load(path, state, redundant_reads="broadcast"))
    load_with(lambda state: asyncckpt.restore_latest(root, state))
    with SyncCheckpointer() as checkpointer:
        load_with(lambda state: checkpointer.load(path, state))
    with CheckpointManager(root, endpoint=endpoint, preemption_signal=()) as manager:
        load_with(manager.restore)
    return found


@pytest.mark.parametrize("world_size", [1, 2, 6])
def test_ranks_of_another_number_share_what_all_ranks_saved(
    shared_worker: RealWorker, tmp_path: pathlib.Path, world_size: int
) -> None:
    rank_processes.run(SAVED, saves, str(tmp_path), shared_worker.endpoint)
    found = rank_processes.run(world_size, loads, str(tmp_path), shared_worker.endpoint)
    assert len(found[0]) == 5
    for ways in zip(*found, strict=True):
        assert [row for rows in ways for row in rows] == list(range(ROWS))


def one_fails(rank: int, root: str) -> list[str]:
    def fails(values: list[Any], rank: int, world_size: int) -> Any:
        if rank == 1:
            raise ValueError("not on this rank")
        return share(values, rank, world_size)

    errors = []
    calls: list[Callable[[dict[str, Any]], Any]] = [
        lambda state: asyncckpt.load(f"{root}/step-00000003", state, redundant_reads="broadcast"),
        lambda state: asyncckpt.restore_latest(root, state),
    ]
    for call in calls:
        try:
            call({"own": PerRank(None, fails), "step": 0})
        except AsyncCkptError as error:
            errors.append(type(error).__name__)
    return errors


def test_an_error_on_one_rank_ends_a_load_of_all_ranks_on_all(
    shared_worker: RealWorker, tmp_path: pathlib.Path
) -> None:
    rank_processes.run(SAVED, saves, str(tmp_path), shared_worker.endpoint)
    found = rank_processes.run(2, one_fails, str(tmp_path))
    assert found == [[SharedLoadError.__name__] * 2, [ReshardError.__name__] * 2]

"""`state_dict()` of an object is called once a save, at the same point on all ranks: it may be a collective."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import torch.distributed as dist
from real_worker import DEADLINE_S

from asyncckpt import AsyncCheckpointer, CheckpointerConfig, SyncCheckpointer

CONFIG = CheckpointerConfig(plan_timeout_s=20.0)
"""Ranks that wait for each other in two places end soon."""


class Gathered:
    """Something whose `state_dict()` needs all ranks."""

    def __init__(self) -> None:
        self.calls = 0
        self.values = {"w": torch.zeros(4)}

    def state_dict(self) -> dict[str, Any]:
        self.calls += 1
        dist.barrier()
        return dict(self.values)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def calls_of(model: Gathered, save: Any) -> Iterator[int]:
    """Save five times, the tensors others from the third on; yield the calls of each."""
    for step in range(5):
        if step == 2:
            model.values["late"] = torch.ones(3)
        before = model.calls
        save(step)
        yield model.calls - before


def saves_asynchronously(rank: int, root: str) -> list[int]:
    model = Gathered()
    with AsyncCheckpointer(config=CONFIG) as checkpointer:
        checkpointer.prepare({"model": model})
        prepared = model.calls
        return [
            prepared,
            *calls_of(model, lambda n: checkpointer.save({"model": model}, f"{root}/s{n}").written.result(DEADLINE_S)),
        ]


def test_an_asynchronous_save_calls_state_dict_once(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    found = rank_processes.run(2, saves_asynchronously, str(tmp_path), environ=environ)
    assert found == [[1] * 6] * 2


def saves_synchronously(rank: int, root: str, replace_on: int) -> list[int]:
    model = Gathered()
    checkpointers = [SyncCheckpointer(config=CONFIG)]

    def save(step: int) -> None:
        if step == 1 and rank == replace_on:  # it knows nothing of what the ranks have agreed on
            checkpointers.append(SyncCheckpointer(config=CONFIG))
        checkpointers[-1].save({"model": model}, f"{root}/s{step}", step=step)

    found = list(calls_of(model, save))
    for checkpointer in checkpointers:
        checkpointer.close()
    return found


@pytest.mark.parametrize("replace_on", [0, 1, -1])
def test_a_synchronous_save_calls_state_dict_once(tmp_path: pathlib.Path, replace_on: int) -> None:
    assert rank_processes.run(2, saves_synchronously, str(tmp_path), replace_on) == [[1] * 5] * 2

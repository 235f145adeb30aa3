"""Every kind of leaf by way of a real worker: objects with a state, numpy's values, and pickles that it never opens."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import real_worker
import states
import torch
from real_worker import RealWorker, written

import asyncckpt
from asyncckpt import AsyncCheckpointer, PerRank, SyncCheckpointer
from asyncckpt.errors import PickledLeafError, UnsupportedLeafError

np: Any = None
if states.every_array():
    import numpy as np


class Custom:
    """A type that nobody knows; it leaves a trace where it is unpickled."""

    def __init__(self, trace: str) -> None:
        self.trace = trace

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        with open(self.trace, "a") as file:
            file.write("unpickled\n")


def made(seed: int) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Embedding(7, 3), torch.nn.LSTM(3, 3))
    model.add_module("head", torch.nn.Linear(3, 7))
    model.head.weight = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    return {"model": model, "optim": optimizer, "schedule": scheduler, "scaler": torch.amp.GradScaler("cpu")}


def trained(state: dict[str, Any], steps: int) -> None:
    model, optimizer = state["model"], state["optim"]
    for n in range(steps):
        optimizer.zero_grad()
        hidden, _ = model[1](model[0](torch.arange(n, n + 5) % 7))
        torch.nn.functional.cross_entropy(model.head(hidden), torch.arange(5)).backward()
        optimizer.step()
        state["schedule"].step()


def assert_same_states(found: dict[str, Any], expected: dict[str, Any]) -> None:
    """Entry by entry: a tied weight's two entries are two tensors over one memory in every new `state_dict()`."""
    for name in ("model", "optim", "schedule", "scaler"):
        one, other = found[name].state_dict(), expected[name].state_dict()
        assert list(one) == list(other)
        for key, value in other.items():
            states.assert_same({key: one[key]}, {key: value})


def test_objects_are_saved_behind_the_back_and_resume_where_they_were(
    checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    state = made(0)
    trained(state, 3)
    handle = checkpointer.save({**state, "step": 3}, tmp_path / "a")
    trained(state, 2)  # what is staged must not change with the objects
    written(handle)
    resumed = made(1)
    assert checkpointer.load(tmp_path / "a", resumed, strict=True) is resumed
    trained(resumed, 2)
    assert_same_states(resumed, state)
    assert resumed["model"].head.weight is resumed["model"][0].weight
    assert asyncckpt.load(tmp_path / "a")["step"] == 3


def test_the_plan_of_objects_is_made_once(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    state = made(0)
    trained(state, 1)
    for n in range(4):
        written(checkpointer.save({**state, "step": n}, tmp_path / str(n)))
    assert checkpointer._stager.plans.n_plans_made == 1  # type: ignore[attr-defined]


@pytest.mark.skipif(np is None, reason="numpy is not installed")
def test_arrays_may_be_changed_once_save_has_returned(checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path) -> None:
    array = np.arange(1 << 20)
    handle = checkpointer.save({"x": array, "last": array[-1]}, tmp_path / "a")
    array[:] = -1
    written(handle)
    found = asyncckpt.load(tmp_path / "a")
    states.assert_same(found, {"x": np.arange(1 << 20), "last": np.int64((1 << 20) - 1)})


def test_pickles_go_through_a_worker_that_does_not_open_them(
    shared_worker: RealWorker, checkpointer: AsyncCheckpointer, tmp_path: pathlib.Path
) -> None:
    trace, path = tmp_path / "trace", tmp_path / "a"
    state = {"x": Custom(str(trace)), "w": torch.ones(3)}
    with pytest.raises(UnsupportedLeafError, match="'x'"):
        checkpointer.save(state, path)
    with AsyncCheckpointer(endpoint=shared_worker.endpoint, allow_pickle=True) as allowed:
        written(allowed.save(state, path))
        assert not trace.exists()
        with pytest.raises(PickledLeafError, match="'x'"):
            checkpointer.load(path)
        assert not trace.exists()
        assert allowed.load(path)["x"].trace == str(trace)
    assert trace.read_text() == "unpickled\n"


class Position:
    """Data position: a state of its own for each rank."""

    def __init__(self, at: int) -> None:
        self.at = at

    def state_dict(self) -> dict[str, Any]:
        return {"at": PerRank(self.at), "epoch": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]
        assert state["epoch"] == 3


def of_rank(rank: int, seed: int) -> dict[str, Any]:
    state = {**made(seed), "data": Position(rank + 100 * seed)}
    if np is not None:
        state |= {"common": np.arange(1000.0) + seed, "own": np.full(3, rank + seed), "scalar": np.float32(seed)}
    return state


def both_ways(rank: int, root: str, endpoint: str) -> None:
    state = of_rank(rank, 1)
    trained(state, 1)
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(state, f"{root}/sync")
    with AsyncCheckpointer(endpoint=endpoint) as other:
        written(other.save(state, f"{root}/async"))
        written(other.save(state, f"{root}/async-2"))
    for name in ("sync", "async", "async-2"):
        target = of_rank(rank, 2)
        asyncckpt.load(f"{root}/{name}", target, strict=True)
        assert target["data"].at == rank + 100
        assert_same_states(target, state)
        states.assert_same({k: target.get(k) for k in ("common", "own")}, {k: state.get(k) for k in ("common", "own")})


def test_ranks_share_objects_and_arrays_and_keep_their_own(tmp_path: pathlib.Path, endpoint: str) -> None:
    with real_worker.running(endpoint):
        rank_processes.run(2, both_ways, str(tmp_path), endpoint)
    assert len(list((tmp_path / "async").glob("rank-*.safetensors"))) == 2

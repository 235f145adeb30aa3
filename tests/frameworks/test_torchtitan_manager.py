"""The manager with torchtitan's methods: needs torch alone. Its `step-N` and those of stock DCP load either way."""

from __future__ import annotations

import os
import pathlib
import random
import warnings
from typing import Any

import pytest
import rank_processes
import real_worker
import torch
import trainings

from asyncckpt.errors import CheckpointNotFoundError, ConfigError
from asyncckpt.integrations.torchtitan import CheckpointManager

pytest.importorskip("numpy", reason="torch.distributed.checkpoint needs numpy")


class State:
    """torchtitan's `TrainState`, as small as it gets."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


class Training:
    """A model that is trained, and its manager."""

    def __init__(self, folder: pathlib.Path, endpoint: str, **options: Any) -> None:
        self.model = torch.nn.Linear(4, 4)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.state = State()
        states = {"train_state": self.state}
        options = {"interval": 2, "attach": [self.optimizer], **options}
        self.manager = CheckpointManager(
            None, [self.model], self.optimizer, None, states, folder=folder, endpoint=endpoint, **options
        )

    def run(self, last: int) -> None:
        while self.state.step < last:
            self.model(torch.ones(2, 4)).sum().backward()
            self.manager.maybe_wait_for_staging()
            self.optimizer.step()
            self.state.step += 1
            self.manager.save(self.state.step, last_step=self.state.step == last)
        self.manager.close()


def test_newest_step_is_loaded_and_the_last_few_are_kept(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    first = Training(tmp_path, worker.endpoint, keep_latest_k=2)
    assert not first.manager.load()
    first.run(9)
    assert sorted(os.listdir(tmp_path)) == ["step-8", "step-9"]
    second = Training(tmp_path, worker.endpoint)
    assert second.manager.load() and second.state.step == 9
    assert torch.equal(second.model.weight, first.model.weight)
    assert torch.equal(
        second.optimizer.state_dict()["state"][0]["exp_avg"], first.optimizer.state_dict()["state"][0]["exp_avg"]
    )
    assert second.manager.load(step=8) and second.state.step == 8
    with pytest.raises(CheckpointNotFoundError, match="no step 4"):
        second.manager.load(step=4)
    second.manager.close()


def test_disabled_and_excluded_and_model_only_mean_what_they_say(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    off = Training(tmp_path, worker.endpoint, enable=False)
    assert not off.manager.save(2) and not off.manager.load()
    only = Training(tmp_path, worker.endpoint, load_only=True)
    assert not only.manager.save(2, last_step=True)
    only.manager.close()
    Training(tmp_path, worker.endpoint, enable_first_step_checkpoint=True, interval=100).run(2)
    assert sorted(os.listdir(tmp_path)) == ["step-1", "step-2"]
    excluding = Training(tmp_path, worker.endpoint, exclude_from_loading=["train_state"])
    assert excluding.manager.load() and excluding.state.step == 0
    excluding.manager.close()


@pytest.mark.parametrize("wrong", [{"keep_latest_k": 1}, {"interval": 0}, {"exclude_from_loading": ["nothing"]}])
def test_impossible_settings_are_refused(wrong: dict[str, Any], tmp_path: pathlib.Path) -> None:
    with pytest.raises(ConfigError):
        Training(tmp_path, "ipc:///nowhere/w.sock", **wrong)


def _stock(rank: int, ours: str, theirs: str, endpoint: str) -> list[bool]:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def trained(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(seed)
        model = torch.nn.Linear(6, 5)
        fully_shard(model, mesh=init_device_mesh("cpu", (2,)))
        optimizer = torch.optim.AdamW(model.parameters())
        model(torch.ones(2, 6)).sum().backward()
        optimizer.step()
        return model, optimizer

    def same(a: torch.nn.Module, b: torch.nn.Module) -> bool:
        pairs = zip(a.parameters(), b.parameters(), strict=True)
        return all(
            isinstance(x, DTensor) and isinstance(y, DTensor) and torch.equal(x.to_local(), y.to_local())
            for x, y in pairs
        )

    model, optimizer = trained(1)
    state = State()
    state.step = 3
    manager = CheckpointManager(
        None, [model], optimizer, None, {"train_state": state}, folder=ours, interval=1, endpoint=endpoint
    )
    manager.save(3)
    manager.maybe_wait_for_saving()
    other, other_optimizer = trained(2)
    wanted = {**other.state_dict(), "optimizer": other_optimizer.state_dict(), "train_state": {"step": torch.tensor(0)}}
    dcp.load(wanted, checkpoint_id=f"{ours}/step-3")
    by_stock = same(model, other) and int(wanted["train_state"]["step"]) == 3
    manager.close()

    dcp.save({**model.state_dict(), "train_state": {"step": torch.tensor(7)}}, checkpoint_id=f"{theirs}/step-7")
    third, third_optimizer = trained(3)
    manager = CheckpointManager(
        None,
        [third],
        third_optimizer,
        None,
        {"train_state": state},
        folder=theirs,
        exclude_from_loading=["optimizer"],
        endpoint=endpoint,
    )
    by_ours = manager.load() and same(model, third) and state.step == 7
    manager.close()
    return [by_stock, by_ours]


def test_stock_dcp_loads_ours_and_the_manager_loads_what_stock_has_saved(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    found = rank_processes.run(2, _stock, str(tmp_path / "ours"), str(tmp_path / "theirs"), worker.endpoint)
    assert found == [[True, True], [True, True]]


def test_the_newest_is_the_one_that_was_saved_last_whoever_saved_it(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    import torch.distributed.checkpoint as dcp

    def stock(step: int) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            state = {**torch.nn.Linear(4, 4).state_dict(), "train_state": {"step": torch.tensor(step)}}
            dcp.save(state, checkpoint_id=str(tmp_path / f"step-{step}"))

    def loaded(step: int = -1) -> int:
        training = Training(tmp_path, worker.endpoint, exclude_from_loading=["optimizer"])
        assert training.manager.load(step)
        training.manager.close()
        return training.state.step

    Training(tmp_path, worker.endpoint).run(4)
    assert loaded() == 4
    stock(9)
    assert loaded() == 9, "stock went on from ours"
    training = Training(tmp_path, worker.endpoint, exclude_from_loading=["optimizer"])
    assert training.manager.load(4)
    training.run(6)
    assert loaded() == 6, "step 9 was left behind"
    assert loaded(9) == 9


def test_interrupted_it_ends_as_an_uninterrupted_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "60"]
    found = trainings.interrupted("torchtitan_loop", arguments, worker.endpoint, tmp_path, rng, last_step=50)
    whole = ["--dir", str(tmp_path / "whole"), "--steps", "60"]
    assert [found] == trainings.result("torchtitan_loop", whole, worker.endpoint)

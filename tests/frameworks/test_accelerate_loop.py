"""Accelerate: what `save_state` stages is what the stock one writes and the stock `load_state` reads."""

from __future__ import annotations

import os
import pathlib
import random

import pytest
import rank_processes
import real_worker
import torch
import trainings

pytest.importorskip("accelerate", reason="`make test-frameworks` installs accelerate")
pytestmark = pytest.mark.timeout(600)


def test_directories_hold_what_stock_puts_there_and_stock_goes_on_from_them(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    ours, stock = tmp_path / "ours", tmp_path / "stock"
    trainings.result("accelerate_loop", ["--dir", str(ours), "--steps", "14"], worker.endpoint)
    trainings.result("accelerate_loop", ["--dir", str(stock), "--steps", "14", "--stock"], worker.endpoint)
    assert sorted(os.listdir(ours / "checkpoints")) == ["checkpoint_2", "checkpoint_3"], "total_limit=2"
    a, b = ours / "checkpoints" / "checkpoint_3", stock / "checkpoints" / "checkpoint_3"
    assert sorted(os.listdir(a)) == sorted(os.listdir(b))
    assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
    states = [torch.load(one / "optimizer.bin", weights_only=True)["state"] for one in (a, b)]
    assert all(torch.equal(states[0][n]["exp_avg"], states[1][n]["exp_avg"]) for n in states[1])
    resumed = [
        trainings.result("accelerate_loop", ["--dir", str(d), "--steps", "20", "--stock"], worker.endpoint)
        for d in (ours, stock)
    ]
    assert resumed[0] == resumed[1]


def _saves(rank: int, directory: str, endpoint: str, kind: str, limit: int, iteration: int) -> str:
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    from asyncckpt.integrations.accelerate import AsyncAccelerator

    os.environ.pop("RANK"), os.environ.pop("WORLD_SIZE")
    project = ProjectConfiguration(directory, automatic_checkpoint_naming=True, total_limit=limit, iteration=iteration)
    options = {"checkpointer_options": {"endpoint": endpoint}} if kind == "ours" else {}
    accelerator = (AsyncAccelerator if kind == "ours" else Accelerator)(cpu=True, project_config=project, **options)
    accelerator.prepare(torch.nn.Linear(2, 2))
    try:
        accelerator.save_state()
    except ValueError as error:
        return str(error)
    finally:
        accelerator.end_training()
    return ""


@pytest.mark.parametrize("kind", ["ours", "stock"])
def test_a_number_that_is_taken_is_refused_and_costs_no_checkpoint(
    kind: str, worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    def save(iteration: int) -> str:
        arguments = (str(tmp_path), worker.endpoint, kind, 4, iteration)
        return str(rank_processes.run(1, _saves, *arguments, group=False, timeout_s=trainings.TIMEOUT_S)[0])

    assert [save(n) for n in (7, 8)] == ["", ""]
    before = (tmp_path / "checkpoints" / "checkpoint_7" / "model.safetensors").read_bytes()
    assert "already exists" in save(7)
    assert sorted(os.listdir(tmp_path / "checkpoints")) == ["checkpoint_7", "checkpoint_8"]
    assert (tmp_path / "checkpoints" / "checkpoint_7" / "model.safetensors").read_bytes() == before


def test_interrupted_it_ends_as_an_uninterrupted_stock_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "60"]
    found = trainings.interrupted("accelerate_loop", arguments, worker.endpoint, tmp_path, rng, last_step=50)
    stock = ["--dir", str(tmp_path / "whole"), "--steps", "60", "--stock"]
    assert [found] == trainings.result("accelerate_loop", stock, worker.endpoint)

"""Accelerate: what `save_state` stages is what the stock one writes and the stock `load_state` reads."""

from __future__ import annotations

import os
import pathlib
import random

import pytest
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


def test_interrupted_it_ends_as_an_uninterrupted_stock_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "60"]
    found = trainings.interrupted("accelerate_loop", arguments, worker.endpoint, tmp_path, rng, last_step=50)
    stock = ["--dir", str(tmp_path / "whole"), "--steps", "60", "--stock"]
    assert [found] == trainings.result("accelerate_loop", stock, worker.endpoint)

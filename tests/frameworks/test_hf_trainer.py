"""Hugging Face Trainer: checkpoints made behind the training are what the stock Trainer makes and resumes from."""

from __future__ import annotations

import json
import pathlib
import random
import re
from typing import Any

import pytest
import real_worker
import torch
import trainings

from asyncckpt.manager.root_lock import RootLock

pytest.importorskip("transformers", reason="`make test-frameworks` installs transformers")
pytest.importorskip("accelerate", reason="`make test-frameworks` installs accelerate")
pytestmark = pytest.mark.timeout(600)

FILES = {
    *("config.json", "generation_config.json", "model.safetensors", "optimizer.pt", "rng_state.pth", "scheduler.pt"),
    *("trainer_state.json", "training_args.bin"),
}


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(_equal, a, b))
    return bool(a == b) if not hasattr(a, "shape") else bool((a == b).all())


def test_directories_hold_what_stock_puts_there_and_stock_goes_on_from_them(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    ours, stock = str(tmp_path / "ours"), str(tmp_path / "stock")
    trainings.result("hf_trainer", ["--dir", ours, "--steps", "8"], worker.endpoint)
    trainings.result("hf_trainer", ["--dir", stock, "--steps", "8", "--stock"], worker.endpoint)
    for name in ("checkpoint-3", "checkpoint-6", "checkpoint-8"):
        a, b = tmp_path / "ours" / name, tmp_path / "stock" / name
        assert {path.name for path in a.iterdir()} == {path.name for path in b.iterdir()} == FILES
        assert (a / "model.safetensors").read_bytes() == (b / "model.safetensors").read_bytes()
        for file in ("optimizer.pt", "scheduler.pt", "rng_state.pth"):
            assert _equal(*(torch.load(one / file, weights_only=False) for one in (a, b)))
        assert json.loads((a / "trainer_state.json").read_text()) == json.loads((b / "trainer_state.json").read_text())
    assert not (tmp_path / "ours" / ".asyncckpt").exists()
    resumed = [
        trainings.result("hf_trainer", ["--dir", d, "--steps", "11", "--stock"], worker.endpoint) for d in (ours, stock)
    ]
    assert resumed[0] == resumed[1]


def test_interrupted_by_sigkill_and_sigterm_it_ends_as_an_uninterrupted_stock_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "40"]
    found = trainings.interrupted("hf_trainer", arguments, worker.endpoint, tmp_path, rng, last_step=30)
    stock = ["--dir", str(tmp_path / "whole"), "--steps", "40", "--stock"]
    assert [found] == trainings.result("hf_trainer", stock, worker.endpoint)
    kept = sorted(path.name for path in (tmp_path / "killed").iterdir())
    assert "checkpoint-40" in kept and len(kept) == 3, kept


def test_of_two_ranks_one_is_told_to_stop_and_both_save_the_same_step(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    ours = str(tmp_path / "ours")
    arguments = ["--dir", ours, "--steps", "5000"]  # far more than it will do
    log = trainings.interrupt_one_of_two("hf_trainer", arguments, worker.endpoint, tmp_path, rng)
    first, second = (int(step) for step in re.findall(r"at step (\d+) the weights", log))
    assert first == second < 5000 and "preemption: all ranks stop" in log
    steps = ["--steps", str(first + 10)]
    found = trainings.result("hf_trainer", ["--dir", ours, *steps], worker.endpoint, world_size=2)
    stock = ["--dir", str(tmp_path / "stock"), *steps, "--stock"]
    assert found == trainings.result("hf_trainer", stock, worker.endpoint, world_size=2)


def test_a_training_in_the_directory_of_one_that_lives_is_refused(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path
) -> None:
    other = RootLock(str(tmp_path / "out"))
    other.take()
    try:
        arguments = ["--dir", str(tmp_path / "out"), "--steps", "3"]
        with pytest.raises(Exception, match="DirectoryInUseError"):
            trainings.result("hf_trainer", arguments, worker.endpoint, world_size=2)
    finally:
        other.release()
    assert not list((tmp_path / "out").iterdir())
    trainings.result("hf_trainer", arguments, worker.endpoint)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["checkpoint-3"]


def test_two_ranks_save_what_two_stock_ranks_go_on_from(worker: real_worker.RealWorker, tmp_path: pathlib.Path) -> None:
    ours = str(tmp_path / "ours")
    trainings.result("hf_trainer", ["--dir", ours, "--steps", "7"], worker.endpoint, world_size=2)
    names = {path.name for path in (tmp_path / "ours" / "checkpoint-6").iterdir()}
    assert names == (FILES - {"rng_state.pth"}) | {"rng_state_0.pth", "rng_state_1.pth"}
    resumed = trainings.result("hf_trainer", ["--dir", ours, "--steps", "12", "--stock"], worker.endpoint, world_size=2)
    stock = ["--dir", str(tmp_path / "stock"), "--steps", "12", "--stock"]
    assert resumed == trainings.result("hf_trainer", stock, worker.endpoint, world_size=2)
    assert resumed[0] == resumed[1]

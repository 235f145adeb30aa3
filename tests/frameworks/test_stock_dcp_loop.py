"""Stock `dcp.save` and `dcp.load` with our storage: the example, killed and not."""

from __future__ import annotations

import pathlib
import random

import pytest
import real_worker
import trainings

pytest.importorskip("numpy", reason="torch.distributed.checkpoint needs numpy")


def test_interrupted_it_ends_as_an_uninterrupted_training(
    worker: real_worker.RealWorker, tmp_path: pathlib.Path, rng: random.Random
) -> None:
    arguments = ["--dir", str(tmp_path / "killed"), "--steps", "40"]
    found = trainings.interrupted("stock_dcp", arguments, worker.endpoint, tmp_path, rng, last_step=35)
    whole = ["--dir", str(tmp_path / "whole"), "--steps", "40"]
    assert [found] == trainings.result("stock_dcp", whole, worker.endpoint)

"""The code of the guides to several ranks, sharded states and stock checkpoints, run by two ranks as it stands."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import rank_processes
import real_worker
import torch
from documented_code import blocks
from many_ranks import save_ranks
from real_worker import manifest_of

import asyncckpt


def runs_the_guide(rank: int, page: str, directory: str) -> dict[str, Any]:
    os.chdir(directory)
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    first, *others = blocks(f"guides/{page}")
    exec(first, names)
    step = names.get("state", {}).get("step")
    for block in others:
        exec(block, names)
    weights = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in names["model"].parameters()]
    whole = names.get("whole")
    return {
        "step": step,
        "position": names.get("position"),
        "trained": [w.detach() for w in weights],
        "loaded": list(whole["model"].values()) if whole else None,
    }


def run(page: str, directory: Path, worker: real_worker.RealWorker) -> list[dict[str, Any]]:
    environ = {"ASYNCCKPT_ENDPOINT": worker.endpoint}
    return rank_processes.run(2, runs_the_guide, page, str(directory), environ=environ)


def test_stock_checkpoints_are_saved_by_the_worker(tmp_path: Path, shared_worker: real_worker.RealWorker) -> None:
    before = shared_worker.status()["counters"].get("saves_committed", 0)
    assert [said["step"] for said in run("dcp", tmp_path, shared_worker)] == [300, 300]
    assert shared_worker.status()["counters"]["saves_committed"] == before + 1
    found = asyncckpt.open_checkpoint(tmp_path / "runs/dcp/step-300")
    assert (found.step, found.world_size) == (300, 2)


def test_several_ranks_write_one_checkpoint_and_resume_from_it(
    tmp_path: Path, shared_worker: real_worker.RealWorker
) -> None:
    for step in (1, 2):
        assert [said["step"] for said in run("several-ranks", tmp_path, shared_worker)] == [step, step]
        assert manifest_of(tmp_path / f"runs/ranks/step-{step}")["world_size"] == 2


def test_values_of_three_ranks_are_resharded_to_two(tmp_path: Path, shared_worker: real_worker.RealWorker) -> None:
    model = torch.nn.Linear(16, 4)
    states = [{"model": model, "position": asyncckpt.PerRank({"samples": 2 + rank})} for rank in range(3)]
    save_ranks(tmp_path / "runs/elastic/step-1", states)
    assert [said["position"] for said in run("several-ranks", tmp_path, shared_worker)] == [{"samples": 4}] * 2


def test_shards_are_saved_as_they_are_and_loaded_whole(tmp_path: Path, shared_worker: real_worker.RealWorker) -> None:
    for said in run("sharded-states", tmp_path, shared_worker):
        assert [tuple(t.shape) for t in said["loaded"]] == [(4, 16), (4,)]
        assert all(torch.equal(a, b) for a, b in zip(said["trained"], said["loaded"], strict=True))
    tensors = asyncckpt.open_checkpoint(tmp_path / "runs/sharded/step-1").tensors
    assert tensors["model.weight"].nbytes == 4 * 16 * 4

"""The README's blocks for several ranks and for shards, run by two."""

from __future__ import annotations

import os
import pathlib

import rank_processes
import real_worker
import torch
from real_worker import manifest_of
from test_readme import blocks

import asyncckpt


def block_with(text: str) -> str:
    """Return the README's first block of Python with `text` in it."""
    return next(block for block in blocks("python") if text in block)


def runs_the_block(rank: int, directory: str) -> str:
    os.chdir(directory)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    names = {"torch": torch, "asyncckpt": asyncckpt, "model": model, "step": 0}
    names["optimizer"] = torch.optim.AdamW(model.parameters())
    for _ in range(2):
        exec(block_with("runs/b"), names)
    return str(names["newest"])


def runs_the_dcp_block(rank: int, directory: str) -> int:
    os.chdir(directory)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 4)
    names = {"model": model, "optimizer": torch.optim.AdamW(model.parameters())}
    exec(block_with("asyncckpt.dcp"), names)
    return names["state"]["step"]  # type: ignore[index,return-value]


def test_the_block_for_stock_checkpoints_as_it_stands(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    before = shared_worker.status()["counters"].get("saves_committed", 0)
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    assert rank_processes.run(2, runs_the_dcp_block, str(tmp_path), environ=environ) == [300, 300]
    assert shared_worker.status()["counters"]["saves_committed"] == before + 1
    found = asyncckpt.open_checkpoint(tmp_path / "runs/d/step-300")
    assert (found.step, found.world_size) == (300, 2)


def test_the_block_for_several_ranks_as_it_stands(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    assert (
        rank_processes.run(2, runs_the_block, str(tmp_path), environ=environ) == [str(tmp_path / "runs/b/step-1")] * 2
    )
    assert manifest_of(tmp_path / "runs/b/step-2")["world_size"] == 2


def runs_the_block_on_shards(rank: int, directory: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    os.chdir(directory)
    torch.manual_seed(0)
    model = torch.nn.Linear(16, 3)  # uneven over two ranks
    names = {"torch": torch, "asyncckpt": asyncckpt, "model": model}
    exec(block_with("fully_shard"), names)
    return [p.full_tensor().detach() for p in model.parameters()], list(names["whole"]["model"].values())


def test_the_block_for_shards_as_it_stands(tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker) -> None:
    environ = {"ASYNCCKPT_ENDPOINT": shared_worker.endpoint}
    for trained, loaded in rank_processes.run(2, runs_the_block_on_shards, str(tmp_path), environ=environ):
        assert [tuple(t.shape) for t in loaded] == [(3, 16), (3,)]
        assert all(torch.equal(a, b) for a, b in zip(trained, loaded, strict=True))
    tensors = asyncckpt.open_checkpoint(tmp_path / "runs/c/step-1").tensors
    assert tensors["model.weight"].nbytes == 3 * 16 * 4

"""What Accelerate writes for FSDP2 with SHARDED_STATE_DICT: DCP directories, or a file of each rank; both are read."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch

import asyncckpt

pytest.importorskip("accelerate", reason="`make test-frameworks` installs accelerate")
pytestmark = pytest.mark.timeout(600)


def prepared(rank: int, step: bool) -> tuple[Any, Any, Any]:
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin

    os.environ["LOCAL_RANK"] = str(rank)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", auto_wrap_policy="size_based_wrap", min_num_params=1
    )
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.1))
    if step:
        accelerator.backward(model(torch.ones(2, 5)).square().mean())
        optimizer.step()
    return accelerator, model, optimizer


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def saves(rank: int, directory: str) -> dict[str, torch.Tensor]:
    from accelerate.utils import save_fsdp_model, save_fsdp_optimizer

    accelerator, model, optimizer = prepared(rank, step=True)
    plugin = accelerator.state.fsdp_plugin
    accelerator.save_state(os.path.join(directory, "stock"))
    files = os.path.join(directory, "files")
    save_fsdp_model(plugin, accelerator, model, files, use_dcp=False)
    save_fsdp_optimizer(plugin, accelerator, optimizer, model, files, use_dcp=False)
    return whole(model)


def loads(rank: int, path: str) -> dict[str, torch.Tensor]:
    _, model, _ = prepared(rank, step=False)
    asyncckpt.load(path, {"model": model.state_dict()})
    return whole(model)


def test_directories_and_rank_files_hold_the_same_and_are_loaded_at_another_world_size(tmp_path: Path) -> None:
    said = rank_processes.run(2, saves, str(tmp_path))[0]
    assert sorted(os.listdir(tmp_path / "files")) == [
        *(f"{name}_0_rank{rank}.bin" for name in ("optimizer", "pytorch_model_fsdp") for rank in range(2))
    ]
    files = asyncckpt.load(tmp_path / "files")
    stock = {
        **asyncckpt.load(tmp_path / "stock" / "pytorch_model_fsdp_0"),
        **asyncckpt.load(tmp_path / "stock" / "optimizer_0"),
    }
    assert files.keys() == stock.keys() == {"model", "optimizer"}
    assert files["model"].keys() == stock["model"].keys() == said.keys()
    for name, tensor in said.items():
        assert torch.equal(files["model"][name], tensor) and torch.equal(stock["model"][name], tensor)
        for kind in ("exp_avg", "exp_avg_sq", "step"):
            ours, theirs = (one["optimizer"]["state"][name][kind] for one in (files, stock))
            assert torch.equal(ours, theirs)
    for source, name in ((tmp_path / "files", "a"), (tmp_path / "stock" / "pytorch_model_fsdp_0", "b")):
        asyncckpt.convert(source, tmp_path / name, to="asyncckpt")
        for found in rank_processes.run(3, loads, str(tmp_path / name)):
            assert found.keys() == said.keys() and all(torch.equal(found[key], said[key]) for key in said)

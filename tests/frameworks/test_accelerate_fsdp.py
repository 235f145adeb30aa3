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


def trained(steps: int) -> tuple[Any, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 3))
    fully_shard(model, mesh=init_device_mesh("cpu", (torch.distributed.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(steps):
        model(torch.ones(2, 5)).square().mean().backward()
        optimizer.step()
    return model, optimizer


def whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def saves(rank: int, directory: str) -> dict[str, torch.Tensor]:
    """Save by the functions that `Accelerator.save_state` calls; Accelerate turns FSDP itself on for GPUs only."""
    from accelerate import Accelerator
    from accelerate.utils import FullyShardedDataParallelPlugin, save_fsdp_model, save_fsdp_optimizer

    os.environ |= {"LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, state_dict_type="SHARDED_STATE_DICT")
    accelerator = Accelerator(cpu=True)
    assert accelerator.process_index == rank and accelerator.num_processes == 2
    model, optimizer = trained(2)
    for name, use_dcp in (("stock", True), ("files", False)):
        place = os.path.join(directory, name)
        save_fsdp_model(plugin, accelerator, model, place, use_dcp=use_dcp)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, place, use_dcp=use_dcp)
    return whole(model)


def loads(rank: int, path: str) -> dict[str, torch.Tensor]:
    model, _ = trained(0)
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

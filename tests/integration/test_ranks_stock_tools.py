"""Stock `dcp.load` on 1 to 4 ranks, by its readers and by ours, of what 1 and 2 ranks saved, in other arrangements."""

from __future__ import annotations

import pathlib
import warnings
from typing import Any

import in_process_writer
import pytest
import rank_processes
import states
import torch

import asyncckpt

for _module in ("numpy", "safetensors", "fsspec"):
    pytest.importorskip(_module)

WHOLE = {
    "model.rows": torch.arange(70.0).reshape(10, 7),
    "model.columns": torch.arange(60, dtype=torch.bfloat16).reshape(5, 12),
    "model.few": torch.arange(3.0).reshape(3, 1),
    "optim.moment": torch.linspace(0, 1, 91, dtype=torch.float64),
}


def sharded(world_size: int, dims: tuple[int, ...], fill: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    return {
        name: distribute_tensor(whole.clone() if fill else torch.full_like(whole, -1), mesh, [Shard(dim)])
        for (name, whole), dim in zip(WHOLE.items(), dims, strict=True)
    }


def save(rank: int, root: str) -> None:
    import torch.distributed.checkpoint as dcp

    with asyncckpt.SyncCheckpointer() as checkpointer:
        state = {**sharded(2, (0, 1, 0, 0), True), "same": torch.arange(5.0), "step": 3}
        checkpointer.save(state, f"{root}/ours")
    dcp.save(state, storage_writer=in_process_writer.StorageWriter(f"{root}/by-dcp-save"))


NAMES = ("one", "ours", "by-dcp-save", "converted", "hf", "dcp")


def load(rank: int, root: str, world_size: int, by_ours: bool) -> None:
    import torch.distributed.checkpoint as dcp

    for name in NAMES:
        state = sharded(world_size, (1, 0, 0, 0), False) | {"same": torch.zeros(5)}
        reader: Any = asyncckpt.dcp.StorageReader("unused") if by_ours else None
        if not by_ours and name != "dcp":
            reader = dcp.HuggingFaceStorageReader(f"{root}/{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.load(state, checkpoint_id=f"{root}/{name}", storage_reader=reader)
        for key, whole in WHOLE.items():
            states.assert_same(state[key].full_tensor(), whole, f"{name} {key}")
        states.assert_same(state["same"], torch.arange(5.0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Checkpoints of one rank and of two, by stock `dcp.save` too, and what one of two was converted to, and back."""
    root = tmp_path_factory.mktemp("ranks")
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save({**WHOLE, "same": torch.arange(5.0), "step": 3}, root / "one")
    rank_processes.run(2, save, str(root))
    asyncckpt.convert(root / "ours", root / "dcp", to="dcp")
    asyncckpt.convert(root / "dcp", root / "converted", to="asyncckpt")
    asyncckpt.convert(root / "ours", root / "hf", to="hf", keys=["model", "optim", "same"], max_shard_bytes=600)
    return root


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_stock_dcp_load_reshards_ours_and_what_it_was_converted_to(world_size: int, saved: pathlib.Path) -> None:
    rank_processes.run(world_size, load, str(saved), world_size, False)


@pytest.mark.parametrize("world_size", [1, 3])
def test_stock_dcp_load_reshards_all_of_it_by_our_reader(world_size: int, saved: pathlib.Path) -> None:
    rank_processes.run(world_size, load, str(saved), world_size, True)

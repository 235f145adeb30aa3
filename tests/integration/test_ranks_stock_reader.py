"""PyTorch's own HuggingFace reader loads what several ranks saved: pieces put together, each rank's own by its name."""

from __future__ import annotations

import pathlib
from typing import Any

import pytest
import rank_processes
import real_worker
import torch

from asyncckpt import AsyncCheckpointer, PerRank


def state_of(rank: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    return {
        "weight": torch.randn(9000, 500, generator=generator),
        "row": torch.randn(1, 2_000_000, generator=generator),
        "small": torch.arange(5),
        "statistics": torch.full((4,), float(rank)),
        "rng": PerRank(torch.tensor([rank])),
    }


def save(rank: int, path: str) -> None:
    with AsyncCheckpointer(files_per_rank=2) as checkpointer:
        checkpointer.save(state_of(rank), path).written.result(60)


@pytest.mark.filterwarnings("ignore")
def test_torch_s_huggingface_reader_joins_the_pieces_of_three_ranks(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for module in ("numpy", "fsspec", "safetensors"):
        pytest.importorskip(module)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path = tmp_path / "step-1"
    rank_processes.run(3, save, str(path), environ={"ASYNCCKPT_ENDPOINT": shared_worker.endpoint})
    state = state_of(0)
    expected = {name: state[name] for name in ("weight", "row", "small")}
    expected |= {f"statistics@rank{r}": state_of(r)["statistics"] for r in range(3)}
    expected |= {f"rng@rank{r}": torch.tensor([r]) for r in range(3)}
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(str(path)), no_dist=True)
    for name, value in expected.items():
        assert torch.equal(target[name], value), name


def save_fsdp2(rank: int, path: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(9, 31), torch.nn.Linear(31, 5), torch.nn.LayerNorm(5))
    fully_shard(model)
    with AsyncCheckpointer(max_shard_bytes=65536) as checkpointer:
        checkpointer.save({"model": dict(model.state_dict())}, path).written.result(60)
    return {f"model.{name}": tensor.full_tensor() for name, tensor in model.state_dict().items()}  # type: ignore[attr-defined]


def load_stock(rank: int, path: str, expected: dict[str, torch.Tensor]) -> bool:
    """Let stock DCP reshard it to a mesh of three, which nothing divides."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    target = {name: distribute_tensor(torch.zeros_like(t), mesh, [Shard(0)]) for name, t in expected.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path))
    return all(torch.equal(target[name].full_tensor(), tensor) for name, tensor in expected.items())


@pytest.mark.filterwarnings("ignore")
def test_torch_s_huggingface_reader_reshards_an_fsdp2_checkpoint(
    tmp_path: pathlib.Path, shared_worker: real_worker.RealWorker
) -> None:
    for module in ("numpy", "fsspec", "safetensors"):
        pytest.importorskip(module)
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    path = str(tmp_path / "step-1")
    expected, _ = rank_processes.run(2, save_fsdp2, path, environ={"ASYNCCKPT_ENDPOINT": shared_worker.endpoint})
    target = {name: torch.zeros_like(value) for name, value in expected.items()}
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(path), no_dist=True)
    assert all(torch.equal(target[name], value) for name, value in expected.items())
    assert rank_processes.run(3, load_stock, path, expected) == [True] * 3

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

"""A model that several ranks hold, exported by all of them: one directory, and one outcome on all ranks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import rank_processes
import torch

import asyncckpt
from asyncckpt.errors import AsyncCkptError, ConfigError, PlanTimeoutError, SaveFailedError

pytest.importorskip("safetensors")


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = torch.nn.Embedding(7, 6)
        self.inner = torch.nn.Linear(6, 6)
        self.head = torch.nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight


def made(wrapper: str) -> Any:
    model = Model()
    if wrapper == "ddp":
        return torch.nn.parallel.DistributedDataParallel(model)
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model.inner, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def export(rank: int, wrapper: str, path: str) -> Any:
    report = asyncckpt.export_hf(made(wrapper), path, config={"model_type": "none"}, dtype="float64")
    return report, os.path.exists(os.path.join(path, "model.safetensors"))


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_ranks_export_one_directory_and_get_one_report(wrapper: str, tmp_path: Path) -> None:
    (first, is_there), (second, is_there_too) = rank_processes.run(2, export, wrapper, str(tmp_path / "hf"))
    assert first == second and is_there and is_there_too
    assert os.listdir(tmp_path) == ["hf"]
    expected = {name: tensor.double() for name, tensor in Model().state_dict().items() if name != "head.weight"}
    found = asyncckpt.load(tmp_path / "hf")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def refused(rank: int, path: str, is_late: bool) -> tuple[str, str, int | None]:
    """Export what rank 0 refuses: before the state is saved, or after."""
    config: Any = 3 if is_late else {}
    if not is_late and rank == 0:
        os.makedirs(os.path.join(path, "notes"))
    try:
        asyncckpt.export_hf(made("fsdp"), path, config=config)
    except AsyncCkptError as error:
        return type(error).__name__, str(error), getattr(error, "rank", None)
    return "none", "", None


@pytest.mark.parametrize("is_late", [False, True])
def test_ranks_learn_why_rank_0_has_failed_and_nothing_is_left(is_late: bool, tmp_path: Path) -> None:
    first, second = rank_processes.run(2, refused, str(tmp_path / "hf"), is_late)
    assert first[0] == (ConfigError if is_late else asyncckpt.errors.CheckpointExistsError).__name__
    assert second[0] == SaveFailedError.__name__ and second[2] == 0 and first[1] in second[1]
    assert os.listdir(tmp_path) == ([] if is_late else ["hf"])


def alone(rank: int, path: str) -> str:
    model = made("ddp")
    if rank == 1:
        return rank_processes.talk().hear()
    try:
        asyncckpt.export_hf(model, path, config={}, timeout_s=2.0)
    except PlanTimeoutError as error:
        return str(error)
    return "none"


def test_a_rank_that_exports_alone_of_two_ranks_says_so(tmp_path: Path) -> None:
    with rank_processes.running(2, alone, str(tmp_path / "hf")) as ranks:
        said = ranks.receive(0)
        ranks.send(1, "end")
        ranks.receive(1)
    assert "export_hf()" in said and os.listdir(tmp_path) == []

"""`torch.set_default_device` and `with torch.device(...)` change nothing of what is saved or loaded."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.manager.rng import RngState
from tests.states import assert_same

HERE = "cpu"


@pytest.fixture
def elsewhere() -> Iterator[None]:
    """The device that new tensors lie on has no memory."""
    with torch.device("meta"):
        yield


def training() -> dict[str, Any]:
    """A model and an optimizer with moments, on the CPU."""
    model = torch.nn.Sequential(torch.nn.Linear(3, 3, device=HERE), torch.nn.BatchNorm1d(3, device=HERE))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 3, device=HERE)).sum().backward()
    optimizer.step()
    return {"model": model, "optimizer": optimizer}


def states(training: dict[str, Any]) -> dict[str, Any]:
    return {name: copy.deepcopy(value.state_dict()) for name, value in training.items()}


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("low_memory", [True, False])
def test_a_training_is_saved_and_restored(tmp_path: Path, low_memory: bool) -> None:
    trained, fresh = training(), training()
    with SyncCheckpointer() as checkpointer:
        checkpointer.save({**trained, "rng": RngState()}, tmp_path / "a")
    random.random()
    asyncckpt.load(tmp_path / "a", {**fresh, "rng": RngState()}, low_memory=low_memory)
    assert_same(states(fresh), states(trained))


@pytest.mark.usefixtures("elsewhere")
def test_a_new_state_is_what_was_saved(tmp_path: Path) -> None:
    base = torch.arange(12.0, device=HERE).reshape(3, 4)
    saved = {
        "tensor": base,
        "transposed": base.t(),
        "conjugated": torch.complex(base, base).conj(),
        "empty": torch.empty(0, 3, device=HERE),
        "bytes": bytes(range(256)) * 300,
        "three": torch.arange(3, device=HERE, dtype=torch.int8),
        "behind": base.double(),
    }
    with SyncCheckpointer() as checkpointer:
        checkpointer.save(saved, tmp_path / "a")
    assert_same(asyncckpt.load(tmp_path / "a"), saved)


@pytest.mark.usefixtures("elsewhere")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_targets_of_any_layout_and_dtype_are_filled(tmp_path: Path, dtype: torch.dtype) -> None:
    values = torch.arange(12.0, device=HERE).reshape(3, 4)
    with SyncCheckpointer() as checkpointer:
        checkpointer.save({"a": values, "b": values.clone(), "c": values.t().contiguous()}, tmp_path / "a")
    whole, strided = (torch.zeros(shape, device=HERE, dtype=dtype) for shape in ((3, 4), (4, 6)))
    asyncckpt.load(tmp_path / "a", {"a": whole, "b": whole, "c": whole.t()})
    asyncckpt.load(tmp_path / "a", {"a": strided.t()[::2]})
    assert torch.equal(whole, values.to(dtype)) and torch.equal(strided.t()[::2], values.to(dtype))

"""`Stager`: how often it copies a state, and that it does where torch has dropped what it uses of torch's own."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import staging
from torch.utils._python_dispatch import TorchDispatchMode

from asyncckpt.dcp.storage_writer import Stager


class Copies(TorchDispatchMode):
    """Counts the elements that are copied into another tensor."""

    n_elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.copy_.default, torch.ops.aten.clone.default, torch.ops.aten._to_copy.default):
            self.n_elements += args[0].numel()
        return func(*args, **(kwargs or {}))


def state(value: float) -> dict[str, Any]:
    return {"a": torch.full((30, 40), value), "b": [{"c": torch.full((7,), value)}, value], "s": torch.tensor(value)}


def assert_is(staged: dict[str, Any], value: float) -> None:
    assert torch.equal(staged["a"], state(value)["a"])
    assert torch.equal(staged["b"][0]["c"], state(value)["b"][0]["c"])
    assert (staged["b"][1], staged["s"].item()) == (value, value)


@pytest.mark.parametrize("cached", [False, True])
def test_a_state_is_copied_once(cached: bool) -> None:
    stager = Stager(cache_staged_state_dict=cached)
    kept = []
    for value in (1.0, 2.0):
        given = state(value)
        with Copies() as copies:
            staged = stager.stage(given)
        assert copies.n_elements == 30 * 40 + 7 + 1
        given["a"].zero_()
        assert_is(staged, value)
        kept.append(staged["a"].data_ptr())
    assert (kept[0] == kept[1]) or not cached


def test_a_torch_without_the_name_that_allocates_stages_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    stock: Any = staging.BlockingAsyncStager.stage
    with_the_name = types.FunctionType(stock.__code__, dict(vars(staging)))
    monkeypatch.setattr(staging.BlockingAsyncStager, "stage", with_the_name)
    monkeypatch.delattr(staging, "_create_cpu_state_dict")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    stager = Stager(cache_staged_state_dict=True)
    for value in (1.0, 2.0):
        assert_is(stager.stage(state(value)), value)

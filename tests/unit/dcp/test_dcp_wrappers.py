"""Tensor subclasses whose elements are not in their memory: stock saves and loads refuse them by name, early."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import composite_samples
import dcp_calls
import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

import asyncckpt
from asyncckpt import SyncCheckpointer
from asyncckpt.dcp import BroadcastingTorchSaveReader, DynamicMetaLoadPlanner, ShardedSavePlanner, StorageReader
from asyncckpt.errors import UnsupportedLeafError


class Quantized(torch.Tensor):
    """As quantizing libraries have them: it stands for a tensor of floats, and holds small integers."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=torch.float32)

    def __init__(self, codes: torch.Tensor) -> None:
        self.codes = codes

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
            return cls(args[0].codes)
        raise NotImplementedError(f"{func} of a {cls.__name__}")


class Watched(torch.Tensor):
    """One with memory of its own, and its own idea of what its elements are."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a {cls.__name__}")


def watched() -> torch.Tensor:
    return torch.Tensor._make_subclass(Watched, torch.ones(4))


def fake() -> torch.Tensor:
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        return torch.ones(4)


KINDS: dict[str, Callable[[], torch.Tensor]] = {
    "Quantized": lambda: Quantized(torch.arange(4, dtype=torch.uint8)),
    "Watched": watched,
    "FakeTensor": fake,
}
NESTED: dict[str, Callable[[Any], Any]] = {
    "a": lambda value: {"a": value},
    "o.state.0.exp_avg": lambda value: {"o": {"state": {0: {"exp_avg": value}}}, "n": 3},
    "l.1": lambda value: {"l": [torch.ones(2), value]},
}


def save(state: Any, writer: Any, way: str) -> None:
    if way == "async":
        dcp.async_save(state, storage_writer=writer, no_dist=True).result(60)
    else:
        planner = ShardedSavePlanner() if way == "sharded" else DefaultSavePlanner()
        dcp.save(state, storage_writer=writer, no_dist=True, planner=planner)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["sync", "async", "sharded"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fqn", NESTED)
def test_a_wrapper_subclass_is_refused_by_name_before_anything_is_begun(
    tmp_path: Path, fqn: str, kind: str, way: str
) -> None:
    writer = StorageWriter(tmp_path / "c", cache_staged_state_dict=way == "async")
    with pytest.raises(CheckpointException) as caught:
        save(NESTED[fqn](KINDS[kind]()), writer, way)
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, UnsupportedLeafError)
    assert (error.leaf, error.type_name) == (fqn, kind) and repr(fqn) in str(error) and kind in str(error)
    assert not os.listdir(tmp_path) and writer.save_id is None
    save({"w": torch.ones(3)}, writer, way)
    assert torch.equal(dcp_calls.load({"w": torch.zeros(3)}, StorageReader(tmp_path / "c"))["w"], torch.ones(3))


class Odd(DefaultSavePlanner):
    """Makes a wrapper of a plain tensor when it is asked for it: nobody can know that before."""

    def resolve_data(self, write_item: Any) -> Any:
        found = super().resolve_data(write_item)
        return Quantized(torch.zeros(4, dtype=torch.uint8)) if write_item.index.fqn == "w" else found


def test_a_wrapper_that_a_planner_makes_late_is_refused_by_name_and_nothing_is_left(tmp_path: Path) -> None:
    with pytest.raises(CheckpointException) as caught:
        dcp_calls.save({"a": torch.ones(2), "w": torch.ones(4)}, StorageWriter(tmp_path / "c"), planner=Odd())
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, UnsupportedLeafError) and (error.leaf, error.type_name) == ("w", "Quantized")
    assert not os.listdir(tmp_path)


def test_a_subclass_with_nothing_but_a_name_is_stored_by_its_memory(tmp_path: Path) -> None:
    class Named(torch.Tensor):
        pass

    class Weight(torch.nn.Parameter):
        pass

    state = {"n": torch.arange(3.0).as_subclass(Named), "w": Weight(torch.ones(2))}
    dcp_calls.save(state, StorageWriter(tmp_path / "c"))
    target = {"n": torch.zeros(3).as_subclass(Named), "w": Weight(torch.zeros(2))}
    dcp_calls.load(target, StorageReader(tmp_path / "c"))
    assert target["n"].tolist() == [0, 1, 2] and target["w"].tolist() == [1, 1]


@pytest.mark.parametrize("kind", ["Quantized", "Watched"])
def test_a_wrapper_as_a_target_is_refused_by_name_before_anything_is_read(tmp_path: Path, kind: str) -> None:
    state = {"a": torch.ones(3), "w": torch.ones(4)}
    dcp_calls.save(state, StorageWriter(tmp_path / "c"))
    torch.save(state, tmp_path / "t.pt")
    for reader, planner in (
        (StorageReader(tmp_path / "c"), None),
        (BroadcastingTorchSaveReader(tmp_path / "t.pt"), DynamicMetaLoadPlanner()),
    ):
        target = {"a": torch.zeros(3), "w": KINDS[kind]()}
        with pytest.raises(CheckpointException) as caught:
            dcp_calls.load(target, reader, planner=planner)
        error = dcp_calls.reason(caught.value)
        assert isinstance(error, UnsupportedLeafError) and (error.leaf, error.type_name) == ("w", kind)
        assert not target["a"].any()


def test_a_tensor_that_a_collective_still_fills_is_waited_for(tmp_path: Path) -> None:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor

    state = {"w": AsyncCollectiveTensor(torch.arange(4.0))}
    dcp_calls.save(state, StorageWriter(tmp_path / "c"))
    assert torch.equal(dcp_calls.load({"w": torch.zeros(4)}, StorageReader(tmp_path / "c"))["w"], torch.arange(4.0))


@pytest.mark.parametrize("where", ["top", "nested"])
def test_a_target_that_was_saved_as_its_components_is_refused_by_name_and_unchanged(tmp_path: Path, where: str) -> None:
    """A planner would put the dict of components in its place, or leave it as it is."""

    def state(seed: int) -> dict[str, Any]:
        found = {"exp_avg": composite_samples.blocks(seed), "step": torch.full((), float(seed))}
        return found if where == "top" else {"o": {"state": {0: found}}}

    with SyncCheckpointer() as checkpointer:
        checkpointer.save(state(1), tmp_path / "c")
    target, fqn = state(2), "exp_avg" if where == "top" else "o.state.0.exp_avg"
    error = dcp_calls.failed_load(target, StorageReader(tmp_path / "c"))
    assert isinstance(error, UnsupportedLeafError) and (error.leaf, error.type_name) == (fqn, "Blocks")
    assert "asyncckpt.load fills it" in str(error)
    assert composite_samples.same(target, state(2))
    asyncckpt.load(tmp_path / "c", target)
    assert composite_samples.same(target, state(1))


UNSTORABLE: dict[str, Callable[[], torch.Tensor]] = {
    "coo": lambda: torch.eye(3).to_sparse(),
    "csr": lambda: torch.eye(3).to_sparse_csr(),
    "qint8": lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 2, torch.qint8),
    "nested": lambda: torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]),
    **{  # dtypes that newer versions of torch have
        name: lambda name=name: torch.empty(4, dtype=getattr(torch, name))  # type: ignore[misc]
        for name in ("int4", "uint3")
        if hasattr(torch, name)
    },
}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("what", UNSTORABLE)
def test_tensors_of_strange_layouts_and_dtypes_are_refused_by_name(what: str, is_async: bool, tmp_path: Path) -> None:
    state = {"plain": torch.ones(2), "model": {"strange": UNSTORABLE[what]()}}
    with pytest.raises(CheckpointException) as caught:
        if is_async:
            dcp.async_save(state, storage_writer=StorageWriter(tmp_path / "c"), no_dist=True).result(60)
        else:
            dcp_calls.save(state, StorageWriter(tmp_path / "c"))
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, UnsupportedLeafError) and error.leaf == "model.strange", error
    assert not (tmp_path / "c").exists()

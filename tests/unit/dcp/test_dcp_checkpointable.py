"""Tensors that give their chunks by torch's protocol for checkpoints (`torch.distributed._checkpointable`)."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import dcp_calls
import pytest
import torch
import torch.distributed.checkpoint as dcp
from in_process_writer import StorageWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor._shards_wrapper import LocalShardsWrapper

import asyncckpt
from asyncckpt.dcp import ShardedLoadPlanner, ShardedSavePlanner, StorageReader
from asyncckpt.errors import CorruptCheckpointError, ShardOutOfRangeError, UnsupportedLeafError

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

Made = tuple[torch.Tensor, list[torch.Tensor]]
"""A tensor, and the memory of its chunks."""


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random bits, so that some are NaNs of every kind."""
    n_bytes = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (n_bytes,), dtype=torch.uint8).view(dtype).view(shape)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one.contiguous().view(torch.uint8), other.view(torch.uint8))


class Rows(torch.Tensor):
    """A tensor of a framework: it says its global shape, holds rows, and has no memory of its own."""

    @staticmethod
    def __new__(cls, chunks: dict[int, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype)

    def __init__(self, chunks: dict[int, Any], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self.chunks = chunks

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(f"{func} of a {cls.__name__}")

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size((row, 0)), chunk.shape) for row, chunk in self.chunks.items()]

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        properties = TensorProperties(dtype=self.dtype)
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, properties, self.size()),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        assert index.offset is not None
        found: torch.Tensor = self.chunks[index.offset[0]]
        return found


class OwnMemory(Rows):
    """One with elements of its own, which are not those that it gives."""

    __torch_dispatch__ = torch._C._disabled_torch_dispatch_impl

    @staticmethod
    def __new__(cls, chunks: dict[int, Any], shape: tuple[int, ...], dtype: torch.dtype) -> Any:
        return torch.Tensor._make_subclass(cls, torch.zeros(shape, dtype=dtype))


def rows(value: torch.Tensor, cuts: tuple[int, ...], kind: type[Rows] = Rows) -> Made:
    chunks = {cut: chunk.clone() for cut, chunk in zip((0, *cuts), value.tensor_split(cuts), strict=True)}
    return kind(chunks, tuple(value.shape), value.dtype), list(chunks.values())


def columns(value: torch.Tensor, cuts: tuple[int, ...]) -> Made:
    chunks = [chunk.clone() for chunk in value.tensor_split(cuts, dim=1)]
    return LocalShardsWrapper(chunks, [(0, cut) for cut in (0, *cuts)]), chunks


KINDS: dict[str, Callable[[torch.Tensor, tuple[int, ...]], Made]] = {
    "wrapper": rows,
    "own memory": lambda value, cuts: rows(value, cuts, OwnMemory),
    "LocalShardsWrapper": columns,
}
PLANNERS: dict[str, tuple[type[DefaultSavePlanner], type[DefaultLoadPlanner]]] = {
    "stock": (DefaultSavePlanner, DefaultLoadPlanner),
    "sharded": (ShardedSavePlanner, ShardedLoadPlanner),
}


@pytest.mark.parametrize("planners", PLANNERS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_chunk_is_saved_and_other_chunks_are_filled_bit_for_bit(tmp_path: Path, kind: str, planners: str) -> None:
    to_save, to_load = PLANNERS[planners]
    values = {dtype: noise(8, 6, dtype=dtype) for dtype in (torch.float32, torch.bfloat16, torch.float8_e5m2)}
    state = {"o": {str(dtype): [KINDS[kind](value, (2, 5))[0], 1] for dtype, value in values.items()}, "step": 3}
    dcp_calls.save(state, StorageWriter(tmp_path), planner=to_save())
    found = asyncckpt.load(tmp_path)
    assert found["step"] == 3 and all(same_bits(found["o"][str(dtype)][0], value) for dtype, value in values.items())
    for cuts in ((2, 5), (3,), ()):
        made = {str(dtype): KINDS[kind](torch.zeros_like(value), cuts) for dtype, value in values.items()}
        target = {"o": {name: [tensor, 0] for name, (tensor, _) in made.items()}, "step": 0}
        dcp_calls.load(target, StorageReader(tmp_path), planner=to_load())
        for dtype, value in values.items():
            pieces = made[str(dtype)][1]
            assert same_bits(torch.cat(pieces, dim=int(kind == "LocalShardsWrapper")), value)
            assert target["o"][str(dtype)][1] == 1
    plain = {"o": {str(dtype): [torch.zeros_like(value), 0] for dtype, value in values.items()}}
    dcp_calls.load(plain, StorageReader(tmp_path), planner=to_load())
    assert all(same_bits(plain["o"][str(dtype)][0], value) for dtype, value in values.items())  # type: ignore[arg-type]


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_asynchronous_save_has_the_chunks_as_they_were_at_the_call(tmp_path: Path, kind: str, cached: bool) -> None:
    writer = StorageWriter(tmp_path / "unused", cache_staged_state_dict=cached)
    for number in range(2):
        value = noise(8, 6)
        tensor, chunks = KINDS[kind](value, (2, 5))
        state = {"o": {0: {"exp_avg": tensor}}, "l": [torch.full((2,), number), tensor]}
        future = dcp.async_save(state, storage_writer=writer, checkpoint_id=tmp_path / str(number), no_dist=True)
        for chunk in chunks:
            chunk.zero_()
        future.result(60)  # type: ignore[union-attr]
        assert state["l"][1] is tensor
        found = asyncckpt.load(tmp_path / str(number))
        assert same_bits(found["o"]["0"]["exp_avg"], value) and same_bits(found["l"][1], value)
        assert found["l"][0].tolist() == [number] * 2


class Failing(Rows):
    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        raise KeyError(index.fqn)


ONES = torch.ones(4, 2)
REFUSED: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "a chunk that computes its elements": (
        lambda: Rows({0: rows(ONES, ())[0]}, (4, 2), ONES.dtype),
        "__torch_dispatch__",
    ),
    "no tensor": (lambda: Rows({0: ONES.numpy(force=True)}, (4, 2), ONES.dtype), "ndarray"),
    "another dtype": (lambda: Rows({0: ONES.int()}, (4, 2), ONES.dtype), "but its plan has float32"),
    "no memory": (lambda: Rows({0: ONES.to("meta")}, (4, 2), ONES.dtype), "meta"),
    "an error": (lambda: Failing({0: ONES}, (4, 2), ONES.dtype), "KeyError: 'o.w'"),
    "nothing but items": (lambda: HalfWay({0: ONES}, (4, 2), ONES.dtype), "__torch_dispatch__"),
}


class HalfWay(torch.Tensor):
    """It makes write items, and the elements of none."""

    __new__ = Rows.__new__
    __init__ = Rows.__init__  # type: ignore[assignment]
    __torch_dispatch__ = Rows.__torch_dispatch__  # type: ignore[assignment]
    __create_write_items__ = Rows.__create_write_items__


@pytest.mark.parametrize("way", ["sync", "async", "sharded"])
@pytest.mark.parametrize("what", REFUSED)
def test_a_chunk_that_cannot_be_stored_is_refused_by_name_before_anything_is_begun(
    tmp_path: Path, what: str, way: str
) -> None:
    pytest.importorskip("numpy")
    make, text = REFUSED[what]
    writer, state = StorageWriter(tmp_path / "c"), {"a": torch.ones(2), "o": {"w": make()}}
    with pytest.raises(CheckpointException) as caught:
        if way == "async":
            dcp.async_save(state, storage_writer=writer, no_dist=True).result(60)  # type: ignore[union-attr]
        else:
            dcp.save(
                state, storage_writer=writer, no_dist=True, planner=ShardedSavePlanner() if way == "sharded" else None
            )
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, UnsupportedLeafError) and error.leaf == "o.w" and text in str(error)
    assert not os.listdir(tmp_path) and writer.save_id is None


@pytest.mark.parametrize(
    ("what", "kind"),
    [
        ("a chunk that computes its elements", UnsupportedLeafError),
        ("no memory", UnsupportedLeafError),
        ("an error", UnsupportedLeafError),
        ("a chunk outside", ShardOutOfRangeError),
    ],
)
def test_a_target_that_cannot_be_filled_is_refused_by_name_and_nothing_is_changed(
    tmp_path: Path, what: str, kind: type[Exception]
) -> None:
    dcp_calls.save({"a": torch.ones(2), "o": {"w": ONES}}, StorageWriter(tmp_path))
    tensor = Rows({2: torch.zeros(4, 2)}, (4, 2), ONES.dtype) if what == "a chunk outside" else REFUSED[what][0]()
    target = {"a": torch.zeros(2), "o": {"w": tensor}}
    with pytest.raises(CheckpointException) as caught:
        dcp_calls.load(target, StorageReader(tmp_path), planner=ShardedLoadPlanner())
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, kind) and error.leaf == "o.w"  # type: ignore[attr-defined]
    assert not target["a"].any()  # type: ignore[attr-defined]


def test_a_chunk_of_which_the_checkpoint_lacks_elements_is_refused_by_name(tmp_path: Path) -> None:
    dcp_calls.save({"w": rows(ONES, (2,))[0]}, dcp.FileSystemWriter(str(tmp_path)))

    class Lossy(dcp.FileSystemReader):
        def read_metadata(self, *args: Any, **kw: Any) -> Any:
            found: Any = super().read_metadata(*args, **kw)
            del found.state_dict_metadata["w"].chunks[0]
            return found

    with pytest.raises(CheckpointException) as caught:
        dcp_calls.load({"w": rows(ONES, (3,))[0]}, Lossy(tmp_path), planner=ShardedLoadPlanner())
    error = dcp_calls.reason(caught.value)
    assert isinstance(error, CorruptCheckpointError) and error.fqn == "w"

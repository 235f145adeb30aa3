"""What stock `dcp.save` and `dcp.load` take of memory with our planners, beside the shards that a rank holds anyway."""

from __future__ import annotations

import math
import os
import pathlib
import shutil
import warnings
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import rank_processes
import torch

import asyncckpt
from asyncckpt.dcp.in_process_save import MIN_THREADS

pytest.importorskip("numpy")
pytestmark = pytest.mark.skipif(
    not os.access("/proc/self/clear_refs", os.W_OK), reason="the peak of memory cannot be reset here"
)

MIB = 1 << 20
BUFFER_NBYTES = 16 * MIB
"""Of each thread that reads or writes, as `StorageWriter` and ADR 0038 have it."""

SLACK_NBYTES = 32 * MIB
"""What allocators keep, stacks, plans; chosen: less than 1 MiB was measured. What a rank holds of a tensor is 64 MiB
for our storage, so that a copy of a single one is too much with one thread."""


class Sizes(NamedTuple):
    """Each rank holds half of `n` tensors of `shape` in each of four ways: 256 MiB in all.

    `uneven`: flat ranges are cut so many elements before a row's end, and then are several boxes each.
    """

    shape: tuple[int, int]
    n: int
    uneven: int


SIZES = {"ours": Sizes((4096, 8192), 1, 5), "stock": Sizes((2048, 2048), 8, 0), "first": Sizes((8, 8), 1, 5)}
"""By storage. Stock readers hold the item that they read twice, so items are small there; and stock writers hold copies
of all views of larger storages until the end (torch 2.13), which boxes of a flat range are unless there is but one."""

ITEMSIZE = 4
Box = tuple[tuple[int, int], tuple[int, int]]


class Tiles:
    """A framework's sharded tensor: two parts, which are not beside each other."""

    def __init__(self, shape: tuple[int, int], parts: dict[tuple[int, int], torch.Tensor]) -> None:
        self.shape, self.parts, self.n_given = shape, parts, 0


def to_shards(value: Tiles) -> Any:
    return value.shape, [(part, offsets) for offsets, part in value.parts.items()]


def from_shards(value: Tiles, shards: Any) -> None:
    assert all(tensor is value.parts[offsets] for tensor, offsets in shards), "not even a copy of its parts"
    value.n_given += 1


def part_of(shape: tuple[int, int], dim: int, number: int, of: int) -> Box:
    """Return offsets and sizes of one of so many equal parts."""
    sizes, offsets = list(shape), [0, 0]
    sizes[dim] //= of
    offsets[dim] = number * sizes[dim]
    return (offsets[0], offsets[1]), (sizes[0], sizes[1])


def elements(shape: tuple[int, int], box: Box, first: int) -> torch.Tensor:
    """Return a box of the tensor whose elements are numbered in row-major order, from `first` on."""
    (row, column), sizes = box
    found = torch.empty(sizes, dtype=torch.int32)
    rows = torch.arange(row, row + sizes[0], dtype=torch.int32) * shape[1] + first
    return torch.add(rows[:, None], torch.arange(column, column + sizes[1], dtype=torch.int32), out=found)


class Held:
    """What a rank holds: a state, its tensors, and what is to be in them; `dim`: along which it is cut."""

    def __init__(self, rank: int, sizes: Sizes, dim: int) -> None:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor import DTensor, Shard

        shape, mesh = sizes.shape, init_device_mesh("cpu", (2,))
        self.parts: list[tuple[torch.Tensor, Callable[[], torch.Tensor]]] = []
        values: dict[str, Any] = {}
        for n in range(sizes.n):
            half = part_of(shape, dim, rank, 2)
            local = self._part(shape, half, n)
            values[f"dtensor{n}"] = DTensor.from_local(local, mesh, [Shard(dim)], run_check=False)
            values[f"slice{n}"] = asyncckpt.ShardedSlice(self._part(shape, half, n + 100), shape, half[0])
            cut, end = math.prod(shape) // 2 - sizes.uneven * (1 + dim), math.prod(shape)
            start, stop = (0, cut) if rank == 0 else (cut, end)
            flat = self._part((1, end), ((0, start), (1, stop - start)), n + 200)[0]
            values[f"flat{n}"] = asyncckpt.FlatShard(flat, shape, start)
            boxes = [part_of(shape, dim, number, 4) for number in (rank, rank + 2)]
            values[f"tiles{n}"] = Tiles(shape, {box[0]: self._part(shape, box, n + 300) for box in boxes})
        self.state = {"values": values, "step": 7, "names": ["a", {"b": None}], "scalar": torch.tensor(2.5)}

    def _part(self, shape: tuple[int, int], box: Box, first: int) -> torch.Tensor:
        found = elements(shape, box, first)
        self.parts.append((found, lambda: elements(shape, box, first)))
        return found

    @property
    def nbytes(self) -> int:
        """Of all its shards."""
        return sum(tensor.numel() * ITEMSIZE for tensor, _ in self.parts)

    def erase(self) -> None:
        """Put other values into all leaves."""
        for tensor, _ in self.parts:
            tensor.fill_(-1)
        self.state |= {"step": 0, "names": [None, {"b": 3}], "scalar": torch.tensor(0.0)}

    def check(self) -> None:
        """Compare every leaf with what is to be in it."""
        assert all(torch.equal(tensor, expected()) for tensor, expected in self.parts)
        assert (self.state["step"], self.state["names"]) == (7, ["a", {"b": None}])
        assert self.state["scalar"] == 2.5
        assert {value.n_given for value in self.state["values"].values() if isinstance(value, Tiles)} == {1}


def taken_nbytes(call: Callable[[], Any]) -> int:
    """Return how much more memory this process had at any time of a call than before it."""

    def said(name: str) -> int:
        with open("/proc/self/status") as file:
            return next(int(line.split()[1]) * 1024 for line in file if line.startswith(name))

    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # forget the peak so far: proc(5)
    before = said("VmRSS")
    call()
    return said("VmHWM") - before


def save_by(storage: str, path: str, held: Held, threads: int) -> None:
    import torch.distributed.checkpoint as dcp
    from in_process_writer import StorageWriter

    from asyncckpt.dcp import ShardedSavePlanner

    writer: Any = StorageWriter(path, sync_files=False, thread_count=threads)
    if storage == "stock":
        writer = dcp.FileSystemWriter(path, sync_files=False, thread_count=threads)
    dcp.save(held.state, storage_writer=writer, planner=ShardedSavePlanner())


def load_by(storage: str, path: str, held: Held, threads: int | None) -> int:
    """Return how many bytes all reads of this rank asked for."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan

    from asyncckpt.dcp import ShardedLoadPlanner, StorageReader

    asked = []

    class Noting(ShardedLoadPlanner):
        def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
            tensors = (item for item in new_plan.items if item.type is LoadItemType.TENSOR)
            asked.extend(math.prod(item.lengths) for item in tensors if item.dest_index.fqn != "scalar")
            return super().finish_plan(new_plan)

    reader: Any = StorageReader(path, threads=threads) if storage == "ours" else dcp.FileSystemReader(path)
    dcp.load(held.state, storage_reader=reader, planner=Noting())
    return sum(asked) * ITEMSIZE


def begin(rank: int, root: str, storage: str) -> None:
    """Save and load little: what is imported and made once for a process's life is not of the save that is measured."""
    warnings.filterwarnings("ignore", "Detected an existing checkpoint")
    asyncckpt.register_shard_type(Tiles, to_shards, from_shards)
    held = Held(rank, SIZES["first"], 0)
    save_by(storage, f"{root}/first", held, 1)
    held.erase()
    load_by(storage, f"{root}/first", held, None)
    held.check()


def save(rank: int, root: str, storage: str) -> tuple[int, list[int]]:
    """Return what this rank holds, and what saves with one thread and with three have taken."""
    begin(rank, root, storage)
    held = Held(rank, SIZES[storage], 0)
    path = f"{root}/saved"
    return held.nbytes, [taken_nbytes(lambda n=n: save_by(storage, path, held, n)) for n in (1, 3)]  # type: ignore[misc]


def load(rank: int, root: str, storage: str, threads: int | None) -> tuple[int, int, int]:
    """Return what this rank holds, what a load into another arrangement has taken, and what it asked for."""
    begin(rank, root, storage)
    held = Held(rank, SIZES[storage], 1)
    held.erase()
    asked = []
    taken = taken_nbytes(lambda: asked.append(load_by(storage, f"{root}/saved", held, threads)))
    held.check()
    return held.nbytes, taken, asked[0]


Saved = Callable[[str], tuple[str, list[Any]]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Saved]:
    """Return by storage where two ranks have saved, and what `save` told of it."""
    root = tmp_path_factory.mktemp("planner-memory")
    told: dict[str, list[Any]] = {}

    def saved_by(storage: str) -> tuple[str, list[Any]]:
        path = pathlib.Path(root, storage)
        if storage not in told:
            path.mkdir()
            told[storage] = rank_processes.run(2, save, str(path), storage)
        return str(path), told[storage]

    yield saved_by
    shutil.rmtree(root)


@pytest.mark.parametrize("storage", ["ours", "stock"])
def test_a_save_takes_a_buffer_for_each_thread_beside_the_shards(storage: str, saved: Saved) -> None:
    for held, taken in saved(storage)[1]:
        assert held >= 255 * MIB, "a copy of all shards does not hide in any bound here"
        for threads, nbytes in zip((1, 3), taken, strict=True):
            buffers = max(threads, MIN_THREADS) if storage == "ours" else threads
            assert nbytes <= buffers * BUFFER_NBYTES + SLACK_NBYTES, (threads, taken)


@pytest.mark.parametrize(
    ("storage", "threads", "buffers"),
    [("ours", 1, 1), ("ours", None, 6), ("stock", None, 1)],
)
def test_a_load_takes_its_buffers_beside_the_shards_and_asks_for_these_alone(
    storage: str, threads: int | None, buffers: int, saved: Saved
) -> None:
    root, _ = saved(storage)
    for held, taken, asked in rank_processes.run(2, load, root, storage, threads):
        assert asked == held
        assert held >= 255 * MIB, "a copy of all shards does not hide in any bound here"
        assert taken <= buffers * BUFFER_NBYTES + SLACK_NBYTES

"""Loading into targets that hold parts of tensors: boxes, flat ranges, types that were registered; what is read."""

from __future__ import annotations

import itertools
import logging
import math
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from storage_samples import RecordingFiles, flip_byte, shard_paths

import asyncckpt
from asyncckpt.errors import (
    AliasMismatchError,
    ConfigError,
    CorruptCheckpointError,
    OverlappingShardsError,
    ShapeMismatchError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.loading import tensor_writers
from asyncckpt.loading.load import DefaultReader, load
from asyncckpt.sharding import registry
from asyncckpt.sharding.registry import register_shard_type
from asyncckpt.sharding.shard_types import FlatShard, ShardedSlice

PAGE = 4096


def save(path: Path, state: dict[Any, Any]) -> str:
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(state, path)
    return str(path)


def box_of(value: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    return value[tuple(slice(o, o + s) for o, s in zip(offsets, sizes, strict=True))]


# ---- types ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("offsets", "sizes"), [((0, 0), (3, 7)), ((4, 2), (5, 3)), ((8, 0), (1, 7)), ((2, 7), (4, 0))])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_slice_gets_its_box_and_nothing_around_it_changes(
    tmp_path: Path, offsets: tuple[int, int], sizes: tuple[int, int], dtype: torch.dtype
) -> None:
    value = torch.randn(9, 7)
    path = save(tmp_path / "c", {"w": value})
    around = torch.full((20, 20), -1.0, dtype=dtype)
    inside = around[3 : 3 + sizes[0], 5 : 5 + sizes[1]]
    target = {"w": ShardedSlice(inside, (9, 7), offsets)}
    assert load(path, target) is target and target["w"].tensor is inside
    assert torch.equal(inside.float(), box_of(value, offsets, sizes))
    assert int((around == -1).sum()) == 400 - math.prod(sizes)


def test_every_flat_range_gets_its_elements(tmp_path: Path) -> None:
    value = torch.randn(3, 4, 5)
    path = save(tmp_path / "c", {"w": value})
    for start, end in itertools.combinations_with_replacement(range(0, 61, 7), 2):
        mine = torch.zeros(end - start)
        load(path, {"w": FlatShard(mine, (3, 4, 5), start)})
        assert torch.equal(mine, value.flatten()[start:end])


class Tiles:
    """A framework's tensor: copies of its tiles go out, padded to one size, and come back when all of them are in."""

    def __init__(self, shape: tuple[int, int], tile: tuple[int, int], mine: Sequence[tuple[int, int]]) -> None:
        self.shape, self.tile, self.mine = shape, tile, list(mine)
        self.parts = {at: torch.zeros(tile) for at in self.mine}
        self.commits = 0

    @property
    def boxes(self) -> list[tuple[tuple[int, int], tuple[int, int]]]:
        """Return (offsets, sizes) of the tiles without padding."""
        found = []
        for row, column in self.mine:
            o = row * self.tile[0], column * self.tile[1]
            found.append((o, (min(self.tile[0], self.shape[0] - o[0]), min(self.tile[1], self.shape[1] - o[1]))))
        return found


def _tiles_out(value: Tiles) -> Any:
    boxes = zip(value.mine, value.boxes, strict=True)
    return value.shape, [(value.parts[at].clone(), offsets, sizes) for at, (offsets, sizes) in boxes]


def _tiles_in(value: Tiles, parts: list[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    value.commits += 1
    for at, (tensor, _) in zip(value.mine, parts, strict=True):
        value.parts[at][: tensor.shape[0], : tensor.shape[1]] = tensor


class Whole:
    """A registered value that every process holds as a whole."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.commits = tensor, 0


def _whole_in(value: Whole, parts: list[tuple[torch.Tensor, tuple[int, ...]]]) -> None:
    value.commits += 1


@pytest.fixture
def tiles() -> Iterator[None]:
    before = dict(registry._registered)
    register_shard_type(Tiles, _tiles_out, _tiles_in)
    register_shard_type(Whole, lambda value: value.tensor, _whole_in)
    yield
    registry._registered.clear()
    registry._registered.update(before)


def test_a_registered_type_is_told_once_when_all_its_padded_parts_are_in(tmp_path: Path, tiles: None) -> None:
    value = torch.randn(10, 7)
    path = save(tmp_path / "c", {"w": value, "x": torch.ones(3)})
    target = Tiles((10, 7), (4, 3), [(0, 0), (2, 2), (1, 2)])
    whole = Whole(torch.zeros(3))
    load(path, {"w": target, "x": whole})
    assert target.commits == whole.commits == 1 and bool(whole.tensor.all())
    for at, (offsets, sizes) in zip(target.mine, target.boxes, strict=True):
        assert torch.equal(target.parts[at][: sizes[0], : sizes[1]], box_of(value, offsets, sizes))
    assert not bool(target.parts[2, 2][2:].any())


def test_a_registered_type_is_not_told_of_a_load_that_failed(tmp_path: Path, tiles: None) -> None:
    path = save(tmp_path / "c", {"w": torch.randn(10, 7)})
    flip_byte(shard_paths(path)[0], PAGE + 8)
    target = Tiles((10, 7), (4, 3), [(0, 0)])
    with pytest.raises(CorruptCheckpointError):
        load(path, {"w": target})
    assert target.commits == 0 and not bool(target.parts[0, 0].any())


def test_a_registered_type_that_refuses_its_parts_is_named(tmp_path: Path, tiles: None) -> None:
    def refuse(value: Tiles, parts: Any) -> None:
        raise ValueError("not today")

    register_shard_type(Tiles, _tiles_out, refuse)
    path = save(tmp_path / "c", {"w": torch.randn(10, 7)})
    with pytest.raises(StateLoadError, match=r"'w', a Tiles.*not today") as caught:
        load(path, {"w": Tiles((10, 7), (4, 3), [(0, 0)])})
    assert (caught.value.fqn, caught.value.type_name) == ("w", "Tiles")


def test_a_checkpointer_takes_the_options_of_load(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(6.0)})
    part = ShardedSlice(torch.zeros(2), (6,), (3,))
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.load(path, {"w": part}, low_memory=False, threads=2, redundant_reads="each")
        assert part.tensor.tolist() == [3, 4]
        with pytest.raises(ConfigError, match="low_memory"):
            checkpointer.load(path, {"w": part}, low_memory=2)


@pytest.mark.parametrize(
    "make", [lambda: ShardedSlice(torch.zeros(2), (3,), (0,)), lambda: Tiles((3, 3), (2, 2), [(0, 0)])]
)
def test_a_second_write_to_the_same_parts_is_refused(tmp_path: Path, tiles: None, make: Any) -> None:
    one = make()
    shape = (3,) if isinstance(one, ShardedSlice) else (3, 3)
    path = save(tmp_path / "c", {"x": torch.ones(shape), "y": torch.zeros(shape)})
    with pytest.raises(AliasMismatchError, match="nothing was changed"):
        load(path, {"x": one, "y": one})


# ---- what is refused ------------------------------------------------------------------------------------------------


def test_global_shapes_are_compared_and_nothing_changes(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"first": torch.ones(4), "w": torch.ones(6, 4)})
    target = {"first": torch.zeros(4), "w": ShardedSlice(torch.zeros(6, 4), (12, 4), (0, 0))}
    with pytest.raises(ShapeMismatchError, match=r"'w' was saved with global shape \[6, 4\].*\[12, 4\]") as caught:
        load(path, target)
    assert (caught.value.fqn, caught.value.saved, caught.value.wanted) == ("w", [6, 4], [12, 4])
    assert not bool(target["first"].any())
    plan = asyncckpt.plan_load(path, target)
    assert plan.mismatched == (("w", (6, 4), (12, 4)),)


def test_a_plain_target_of_a_shards_shape_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(6, 4)})
    with pytest.raises(ShapeMismatchError):
        load(path, {"w": torch.zeros(3, 4)})


def test_overlapping_shards_of_a_target_are_refused_by_name(tmp_path: Path, tiles: None) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(4, 4)})
    target = Tiles((4, 4), (2, 2), [(0, 0), (0, 1)])
    register_shard_type(
        Tiles, lambda v: (v.shape, [(torch.zeros(2, 2), (0, 0)), (torch.zeros(2, 2), (1, 1))]), _tiles_in
    )
    with pytest.raises(OverlappingShardsError, match=r"'model\.w'"):
        load(path, {"model": {"w": target}}, key_map={"model.w": "w"})


def test_shards_that_cannot_be_are_refused_by_name(tmp_path: Path, tiles: None) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(4, 4)})
    register_shard_type(Tiles, lambda v: (v.shape, [(torch.zeros(2, 2), (3, 3))]), _tiles_in)
    with pytest.raises(UnsupportedLeafError, match=r"'w'.*is not inside") as caught:
        load(path, {"w": Tiles((4, 4), (2, 2), [])})
    assert caught.value.leaf == "w"


def test_an_expanded_part_is_refused(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(4, 4)})
    with pytest.raises(ConfigError, match="expanded"):
        load(path, {"w": ShardedSlice(torch.zeros(1, 4).expand(2, 4), (4, 4), (0, 0))})


def test_keys_key_map_and_conversion_apply_to_slices(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save(tmp_path / "c", {"w": torch.arange(8.0), "v": torch.ones(8)})
    target = {
        "a": ShardedSlice(torch.zeros(3, dtype=torch.bfloat16), (8,), (2,)),
        "v": ShardedSlice(torch.zeros(2), (8,), (0,)),
    }
    with caplog.at_level(logging.WARNING, "asyncckpt"):
        load(path, target, keys=["a"], key_map={"a": "w"}, strict=True)
    assert target["a"].tensor.tolist() == [2, 3, 4] and not bool(target["v"].tensor.any())
    assert "1 tensors are converted" in caplog.text


# ---- what is read ---------------------------------------------------------------------------------------------------


class CountingFiles(RecordingFiles):
    """Counts the bytes that are read of shards, without the save ids."""

    @property
    def nbytes(self) -> int:
        return sum(n for _, n in self.read_ranges if n > 64)


class ColdFiles(CountingFiles):
    """The page cache holds nothing."""

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        return False


def units(path: str, offsets: Sequence[int], sizes: Sequence[int], shape: Sequence[int], unit: int) -> int:
    """Return how many bytes the units have that hold a box of the only tensor (float32) of a checkpoint."""
    with asyncckpt.open_checkpoint(path) as found:
        ((_, chunk),) = found._contents.tensors["w"].chunks
    elements = torch.arange(math.prod(shape)).view(tuple(shape))
    starts = box_of(elements, offsets, sizes).flatten() * 4 + chunk.offset_bytes
    return len(torch.unique(torch.div(starts, unit, rounding_mode="floor"))) * unit


CUTS = {
    "rows": ((300, 0), (300, 3000)),
    "columns": ((0, 1500), (1200, 1500)),
    "a tile": ((600, 1500), (600, 1500)),
    "narrow columns": ((0, 700), (1200, 100)),
    "one column": ((0, 5), (1200, 1)),
}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, torch.Tensor]:
    value = torch.randn(1200, 3000)
    return save(tmp_path_factory.mktemp("wide") / "c", {"w": value}), value


@pytest.mark.parametrize("cut", CUTS)
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("kind", [CountingFiles, ColdFiles])
def test_a_part_reads_little_more_than_it_needs(
    wide: tuple[str, torch.Tensor], cut: str, verify: bool, kind: type[CountingFiles]
) -> None:
    path, value = wide
    offsets, sizes = CUTS[cut]
    files, mine = kind(), torch.zeros(sizes)
    DefaultReader(files).read(path, {"w": ShardedSlice(mine, (1200, 3000), offsets)}, verify=verify)
    assert torch.equal(mine, box_of(value, offsets, sizes))
    needed = mine.numel() * 4
    blocks, pages = (units(path, offsets, sizes, (1200, 3000), unit) for unit in (BLOCK_NBYTES, PAGE))
    if verify:
        assert files.nbytes <= 1.1 * blocks
    elif sizes[1] * 4 >= PAGE:
        assert files.nbytes <= 1.1 * needed
    else:  # no storage reads less than the pages
        assert files.nbytes <= 1.1 * pages


def test_parts_that_interleave_are_read_once(tmp_path: Path, tiles: None) -> None:
    value = torch.randn(400, 1000)
    path = save(tmp_path / "c", {"w": value})
    files = CountingFiles()
    target = Tiles((400, 1000), (400, 100), [(0, n) for n in range(0, 10, 2)])
    DefaultReader(files).read(path, {"w": target})
    assert files.nbytes <= value.numel() * 4 + 2 * BLOCK_NBYTES
    for _, n in target.mine:
        assert torch.equal(target.parts[0, n], value[:, n * 100 : n * 100 + 100])


def test_plan_load_counts_the_bytes_of_the_parts(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"w": torch.zeros(8, 8), "v": torch.zeros(4)})
    part = ShardedSlice(torch.zeros(2, 8), (8, 8), (2, 0))
    assert asyncckpt.plan_load(path, {"w": part, "v": torch.zeros(4)}).nbytes == 64 + 16
    assert asyncckpt.plan_load(path, {"w": part}).fits


# ---- pieces ---------------------------------------------------------------------------------------------------------


def test_random_runs_of_random_strided_boxes_hold_every_element_once(rng: random.Random) -> None:
    for _ in range(300):
        sizes = tuple(rng.randrange(1, 5) for _ in range(rng.randrange(0, 4)))
        strides, inner = [], 1
        for n in reversed(sizes):
            strides.append(inner + rng.randrange(0, 4))
            inner = (n - 1) * strides[-1] + inner
        places = tuple(reversed(strides))
        cuts = sorted({0, inner, *(rng.randrange(0, inner + 1) for _ in range(4))})
        found: dict[tuple[int, ...], int] = {}
        for low, high in itertools.pairwise(cuts):
            for start, offsets, shape in tensor_writers.boxes_within(sizes, places, (7,) * len(sizes), low, high):
                for at in itertools.product(*map(range, shape)):
                    place = start + sum(i * s for i, s in zip(at, places, strict=True))
                    assert low <= place < high
                    element = tuple(o - 7 + i for o, i in zip(offsets, at, strict=True))
                    assert element not in found
                    found[element] = place
        assert len(found) == math.prod(sizes)
        assert all(p == sum(i * s for i, s in zip(e, places, strict=True)) for e, p in found.items())


def test_elements_that_are_not_aligned_in_the_file_are_gathered_first() -> None:
    value, target = torch.randn(5, 6), torch.zeros(5, 6)
    sink = tensor_writers.BoxWriter(target, (0, 0), (5, 3), torch.float32, 27 * 4, (6, 1), aligned=False)
    raw = value.flatten()[:27].clone()
    for start in range(0, 108, 10):
        sink.deliver(start, raw.data_ptr() + start, min(10, 108 - start))
    assert torch.equal(target[:, :3], value[:, :3]) and not bool(target[:, 3:].any())


# ---- memory ---------------------------------------------------------------------------------------------------------


def test_without_low_memory_nothing_changes_until_everything_is_verified(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {"a": torch.ones(1 << 20), "b": torch.ones(1 << 20)})
    flip_byte(shard_paths(path)[0], PAGE + (6 << 20))
    for low_memory, stays in ((False, True), (True, False)):
        target = {"a": torch.zeros(1 << 20), "b": torch.zeros(1 << 20)}
        with pytest.raises(CorruptCheckpointError):
            load(path, target, low_memory=low_memory, threads=1)
        assert (not any(bool(t.any()) for t in target.values())) == stays


def test_without_low_memory_the_same_comes_back(tmp_path: Path) -> None:
    value = torch.randn(50, 60)
    path = save(tmp_path / "c", {"w": value, "h": value.half(), "e": torch.zeros(0, 3)})
    target = {
        "w": ShardedSlice(torch.zeros(60, 30).t()[:20], (50, 60), (7, 0)),
        "h": torch.zeros(50, 60),
        "e": torch.ones(0, 3),
    }
    load(path, target, low_memory=False)
    assert torch.equal(target["w"].tensor, value[7:27, :60]) and torch.equal(target["h"], value.half().float())
    assert torch.equal(load(path, low_memory=False)["w"], value)


@pytest.mark.parametrize("low_memory", [1, None, "yes"])
def test_low_memory_is_a_bool(tmp_path: Path, low_memory: Any) -> None:
    path = save(tmp_path / "c", {"w": torch.ones(1)})
    with pytest.raises(ConfigError, match="low_memory"):
        load(path, {"w": torch.zeros(1)}, low_memory=low_memory)


_MEASURE = """
import os, sys, torch, asyncckpt
from asyncckpt import ShardedSlice
def kib(name):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(name))
def measure(path, low_memory, threads):
    target = {f"w{n}": ShardedSlice(torch.ones(8192, 2048), (8192, 4096), (0, 1024)) for n in range(2)}
    asyncckpt.load(path, {"small": torch.ones(1)})
    open("/proc/self/clear_refs", "w").write("5")  # forgets the peak
    before = kib("VmHWM")
    asyncckpt.load(path, target, low_memory=low_memory, threads=threads)
    print(kib("VmHWM") - before, float(target["w1"].tensor.sum()), flush=True)
for low_memory, threads in ((True, 4), (True, 64), (False, 4)):
    pid = os.fork()  # each with a heap that no other load has used
    if pid == 0:
        measure(sys.argv[1], low_memory, threads)
        os._exit(0)
    os.waitpid(pid, 0)
"""


def test_low_memory_bounds_what_a_load_takes_beside_its_targets(tmp_path: Path) -> None:
    path = save(tmp_path / "c", {**{f"w{n}": torch.full((8192, 4096), 2.0) for n in range(2)}, "small": torch.zeros(1)})
    command = [sys.executable, "-c", _MEASURE, path]
    found = subprocess.run(command, check=True, capture_output=True, text=True, timeout=100).stdout.split()
    assert [float(total) for total in found[1::2]] == [8192 * 2048 * 2] * 3
    few, many, whole = map(int, found[::2])
    assert max(few, many) <= 256_000
    assert whole >= 2 * 8192 * 2048 * 4 // 1024

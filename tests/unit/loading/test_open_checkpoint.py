"""open_checkpoint: what is there, parts of tensors, and that only what is asked for is read."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from many_ranks import raw_bytes, save_ranks
from states import ALL_DTYPES, tensor_of
from storage_samples import RecordingFiles, flip_byte, shard_paths

import asyncckpt
from asyncckpt import PerRank
from asyncckpt.config import RankInfo
from asyncckpt.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    LeafTypeMismatchError,
    MissingKeysError,
    PerRankUnavailableError,
)
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_OFFSET
from asyncckpt.loading import byte_ranges, fetch
from asyncckpt.loading.open_checkpoint import OpenCheckpoint
from asyncckpt.loading.read_source import ReadSource
from asyncckpt.storage.contents import SavedTensor, read_contents


class CountingFiles(RecordingFiles):
    """Remembers what of which shard was read; the save ids do not count."""

    def __init__(self) -> None:
        super().__init__()
        self.shards: list[tuple[str, int, int]] = []

    def preadv(self, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        count = super().preadv(fd, buffers, offset, flags)
        name = self.paths[fd]
        if name.endswith(".safetensors") and offset != SAVE_ID_OFFSET:
            with self.lock:
                self.shards.append((name, offset, count))
        return count

    @property
    def nbytes(self) -> int:
        """Bytes of shards that were read."""
        return sum(n for _, _, n in self.shards)


def opened(path: str, files: CountingFiles | None = None, rank: int = 0, world_size: int = 1) -> OpenCheckpoint:
    files = files or CountingFiles()
    return OpenCheckpoint(ReadSource(read_contents(path, files), files), RankInfo(rank, world_size))


STATE = {
    "model": {"w": torch.arange(600.0).reshape(20, 30), "b": torch.ones(3, dtype=torch.bfloat16)},
    "step": 7,
    "name": "x",
    "long": b"y" * 70_000,
}


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("open") / "c"
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save(STATE, path, metadata={"loss": 0.5})
    return str(path)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> str:
    w = torch.arange(40.0).reshape(10, 4)
    states = [
        {"w": w, "m": torch.full((2,), float(r)), "rng": PerRank({"t": torch.full((3,), r), "s": r}), "n": -r}
        for r in range(3)
    ]
    return save_ranks(tmp_path_factory.mktemp("ranks") / "c", states, step=9)


# ---- what is there --------------------------------------------------------------------------------------------------


def test_it_says_what_is_there_without_reading_data(path: str) -> None:
    files = CountingFiles()
    found = opened(path, files)
    assert found.keys() == ["model.w", "model.b", "step", "name", "long"]
    assert (found.step, found.world_size, found.metadata, found.path) == (7, 1, {"loss": 0.5}, path)
    assert found.save_id.endswith(os.path.basename(shard_paths(path)[0]).split(".")[1])
    assert "model.w" in found and "model" not in found
    assert {n: (t.dtype, t.shape, t.nbytes) for n, t in found.tensors.items()} == {
        "model.w": (torch.float32, (20, 30), 2400), "model.b": (torch.bfloat16, (3,), 6)
    }  # fmt: skip
    assert list(found.objects) == ["step", "name", "long"]
    assert not any(
        str(where).endswith((".safetensors", ".json"))
        for name, where in files.calls
        if name == "open" and "manifest" not in str(where)
    )


def test_objects_are_read_when_they_are_asked_for(path: str) -> None:
    found = asyncckpt.open_checkpoint(path)
    assert found.objects["step"] == 7 and found.objects["long"] == b"y" * 70_000
    assert dict(found.objects) == {"step": 7, "name": "x", "long": b"y" * 70_000}
    assert found.objects.get("nothing", 5) == 5 and "model.w" not in found.objects
    with pytest.raises(KeyError):
        found.objects["nothing"]
    assert "step" in repr(found.objects)


def test_it_is_a_context_manager(path: str) -> None:
    with asyncckpt.open_checkpoint(Path(path)) as found:
        assert torch.equal(found.tensor("model.w"), STATE["model"]["w"])  # type: ignore[index]
    assert "step=7" in repr(found)


def test_what_is_not_there_is_named(path: str, tmp_path: Path) -> None:
    found = asyncckpt.open_checkpoint(path)
    with pytest.raises(MissingKeysError) as caught:
        found.tensor("model")
    assert caught.value.keys == ["model"]
    with pytest.raises(LeafTypeMismatchError, match=r"\.objects\['step'\]"):
        found.tensor("step")
    with pytest.raises(ConfigError, match="threads"):
        found.tensor("model.w", threads=0)
    with pytest.raises(CheckpointNotFoundError):
        asyncckpt.open_checkpoint(tmp_path / "nothing")


# ---- several ranks --------------------------------------------------------------------------------------------------


def test_a_rank_sees_its_own_values(ranks: str) -> None:
    found = asyncckpt.open_checkpoint(ranks, rank_info=RankInfo(2, 3))
    assert found.keys() == ["w", "m", "rng.t", "rng.s", "n"]
    assert (found.world_size, found.step) == (3, 9)
    assert found.tensor("m").tolist() == [2, 2] and found.tensor("rng.t").tolist() == [2, 2, 2]
    assert dict(found.objects) == {"rng.s": 2, "n": -2}
    assert found.tensors["m"].stored_name == "m@rank2"


def test_a_reader_of_another_world_finds_every_ranks_values_by_name(ranks: str) -> None:
    found = asyncckpt.open_checkpoint(ranks)
    assert found.keys() == ["w", "m", "n"]
    assert found.tensor("m").tolist() == [0, 0] and dict(found.objects) == {"n": 0}
    for rank in range(3):
        assert found.tensor(f"m@rank{rank}", 1).item() == rank
        assert found.tensor(f"rng.t@rank{rank}").tolist() == [rank] * 3
        assert dict(found.objects_of(rank)) == {"rng.s": rank, "n": -rank}
    assert set(found.stored_tensors) == {"w"} | {f"{n}@rank{r}" for n in ("m", "rng.t") for r in range(3)}
    with pytest.raises(PerRankUnavailableError, match=r"rng\.t"):
        found.tensor("rng.t")
    with pytest.raises(PerRankUnavailableError):
        found.objects["rng.s"]
    assert "rng.s" not in found.objects
    with pytest.raises(MissingKeysError):
        found.tensor("m@rank3")


@pytest.mark.parametrize("rank", [-1, 3, True, "0", None])
def test_objects_of_a_rank_that_was_not_there_are_refused(ranks: str, rank: Any) -> None:
    with pytest.raises(ConfigError, match="3 ranks saved"):
        asyncckpt.open_checkpoint(ranks).objects_of(rank)


def test_a_part_of_a_replica_is_read_from_the_rank_that_has_it(ranks: str) -> None:
    files = CountingFiles()
    assert opened(ranks, files).tensor("w", slice(4, 6)).tolist() == torch.arange(40.0).reshape(10, 4)[4:6].tolist()
    assert {name for name, _, _ in files.shards} == {shard_paths(ranks)[1]}


# ---- slices ---------------------------------------------------------------------------------------------------------

BASE = tensor_of(torch.float32, (7, 5, 4), 3)
SLICES = [
    None, (), ..., 0, -1, 6, slice(None), slice(2, 5), slice(-3, None), slice(5, 2), slice(100), slice(-100, 100),
    slice(None, None, 2), slice(1, 7, 3), (1, 2), (1, 2, 3), (..., 1), (0, ..., 1), (slice(1, 3), slice(2), -1),
    (slice(None), 2), (slice(0, 7, 4), slice(1, 5, 3), slice(0, 4, 2)), [slice(1, 2), 0], (slice(None), slice(3, 3)),
    (..., slice(1, 3)), (1, 2, 3, ...), slice(None, None, 100),
]  # fmt: skip


@pytest.mark.parametrize("slices", SLICES, ids=repr)
def test_slices_select_what_indexing_would(tmp_path: Path, slices: Any) -> None:
    path = save_ranks(tmp_path / "c", [{"x": BASE}] * 3, block_nbytes=4096)
    expected = BASE if slices is None else BASE[tuple(slices) if isinstance(slices, list) else slices]
    for verify in (True, False):
        found = opened(path).tensor("x", slices, verify=verify)
        assert found.shape == expected.shape and found.is_contiguous() and found.dtype == torch.float32
        assert raw_bytes(found) == raw_bytes(expected)


@pytest.mark.parametrize(
    ("slices", "why"),
    [
        (7, "index 7 is out of range for dimension 0 of size 7"), (-8, "out of range"), ((0, 0, 0, 0), "3 dimensions"),
        ((..., ...), "3 dimensions"), (slice(None, None, -1), "step -1 of dimension 0"), (slice(None, None, 0), "zero"),
        ("x", "no int, slice or"), (1.5, "no int"), ((True,), "no int"), ((None, 0), "no int"), (slice(1.5), "slice"),
        (torch.tensor([0, 1]), "no int"), ({0: 1}, "no int"),
    ],
)  # fmt: skip
def test_slices_that_make_no_sense_are_refused(tmp_path: Path, slices: Any, why: str) -> None:
    path = save_ranks(tmp_path / "c", [{"x": BASE}])
    with pytest.raises(ConfigError, match=why) as caught:
        opened(path).tensor("x", slices)
    assert caught.value.field == "slices"


@pytest.mark.parametrize("dtype", ALL_DTYPES, ids=str)
@pytest.mark.filterwarnings("error")
def test_parts_of_every_dtype_keep_every_bit(tmp_path: Path, dtype: torch.dtype) -> None:
    value = tensor_of(dtype, (6, 5), 1)
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"x": value}, tmp_path / "c")
    found = asyncckpt.open_checkpoint(tmp_path / "c").tensor("x", (slice(1, 6, 2), slice(1, 4)))
    raw = value.view(torch.uint8).view(6, 5, -1)[1:6:2, 1:4]
    assert found.dtype == dtype and found.shape == (3, 3)
    assert raw_bytes(found.view(torch.uint8)) == raw_bytes(raw)


def test_what_comes_back_is_an_ordinary_tensor(path: str) -> None:
    found = asyncckpt.open_checkpoint(path).tensor("model.w", slice(0, 4, 2))
    assert not found.requires_grad and found.untyped_storage().nbytes() == 2 * 30 * 4
    found.requires_grad_().sum().backward()


# ---- what is read ---------------------------------------------------------------------------------------------------

LARGE = torch.arange(1_500_000, dtype=torch.float32).reshape(1500, 1000)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("large") / "c"
    with asyncckpt.SyncCheckpointer(fsync=False) as checkpointer:
        checkpointer.save({"other": torch.zeros(500_000), "x": LARGE}, path)
    return str(path)


@pytest.mark.parametrize(
    ("slices", "pages", "blocks"),
    [
        (700, 2, 2),
        (slice(700, 710), 11, 2),
        ((slice(None, None, 300), 0), 5, 5),
        ((3, slice(0, 10)), 2, 2),
        (slice(0, 0), 0, 0),
    ],
)
def test_rows_read_their_pages_or_blocks_only(large: str, slices: Any, pages: int, blocks: int) -> None:
    for verify, limit in ((True, blocks * BLOCK_NBYTES), (False, pages * PAGE_NBYTES)):
        files = CountingFiles()
        assert torch.equal(opened(large, files).tensor("x", slices, verify=verify), LARGE[slices])
        assert files.nbytes <= limit


def test_a_column_is_one_run_and_no_byte_is_read_twice(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    make = fetch.wanted_ranges

    def noted(*args: Any, **kw: Any) -> Any:
        for file, wanted in make(*args, **kw):
            sizes.append(wanted.nbytes)
            yield file, wanted

    monkeypatch.setattr(fetch, "wanted_ranges", noted)
    files = CountingFiles()
    assert torch.equal(opened(large, files).tensor("x", (..., slice(5, 7))), LARGE[:, 5:7])
    assert len(sizes) == 1
    assert files.nbytes <= LARGE.numel() * 4 + 2 * BLOCK_NBYTES


def test_too_many_ranges_become_fewer(large: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(byte_ranges, "MAX_RANGES", 100)
    shape = LARGE.view(750, 2000)
    files = CountingFiles()
    assert torch.equal(opened(large, files).tensor("x", (slice(None, None, 2), 0), verify=False), shape[:, 0])
    assert files.nbytes <= LARGE.numel() * 4 + 2 * BLOCK_NBYTES


def test_damage_outside_the_part_does_not_matter_and_inside_is_named(large: str, tmp_path: Path) -> None:
    copy = str(tmp_path / "c")
    shutil.copytree(large, copy)
    (shard,) = shard_paths(copy)
    flip_byte(shard, os.path.getsize(shard) - 1)
    found = opened(copy)
    assert torch.equal(found.tensor("x", slice(0, 100)), LARGE[:100])
    with pytest.raises(CorruptCheckpointError) as caught:
        found.tensor("x", -1)
    assert caught.value.fqn == "x" and caught.value.file == os.path.basename(shard)
    found.tensor("x", -1, verify=False)
    os.truncate(shard, os.path.getsize(shard) - 4096)
    with pytest.raises(CorruptCheckpointError):
        found.tensor("x", 0, verify=False)


def test_a_shard_that_is_not_needed_may_be_missing(ranks: str, tmp_path: Path) -> None:
    shutil.copytree(ranks, tmp_path / "c")
    os.unlink(shard_paths(str(tmp_path / "c"))[2])
    found = opened(str(tmp_path / "c"))
    assert found.tensor("m").tolist() == [0, 0]
    with pytest.raises(CorruptCheckpointError, match="missing"):
        found.tensor("w")


# ---- random states, cuts and slices ---------------------------------------------------------------------------------


def test_random_parts_of_random_cuts_are_bit_exact_and_read_no_other_block(tmp_path: Path) -> None:
    hypothesis = pytest.importorskip("hypothesis")
    st = pytest.importorskip("hypothesis.strategies")
    counter = iter(range(1 << 30))

    @hypothesis.given(st.data())
    @hypothesis.settings(max_examples=150)
    def check(data: Any) -> None:
        draw = data.draw
        n_ranks = draw(st.integers(1, 4))
        shape = tuple(draw(st.lists(st.sampled_from([0, 1, 1, 2, 3, 5, 17, 40]), max_size=4)))
        dtype = draw(st.sampled_from([torch.uint8, torch.int16, torch.float32, torch.complex128]))
        value = tensor_of(dtype, shape, 5)
        cuts = sorted(draw(st.lists(st.integers(0, shape[0] if shape else 0), max_size=6)))

        def cut(fqn: str, shape: tuple[int, ...], holders: Sequence[int]) -> dict[int, Any]:
            if not shape or shape[0] < 2:
                return {draw(st.sampled_from(list(holders))): [((0,) * len(shape), shape)]}
            found: dict[int, Any] = {}
            for low, high in zip([0, *cuts], [*cuts, shape[0]], strict=True):
                box = ((low, *(0,) * (len(shape) - 1)), (high - low, *shape[1:]))
                found.setdefault(draw(st.integers(0, n_ranks - 1)), []).append(box)
            return found

        states = [{"first": torch.full((r + 1,), r), "x": value} for r in range(n_ranks)]
        path = save_ranks(tmp_path / str(next(counter)), states, cut=cut, block_nbytes=4096)
        assert raw_bytes(asyncckpt.load(path, keys="x")["x"]) == raw_bytes(value)

        def index(n: int) -> Any:
            any_slice = st.builds(slice, *[st.none() | st.integers(-n - 2, n + 2)] * 2, st.none() | st.integers(1, 5))
            return draw(any_slice | st.integers(-n, n - 1)) if n else draw(any_slice)

        slices = tuple(index(n) for n in shape[: draw(st.integers(0, len(shape)))])
        verify = draw(st.booleans())
        files = CountingFiles()
        found = opened(path, files)
        part = found.tensor("x", slices, verify=verify, threads=1)
        assert part.shape == value[slices].shape and raw_bytes(part) == raw_bytes(value[slices])
        saved = read_contents(path, CountingFiles()).tensors["x"]
        touched = units(saved, value, slices)
        read = {(name, at) for name, start, n in files.shards for at in range(start // 4096, -(-(start + n) // 4096))}
        assert len(read) == len(touched)

    check()


def units(saved: SavedTensor, value: torch.Tensor, slices: Any) -> set[tuple[int, int, int]]:
    """Return (rank, part, page) of all pages that hold an element of what is selected."""
    numbers = torch.arange(value.numel()).reshape(value.shape)
    wanted = torch.zeros(value.numel(), dtype=torch.bool)
    wanted[numbers[slices].flatten()] = True
    found = set()
    for rank, chunk in saved.chunks:
        inside = numbers
        for dim, (offset, size) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            inside = inside.narrow(dim, offset, size)
        for at in wanted[inside.flatten()].nonzero().flatten().tolist():
            start = chunk.offset_bytes + at * value.itemsize
            found.add((rank, chunk.part, start // 4096))
            found.add((rank, chunk.part, (start + value.itemsize - 1) // 4096))
    assert math.prod(value.shape) or not found
    return found

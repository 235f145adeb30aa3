"""The copy pipeline: tensors that pass in several windows, how files are cut, and how checksums find their places."""

from __future__ import annotations

import ctypes
import itertools
import pathlib
import threading
import zlib
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
import states
import torch

import asyncckpt
from asyncckpt import RankInfo, SyncCheckpointer
from asyncckpt.format.checksums import BLOCK_NBYTES, block_digest
from asyncckpt.format.layout import Payload
from asyncckpt.interop import copy_pipeline, verify_target
from asyncckpt.interop.copy_pipeline import ElementRun, OutputFile, Target, write_files
from asyncckpt.interop.source_reader import SourceReader
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import ShardWriter

pytest.importorskip("numpy")

SOURCES = ("asyncckpt", "torch", "legacy", "dcp", "safetensors", "hf")
TARGETS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")


@pytest.mark.parametrize("to", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_tensors_larger_than_a_window_pass_in_several(
    source: str,
    to: str,
    large_sources: dict[str, pathlib.Path],
    tmp_path: pathlib.Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    asyncckpt.convert(large_sources[source], tmp_path / "x", to=to)
    found, expected = asyncckpt.load(tmp_path / "x"), large_state()
    assert set(found) == set(expected)
    for name, tensor in expected.items():
        states.assert_same(found[name], tensor.contiguous(), name)
    if to in ("torch", "dcp"):
        assert not verify_any(str(tmp_path / "x"), Files()).faults, "every CRC-32 is right"


def large_state() -> dict[str, torch.Tensor]:
    """Tensors over several windows, around their ends, and within one; of odd sizes, and not row-major."""
    random = torch.Generator().manual_seed(5)

    def some(*shape: int, dtype: torch.dtype = torch.uint8) -> torch.Tensor:
        return torch.randint(0, 100, shape, generator=random, dtype=dtype)

    return {
        "wide": some(3, 211, 577, dtype=torch.int16),
        "one": some(700_001),
        "turned": some(301, 1013).t(),
        "near": some(BLOCK_NBYTES - 5000),
        **{f"small{n}": some(n * 37) for n in range(30)},
        "double": some(211, 307, dtype=torch.int64).double(),
    }


@pytest.fixture(scope="module")
def large_sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("large")
    torch.save(large_state(), root / "torch")
    torch.save(large_state(), root / "legacy", _use_new_zipfile_serialization=False)
    for kind in ("asyncckpt", "dcp", "safetensors", "hf"):
        asyncckpt.convert(
            root / "torch", root / kind, to=kind, max_shard_bytes=None if kind == "safetensors" else 900_000
        )
    return {kind: root / kind for kind in SOURCES}


class Elements:
    """A source whose tensors are bytes; of some runs it knows the CRC-32, as one that compares them with its own."""

    def __init__(self, tensors: dict[int, bytes], summed: set[int]) -> None:
        self.tensors, self.summed = tensors, summed

    def read(self, runs: Sequence[ElementRun], address: int, origin: int, buffer: memoryview) -> dict[ElementRun, int]:
        found = {}
        for run in runs:
            data = self.tensors[run.tensor][run.start : run.start + run.nbytes]
            ctypes.memmove(address + run.at - origin, data, run.nbytes)
            if run.tensor in self.summed:
                found[run] = zlib.crc32(data)
        return found


@pytest.mark.parametrize("seed", range(20))
def test_checksums_are_put_behind_their_elements_whatever_the_windows(
    seed: int, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    random = Random(seed)
    sizes = [random.choice((0, 5, 1000, BLOCK_NBYTES - 20, BLOCK_NBYTES, 3 * BLOCK_NBYTES + 11)) for _ in range(9)]
    contents = {n: random.randbytes(size) for n, size in enumerate(sizes)}
    pieces: list[bytes | Payload] = []
    crc_at, at = [], 0
    for n, size in enumerate(sizes):
        behind = bytes(random.choice((4, 40, -(at + size) % BLOCK_NBYTES + random.randrange(4, 9))))
        at += size + len(behind)
        crc_at.append((2 * n, at - 4))
        pieces += [Payload(n, size), behind]
    crc_at += [(2 * n, at + 4 * n) for n in range(len(sizes))]
    file = OutputFile(name="", pieces=(*pieces, bytes(4 * len(sizes))), crc_at=tuple(crc_at))
    expected = bytearray().join(contents[p.tensor] if isinstance(p, Payload) else p for p in file.pieces)
    for piece, offset in crc_at:
        expected[offset : offset + 4] = zlib.crc32(contents[piece // 2]).to_bytes(4, "little")
    source, steps = Elements(contents, set(random.sample(range(9), 4))), list[int]()
    path = str(tmp_path / "x")
    digests = write_files(path, Target([file], is_directory=False), source, Files(), 0o600, steps.append, threads=4)
    assert (tmp_path / "x").read_bytes() == expected
    assert sum(steps) == file.nbytes
    blocks = [expected[at : at + BLOCK_NBYTES] for at in range(0, len(expected), BLOCK_NBYTES)]
    assert digests == {"": b"".join(map(block_digest, blocks))}


def test_who_waits_for_a_checksum_is_told_when_another_thread_fails(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    has_begun = threading.Event()

    class Failing:
        def read(
            self, runs: Sequence[ElementRun], address: int, origin: int, buffer: memoryview
        ) -> dict[ElementRun, int]:
            if origin:
                has_begun.set()  # and waits for the sum of the first window's elements
                return {}
            assert has_begun.wait(60)
            raise OSError(5, "bad")

    pieces = (Payload(0, BLOCK_NBYTES), bytes(100))
    target = Target([OutputFile(name="", pieces=pieces, crc_at=((0, BLOCK_NBYTES),))], is_directory=False)
    with pytest.raises(OSError, match="bad"):
        write_files(str(tmp_path / "x"), target, Failing(), Files(), 0o600, lambda nbytes: None, threads=2)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("asyncckpt-convert")]


@pytest.mark.parametrize("stretch_blocks", [1, 2, 1000])
def test_all_files_are_read_back_whatever_a_pass_holds(
    stretch_blocks: int, large_sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify_target, "_PASS_NBYTES", stretch_blocks * BLOCK_NBYTES)
    monkeypatch.setattr(verify_target, "_REPORTED_NBYTES", 1)
    real, passes, seen = verify_target.read_shards, [], []

    def counted(directory: str, save_id: Any, requests: Any, **options: Any) -> Any:
        passes.append([(r.shard.name, w.offset, w.nbytes) for r in requests for w in r.wanted])
        return real(directory, save_id, requests, **options)

    monkeypatch.setattr(verify_target, "read_shards", counted)
    report = asyncckpt.convert(
        large_sources["torch"],
        tmp_path / "x",
        to="hf",
        max_shard_bytes=300_000,
        progress=lambda done, total: seen.append((threading.get_ident(), done, total)),
    )
    assert {thread for thread, _, _ in seen} == {threading.get_ident()}
    assert sorted(done for _, done, _ in seen) == [done for _, done, _ in seen]
    assert seen[-1][1:] == (2 * report.nbytes, 2 * report.nbytes)
    held: dict[str, int] = {}
    for found in passes:
        assert sum(nbytes for _, _, nbytes in found) <= stretch_blocks * BLOCK_NBYTES
        for name, offset, nbytes in found:
            assert offset == held.get(name, 0)
            held[name] = offset + nbytes
    files = [file for file in (tmp_path / "x").iterdir() if not file.name.startswith(".")]
    assert held == {file.name: file.stat().st_size for file in files}


@pytest.mark.parametrize("source", ["asyncckpt", "dcp", "torch", "safetensors"])
def test_a_window_of_one_tensor_is_read_in_one_call(
    source: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    window = 8 * BLOCK_NBYTES
    torch.save({"t": torch.arange(6 * window // 4, dtype=torch.int32)}, tmp_path / "torch")
    if source != "torch":
        asyncckpt.convert(tmp_path / "torch", tmp_path / source, to=source)
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", window)
    reads: list[tuple[int, int]] = []

    def preadv(files: Files, fd: int, buffers: Sequence[Any], offset: int, flags: int = 0) -> int:
        if threading.current_thread().name.startswith("asyncckpt-convert") and len(buffers[0]) > 4096:
            reads.append((offset, len(buffers[0])))
        return real(files, fd, buffers, offset, flags)

    real = Files.preadv
    monkeypatch.setattr(Files, "preadv", preadv)
    monkeypatch.setattr(Files, "resident", lambda files, fd, offset, nbytes: False)
    asyncckpt.convert(tmp_path / source, tmp_path / "x", to="hf", read_back=False)
    assert len(reads) <= 7, f"six windows and the rest of the last: {reads}"
    assert sum(nbytes >= window - BLOCK_NBYTES for _, nbytes in reads) == 6


def test_windows_without_a_checksums_place_wait_for_no_earlier_one(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    state = {"t": torch.arange(6 * BLOCK_NBYTES // 4, dtype=torch.int32)}
    torch.save(state, tmp_path / "a")
    first_may_go, written = threading.Event(), set()

    def read(reader: SourceReader, runs: Any, *arguments: Any) -> Any:
        if arguments[1] == 0:
            assert first_may_go.wait(60), "the second and the third window wait for the first"
        return real_read(reader, runs, *arguments)

    def write_extent(writer: ShardWriter, start: int, *arguments: Any) -> None:
        real_write(writer, start, *arguments)
        written.add(start)
        if {BLOCK_NBYTES, 2 * BLOCK_NBYTES} <= written:
            first_may_go.set()

    real_read, real_write = SourceReader.read, ShardWriter.write_extent
    monkeypatch.setattr(SourceReader, "read", read)
    monkeypatch.setattr(ShardWriter, "write_extent", write_extent)
    asyncckpt.convert(tmp_path / "a", tmp_path / "x", to="torch")
    states.assert_same(asyncckpt.load(tmp_path / "x"), state)
    assert not verify_any(str(tmp_path / "x"), Files()).faults, "every CRC-32 is right"


class Columns:
    """A framework's tensor that is stored by columns of uneven width."""

    def __init__(self, whole: torch.Tensor) -> None:
        self.whole = whole


def to_shards(value: Columns) -> Any:
    cuts = [0, 3, 200, value.whole.shape[1]]
    parts = [(value.whole[:, a:b].contiguous(), [0, a]) for a, b in itertools.pairwise(cuts)]
    return value.whole.shape, parts


@pytest.mark.parametrize("to", ["asyncckpt", "dcp", "torch"])
@pytest.mark.parametrize("layout", ["safetensors", "dcp"])
def test_a_tensor_of_several_chunks_passes_in_several_windows(
    layout: str, to: str, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copy_pipeline, "WINDOW_NBYTES", BLOCK_NBYTES)
    asyncckpt.register_shard_type(Columns, to_shards, lambda value, parts: None)
    whole = torch.randint(-999, 999, (701, 607), dtype=torch.int32, generator=torch.Generator().manual_seed(3))
    with SyncCheckpointer(rank_info=RankInfo(0, 1), layout=layout) as checkpointer:
        checkpointer.save({"w": Columns(whole), "x": torch.ones(5)}, tmp_path / "a")
    if layout == "dcp":
        for file in (tmp_path / "a").iterdir():  # now it is anybody's
            if file.suffix != ".distcp" and file.name != ".metadata":
                file.unlink()
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to=to)
    states.assert_same(asyncckpt.load(tmp_path / "b"), {"w": whole, "x": torch.ones(5)})

"""Conversions whose tensors pass in several windows; how files are cut, and how checksums find their places."""

from __future__ import annotations

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
from asyncckpt.conversion import reading_back, windows
from asyncckpt.conversion.passing import PassingChecksums
from asyncckpt.conversion.pieces import OutputFile
from asyncckpt.conversion.runs import RunReader
from asyncckpt.foreign.verification import verify_any
from asyncckpt.format.archive import Payload
from asyncckpt.format.checksum import BLOCK_NBYTES
from asyncckpt.format.crc import joined
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
    monkeypatch.setattr(windows, "WINDOW_NBYTES", BLOCK_NBYTES)
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


# ---- windows --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_windows_hold_every_byte_of_a_file_once(seed: int) -> None:
    random = Random(seed)
    pieces = tuple(
        Payload(n, random.choice((0, 1, 7, 64, 300, 1000)))
        if random.random() < 0.5
        else random.randbytes(random.randrange(90))
        for n in range(random.randrange(30))
    )
    file = OutputFile(name="", pieces=pieces)
    contents = {n: random.randbytes(piece.nbytes) for n, piece in enumerate(pieces) if isinstance(piece, Payload)}
    expected = b"".join(contents[n] if isinstance(piece, Payload) else piece for n, piece in enumerate(pieces))
    found, ends = bytearray(file.nbytes), set()
    taken = 0
    for window in windows.windows_of(file, 128):
        assert window.end - window.start == 128 or window.end == file.nbytes
        for at, text in window.texts:
            found[at : at + len(text)] = text
            taken += len(text)
        for run in window.runs:
            assert window.start <= run.at < run.at + run.nbytes <= window.end
            found[run.at : run.at + run.nbytes] = contents[run.piece][run.start : run.start + run.nbytes]
            taken += run.nbytes
            ends |= {run.piece} if run.is_last else set()
    assert (bytes(found), taken) == (expected, file.nbytes)
    assert ends == {n for n, content in contents.items() if content}


@pytest.mark.parametrize("seed", range(20))
def test_checksums_before_and_behind_their_elements_are_put_whatever_the_windows(seed: int) -> None:
    random = Random(seed)
    sizes = [random.choice((0, 5, 1000, BLOCK_NBYTES - 20, BLOCK_NBYTES, 3 * BLOCK_NBYTES + 11)) for _ in range(9)]
    pieces: list[bytes | Payload] = []
    crc_at, at = [], 0
    for n, size in enumerate(sizes):
        pad = bytes(random.choice((4, 40, -at % BLOCK_NBYTES + random.randrange(4, 9))))
        crc_at.append((2 * n + 1, at + len(pad) - 4))
        pieces += [pad, Payload(n, size)]
        at += len(pad) + size
    crc_at += [(2 * n + 1, at + 4 * n) for n in range(len(sizes))]
    file = OutputFile(name="", pieces=(*pieces, bytes(4 * len(sizes))), crc_at=tuple(crc_at))
    contents = {2 * n + 1: random.randbytes(size) for n, size in enumerate(sizes)}
    expected = bytearray().join(contents[n] if isinstance(p, Payload) else p for n, p in enumerate(file.pieces))
    for piece, offset in crc_at:
        expected[offset : offset + 4] = zlib.crc32(contents[piece]).to_bytes(4, "little")
    found = bytearray(-(-file.nbytes // BLOCK_NBYTES) * BLOCK_NBYTES)
    checksums, n_written = PassingChecksums(file), 0
    for window in windows.windows_of(file, BLOCK_NBYTES):
        room = bytearray(BLOCK_NBYTES)
        for where, text in window.texts:
            room[where - window.start : where - window.start + len(text)] = text
        for run in window.runs:
            where = run.at - window.start
            room[where : where + run.nbytes] = contents[run.piece][run.start : run.start + run.nbytes]
        view = memoryview(room)
        for start, data in checksums.released(checksums.sums(window, view, {})):
            found[start : start + len(data)] = data
            n_written += len(data)
        before, extents = bytes(room), checksums.put(window, view)
        if not checksums.concerns(window):
            assert (extents, bytes(room)) == ([(window.start, -(-window.end // 4096) * 4096)], before)
        for start, end in extents:
            found[start:end] = view[start - window.start : end - window.start]
            n_written += end - start
    checksums.close()
    assert found[: file.nbytes] == expected
    assert n_written == -(-file.nbytes // 4096) * 4096, "every byte is written once"


@pytest.mark.parametrize("nbytes", [0, 1, 7, 4096, 100_003])
def test_the_checksum_of_two_runs_is_that_of_all_their_bytes(nbytes: int, rng: Random) -> None:
    first, second = rng.randbytes(rng.randrange(2000)), rng.randbytes(nbytes)
    assert joined(zlib.crc32(first), zlib.crc32(second), nbytes) == zlib.crc32(first + second)


@pytest.mark.parametrize("stretch_blocks", [1, 2, 1000])
def test_all_files_are_read_back_whatever_a_pass_holds(
    stretch_blocks: int, large_sources: dict[str, pathlib.Path], tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading_back, "STRETCH_NBYTES", stretch_blocks * BLOCK_NBYTES)
    monkeypatch.setattr(reading_back, "_REPORTED_NBYTES", 1)
    real, passes, seen = reading_back.read_shards, [], []

    def counted(directory: str, save_id: Any, requests: Any, **options: Any) -> Any:
        passes.append([(r.shard.name, w.offset, w.nbytes) for r in requests for w in r.wanted])
        return real(directory, save_id, requests, **options)

    monkeypatch.setattr(reading_back, "read_shards", counted)
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
    monkeypatch.setattr(windows, "WINDOW_NBYTES", window)
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
    monkeypatch.setattr(windows, "WINDOW_NBYTES", BLOCK_NBYTES)
    state = {"t": torch.arange(6 * BLOCK_NBYTES // 4, dtype=torch.int32)}
    torch.save(state, tmp_path / "a")
    first_may_go, written = threading.Event(), set()

    def read(reader: RunReader, runs: Any, *arguments: Any) -> None:
        if arguments[1] == 0:
            assert first_may_go.wait(60), "the second and the third window wait for the first"
        real_read(reader, runs, *arguments)

    def write_extent(writer: ShardWriter, start: int, *arguments: Any) -> None:
        real_write(writer, start, *arguments)
        written.add(start)
        if {BLOCK_NBYTES, 2 * BLOCK_NBYTES} <= written:
            first_may_go.set()

    real_read, real_write = RunReader.read, ShardWriter.write_extent
    monkeypatch.setattr(RunReader, "read", read)
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
    monkeypatch.setattr(windows, "WINDOW_NBYTES", BLOCK_NBYTES)
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

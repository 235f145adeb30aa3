"""The archives that a conversion writes: what `torch.save` writes, with every CRC-32 right."""

from __future__ import annotations

import collections
import functools
import io
import json
import os
import pickle
import struct
import warnings
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import states
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import Metadata

import asyncckpt
from asyncckpt.format.layout import Payload
from asyncckpt.format.torch_zip import combined_crc32
from asyncckpt.interop.outline import outline_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.write_torch import torch_target
from asyncckpt.storage.files import Files

SERIALIZATION_ID = "archive/.data/serialization_id"
"""torch derives it from the CRC-32s that it has computed, which are zeros where it was told to skip elements."""


def module_state() -> Any:
    """A state dict with `_metadata`, whose values are all kept from torch to torch."""
    model = torch.nn.Sequential(torch.nn.Linear(30, 20), torch.nn.BatchNorm1d(20)).state_dict()
    return collections.OrderedDict((name, tensor.detach().clone()) for name, tensor in model.items())


def training_state() -> dict[str, Any]:
    tied = torch.randn(3, 5)
    return {
        "model": module_state(),
        "tied": [tied, (tied, torch.empty(0, 3))],
        "narrow": torch.arange(9).to(torch.uint16),
        "eights": torch.arange(8).to(torch.float8_e4m3fn),
        "half": torch.randn(7).bfloat16(),
        "counts": collections.Counter(a=1, b=-2),
        "text": "grüße\n",
        "bytes": b"\0\xff" * 9,
        "numbers": [1, -5, 1 << 70, 0.1, float("nan"), True, None, 2 + 1j],
        "types": (torch.float32, torch.Size([3, 4]), torch.device("cpu")),
        3: {"keyed": {1, 2, 3}},
    }


def entries(archive: bytes) -> dict[str, bytes]:
    file = zipfile.ZipFile(io.BytesIO(archive))
    assert file.testzip() is None
    return {name: file.read(name) for name in file.namelist()}


def test_a_torch_file_has_the_entries_that_torch_save_writes(tmp_path: Path) -> None:
    state = training_state()
    torch.save(state, tmp_path / "archive.pt")
    asyncckpt.convert(tmp_path / "archive.pt", tmp_path / "b", to="torch")
    found, expected = (entries((tmp_path / name).read_bytes()) for name in ("b", "archive.pt"))
    assert list(found) == list(expected)
    for name, data in expected.items():
        if name not in (SERIALIZATION_ID, "archive/data.pkl"):
            assert found[name] == data, name
    states.assert_same(torch.load(tmp_path / "b", weights_only=True), torch.load(tmp_path / "archive.pt"))
    mapped = torch.load(tmp_path / "b", weights_only=True, mmap=True)
    states.assert_same(mapped, torch.load(tmp_path / "archive.pt"))


@pytest.mark.parametrize(
    "value",
    [b"", [b"", (b"", {b""})], {b"": 1, (1, b""): b""}, [{"a": b""}], collections.OrderedDict({b"": 2})],
    ids=repr,
)
def test_empty_bytes_are_read_by_torch_load_too(value: Any, tmp_path: Path) -> None:
    """The pickle that `torch.save` itself writes of them is refused with `weights_only=True`."""
    with asyncckpt.SyncCheckpointer() as checkpointer:
        checkpointer.save({"v": value, "w": torch.ones(2)}, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
    found = torch.load(tmp_path / "b", weights_only=True)["v"]
    assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("computes", [False, True])
def test_every_checksum_is_written_whatever_torch_is_told(computes: bool, tmp_path: Path) -> None:
    torch.save({"a": torch.arange(10.0)}, tmp_path / "a")
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(computes)
    try:
        asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="torch")
        assert torch.serialization.get_crc32_options() is computes
    finally:
        torch.serialization.set_crc32_options(before)
    with zipfile.ZipFile(tmp_path / "b") as file:
        assert file.testzip() is None
        assert all(entry.CRC for entry in file.infolist())


def test_the_items_of_a_dcp_directory_are_archives_without_a_wrong_checksum(tmp_path: Path) -> None:
    state = {"w": torch.randn(30, 7), "same": torch.randn(30, 7), "n": 5, "t": (torch.ones(3), "x"), "e": torch.ones(0)}
    torch.save(state, tmp_path / "a")
    asyncckpt.convert(tmp_path / "a", tmp_path / "b", to="dcp", max_shard_bytes=900)
    metadata = pickle.loads((tmp_path / "b" / ".metadata").read_bytes())
    assert isinstance(metadata, Metadata)
    assert len({info.relative_path for info in metadata.storage_data.values()}) > 1
    for index, info in metadata.storage_data.items():
        data = (tmp_path / "b" / info.relative_path).read_bytes()[info.offset : info.offset + info.length]
        entries(data)
        states.assert_same(torch.load(io.BytesIO(data), weights_only=True), state[index.fqn], index.fqn)
    target = {name: torch.zeros_like(value) if torch.is_tensor(value) else None for name, value in state.items()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(target, checkpoint_id=tmp_path / "b")
    states.assert_same(target, state)


def test_beyond_4_gib_the_fields_of_zip64_are_right(tmp_path: Path) -> None:
    """Source and target are holes: zeros that take no room on the disk."""
    nbytes = (4 << 30) + 4096
    header = {"large": {"dtype": "U8", "shape": [nbytes], "data_offsets": [0, nbytes]}}
    header |= {"small": {"dtype": "U8", "shape": [7], "data_offsets": [nbytes, nbytes + 7]}}
    text = json.dumps(header).encode()
    with open(tmp_path / "a.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + nbytes + 7)
    (written,) = torch_target(outline_of(read_any(str(tmp_path / "a.safetensors"), Files()), Files()), Files()).files
    megabyte, sums = bytes(1 << 20), {7: zlib.crc32(bytes(7))}
    sums[nbytes] = functools.reduce(
        lambda crc, _: combined_crc32(crc, zlib.crc32(megabyte), 1 << 20), range(nbytes >> 20), 0
    )
    sums[nbytes] = combined_crc32(sums[nbytes], zlib.crc32(bytes(4096)), 4096)
    with open(tmp_path / "b", "wb") as file:
        for piece in written.pieces:
            if isinstance(piece, Payload):
                file.seek(piece.nbytes, os.SEEK_CUR)
            else:
                file.write(piece)
        for number, offset in written.crc_at:
            payload = written.pieces[number]
            assert isinstance(payload, Payload)
            file.seek(offset)
            file.write(sums[payload.nbytes].to_bytes(4, "little"))
    with zipfile.ZipFile(tmp_path / "b") as archive, open(tmp_path / "b", "rb") as file:
        for name, expected in (("archive/data/0", nbytes), ("archive/data/1", 7)):
            entry = archive.getinfo(name)
            assert (entry.file_size, entry.compress_size, entry.CRC) == (expected, expected, sums[expected])
            file.seek(entry.header_offset + 26)
            name_nbytes, extra_nbytes = struct.unpack("<2H", file.read(4))
            file.seek(entry.header_offset + 30 + name_nbytes + extra_nbytes + expected)
            descriptor = struct.unpack("<4sL2Q", file.read(24))  # 64 bits also for what only begins beyond 4 GiB
            assert descriptor == (b"PK\x07\x08", sums[expected], expected, expected)
        assert archive.read("archive/data/1") == bytes(7)
    found = torch.load(tmp_path / "b", weights_only=True, mmap=True)
    assert found["large"].shape == (nbytes,)
    states.assert_same(found["small"], torch.zeros(7, dtype=torch.uint8))

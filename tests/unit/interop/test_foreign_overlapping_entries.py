"""Entries of a zip archive that claim the same bytes: whoever reads all reads far more than it has (CVE-2024-0450)."""

from __future__ import annotations

import errno
import io
import pickle
import struct
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from dcp_calls import save
from torch.distributed.checkpoint import FileSystemWriter

import asyncckpt
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.interop.sources import torch_file
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.interop.sources.torch_file import read_directory
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.files import Files

FILES = Files()
PAYLOAD_NBYTES = 1 << 16


def archive(claims: Callable[[int, int], int], count: int) -> bytes:
    """An archive of `torch.save` of `count` tensors, whose local headers lie one behind the other.

    Args:
        claims: (where the bytes of an entry begin, where the directory begins) -> the length that the directory says.
    """
    real = io.BytesIO()
    torch.save({f"t{n}": torch.zeros(0) for n in range(count)}, real)
    with zipfile.ZipFile(real) as opened:
        pickled = opened.read(next(name for name in opened.namelist() if name.endswith("/data.pkl")))
    members = [("archive/data.pkl", pickled), *((f"archive/data/{n}", b"") for n in range(count))]
    body, starts = bytearray(), []
    for name, data in members:
        starts.append(len(body))
        body += struct.pack("<4s5H3L2H", b"PK\x03\x04", 0, 0, 0, 0, 0, 0, 0, 0, len(name), 0) + name.encode() + data
    body += bytes(PAYLOAD_NBYTES)
    directory = bytearray()
    for (name, data), start in zip(members, starts, strict=True):
        begin = start + 30 + len(name)
        nbytes = len(data) or claims(begin, len(body))
        crc = zlib.crc32(body[begin : begin + nbytes])
        directory += struct.pack(
            "<4s6H3L5H2L", b"PK\x01\x02", 0, 0, 0, 0, 0, 0, crc, nbytes, nbytes, len(name), 0, 0, 0, 0, 0, start
        )
        directory += name.encode()
    n = len(members)
    return bytes(body + directory + struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, n, n, len(directory), len(body), 0))


def entries_of(data: bytes) -> dict[str, Any]:
    return dict(read_directory(lambda at, length: data[at : at + length], len(data)))


@pytest.fixture
def overlapping(tmp_path: Path) -> Path:
    path = tmp_path / "a.pt"
    path.write_bytes(archive(lambda begin, end: end - begin, 300))
    return path


def test_an_archive_whose_headers_lie_together_and_claim_nothing_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(archive(lambda *_: 0, 3))
    states.assert_same(asyncckpt.load(tmp_path / "a.pt"), {f"t{n}": torch.zeros(0) for n in range(3)})


@pytest.mark.parametrize(
    "read",
    [
        lambda path: read_any(str(path), FILES),
        asyncckpt.load,
        lambda path: asyncckpt.convert(path, path.with_name("out"), to="asyncckpt"),
    ],
    ids=["read_any", "load", "convert"],
)
def test_entries_that_overlap_are_refused(read: Callable[[Path], Any], overlapping: Path) -> None:
    with pytest.raises(CorruptCheckpointError, match="overlap") as caught:
        read(overlapping)
    assert str(overlapping) in str(caught.value)
    assert [path.name for path in overlapping.parent.iterdir()] == ["a.pt"]


def test_verify_reads_nothing_of_entries_that_overlap(overlapping: Path) -> None:
    verdict = verify_any(str(overlapping), FILES)
    assert (verdict.state, verdict.read_nbytes) == ("corrupt", 0)
    assert "overlap" in str(verdict.faults[0])


@pytest.mark.parametrize("more", [-1, 0, 1])
def test_an_entry_may_reach_to_the_next_header_and_no_further(more: int) -> None:
    name_nbytes = len("archive/data/0")  # what lies between the bytes that the directory tells and the next header
    data = archive(lambda *_: name_nbytes + more, 2)
    if more > 0:
        with pytest.raises(ValueError, match="overlap"):
            entries_of(data)
    else:
        assert len(entries_of(data)) == 3


def test_two_names_for_one_header_are_refused() -> None:
    data = bytearray(archive(lambda *_: 0, 2))
    first = data.find(b"PK\x01\x02", data.find(b"PK\x01\x02") + 4)
    second = data.find(b"PK\x01\x02", first + 4)
    data[second + 42 : second + 46] = data[first + 42 : first + 46]
    with pytest.raises(ValueError, match="overlap"):
        entries_of(bytes(data))


@pytest.mark.parametrize("alignment", [1, 64, 4096])
@pytest.mark.parametrize("has_crcs", [True, False])
def test_what_torch_writes_is_read_however_it_aligns(alignment: int, has_crcs: bool, tmp_path: Path) -> None:
    config = pytest.importorskip("torch.utils.serialization").config
    if not hasattr(config.save, "storage_alignment"):
        pytest.skip("this torch aligns storages as it likes")
    state = {"a": torch.zeros(0), "b": torch.ones(5, dtype=torch.uint8), "c": torch.zeros(0), "d": torch.ones(9000)}
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(has_crcs)
    try:
        with config.patch("save.storage_alignment", alignment):
            torch.save(state, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    states.assert_same(asyncckpt.load(tmp_path / "a.pt"), state)


@pytest.mark.parametrize("more", [-66, -16, -8, -1, 1, 8, 16, 64])
@pytest.mark.parametrize("field", [26, 28], ids=["length of the name", "length of the extra field"])
def test_a_local_header_that_moves_the_bytes_of_its_entry_is_refused(field: int, more: int, tmp_path: Path) -> None:
    """Nothing sums up a local header: its lengths must agree with where the next one begins."""
    torch.save({"a": torch.arange(500.0), "b": torch.arange(100, 600.0)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    with zipfile.ZipFile(tmp_path / "a.pt") as opened:
        header = next(info.header_offset for info in opened.infolist() if info.filename.endswith("data/0"))
    (length,) = struct.unpack_from("<H", data, header + field)
    struct.pack_into("<H", data, header + field, max(0, length + more))
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="header of entry"):
        asyncckpt.load(tmp_path / "a.pt")
    assert verify_any(str(tmp_path / "a.pt"), FILES).state == "corrupt"


def test_a_local_header_that_points_beyond_an_item_of_dcp_is_refused(tmp_path: Path) -> None:
    save({"k": torch.ones(2, 3)}, FileSystemWriter(tmp_path / "d"))
    file = tmp_path / "d" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    header = data.rfind(b"PK\x03\x04", 0, data.find(b"/data/0"))
    data[header + 28 : header + 30] = b"\xff\xff"  # the length of the extra field
    file.write_bytes(data)
    with pytest.raises(CorruptCheckpointError, match="header of entry"):
        asyncckpt.load(tmp_path / "d")


def test_items_of_dcp_that_overlap_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "dcp"
    save({"a": torch.ones(300), "b": torch.zeros(300)}, FileSystemWriter(path))
    metadata = pickle.loads((path / ".metadata").read_bytes())
    first, second = sorted(metadata.storage_data.values(), key=lambda info: info.offset)
    assert read_any(str(path), FILES), "they lie side by side"
    second.offset, second.length = first.offset + 1, first.length
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    for read in (lambda: asyncckpt.load(path), lambda: read_any(str(path), FILES)):
        with pytest.raises(CorruptCheckpointError, match="overlap"):
            read()
    second.offset = first.offset
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(asyncckpt.load(path, keys=["a"])["a"], torch.ones(300)), "an item may be two tensors"


def test_a_directory_that_is_longer_than_is_held_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    data = archive(lambda *_: 0, 3)
    assert len(entries_of(data)) == 4
    monkeypatch.setattr(torch_file, "MAX_DIRECTORY_NBYTES", 100)
    with pytest.raises(ValueError, match="a directory of"):
        entries_of(data)


def test_an_error_of_the_disk_is_not_taken_for_damage() -> None:
    data = archive(lambda *_: 0, 300)

    def read_at(at: int, length: int) -> bytes:
        if at + length < len(data):
            raise OSError(errno.EIO, "bad sector")
        return data[at : at + length]

    with pytest.raises(OSError, match="bad sector"):
        read_directory(read_at, len(data))

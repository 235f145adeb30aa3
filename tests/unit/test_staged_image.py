"""Files of a checkpoint that lie in memory: opened, measured and read as if they were on disk."""

from __future__ import annotations

import ctypes
import os
import pathlib
import stat
from collections.abc import Iterator

import pytest

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.mapping import Mapping
from asyncckpt.storage.files import Files, read_small_file
from asyncckpt.storage.staged_image import Image, OverlaidFiles, StagedCheckpoint, StagedRank, staged_contents
from tests.torch_free_client import Snapshot

SAVE_ID = SaveId(1, 2, "0123456789ab")
SHARD = f"rank-00000-part-000.{SAVE_ID}.safetensors"


@pytest.fixture
def memory() -> Iterator[Mapping]:
    """Two pages: the bytes of one shard, and what lies behind it."""
    with Mapping(-1, 8192) as made:
        made.view()[:5000] = bytes(n % 251 for n in range(5000))
        yield made


def staged(path: pathlib.Path, memory: Mapping, nbytes: int = 5000) -> StagedCheckpoint:
    rank = StagedRank(
        rank=0, images=(Image(memory.address, nbytes),), structure=b"", objects=b'["objects"]', n_tensors=0
    )
    return StagedCheckpoint(
        path=str(path),
        save_id=SAVE_ID,
        step=1,
        world_size=1,
        layout="safetensors",
        package="0",
        metadata={},
        ranks=[rank],
    )


def test_held_file_is_read_like_one_on_disk(tmp_path: pathlib.Path, memory: Mapping) -> None:
    files, path = OverlaidFiles(Files(), staged(tmp_path, memory)), str(tmp_path / SHARD)
    assert files.lstat(path).st_size == files.stat(path).st_size == 5000
    assert stat.S_ISREG(files.lstat(path).st_mode)
    fd = files.open(path, os.O_RDONLY)
    assert files.fstat(fd).st_size == 5000 and files.address(fd) == memory.address and files.resident(fd, 0, 5000)
    files.advise_random(fd)
    files.advise_needed(fd, 0, 5000)
    found = bytearray(600)
    assert files.preadv(fd, [found], 4500) == 500, "it ends where the file does, not the memory"
    assert found[:500] == bytes(n % 251 for n in range(4500, 5000)) and found[500:] == bytes(100)
    first, second = bytearray(3), bytearray(4)
    assert files.preadv(fd, [first, memoryview(second)], 10) == 7 and first + second == bytes(range(10, 17))
    assert files.preadv(fd, [first], 6000) == 0
    files.close(fd)
    with pytest.raises(KeyError):
        files.fstat(fd)
    name = str(tmp_path / f"rank-00000.{SAVE_ID}.objects.json")
    assert read_small_file(files, name, 100) == b'["objects"]'


@pytest.mark.parametrize(("offset", "times", "copied"), [(10, 4, 4), (1990, 4, 4), (1991, 4, 0), (4990, 1, 1)])
def test_many_ranges_of_a_held_file_are_copied_unless_they_go_beyond_it(
    tmp_path: pathlib.Path, memory: Mapping, offset: int, times: int, copied: int
) -> None:
    files, path = OverlaidFiles(Files(), staged(tmp_path, memory)), str(tmp_path / SHARD)
    fd, found = files.open(path, os.O_RDONLY), ctypes.create_string_buffer(10 * times)
    assert files.gather(fd, ctypes.addressof(found), offset, 10, 1000, times) == copied
    expected = [bytes(n % 251 for n in range(at, at + 10)) for at in range(offset, offset + copied * 1000, 1000)]
    assert found.raw[: 10 * copied] == b"".join(expected)


def test_many_ranges_of_a_file_below_are_copied(tmp_path: pathlib.Path, memory: Mapping) -> None:
    files = OverlaidFiles(Files(), staged(tmp_path, memory))
    (tmp_path / "other.bin").write_bytes(b"a-b-c-")
    fd, found = files.open(str(tmp_path / "other.bin"), os.O_RDONLY), ctypes.create_string_buffer(3)
    assert files.gather(fd, ctypes.addressof(found), 0, 1, 2, 3) == 3 and found.raw == b"abc"
    files.close(fd)


def test_other_files_are_those_below(tmp_path: pathlib.Path, memory: Mapping) -> None:
    files, path = OverlaidFiles(Files(), staged(tmp_path, memory)), str(tmp_path / "other.bin")
    (tmp_path / "other.bin").write_bytes(b"on disk")
    assert read_small_file(files, path, 100) == b"on disk"
    assert files.lstat(path).st_size == files.stat(path).st_size == 7 and files.listdir(str(tmp_path)) == ["other.bin"]
    fd = files.open(path, os.O_RDONLY)
    files.advise_random(fd)
    files.advise_needed(fd, 0, 7)
    assert files.address(fd) is None and files.fstat(fd).st_size == 7 and isinstance(files.resident(fd, 0, 7), bool)
    files.close(fd)
    with pytest.raises(FileNotFoundError):
        files.open(str(tmp_path / SHARD.replace("part-000", "part-001")), os.O_RDONLY)


def test_what_all_ranks_staged_is_a_checkpoint_without_anything_on_disk(memory: Mapping) -> None:
    snapshots = [Snapshot(seed=rank, shard=(rank, 2)) for rank in (0, 1)]
    path = pathlib.Path("/nowhere")
    ranks = [
        StagedRank(
            rank=number,
            images=tuple(Image(memory.address, len(image)) for image in snapshot.images),
            structure=snapshot.structure,
            objects=b"",
            n_tensors=snapshot.n_tensors,
        )
        for number, snapshot in enumerate(snapshots)
    ]
    found = staged(path, memory)
    contents = staged_contents(
        StagedCheckpoint(
            **{n: getattr(found, n) for n in found.__dataclass_fields__} | {"ranks": ranks, "world_size": 2}
        )
    )
    assert contents.manifest.world_size == 2 and contents.manifest.step == 1
    assert [rank.index.shards[0].digests for rank in contents.ranks] == [b"", b""]
    tensor = contents.tensors["t0"]
    assert [chunk.offsets[0] for _, chunk in tensor.chunks] == [0, tensor.global_shape[0] // 2]


def test_structure_of_other_lengths_than_the_shards_is_refused(memory: Mapping) -> None:
    snapshot = Snapshot()
    found = staged(pathlib.Path("/nowhere"), memory)
    rank = StagedRank(
        rank=0, images=(Image(memory.address, 4096),), structure=snapshot.structure, objects=b"", n_tensors=3
    )
    wrong = StagedCheckpoint(**{n: getattr(found, n) for n in found.__dataclass_fields__} | {"ranks": [rank]})
    with pytest.raises(CorruptCheckpointError, match="other lengths"):
        staged_contents(wrong)

"""Files of a checkpoint that lie in memory: opened, measured and read as if they were on disk."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import stat
from collections.abc import Iterator

import pytest

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.recall.memory_overlay import OverlaidFiles, SlotShard, StagedCheckpoint, StagedRank, staged_contents
from asyncckpt.storage.files import Files, read_small_file
from tests.torch_free_client import Snapshot

SAVE_ID = SaveId(1, 2, "0123456789ab")
SHARD = f"rank-00000-part-000.{SAVE_ID}.safetensors"


AT = 4096


@pytest.fixture
def slot() -> Iterator[int]:
    """A memfd of three pages: the bytes of one shard, and what lies before and behind it."""
    fd = os.memfd_create("slot", os.MFD_CLOEXEC)
    os.pwrite(fd, b"-" * AT + bytes(n % 251 for n in range(5000)) + b"-" * 3192, 0)
    yield fd
    os.close(fd)


def staged(path: pathlib.Path, slot: int, nbytes: int = 5000) -> StagedCheckpoint:
    rank = StagedRank(rank=0, images=(SlotShard(slot, AT, nbytes),), structure=b"", objects=b'["objects"]', n_tensors=0)
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


def test_held_file_is_read_like_one_on_disk(tmp_path: pathlib.Path, slot: int) -> None:
    files, path = OverlaidFiles(Files(), staged(tmp_path, slot)), str(tmp_path / SHARD)
    assert files.lstat(path).st_size == files.stat(path).st_size == 5000
    assert stat.S_ISREG(files.lstat(path).st_mode)
    fd = files.open(path, os.O_RDONLY)
    assert files.fstat(fd).st_size == 5000 and files.resident(fd, 0, 5000)
    files.advise_random(fd)
    files.advise_needed(fd, 0, 5000)
    found = bytearray(600)
    assert files.preadv(fd, [found], 4500) == 500, "it ends where the file does, not the memory"
    assert found[:500] == bytes(n % 251 for n in range(4500, 5000)) and found[500:] == bytes(100)
    first, second = bytearray(3), bytearray(4)
    assert files.preadv(fd, [first, memoryview(second)], 10) == 7 and first + second == bytes(range(10, 17))
    assert files.preadv(fd, [first], 6000) == 0
    assert files.preadv(fd, [first], 3, os.RWF_NOWAIT) == 3 and first == bytes([3, 4, 5])
    files.close(fd)
    with pytest.raises(KeyError):
        files.fstat(fd)
    name = str(tmp_path / f"rank-00000.{SAVE_ID}.objects.json")
    assert read_small_file(files, name, 100) == b'["objects"]'


def test_a_shard_that_is_a_link_on_disk_has_the_save_id_of_the_linked_file(tmp_path: pathlib.Path) -> None:
    origin = SaveId(1, 0, SAVE_ID.run_id)
    snapshot, fd = Snapshot(), os.memfd_create("slot", os.MFD_CLOEXEC)
    (image,) = snapshot.images
    os.pwrite(fd, image, AT)
    rank = StagedRank(
        rank=0, images=(SlotShard(fd, AT, len(image)),), structure=snapshot.structure, objects=b"", n_tensors=3
    )
    found = dataclasses.replace(staged(tmp_path, fd), ranks=[rank])
    contents = staged_contents(found)
    (record,) = contents.ranks[0].index.shards
    index = dataclasses.replace(contents.ranks[0].index, shards=(dataclasses.replace(record, origin=origin),))
    committed = dataclasses.replace(contents, ranks=(dataclasses.replace(contents.ranks[0], index=index),))
    files = OverlaidFiles(Files(), found)
    files.use_origins(committed)
    expected = bytearray(image)
    expected[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(origin)
    opened = files.open(str(tmp_path / SHARD), os.O_RDONLY)
    for at, nbytes in [(0, 200), (0, SAVE_ID_OFFSET), (0, 60), (50, 10), (60, 100), (SAVE_ID_OFFSET, SAVE_ID_NBYTES)]:
        first, second = bytearray(nbytes // 3), bytearray(nbytes - nbytes // 3)
        assert files.preadv(opened, [first, second], at) == nbytes
        assert first + second == expected[at : at + nbytes], (at, nbytes)
    tail = bytearray(200)
    assert files.preadv(opened, [tail], len(image) - 100) == 100 and tail[:100] == image[-100:]
    files.close(opened)
    os.close(fd)


def test_other_files_are_those_below(tmp_path: pathlib.Path, slot: int) -> None:
    files, path = OverlaidFiles(Files(), staged(tmp_path, slot)), str(tmp_path / "other.bin")
    (tmp_path / "other.bin").write_bytes(b"on disk")
    assert read_small_file(files, path, 100) == b"on disk"
    assert files.lstat(path).st_size == files.stat(path).st_size == 7 and files.listdir(str(tmp_path)) == ["other.bin"]
    fd = files.open(path, os.O_RDONLY)
    files.advise_random(fd)
    files.advise_needed(fd, 0, 7)
    assert files.fstat(fd).st_size == 7 and isinstance(files.resident(fd, 0, 7), bool)
    files.close(fd)
    with pytest.raises(FileNotFoundError):
        files.open(str(tmp_path / SHARD.replace("part-000", "part-001")), os.O_RDONLY)


def test_what_all_ranks_staged_is_a_checkpoint_without_anything_on_disk(slot: int) -> None:
    snapshots = [Snapshot(seed=rank, shard=(rank, 2)) for rank in (0, 1)]
    path = pathlib.Path("/nowhere")
    ranks = [
        StagedRank(
            rank=number,
            images=tuple(SlotShard(slot, 0, len(image)) for image in snapshot.images),
            structure=snapshot.structure,
            objects=b"",
            n_tensors=snapshot.n_tensors,
        )
        for number, snapshot in enumerate(snapshots)
    ]
    found = staged(path, slot)
    contents = staged_contents(
        StagedCheckpoint(
            **{n: getattr(found, n) for n in found.__dataclass_fields__} | {"ranks": ranks, "world_size": 2}
        )
    )
    assert contents.manifest.world_size == 2 and contents.manifest.step == 1
    assert [rank.index.shards[0].digests for rank in contents.ranks] == [b"", b""]
    tensor = contents.tensors["t0"]
    assert [chunk.offsets[0] for _, chunk in tensor.chunks] == [0, tensor.global_shape[0] // 2]


def test_structure_of_other_lengths_than_the_shards_is_refused(slot: int) -> None:
    snapshot = Snapshot()
    found = staged(pathlib.Path("/nowhere"), slot)
    rank = StagedRank(
        rank=0, images=(SlotShard(slot, AT, 4096),), structure=snapshot.structure, objects=b"", n_tensors=3
    )
    wrong = StagedCheckpoint(**{n: getattr(found, n) for n in found.__dataclass_fields__} | {"ranks": [rank]})
    with pytest.raises(CorruptCheckpointError, match="lengths of the shards"):
        staged_contents(wrong)

"""Lets a checkpoint whose files are still in slots be read by the same code as one on disk.

A slot has the layout of the shard file, so a shard is a range of a memfd. `OverlaidFiles` provides these ranges as
files with the names of the shards. `staged_contents` returns the contents of a checkpoint without manifest and indexes.
"""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import FILE_CHECKSUM_PREFIX, file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.manifest import DcpRecord, Manifest, RankRecord
from asyncckpt.format.names import DCP, SaveId, index_name, objects_name, shard_name
from asyncckpt.format.structure import decode_structure
from asyncckpt.storage.contents import Contents, RankContents, join
from asyncckpt.storage.files import MODE_FILE, Files

_FIRST_FD = 1 << 30
"""First file descriptor of files in memory: far above every descriptor of the kernel (fs.nr_open is 2^20)."""

_NO_CHECKSUM = FILE_CHECKSUM_PREFIX + "0" * 32


class SlotShard(NamedTuple):
    """The bytes of a shard in a slot: `nbytes` at `offset` of the memfd `fd`.

    `origin`: the save whose ID the file on disk has, if that is a link to a file of another save; else None.
    """

    fd: int
    offset: int
    nbytes: int
    origin: SaveId | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedRank:
    """The snapshot of one rank. `images`: its shards, in order. The other fields are those of the save request."""

    rank: int
    images: tuple[SlotShard, ...]
    structure: bytes
    objects: bytes
    n_tensors: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StagedCheckpoint:
    """The snapshots of some or all ranks of one save; `package`: asyncckpt's version that staged them."""

    path: str
    save_id: SaveId
    step: int
    world_size: int
    layout: str
    package: str
    metadata: Mapping[str, Any]
    ranks: Sequence[StagedRank]


_Held = SlotShard | bytes
"""A file in memory: a shard in its slot, or the bytes of a small file."""


class OverlaidFiles(Files):
    """A `Files` that serves a staged checkpoint from memory. Has only the methods that a reader calls.

    Args:
        below: Files for all other paths.
        staged: The checkpoint in memory; its slots must outlive this.
    """

    def __init__(self, below: Files, staged: StagedCheckpoint) -> None:
        self._below = below
        self._lock = threading.Lock()
        self._opened: dict[int, _Held] = {}
        self._next = _FIRST_FD
        self._held: dict[str, _Held] = {}
        for rank in staged.ranks:
            for part, image in enumerate(rank.images):
                name = shard_name(staged.save_id, rank.rank, part, staged.layout)
                self._held[os.path.join(staged.path, name)] = image
            name = objects_name(staged.save_id, rank.rank)
            self._held[os.path.join(staged.path, name)] = rank.objects

    def use_origins(self, contents: Contents) -> None:
        """Serve shards that are links on disk with the save ID that the linked file has, not with that in the slot.

        IMPORTANT: call it before the first shard is opened with `contents`. Its checksums are of the linked files.

        Args:
            contents: Contents of the staged checkpoint, as committed on disk.
        """
        for rank in contents.ranks:
            for shard in rank.index.shards:
                path = os.path.join(contents.path, shard.name)
                held = self._held.get(path)
                if isinstance(held, SlotShard):
                    self._held[path] = held._replace(origin=shard.origin)

    def open(self, path: str, flags: int, mode: int = MODE_FILE) -> int:
        """Open a file in memory, and return a number in place of a descriptor; or open a file on disk."""
        held = self._held.get(path)
        if held is None:
            return self._below.open(path, flags, mode)
        with self._lock:
            self._next += 1
            self._opened[self._next] = held
            return self._next

    def close(self, fd: int) -> None:
        """Close a file in memory or on disk."""
        if fd < _FIRST_FD:
            return self._below.close(fd)
        with self._lock:
            del self._opened[fd]
        return None

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` of an open file."""
        if fd < _FIRST_FD:
            return self._below.preadv(fd, buffers, offset, flags)
        held, done = self._opened[fd], 0
        for buffer in buffers:
            with memoryview(buffer)[: max(0, _nbytes_of(held) - offset - done)] as view:
                if isinstance(held, bytes):
                    view[:] = held[offset + done : offset + done + len(view)]
                    done += len(view)
                elif view:  # the file system of a memfd may not know the flags
                    count = os.preadv(held.fd, [view], held.offset + offset + done)
                    if held.origin is not None:
                        _put_save_id(view[:count], offset + done, held.origin)
                    done += count
        return done

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether a range is in memory."""
        return fd >= _FIRST_FD or self._below.resident(fd, offset, nbytes)

    def advise_random(self, fd: int) -> None:
        """Advise the kernel about a file on disk."""
        if fd < _FIRST_FD:
            self._below.advise_random(fd)

    def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
        """Advise the kernel about a file on disk."""
        if fd < _FIRST_FD:
            self._below.advise_needed(fd, offset, nbytes)

    def fstat(self, fd: int) -> os.stat_result:
        """Stat an open file."""
        return _stat_of(self._opened[fd]) if fd >= _FIRST_FD else self._below.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        """Stat a file by its name."""
        held = self._held.get(path)
        return _stat_of(held) if held is not None else self._below.lstat(path)

    def stat(self, path: str) -> os.stat_result:
        """Stat a file by its name, links followed."""
        held = self._held.get(path)
        return _stat_of(held) if held is not None else self._below.stat(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names on disk."""
        return self._below.listdir(path)


def _put_save_id(view: memoryview, start: int, save_id: SaveId) -> None:
    """Put the part of a shard's save ID that lies in `view`, which has the shard's bytes from `start` on."""
    low, high = max(start, SAVE_ID_OFFSET), min(start + len(view), SAVE_ID_OFFSET + SAVE_ID_NBYTES)
    if low < high:
        view[low - start : high - start] = save_id_bytes(save_id)[low - SAVE_ID_OFFSET : high - SAVE_ID_OFFSET]


def _nbytes_of(held: _Held) -> int:
    return len(held) if isinstance(held, bytes) else held.nbytes


def _stat_of(held: _Held) -> os.stat_result:
    return os.stat_result((stat.S_IFREG | 0o400, 0, 0, 1, 0, 0, _nbytes_of(held), 0, 0, 0))


def staged_contents(staged: StagedCheckpoint) -> Contents:
    """Return the contents of a checkpoint that all of its ranks have staged. Reads nothing from disk.

    Their shards have no checksums, which are computed only when files are written.

    Raises:
        CorruptCheckpointError: A structure does not decode, or the lengths of the shards differ from those in it; or
            the chunks of a tensor do not hold each element exactly once.
        UnsupportedFormatError: A structure is of a newer version.
    """
    assert [r.rank for r in staged.ranks] == list(range(staged.world_size))
    manifest = Manifest(
        save_id=staged.save_id,
        step=staged.step,
        world_size=staged.world_size,
        created="",
        fsync=False,
        writer=f"asyncckpt {staged.package}",
        ranks=tuple(_record(staged, rank) for rank in staged.ranks),
        metadata=staged.metadata,
        dcp=DcpRecord(nbytes=0, checksum=_NO_CHECKSUM) if staged.layout == DCP else None,
    )
    ranks = tuple(_contents(staged, rank) for rank in staged.ranks)
    return Contents(path=staged.path, manifest=manifest, ranks=ranks, tensors=join(staged.path, ranks))


def _record(staged: StagedCheckpoint, rank: StagedRank) -> RankRecord:
    return RankRecord(
        rank=rank.rank,
        index_name=index_name(staged.save_id, rank.rank),
        index_nbytes=0,
        index_checksum=_NO_CHECKSUM,
        n_tensors=rank.n_tensors,
        n_files=len(rank.images) + 1,
        nbytes=sum(image.nbytes for image in rank.images) + len(rank.objects),
    )


def _contents(staged: StagedCheckpoint, rank: StagedRank) -> RankContents:
    save_id, structure = staged.save_id, decode_structure(rank.structure)
    if structure.part_nbytes != tuple(image.nbytes for image in rank.images):
        detail = f"the lengths of the shards that rank {rank.rank} has staged differ from those in its structure"
        raise CorruptCheckpointError(f"{staged.path}: {detail}", path=staged.path, detail=detail)
    objects = ObjectsRecord(
        name=objects_name(save_id, rank.rank), nbytes=len(rank.objects), checksum=file_checksum(rank.objects)
    )
    shards = tuple(
        ShardRecord(name=shard_name(save_id, rank.rank, part, staged.layout), nbytes=image.nbytes, digests=b"")
        for part, image in enumerate(rank.images)
    )
    index = RankIndex(
        save_id=save_id,
        rank=rank.rank,
        world_size=staged.world_size,
        shards=shards,
        objects=objects,
        structure=rank.structure,
        layout=staged.layout,
    )
    return RankContents(index=index, structure=structure)

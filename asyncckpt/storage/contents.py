"""The contents of a checkpoint: manifest, indexes and structures of all ranks, all checked before any use.

For a checkpoint of another format, also the places of the elements of its chunks (`ForeignSource`).
"""

from __future__ import annotations

import errno
import itertools
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.coverage import located_fault
from asyncckpt.format.index import MAX_INDEX_NBYTES, RankIndex, ShardRecord, decode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import is_reserved, split_per_rank_name
from asyncckpt.format.objects import MAX_OBJECTS_NBYTES, decode_objects
from asyncckpt.format.structure import Chunk, Structure, TensorEntry, decode_structure
from asyncckpt.storage.catalog import read_newest_manifest
from asyncckpt.storage.files import Files, read_small_file
from asyncckpt.storage.local import store_over
from asyncckpt.storage.store import for_each

NATIVE = "asyncckpt"
"""The kind of checkpoints in the format of this package."""


class Located(NamedTuple):
    """Place of a chunk whose elements are row-major in their file: from byte `offset` of shard number `part` on."""

    part: int
    offset: int


class Strided(NamedTuple):
    """Place of a chunk whose elements are not row-major in their file.

    All are in the `nbytes` bytes from byte `offset` of shard number `part` on.

    Attributes:
        part, offset, nbytes: The range of bytes.
        itemsize: Bytes of an element.
        sizes: Shape of the chunk, in elements.
        strides: Its strides, in elements.
    """

    part: int
    offset: int
    nbytes: int
    itemsize: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]


class Inline(NamedTuple):
    """Row-major elements of a chunk that were already read with the structure."""

    data: bytes


Place = Located | Strided | Inline


Lazy = Callable[[Files], Place]
"""Returns the place of a chunk; reads a few bytes of its file for that."""


@dataclass(slots=True)
class ForeignSource:
    """How to read a checkpoint of another format.

    The `part` of a chunk is an index into `places`, and its offset counts from that place.

    Attributes:
        kind: `dcp`, `torch`, `safetensors`, `hf` or `fsdp`.
        directory: Directory to which the shards' names are relative.
        objects: JSON forms of the object leaves, by number.
        metadata: Metadata of the format, such as a safetensors file's `__metadata__`.
        places: Place of each part, or a function that finds it when it is needed.
        archives: The zip archives with the data, whose entries have a CRC-32: (file name, offset, length in bytes).
        stamps: `stamp_of` each file from which the structure was read, by file name.
        changed: Leaves that are read in another form than they were written: for each sentence that describes a
            change, the FQNs and an addition for each.
        names_save: Whether the files contain an ID of this save, as the `.metadata` of a DCP directory does.
    """

    kind: str
    directory: str
    objects: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    places: list[Lazy | Place] = field(default_factory=list)
    archives: list[tuple[str, int, int]] = field(default_factory=list)
    stamps: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    changed: dict[str, dict[str, str]] = field(default_factory=dict)
    names_save: bool = False

    def place(self, part: int, files: Files) -> Place:
        """Return the place of the elements of `part`.

        Raises:
            CorruptCheckpointError: The elements are not as the structure says.
            OSError: The file cannot be read.
        """
        found = self.places[part]
        if callable(found):  # may be kept: callers call `check_unchanged` after reading
            found = self.places[part] = found(files)
        return found

    def stamp(self, name: str, found: os.stat_result) -> None:
        """Record the stamp of a file when its structure is read. `found`: its stat result."""
        self.stamps[name] = stamp_of(found)

    def check_unchanged(self, files: Files, names: Iterable[str] | None = None) -> None:
        """Check that files have not changed since the structure was read. Their data contain no save ID.

        Args:
            files: The `Files` to read with.
            names: Names of the files to check; None: all.

        Raises:
            CorruptCheckpointError: A file was changed, replaced or removed; names it.
            OSError: A file cannot be read.
        """
        for name in self.stamps if names is None else set(names):
            stamp, path = self.stamps.get(name), os.path.join(self.directory, name)
            try:
                now: tuple[int, int, int, int] | None = stamp_of(files.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                now = None
            if stamp is not None and now != stamp:
                detail = "it was changed or replaced while it was read, so the data may be of two checkpoints"
                raise CorruptCheckpointError(f"{path}: {detail}", path=self.directory, file=name, detail=detail)


def stamp_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """Return a stamp of a file, which changes if the file is replaced or written: device, inode, size, mtime in ns."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


_NOT_A_FILE = frozenset({errno.ENOENT, errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ENXIO})


@dataclass(frozen=True, kw_only=True, slots=True)
class RankContents:
    """One rank's index and its decoded structure."""

    index: RankIndex
    structure: Structure


class SavedTensor(NamedTuple):
    """A global tensor: FQN, dtype name, shape in elements, and the chunks of all ranks as (rank, chunk)."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    chunks: tuple[tuple[int, Chunk], ...]

    @property
    def is_own_and_empty(self) -> bool:
        """Whether it belongs to one rank and has no elements, as the empty shard of a tensor in an "E" node."""
        return 0 in self.global_shape and split_per_rank_name(self.fqn) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path: Its directory.
        manifest: Its manifest; for another format one that was made from the files.
        ranks: Index and structure of each rank, in order.
        tensors: The tensors by FQN, in the order of the ranks and their structures.
        source: For a checkpoint of another format, how to read it; else None.
    """

    path: str
    manifest: Manifest
    ranks: tuple[RankContents, ...]
    tensors: dict[str, SavedTensor]
    source: ForeignSource | None = None

    @property
    def kind(self) -> str:
        """`NATIVE`, or the `kind` of its source."""
        return NATIVE if self.source is None else self.source.kind

    @property
    def reused_nbytes(self) -> int:
        """Bytes of its shards that were written by earlier saves."""
        return sum(s.nbytes for rank in self.ranks for s in rank.index.shards if s.origin is not None)


def corrupt(path: str, file: str, detail: str) -> CorruptCheckpointError:
    """Return the error of a damaged file of the checkpoint at `path`."""
    return CorruptCheckpointError(f"{os.path.join(path, file)}: {detail}", path=path, file=file, detail=detail)


def read_contents(path: str, files: Files) -> Contents:
    """Read and check manifest, indexes and structures of the checkpoint at `path`.

    Args:
        path: The checkpoint's directory.
        files: The `Files` to read with.

    Raises:
        CheckpointNotFoundError: There is no checkpoint.
        CheckpointNotCommittedError: It was never committed.
        CorruptCheckpointError: It is damaged, or the chunks of a tensor do not hold each element exactly once, or a
            stock `dcp.save` has written to the same path later.
        UnsupportedFormatError: A newer version wrote it.
        OSError: It cannot be read.

    Blocks: for the reads.
    """
    manifest = read_newest_manifest(path, store_over(files))
    reach("load: manifest read")
    ranks = tuple(for_each(store_over(files), lambda record: _read_rank(path, manifest, record, files), manifest.ranks))
    return Contents(path=path, manifest=manifest, ranks=ranks, tensors=join(path, ranks))


def read_named_file(path: str, name: str, *, nbytes: int, max_nbytes: int, checksum: str, files: Files) -> bytes:
    """Return the bytes of a small file of a checkpoint, after a check of its length and checksum.

    Args:
        path: The checkpoint's directory.
        name: Name of the file.
        nbytes: Its recorded length.
        max_nbytes: Largest length that the format allows.
        checksum: Its recorded `file_checksum`.
        files: The `Files` to read with.

    Raises:
        CorruptCheckpointError: It is missing, has another length or content, or is not a regular file.
        OSError: It cannot be read.
    """
    try:
        data = read_small_file(files, os.path.join(path, name), min(nbytes, max_nbytes))
    except OSError as error:
        if error.errno not in _NOT_A_FILE:
            raise
        raise corrupt(path, name, "it is missing" if error.errno == errno.ENOENT else str(error.strerror)) from error
    if len(data) != nbytes:
        raise corrupt(path, name, f"{len(data)} bytes long, {nbytes} were written")
    if file_checksum(data) != checksum:
        raise corrupt(path, name, "its checksum does not match: it was changed after it was written")
    return data


def _read_rank(path: str, manifest: Manifest, record: RankRecord, files: Files) -> RankContents:
    name = record.index_name
    data = read_named_file(
        path,
        name,
        nbytes=record.index_nbytes,
        max_nbytes=MAX_INDEX_NBYTES,
        checksum=record.index_checksum,
        files=files,
    )
    try:
        index = decode_index(data)
    except CorruptCheckpointError as error:
        raise corrupt(path, name, error.message) from error
    expected = (manifest.save_id, record.rank, manifest.world_size)
    if (index.save_id, index.rank, index.world_size) != expected:
        detail = (
            f"it is of save {index.save_id}, rank {index.rank} of {index.world_size}; expected save "
            f"{manifest.save_id}, rank {record.rank} of {manifest.world_size}"
        )
        raise corrupt(path, name, detail)
    if index.layout != manifest.layout:
        raise corrupt(path, name, f"it has layout {index.layout!r}, the manifest has {manifest.layout!r}")
    try:
        structure = decode_structure(index.structure)
    except CorruptCheckpointError as error:
        raise corrupt(path, name, error.message) from error
    if structure.part_nbytes != tuple(shard.nbytes for shard in index.shards):
        raise corrupt(path, name, "the lengths of its shards differ from those in its structure")
    reach("load: index read")
    return RankContents(index=index, structure=structure)


def join(path: str, ranks: tuple[RankContents, ...]) -> dict[str, SavedTensor]:
    """Return the tensors of all ranks by FQN.

    Args:
        path: The checkpoint's directory, for messages.
        ranks: Index and structure of each rank, in order.

    Raises:
        CorruptCheckpointError: Ranks have different dtypes or shapes for a tensor, or the chunks of a tensor do not
            hold each element exactly once.
    """
    if len(ranks) == 1:
        alone = _of_one_rank(ranks[0].structure.tensors)
        if alone is not None:
            return alone
    first: dict[str, TensorEntry] = {}
    found: dict[str, list[tuple[int, Chunk]]] = {}
    for rank, contents in enumerate(ranks):
        for entry in contents.structure.tensors:
            fqn, dtype, shape, chunks = entry
            if "@rank" in fqn and is_reserved(fqn) and not _belongs_to(rank, fqn):
                raise _corrupt_tensor(path, fqn, f"rank {rank} stores it, but by its name it belongs to another rank")
            known = first.get(fqn)
            if known is None:
                first[fqn] = entry
                found[fqn] = [(rank, chunk) for chunk in chunks]
                continue
            if (known.dtype, known.global_shape) != (dtype, shape):
                earlier = f"{known.dtype}{list(known.global_shape)}"
                detail = f"rank {contents.index.rank} has it as {dtype}{list(shape)}, an earlier rank as {earlier}"
                raise _corrupt_tensor(path, fqn, detail)
            found[fqn] += [(rank, chunk) for chunk in chunks]
    tensors = {
        fqn: SavedTensor(fqn, known.dtype, known.global_shape, tuple(found[fqn])) for fqn, known in first.items()
    }
    for fqn, _, shape, placed in tensors.values():
        if len(placed) == 1 and placed[0][1].sizes == shape:
            continue  # the usual case
        boxes = [(chunk.offsets, chunk.sizes) for _, chunk in placed]
        fault = located_fault(shape, boxes, [rank for rank, _ in placed])
        if fault:
            raise _corrupt_tensor(path, fqn, fault)
    return tensors


def _of_one_rank(entries: tuple[TensorEntry, ...]) -> dict[str, SavedTensor] | None:
    """Return the tensors of the only rank if each is one chunk and none is per-rank: the usual case, without a loop.

    Returns None otherwise, and if a chunk does not have its tensor's shape.
    """
    fqns, chunks = [entry[0] for entry in entries], [entry[3] for entry in entries]
    if set(map(len, chunks)) != {1} or any("@rank" in fqn for fqn in fqns):
        return None
    dtypes, shapes = [entry[1] for entry in entries], [entry[2] for entry in entries]
    if [chunk.sizes for (chunk,) in chunks] != shapes:
        return None
    placed = zip(itertools.repeat(0), itertools.chain.from_iterable(chunks), strict=False)
    tensors = map(partial(tuple.__new__, SavedTensor), zip(fqns, dtypes, shapes, zip(placed), strict=True))
    return dict(zip(fqns, tensors, strict=True))


def _belongs_to(rank: int, name: str) -> bool:
    found = split_per_rank_name(name)
    return found is not None and found[1] == rank


def _corrupt_tensor(path: str, fqn: str, detail: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"{path}: tensor {fqn!r}: {detail}", path=path, fqn=fqn, detail=detail)


def check_lengths(contents: Contents, files: Files, of: SavedTensor | None = None) -> None:
    """Check that each shard has its recorded length, so that a wrong length cannot cause a huge allocation.

    For another format this was checked when the checkpoint was opened.

    Args:
        contents: The checkpoint.
        files: The `Files` to read with.
        of: Check only the shards that hold this tensor; None: all.

    Raises:
        CorruptCheckpointError: A shard is missing, has another length, or is not a regular file.
        OSError: A call failed.
    """
    if contents.source is not None:
        return
    needed = None if of is None else {(rank, chunk.part) for rank, chunk in of.chunks}

    def check(shard: ShardRecord) -> None:
        try:
            found = files.lstat(os.path.join(contents.path, shard.name))
        except FileNotFoundError as error:
            raise corrupt(contents.path, shard.name, "it is missing") from error
        if not stat.S_ISREG(found.st_mode):
            raise corrupt(contents.path, shard.name, "it is not a regular file")
        if found.st_size != shard.nbytes:
            raise corrupt(contents.path, shard.name, f"{found.st_size} bytes long, {shard.nbytes} were written")

    shards = [
        shard
        for number, rank in enumerate(contents.ranks)
        for part, shard in enumerate(rank.index.shards)
        if needed is None or (number, part) in needed
    ]
    for_each(store_over(files), check, shards)


def read_objects(contents: Contents, rank: int, files: Files) -> list[Any]:
    """Return the JSON forms of the object leaves of `rank`, by number.

    Raises:
        CorruptCheckpointError: The objects file is damaged or missing.
        UnsupportedFormatError: A newer version wrote it.
        OSError: It cannot be read.
    """
    if contents.source is not None:
        return list(contents.source.objects)
    index, structure = contents.ranks[rank].index, contents.ranks[rank].structure
    record = index.objects
    data = read_named_file(
        contents.path,
        record.name,
        nbytes=record.nbytes,
        max_nbytes=MAX_OBJECTS_NBYTES,
        checksum=record.checksum,
        files=files,
    )
    try:
        found = decode_objects(data, index.save_id, structure.n_objects)
    except CorruptCheckpointError as error:
        raise corrupt(contents.path, record.name, error.message) from error
    reach("load: objects read")
    return found

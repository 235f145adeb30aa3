"""From files and tensors of another format to the `Contents` that a checkpoint of ours would have, of one rank."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError, DuplicateNameError, UnsupportedFormatError
from asyncckpt.failpoints import reach
from asyncckpt.foreign.as_saved import AsSaved
from asyncckpt.format.checksum import file_checksum
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId, objects_name
from asyncckpt.format.structure import MAX_TENSORS, Chunk, Structure, TensorEntry
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.storage.contents import Contents, RankContents, SavedTensor
from asyncckpt.storage.coverage import coverage_fault
from asyncckpt.storage.files import Files
from asyncckpt.storage.source import Inline, Latin1, Located, Place, Strided

_MAX_NAME_BYTES, _MAX_PART_BYTES = 2048, 255
NO_SAVE = SaveId(0, 0, "0" * 12)
Lazy = Callable[[Files], Place]
"""Finds out where elements lie, by reading a little."""


@dataclass(slots=True)
class ForeignSource:
    """See `storage.source.Source`. `places` is by part; None for a file.

    `in_pickles`: Of long bytes that lie in pickles, by part and where they begin there, length and CRC-32.
    `names_save`: Whether something in it is of this one save, as the save id in the `.metadata` of torch's directories.
    `as_saved`: What pickles said beyond what `objects` and the structure hold.
    """

    kind: str
    directory: str
    objects: list[Any] = field(default_factory=list)
    metadata: dict[str, Any] = field(default_factory=dict)
    places: list[Lazy | Strided | Latin1 | Inline | None] = field(default_factory=list)
    archives: list[tuple[str, int, int]] = field(default_factory=list)
    stamps: dict[str, tuple[int, int, int, int]] = field(default_factory=dict)
    changed: dict[str, dict[str, str]] = field(default_factory=dict)
    in_pickles: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    names_save: bool = False
    as_saved: AsSaved = field(default_factory=AsSaved)

    def check_unchanged(self, files: Files, names: Iterable[str] | None = None) -> None:
        """See `storage.source.Source.check_unchanged`."""
        for name in self.stamps if names is None else set(names):
            stamp, path = self.stamps.get(name), os.path.join(self.directory, name)
            try:
                now: tuple[int, int, int, int] | None = stamp_of(files.stat(path))
            except (FileNotFoundError, NotADirectoryError):
                now = None
            if stamp is not None and now != stamp:
                detail = "it was changed or replaced while it was read: what was read may be of two checkpoints"
                raise CorruptCheckpointError(f"{path}: {detail}", path=self.directory, file=name, detail=detail)

    def place(self, part: int, files: Files) -> Place:
        """Say where the elements of a part begin."""
        found = self.places[part]
        if found is None:
            return Located(part, 0)
        return found if isinstance(found, (Strided, Latin1, Inline)) else found(files)


def stamp_of(found: os.stat_result) -> tuple[int, int, int, int]:
    """Return what tells that a file is still the same, with the same content."""
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


def _stays_inside(name: str) -> bool:
    """Whether a name can be that of a file below a directory."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    if not name or os.path.isabs(name) or "\0" in name or len(name) > _MAX_NAME_BYTES:
        return False
    return b".." not in parts and all(len(part) <= _MAX_PART_BYTES for part in parts)


class Assembly:
    """Collects files, tensors and objects of one checkpoint.

    Args:
        kind: As `Source.kind`.
        path: For messages: the file or directory that was opened.
        directory: Where the names of files begin.
        files: The storage seam.
    """

    def __init__(self, kind: str, path: str, directory: str, files: Files) -> None:
        self.path, self._files = path, files
        self.source = ForeignSource(kind, directory)
        self.shards: list[ShardRecord] = []
        self._numbers: dict[str, int] = {}
        self._tensors: list[SavedTensor] = []
        self._modified = 0.0

    def file(self, name: str) -> int:
        """Return the part number of a file below the directory.

        Raises:
            CorruptCheckpointError: It is missing, no regular file, or its name leads elsewhere.
        """
        if name not in self._numbers:
            if not _stays_inside(name):
                raise self.corrupt(f"a file is called {name[:200]!r}, which leads out of the directory, or nowhere")
            try:
                found = self._files.stat(os.path.join(self.source.directory, name))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self.corrupt("it is missing", file=name) from error
            if not stat.S_ISREG(found.st_mode):
                raise self.corrupt("it is not a regular file", file=name)
            self.source.stamps[name] = stamp_of(found)
            self._modified = max(self._modified, found.st_mtime)
            self._numbers[name] = self._part(name, found.st_size, None)
        return self._numbers[name]

    @property
    def files_nbytes(self) -> int:
        """Length of the files that are known by now."""
        return sum(nbytes for _, _, nbytes, _ in self.source.stamps.values())

    def stamp(self, name: str) -> None:
        """Remember a file that is about to be read as a whole, if it is there."""
        with contextlib.suppress(OSError):
            self.source.stamps[name] = stamp_of(self._files.stat(os.path.join(self.source.directory, name)))

    def place(self, part: int, nbytes: int, where: Lazy | Strided | Latin1 | Inline) -> int:
        """Return a part number for elements that no offset in file `part` tells; `nbytes`: of the elements."""
        return self._part(self.shards[part].name if part >= 0 else "", nbytes, where)

    def _part(self, name: str, nbytes: int, where: Lazy | Strided | Latin1 | Inline | None) -> int:
        self.shards.append(ShardRecord(name=name, nbytes=nbytes, digests=b""))
        self.source.places.append(where)
        return len(self.shards) - 1

    def tensor(self, fqn: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> Node:
        """Add a tensor.

        Raises:
            CorruptCheckpointError: Its chunks lie outside of their files, or do not cover it exactly once.
            UnsupportedFormatError: Too many tensors.
        """
        found = tuple(chunks)
        if len(self._tensors) >= MAX_TENSORS:
            raise self.unsupported(f"more than {MAX_TENSORS} tensors")
        for chunk in found:
            if chunk.offset_bytes + chunk.nbytes > self.shards[chunk.part].nbytes:
                raise self.corrupt(
                    f"tensor {fqn!r} reaches beyond the end: the file was cut short",
                    file=self.shards[chunk.part].name,
                    fqn=fqn,
                )
            if chunk.nbytes != math.prod(chunk.sizes) * DTYPES[dtype].itemsize:
                raise self.corrupt(
                    f"tensor {fqn!r} has {chunk.nbytes} bytes where its shape {list(chunk.sizes)} wants others",
                    file=self.shards[chunk.part].name,
                    fqn=fqn,
                )
        if len(found) != 1 or found[0].sizes != shape:
            fault = coverage_fault(shape, [(chunk.offsets, chunk.sizes) for chunk in found])
            if fault:
                raise self.corrupt(f"tensor {fqn!r}: {fault}", fqn=fqn)
        self._tensors.append(
            SavedTensor(fqn=fqn, dtype=dtype, global_shape=shape, chunks=tuple((0, chunk) for chunk in found))
        )
        return ("T", len(self._tensors) - 1)

    def contents(self, tree: Node, writer: str) -> Contents:
        """Return the whole.

        Raises:
            DuplicateNameError: Two leaves join to one FQN.
        """
        names: dict[str, Path] = {}
        for path, _ in leaves(tree):
            if names.setdefault(fqn_of(path), path) != path:
                raise DuplicateNameError(f"{self.path}: two leaves are called {fqn_of(path)!r}", fqn=fqn_of(path))
        entries = tuple(
            TensorEntry(fqn=t.fqn, dtype=t.dtype, global_shape=t.global_shape, chunks=tuple(c for _, c in t.chunks))
            for t in self._tensors
        )
        structure = Structure(
            tree=tree,
            tensors=entries,
            n_objects=len(self.source.objects),
            part_nbytes=tuple(shard.nbytes for shard in self.shards),
        )
        index = RankIndex(
            save_id=NO_SAVE,
            rank=0,
            world_size=1,
            shards=tuple(self.shards),
            objects=ObjectsRecord(name=objects_name(NO_SAVE, 0), nbytes=0, checksum=file_checksum(b"")),
            structure=b"",
        )
        reach("load: foreign structure read")
        created = datetime.fromtimestamp(self._modified, timezone.utc).isoformat(timespec="seconds")
        manifest = Manifest(
            save_id=NO_SAVE,
            step=_step(tree, self.source.objects),
            world_size=1,
            created=created,
            fsync=False,
            writer=writer,
            ranks=(),
            metadata=self.source.metadata,
        )
        return Contents(
            path=self.path,
            manifest=manifest,
            ranks=(RankContents(index=index, structure=structure),),
            tensors={tensor.fqn: tensor for tensor in self._tensors},
            source=self.source,
        )

    def corrupt(self, detail: str, file: str = "", fqn: str | None = None) -> CorruptCheckpointError:
        """Return the error for something that cannot be as it was written."""
        where = os.path.join(self.source.directory, file) if file else self.path
        return CorruptCheckpointError(f"{where}: {detail}", path=self.path, file=file or None, fqn=fqn, detail=detail)

    def unsupported(self, detail: str, found: str | None = None) -> UnsupportedFormatError:
        """Return the error for something that is not read."""
        return UnsupportedFormatError(f"{self.path}: {detail}", path=self.path, found=found)

    def refused(self, error: ValueError, file: str = "") -> AsyncCkptError:
        """Return the error for what a pickle or an archive holds."""
        name = getattr(error, "name", None)
        if name is None:
            return self.corrupt(str(error), file=file)
        where = os.path.join(self.source.directory, file) if file else self.path
        return UnsupportedFormatError(
            f"{where}: {error}; nothing of it was run. Write plain values instead, such as a state_dict()",
            path=self.path,
            found=name,
        )


def _step(tree: Node, objects: list[Any]) -> int:
    """Return the top-level int leaf `step`; -1 without one."""
    if tree[0] in ("d", "o"):
        members = dict(zip(tree[1][::2], tree[1][1::2], strict=True))
        node = members.get("step", ("",))
        if node[0] == "O" and type(objects[node[1]]) is int and objects[node[1]] >= 0:
            return int(objects[node[1]])
    return -1

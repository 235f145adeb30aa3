"""Builds the `Contents` of a checkpoint of another format from files, tensors and objects; it has one rank."""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from datetime import datetime, timezone

from asyncckpt.basics.failpoints import reach
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError, DuplicateNameError, UnsupportedFormatError
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.coverage import coverage_fault
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId, objects_name
from asyncckpt.format.state_tree import OBJECT, TENSOR, Node, Path, fqn_of, leaves
from asyncckpt.format.structure import MAX_TENSORS, Chunk, Structure, TensorEntry
from asyncckpt.storage.contents import Contents, ForeignSource, Lazy, Located, Place, RankContents, SavedTensor
from asyncckpt.storage.files import Files


def read_exactly(files: Files, fd: int, nbytes: int, start: int = 0) -> Callable[[int, int], bytes]:
    """Return a function (offset, length) that reads exactly these bytes of the `nbytes` bytes at `start` of a file.

    The function raises ValueError if the range is outside of these bytes or the file ends early, and OSError.
    """

    def read_at(offset: int, length: int) -> bytes:
        if offset < 0 or length < 0 or offset + length > nbytes:
            raise ValueError(f"bytes {offset} to {offset + length} are outside of the {nbytes} bytes: it was cut short")
        data = bytearray(length)
        done = 0
        with memoryview(data) as view:
            while done < length:
                count = files.preadv(fd, [view[done:]], start + offset + done)
                if count <= 0:
                    raise ValueError(f"it ends early, at byte {offset + done}")
                done += count
        return bytes(data)

    return read_at


_MAX_NAME_BYTES, _MAX_PART_BYTES = 2048, 255
NO_SAVE = SaveId(0, 0, "0" * 12)


def _stays_inside(name: str) -> bool:
    """Whether a name, relative to a directory, is valid and stays inside that directory."""
    try:
        parts = os.fsencode(name).split(b"/")
    except UnicodeEncodeError:
        return False
    is_name = name and "\0" not in name and len(name) <= _MAX_NAME_BYTES and max(map(len, parts)) <= _MAX_PART_BYTES
    return bool(is_name) and not os.path.isabs(name) and b".." not in parts


class ContentsBuilder:
    """Collects files, tensors and objects of one checkpoint.

    Args:
        kind: See `ForeignSource.kind`.
        path: The file or directory that was opened, for messages.
        directory: The directory to which the names of files are relative.
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
        """Return the part number of a file in the directory.

        Raises:
            CorruptCheckpointError: It is missing or no regular file, or its name leads out of the directory.
        """
        if name not in self._numbers:
            if not _stays_inside(name):
                raise self.corrupt(f"file name {name[:200]!r} is invalid or leads out of the directory")
            try:
                found = self._files.stat(os.path.join(self.source.directory, name))
            except (FileNotFoundError, NotADirectoryError) as error:
                raise self.corrupt("it is missing", file=name) from error
            if not stat.S_ISREG(found.st_mode):
                raise self.corrupt("it is not a regular file", file=name)
            self.source.stamp(name, found)
            self._modified = max(self._modified, found.st_mtime)
            self._numbers[name] = self._part(name, found.st_size, Located(len(self.shards), 0))
        return self._numbers[name]

    @property
    def files_nbytes(self) -> int:
        """Length of all files so far, in bytes."""
        return sum(nbytes for _, _, nbytes, _ in self.source.stamps.values())

    def stamp(self, name: str) -> None:
        """Record length and modification time of a file, if it exists, to detect later changes."""
        with contextlib.suppress(OSError):
            self.source.stamp(name, self._files.stat(os.path.join(self.source.directory, name)))

    def place(self, part: int, nbytes: int, where: Lazy | Place) -> int:
        """Return a new part number for elements that have no known offset in a file.

        Args:
            part: Part number of the file that holds them; negative: none does.
            nbytes: Length of the elements in bytes.
            where: Where the elements are, or a function that finds out.
        """
        return self._part(self.shards[part].name if part >= 0 else "", nbytes, where)

    def _part(self, name: str, nbytes: int, where: Lazy | Place) -> int:
        self.shards.append(ShardRecord(name=name, nbytes=nbytes, digests=b""))
        self.source.places.append(where)
        return len(self.shards) - 1

    def tensor(self, fqn: str, dtype: str, shape: tuple[int, ...], chunks: Iterable[Chunk]) -> Node:
        """Add a tensor; return its node.

        Raises:
            CorruptCheckpointError: A chunk is outside of its file, or the chunks do not cover the tensor exactly once.
            UnsupportedFormatError: There are too many tensors.
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
                    f"tensor {fqn!r} has {chunk.nbytes} bytes, which does not match its shape {list(chunk.sizes)} and "
                    f"dtype {dtype}",
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
        return (TENSOR, len(self._tensors) - 1)

    def whole_tensor(
        self, fqn: str, dtype: str, shape: tuple[int, ...], part: int, offset_bytes: int, nbytes: int
    ) -> int:
        """Add a tensor that is stored as one chunk; return its number. Raises the errors of `tensor`."""
        chunk = Chunk(part=part, offset_bytes=offset_bytes, nbytes=nbytes, offsets=(0,) * len(shape), sizes=shape)
        return int(self.tensor(fqn, dtype, shape, [chunk])[1])

    def contents(self, tree: Node, writer: str) -> Contents:
        """Return the contents with the given tree.

        Raises:
            DuplicateNameError: Two leaves have the same FQN.
        """
        names: dict[str, Path] = {}
        step = -1
        for path, node in leaves(tree):
            if names.setdefault(fqn_of(path), path) != path:
                raise DuplicateNameError(f"{self.path}: two leaves are called {fqn_of(path)!r}", fqn=fqn_of(path))
            if path == ("step",) and node[0] == OBJECT and type(self.source.objects[node[1]]) is int:
                step = max(-1, self.source.objects[node[1]])
        structure = Structure(
            tree=tree,
            tensors=tuple(
                TensorEntry(fqn=t.fqn, dtype=t.dtype, global_shape=t.global_shape, chunks=tuple(c for _, c in t.chunks))
                for t in self._tensors
            ),
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
            step=step,
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
        """Return the error for damaged content."""
        said = f"{self._named(file)}: {detail}"
        return CorruptCheckpointError(said, path=self.path, file=file or None, fqn=fqn, detail=detail)

    def unsupported(self, detail: str, found: str | None = None, file: str = "") -> UnsupportedFormatError:
        """Return the error for content that cannot be read."""
        return UnsupportedFormatError(f"{self._named(file)}: {detail}", path=self.path, found=found)

    def _named(self, file: str) -> str:
        return os.path.join(self.source.directory, file) if file else self.path

    @contextlib.contextmanager
    def refusing(self, file: str = "", what: str = "") -> Iterator[None]:
        """Convert a ValueError about the content of `file` into an asyncckpt error; its detail begins with `what`."""
        try:
            yield
        except AsyncCkptError:
            raise
        except ValueError as error:
            name = getattr(error, "name", None)
            if name is None:
                raise self.corrupt(f"{what}{error}", file=file) from error
            advice = "no code of it was run. Save plain values instead, such as a state_dict()"
            raise self.unsupported(f"{what}{error}; {advice}", name, file) from error

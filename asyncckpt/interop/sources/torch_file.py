"""Reads files of `torch.save`: zip archives, and the stream of pickles that torch wrote before version 1.6.

Sources: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3; what torch writes: `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import IO, Any, NamedTuple, cast

from asyncckpt.errors import AsyncCkptError, CorruptCheckpointError
from asyncckpt.interop.sources.pickle_globals import KNOWN, StorageRef, storage_of
from asyncckpt.interop.sources.pickle_tree import TreeBuilder
from asyncckpt.interop.sources.source import ContentsBuilder, read_exactly
from asyncckpt.interop.sources.unpickler import (
    OpaqueGlobal,
    PickleStream,
    UnpicklingError,
    check_length,
    shown,
    unknown_global,
    unpickle_data,
)
from asyncckpt.storage.contents import Contents, ForeignSource, Located, Strided
from asyncckpt.storage.files import Files, opened

ZIP_MAGIC = b"PK\x03\x04"
_LOCAL = struct.Struct("<4s5H3L2H")
_MAX_32 = (1 << 32) - 1
_TAIL_NBYTES = 2048
"""Bytes at the end of an archive that are read first: they hold the whole directory of an archive with one tensor."""

MAX_DIRECTORY_NBYTES = 1 << 30
"""Limit of the directory of an archive, which is held in memory."""

_STEP_NBYTES = 4 << 20
"""Bytes of one read when the CRC-32 of an entry is computed."""

ReadAt = Callable[[int, int], bytes]
"""(offset, length) in the archive -> exactly these bytes."""


class ZipEntry(NamedTuple):
    """One entry of an archive.

    Attributes:
        name: Its name.
        header_offset: Offset of its local header in the archive.
        nbytes: Length of its data in bytes.
        crc: CRC-32 of its data.
        limit: Offset of the next local header, or of the directory; the data must end before.
    """

    name: str
    header_offset: int
    nbytes: int
    crc: int
    limit: int


class _Window:
    """A file object for `zipfile` that reads an archive which is a part of a file."""

    def __init__(self, read_at: ReadAt, nbytes: int) -> None:
        self._read_at, self._nbytes, self._at = read_at, nbytes, 0
        self._tail_at = max(0, nbytes - _TAIL_NBYTES)
        self._tail = read_at(self._tail_at, nbytes - self._tail_at)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        at = offset + (self._nbytes if whence == os.SEEK_END else 0)
        if at < 0:
            raise io.UnsupportedOperation("before the beginning")
        self._at = at
        return at

    def tell(self) -> int:
        return self._at

    def read(self, nbytes: int = -1) -> bytes:
        left = max(0, self._nbytes - self._at)
        nbytes, start = left if nbytes < 0 else min(nbytes, left), self._at - self._tail_at
        if nbytes > MAX_DIRECTORY_NBYTES:
            raise ValueError(f"a directory of {nbytes} bytes")
        self._at += nbytes
        return self._tail[start : start + nbytes] if start >= 0 else self._read_at(self._at - nbytes, nbytes)


def read_directory(read_at: ReadAt, nbytes: int) -> dict[str, ZipEntry]:
    """Return the entries of an archive of `nbytes`, by name.

    Raises:
        UnpicklingError: It is a TorchScript archive.
        ValueError: It is no zip archive, or damaged, or has entries that overlap, are compressed or encrypted.
        OSError: It cannot be read.
    """
    try:
        archive = zipfile.ZipFile(cast(IO[bytes], _Window(read_at, nbytes)))
    except (zipfile.BadZipFile, NotImplementedError, struct.error, OverflowError) as error:
        hidden = error.__context__  # the OSError of a failed read, which zipfile replaces
        if isinstance(hidden, OSError) and not isinstance(hidden, io.UnsupportedOperation):
            raise hidden from None
        raise ValueError(f"it is no zip archive, damaged, or cut short: {error}") from error
    infos = sorted(archive.infolist(), key=lambda info: info.header_offset)
    limits = [*(info.header_offset for info in infos[1:]), archive.start_dir]
    found = {
        info.filename: ZipEntry(info.filename, info.header_offset, info.file_size, info.CRC, limit)
        for info, limit in zip(infos, limits, strict=False)
    }
    if any(name.endswith("/constants.pkl") for name in found):
        raise UnpicklingError("a TorchScript archive, which is code", "torch.jit")
    if len(found) != len(infos):
        raise ValueError("an entry is there twice")
    for info, limit in zip(infos, limits, strict=False):
        if info.compress_type or info.flag_bits & 1 or info.compress_size != info.file_size:
            raise ValueError(f"entry {info.filename!r} is compressed or encrypted")
        if info.header_offset + _LOCAL.size + info.file_size > limit:
            raise ValueError(f"entry {info.filename!r} overlaps with the next one, or with the directory")
    return found


def data_offset(read_at: ReadAt, entry: ZipEntry) -> int:
    """Return where the bytes of an entry begin in the archive.

    IMPORTANT: the offset depends on lengths in the local header, which no checksum covers. They are checked against the
    offset of the next header: with wrong lengths, a tensor would get bytes from elsewhere in the file.

    Raises:
        ValueError: Its local header is damaged.
    """
    magic, _, flags, *_, n_name, n_extra = _LOCAL.unpack(read_at(entry.header_offset, _LOCAL.size))
    start: int = entry.header_offset + _LOCAL.size + n_name + n_extra
    behind = entry.limit - start - entry.nbytes
    descriptors = (0,) if not flags & 8 else (16, 24) if entry.limit > _MAX_32 else (16,)
    if magic != ZIP_MAGIC or behind < 0 or (entry.nbytes and behind not in descriptors):
        raise ValueError(f"the header of entry {entry.name!r} is damaged")
    return start


_LEGACY_MAGIC = re.compile(
    rb"\x80([\x02\x03]|[\x04\x05]\x95.{8})\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", re.DOTALL
)
"""A pickle of torch's magic number, `torch.serialization.MAGIC_NUMBER`; from protocol 4 on in a frame."""

HEAD_NBYTES = 32
"""Bytes at the beginning of a file that are enough to determine its kind."""

_LEGACY_PROTOCOL, _LEGACY_VALUE = 1001, 3


class TorchArchive:
    """One zip archive of `torch.save`, anywhere in a file.

    Args:
        read_at: Reads from the archive.
        nbytes: Its length.

    Raises:
        UnpicklingError: A TorchScript archive.
        ValueError: It is not an archive of `torch.save`, or it is damaged.
    """

    def __init__(self, read_at: ReadAt, nbytes: int) -> None:
        self._read_at, self.entries = read_at, read_directory(read_at, nbytes)
        self._has_crcs = any(entry.crc for entry in self.entries.values())
        pickles = [name for name in self.entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("a zip archive that torch.save did not write: it holds no data.pkl")
        self.prefix = pickles[0].removesuffix("data.pkl")
        order = self.entries.get(f"{self.prefix}byteorder")
        if order is not None and (order.nbytes != 6 or self._bytes_of(order) != b"little"):
            raise ValueError("it was written on a big-endian machine")

    def _bytes_of(self, entry: ZipEntry) -> bytes:
        """Return the bytes of an entry, and verify its CRC-32."""
        data = self._read_at(data_offset(self._read_at, entry), entry.nbytes)
        if self._has_crcs and zlib.crc32(data) != entry.crc:
            raise ValueError(f"entry {entry.name!r} differs from its CRC-32")
        return data

    def value(self, known: Mapping[str, Any] = KNOWN) -> Any:
        """Return what was saved: a `TensorRef` for a tensor, an `OpaqueGlobal` for an object of another class.

        Args:
            known: The globals that are on the list.
        """
        entry = self.entries[f"{self.prefix}data.pkl"]
        check_length(entry.nbytes)
        return unpickle_data(self._bytes_of(entry), known, storage_of, opaque=True)[0]

    def storages(self) -> dict[str, tuple[int, int]]:
        """Return where each storage begins in the archive, and its length in bytes, by its key.

        Raises:
            ValueError: A local header is damaged.
        """
        prefix = f"{self.prefix}data/"
        return {
            name.removeprefix(prefix): (data_offset(self._read_at, entry), entry.nbytes)
            for name, entry in self.entries.items()
            if name.startswith(prefix)
        }

    def storage(self, storage: StorageRef) -> int:
        """Return where the bytes of a storage begin in the archive.

        Raises:
            ValueError: They are not there, or too few.
        """
        entry = self.entries.get(f"{self.prefix}data/{storage.key}")
        if entry is None:
            raise ValueError(f"storage {storage.key!r} is missing")
        if entry.nbytes < storage.nbytes:
            raise ValueError(f"storage {storage.key!r} was cut short")
        return data_offset(self._read_at, entry)


def read_torch_file(path: str, files: Files) -> Contents:
    """Read the structure of a file that `torch.save` wrote.

    The tree is always a dict: a list or tuple becomes a dict from index to member, any other value a dict with the one
    key `value`.

    Raises:
        CorruptCheckpointError: The file is damaged.
        UnsupportedFormatError: It holds a value that cannot be read; names the global, if that is why.
        DuplicateNameError: Two leaves have the same name.
        OSError: The file cannot be read.
    """
    directory, name = os.path.split(path)
    builder = ContentsBuilder("torch", path, directory, files)
    part = builder.file(name)
    nbytes = builder.shards[part].nbytes
    with builder.refusing(), opened(files, path, os.O_RDONLY) as fd:
        read_at = read_exactly(files, fd, nbytes)
        if _LEGACY_MAGIC.match(read_at(0, min(nbytes, HEAD_NBYTES))):
            value, start_of, writer = *_legacy(read_at, nbytes), "torch.save, before torch 1.6"
        else:
            archive = TorchArchive(read_at, nbytes)
            value, start_of, writer = archive.value(), archive.storage, "torch.save"
            builder.source.archives.append((name, 0, nbytes))

        @functools.cache
        def locate(storage: StorageRef) -> tuple[int, int]:
            return part, start_of(storage)

        if isinstance(value, (list, tuple)):
            builder.source.changed[f"a {type(value).__name__} became a dict of its members' numbers"] = {"": ""}
            value = dict(enumerate(value))
        elif not isinstance(value, dict):
            builder.source.changed["what was no dict is its member 'value'"] = {"": ""}
            value = {"value": value}
        tree = TreeBuilder(builder).add(value, (), locate)
    return builder.contents(tree, writer)


def begins_torch_file(head: bytes) -> bool:
    """Whether a file may be one of `torch.save`. `head`: its first `HEAD_NBYTES` bytes, or all if it is shorter."""
    return head.startswith(ZIP_MAGIC) or _LEGACY_MAGIC.match(head) is not None


def is_torch_file(path: str, files: Files) -> bool:
    """Whether `torch.save` wrote a file for which `begins_torch_file` is True; it is True for any zip archive.

    Raises:
        OSError: It cannot be read.
    """
    with opened(files, path, os.O_RDONLY) as fd:
        nbytes = files.fstat(fd).st_size
        with contextlib.suppress(ValueError):
            read_at = read_exactly(files, fd, nbytes)
            return bool(_LEGACY_MAGIC.match(read_at(0, min(nbytes, HEAD_NBYTES))) or TorchArchive(read_at, nbytes))
    return False


def _legacy(read_at: ReadAt, nbytes: int) -> tuple[Any, Callable[[StorageRef], int]]:
    """Read a file of torch before 1.6: five pickles (magic number, protocol, system, value, keys), then storages."""
    pickle, at = PickleStream(read_at, nbytes), 0
    found: list[Any] = []
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> StorageRef:
        ref = storage_of(pid)
        if isinstance(ref, OpaqueGlobal):  # its element size, and so the offsets of later storages, is unknown
            raise unknown_global(ref.name)
        return storages.setdefault(ref.key, ref)

    while len(found) < 5:
        value, at = unpickle_data(pickle, KNOWN, persistent, at, opaque=len(found) == _LEGACY_VALUE)
        found.append(value)
    _, protocol, system, value, keys = found
    if protocol != _LEGACY_PROTOCOL or not isinstance(system, dict) or not isinstance(keys, list):
        raise ValueError("not a file that torch.save wrote")
    if system.get("little_endian") is not True:
        raise ValueError("it was written on a big-endian machine")
    starts: dict[str, int] = {}
    for key in keys:
        ref = storages.get(key) if isinstance(key, str) else None
        if ref is None:
            raise ValueError(f"storage {shown(key)} belongs to no tensor")
        (numel,) = struct.unpack("<q", read_at(at, 8))
        if numel != ref.numel:
            raise ValueError(f"storage {key!r} has {numel} elements, {ref.numel} were wanted")
        starts[key] = at + 8
        at += 8 + ref.nbytes
        if at > nbytes:
            raise ValueError("it was cut short")

    def start_of(ref: StorageRef) -> int:
        if ref.key not in starts:
            raise ValueError(f"storage {ref.key!r} is missing")
        return starts[ref.key]

    return value, start_of


@contextlib.contextmanager
def opened_archive(contents: Contents, archive: tuple[str, int, int], files: Files) -> Iterator[ReadAt]:
    """Open an archive of a source, an element of `ForeignSource.archives`, for reading.

    Raises:
        CorruptCheckpointError: The block has raised a `ValueError`: the archive is damaged.
        OSError: The file cannot be opened.
    """
    assert contents.source is not None
    name, start, nbytes = archive
    path = os.path.join(contents.source.directory, name)
    with opened(files, path, os.O_RDONLY) as fd:
        try:
            yield read_exactly(files, fd, nbytes, start)
        except AsyncCkptError:
            raise
        except ValueError as error:
            detail = f"bytes {start} to {start + nbytes}: {error}"
            said = f"{path}: {detail}"
            raise CorruptCheckpointError(said, path=contents.path, file=name, detail=detail) from error


def crc_of(read_at: ReadAt, entry: ZipEntry, offset: int) -> int:
    """Return the CRC-32 of an entry whose bytes begin at `offset` of its archive.

    Raises:
        ValueError: The file ends early.
        OSError: The file cannot be read.
    """
    crc = 0
    for at in range(0, entry.nbytes, _STEP_NBYTES):
        crc = zlib.crc32(read_at(offset + at, min(_STEP_NBYTES, entry.nbytes - at)), crc)
    return crc


def damaged(contents: Contents, name: str, entry: ZipEntry, offset: int) -> CorruptCheckpointError:
    """Return the error for an entry at byte `offset` of file `name` whose CRC-32 differs; it names the tensors."""
    assert contents.source is not None
    shards = contents.ranks[0].index.shards
    end = offset + entry.nbytes
    holds = [
        tensor.fqn
        for tensor in contents.tensors.values()
        for _, chunk in tensor.chunks
        if shards[chunk.part].name == name
        and _begins_within(contents.source, chunk.part, chunk.offset_bytes, offset, end)
    ]
    detail = f"bytes {offset} to {end} differ from their CRC-32"
    what = f"; they hold tensor {', '.join(map(repr, holds[:3]))}" if holds else ""
    return CorruptCheckpointError(
        f"{os.path.join(contents.source.directory, name)}: {detail}{what}",
        path=contents.path,
        file=name,
        fqn=holds[0] if holds else None,
        offset=offset,
        nbytes=entry.nbytes,
        detail=detail,
    )


def _begins_within(source: ForeignSource, part: int, offset: int, start: int, end: int) -> bool:
    try:
        place = source.place(part, Files())
    except (AsyncCkptError, OSError):
        return False
    return isinstance(place, (Located, Strided)) and start <= place.offset + offset < max(end, start + 1)

"""Files of `torch.save`: zip archives, and the stream of pickles that torch wrote before version 1.6."""

from __future__ import annotations

import os
import re
import struct
import zlib
from collections.abc import Callable
from typing import Any

from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import AsyncCkptError
from asyncckpt.foreign.assembly import Assembly
from asyncckpt.foreign.growth import Growth
from asyncckpt.foreign.long_values import FilePickle, LongBytes
from asyncckpt.foreign.pickle_values import shown, unknown_global
from asyncckpt.foreign.ranges import read_exactly
from asyncckpt.foreign.refusals import TooLargeError, UnpicklingError
from asyncckpt.foreign.strangers import Stranger
from asyncckpt.foreign.torch_globals import KNOWN, StorageRef, TensorRef, storage_of
from asyncckpt.foreign.unpickling import unpickle_data
from asyncckpt.foreign.zip_directory import PackedError, ReadAt, ZipEntry, data_offset, read_directory
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import Files, opened
from asyncckpt.storage.source import Strided

ZIP_MAGIC = b"PK\x03\x04"
_LEGACY_MAGIC = re.compile(
    rb"\x80([\x02\x03]|[\x04\x05]\x95.{8})\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19", re.DOTALL
)
"""A pickle of torch's magic number, `torch.serialization.MAGIC_NUMBER`; from protocol 4 on in a frame."""

_MAX_SMALL_NBYTES = 64
"""Of an entry that holds a word, such as that of the byte order."""

HEAD_NBYTES = 32
"""Of a file: enough to tell what it is."""

_MAX_EXPANDED_NBYTES, _MAX_EXPANSION = 64 << 30, 1000
"""Of a tensor that `expand` made: saved as the elements that it repeats, and read as what it claims to be. Chosen."""

_LEGACY_PROTOCOL, _LEGACY_VALUE = 1001, 3


class TorchArchive:
    """One zip archive of `torch.save`, anywhere in a file.

    Args:
        read_at: Reads from the archive.
        nbytes: Its length.

    Raises:
        UnpicklingError: A TorchScript archive.
        ValueError: No such archive, or damaged.
    """

    def __init__(self, read_at: ReadAt, nbytes: int) -> None:
        self._read_at = read_at
        try:
            self.entries = read_directory(read_at, nbytes)
        except PackedError as error:
            if any(name.endswith("/constants.pkl") for name in error.names):  # its code is compressed
                raise _torchscript() from error
            raise
        self._has_crcs = any(entry.crc for entry in self.entries.values())
        pickles = [name for name in self.entries if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(pickles) != 1:
            raise ValueError("a zip archive that torch.save did not write: it holds no data.pkl")
        self.prefix = pickles[0].removesuffix("data.pkl")
        if f"{self.prefix}constants.pkl" in self.entries:
            raise _torchscript()
        order = self.entries.get(f"{self.prefix}byteorder")
        if order is not None and self.bytes_of(order) != b"little":
            raise ValueError("it was written on a big-endian machine")

    def bytes_of(self, entry: ZipEntry) -> bytes:
        """Return the bytes of a small entry."""
        if entry.nbytes > _MAX_SMALL_NBYTES:
            raise ValueError(f"entry {entry.name!r} has {entry.nbytes} bytes")
        data = self._read_at(data_offset(self._read_at, entry), entry.nbytes)
        if self._has_crcs and zlib.crc32(data) != entry.crc:
            raise _differs(entry)
        return data

    def value(self) -> Any:
        """Return what was saved: a `TensorRef` for a tensor, a `Stranger` for an object of a class not on the list."""
        entry = self.entries[f"{self.prefix}data.pkl"]
        pickle = FilePickle(self._read_at, data_offset(self._read_at, entry), entry.nbytes)
        try:
            found, _ = unpickle_data(pickle, KNOWN, storage_of, strangers=True)
        except UnpicklingError as error:
            if not isinstance(error, TooLargeError):
                self._check(entry, pickle)
            raise
        self._check(entry, pickle)
        return found

    def _check(self, entry: ZipEntry, pickle: FilePickle) -> None:
        """Hold a pickle against its CRC-32, also one that makes no sense: where it was damaged, that is why."""
        if self._has_crcs:
            pickle.read_up_to(entry.nbytes)
            if pickle.crc != entry.crc:
                raise _differs(entry)

    def storage(self, storage: StorageRef) -> int:
        """Return where the bytes of a storage begin in the archive.

        Raises:
            ValueError: They are not there, or too few.
        """
        entry = self.entries.get(f"{self.prefix}data/{storage.key}")
        if entry is None:
            raise ValueError(f"storage {storage.key!r} is missing")
        if entry.nbytes < storage.numel * DTYPES[storage.dtype or "uint8"].itemsize:
            raise ValueError(f"storage {storage.key!r} was cut short")
        return data_offset(self._read_at, entry)


def _differs(entry: ZipEntry) -> ValueError:
    return ValueError(f"entry {entry.name!r} differs from its CRC-32")


def _torchscript() -> UnpicklingError:
    return UnpicklingError("a TorchScript archive, which is code", "torch.jit")


def place_of(ref: TensorRef, part: int, start: int) -> tuple[int, int] | Strided:
    """Return where a tensor's elements lie, whose storage begins at byte `start` of a part.

    Raises:
        UnpicklingError: Few elements are repeated, by strides of zero, to what no memory holds.
    """
    itemsize = DTYPES[ref.dtype].itemsize
    offset = start + ref.offset * itemsize
    expected, row_major = 1, True
    for size, stride in zip(ref.size[::-1], ref.stride[::-1], strict=True):
        row_major = row_major and (size <= 1 or stride == expected)
        expected *= size
    if row_major or 0 in ref.size:
        return part, offset
    span = 1 + sum((n - 1) * s for n, s in zip(ref.size, ref.stride, strict=True))
    nbytes = expected * itemsize
    if nbytes > max(_MAX_EXPANDED_NBYTES, _MAX_EXPANSION * span * itemsize):
        raise UnpicklingError(f"a tensor of {nbytes} bytes that repeats {span * itemsize} of them", "expanded tensor")
    return Strided(part, offset, span * itemsize, itemsize, ref.size, ref.stride)


def read_torch_file(path: str, files: Files) -> Contents:
    """Read the structure of a file that `torch.save` wrote.

    What is no dict becomes one: the members of a list under their numbers, anything else under `value`.

    Raises:
        CorruptCheckpointError: Damaged.
        UnsupportedFormatError: It holds something that is not read; of a global, names it.
        DuplicateNameError: Two leaves have one name.
        OSError: It cannot be read.
    """
    directory, name = os.path.split(path)
    assembly = Assembly("torch", path, directory, files)
    part = assembly.file(name)
    nbytes = assembly.shards[part].nbytes
    try:
        with opened(files, path, os.O_RDONLY) as fd:
            read_at = read_exactly(files, fd, nbytes)
            if _is_legacy(read_at(0, min(nbytes, HEAD_NBYTES))):
                value, start_of = _legacy(read_at, nbytes)
                writer = "torch.save, before torch 1.6"
            else:
                archive = TorchArchive(read_at, nbytes)
                value, start_of = archive.value(), archive.storage
                writer = "torch.save"
                assembly.source.archives.append((name, 0, nbytes))
            starts: dict[str, int] = {}

            def locate(ref: TensorRef | LongBytes) -> tuple[int, int] | Strided:
                if isinstance(ref, LongBytes):
                    return part, ref.start
                key = ref.storage.key
                if key not in starts:
                    starts[key] = start_of(ref.storage)
                return place_of(ref, part, starts[key])

            if isinstance(value, (list, tuple)):
                assembly.source.changed[f"a {type(value).__name__} became a dict of its members' numbers"] = {"": ""}
                value = dict(enumerate(value))
            elif not isinstance(value, dict):
                assembly.source.changed["what was no dict is its member 'value'"] = {"": ""}
                value = {"value": value}
            tree = Growth(assembly).node_of(value, (), locate)
    except ValueError as error:
        if isinstance(error, AsyncCkptError):
            raise
        raise assembly.refused(error) from error
    return assembly.contents(tree, writer)


def begins_torch_file(head: bytes) -> bool:
    """Whether a file that begins with `head`, of `HEAD_NBYTES` or all of it, may be one of torch's."""
    return head.startswith(ZIP_MAGIC) or _is_legacy(head)


def _is_legacy(head: bytes) -> bool:
    return _LEGACY_MAGIC.match(head) is not None


def is_torch_file(path: str, files: Files) -> bool:
    """Whether `torch.save` wrote a file that begins as one of its: any zip archive does.

    Raises:
        OSError: It cannot be read.
    """
    with opened(files, path, os.O_RDONLY) as fd:
        nbytes = files.fstat(fd).st_size
        try:
            read_at = read_exactly(files, fd, nbytes)
            if not _is_legacy(read_at(0, min(nbytes, HEAD_NBYTES))):
                TorchArchive(read_at, nbytes)
        except ValueError:
            return False
    return True


def _legacy(read_at: ReadAt, nbytes: int) -> tuple[Any, Callable[[StorageRef], int]]:
    """Read five pickles: magic number, protocol, what machine, the value, the keys of the storages; then storages."""
    pickle, at = FilePickle(read_at, 0, nbytes), 0
    found: list[Any] = []
    storages: dict[str, StorageRef] = {}

    def persistent(pid: Any) -> StorageRef:
        ref = storage_of(pid)
        if isinstance(ref, Stranger):  # where the storages behind it begin depends on how long its elements are
            raise unknown_global(ref.name)
        return storages.setdefault(ref.key, ref)

    while len(found) < 5:
        value, at = unpickle_data(pickle, KNOWN, persistent, at, strangers=len(found) == _LEGACY_VALUE)
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
        at += 8 + numel * DTYPES[ref.dtype or "uint8"].itemsize
        if at > nbytes:
            raise ValueError("it was cut short")

    def start_of(ref: StorageRef) -> int:
        if ref.key not in starts:
            raise ValueError(f"storage {ref.key!r} is missing")
        return starts[ref.key]

    return value, start_of

"""The entries of a zip archive that lies anywhere in a file, and where their bytes are. Stored entries only.

Source: PKWARE APPNOTE.TXT 6.3.10, sections 4.3 and 4.5.3; what torch writes: `caffe2/serialize/inline_container.cc`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import NamedTuple

_END = struct.Struct("<4s4H2LH")
_END64_LOCATOR = struct.Struct("<4sLQL")
_END64 = struct.Struct("<4sQ2H2L4Q")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_LOCAL = struct.Struct("<4s5H3L2H")
_TAIL_NBYTES = 65_557
"""The end record with its longest comment."""

_FIRST_TAIL_NBYTES = 2048
"""Enough for the whole directory of one tensor that torch saved."""

MAX_DIRECTORY_NBYTES = 1 << 30
_MAX32, _MAX16 = 0xFFFFFFFF, 0xFFFF

ReadAt = Callable[[int, int], bytes]
"""(offset, length) in the archive -> exactly these bytes."""


class ZipEntry(NamedTuple):
    """One stored entry: name, where its local header begins in the archive, length, CRC-32.

    `limit`: where the archive's directory begins, which its bytes must not reach.
    """

    name: str
    header_offset: int
    nbytes: int
    crc: int
    limit: int


class PackedError(ValueError):
    """An entry, `name`, is compressed or encrypted. `names`: of all entries."""

    def __init__(self, name: str, names: Iterable[str]) -> None:
        self.names = frozenset(names)
        super().__init__(f"entry {name!r} is compressed or encrypted")


def read_directory(read_at: ReadAt, nbytes: int) -> dict[str, ZipEntry]:
    """Return the entries of an archive of `nbytes`, by name.

    Raises:
        PackedError: Some are not stored as they are.
        ValueError: No zip archive, a damaged one, or one whose entries overlap.
    """
    tail_nbytes = min(nbytes, _FIRST_TAIL_NBYTES)
    tail = read_at(nbytes - tail_nbytes, tail_nbytes)
    at = tail.rfind(b"PK\x05\x06")
    if at < 0 and nbytes > tail_nbytes:
        tail_nbytes = min(nbytes, _TAIL_NBYTES)
        tail = read_at(nbytes - tail_nbytes, tail_nbytes)
        at = tail.rfind(b"PK\x05\x06")
    if at < 0 or len(tail) - at < _END.size:
        raise ValueError("it is no zip archive, or was cut short: the end record is missing")
    end_offset = nbytes - tail_nbytes + at
    _, disk, _, _, count, length, start, _ = _END.unpack_from(tail, at)
    if disk not in (0, _MAX16):
        raise ValueError("a zip archive in several volumes")
    if _MAX16 in (count, disk) or _MAX32 in (length, start):
        count, length, start = _end64(read_at, end_offset, (count, length, start))
    if start + length > end_offset or length > MAX_DIRECTORY_NBYTES:
        raise ValueError("the directory lies outside of the archive")
    first = nbytes - tail_nbytes
    data = tail[start - first : start - first + length] if start >= first else read_at(start, length)
    found = _entries(data, count, start)
    _check_apart(found.values())
    return found


def _end64(read_at: ReadAt, end_offset: int, plain: tuple[int, int, int]) -> tuple[int, int, int]:
    if end_offset < _END64_LOCATOR.size:
        return plain
    magic, _, offset, _ = _END64_LOCATOR.unpack(read_at(end_offset - _END64_LOCATOR.size, _END64_LOCATOR.size))
    if magic != b"PK\x06\x07":
        return plain
    if offset + _END64.size > end_offset:
        raise ValueError("the zip64 end record lies outside of the archive")
    found = _END64.unpack(read_at(offset, _END64.size))
    if found[0] != b"PK\x06\x06":
        raise ValueError("the zip64 end record is damaged")
    return found[7], found[8], found[9]


def _entries(data: bytes, count: int, limit: int) -> dict[str, ZipEntry]:
    found: dict[str, ZipEntry] = {}
    packed_one: str | None = None
    at = 0
    for _ in range(count):
        if at + _ENTRY.size > len(data):
            raise ValueError("the directory ends early")
        parts = _ENTRY.unpack_from(data, at)
        magic, flags, method, crc, packed, nbytes = parts[0], parts[3], parts[4], parts[7], parts[8], parts[9]
        n_name, n_extra, n_comment, offset = parts[10], parts[11], parts[12], parts[16]
        at += _ENTRY.size
        name = data[at : at + n_name].decode("utf-8", "replace")
        if magic != b"PK\x01\x02" or at + n_name + n_extra + n_comment > len(data):
            raise ValueError("the directory is damaged")
        if _MAX32 in (packed, nbytes, offset):
            nbytes, packed, offset = _extra64(data[at + n_name : at + n_name + n_extra], nbytes, packed, offset)
        at += n_name + n_extra + n_comment
        if packed_one is None and (method or flags & 1 or packed != nbytes):
            packed_one = name
        if offset + _LOCAL.size + packed > limit:
            raise ValueError(f"entry {name!r} lies outside of the archive")
        if name in found:
            raise ValueError(f"entry {name!r} is there twice")
        found[name] = ZipEntry(name, offset, nbytes, crc, limit)
    if packed_one is not None:
        raise PackedError(packed_one, found)
    return found


def _check_apart(entries: Iterable[ZipEntry]) -> None:
    """Refuse entries that have bytes in common: who reads them all would read many times what the archive has."""
    for entry, following in pairwise(sorted(entries, key=lambda entry: entry.header_offset)):
        if entry.header_offset + _LOCAL.size + entry.nbytes > following.header_offset:
            raise ValueError(f"entries {entry.name!r} and {following.name!r} overlap")


def _extra64(extra: bytes, nbytes: int, packed: int, offset: int) -> tuple[int, int, int]:
    at = 0
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<2H", extra, at)
        if kind == 1:
            numbers = list(struct.unpack_from(f"<{length // 8}Q", extra, at + 4))
            wide = [numbers.pop(0) if value == _MAX32 and numbers else value for value in (nbytes, packed, offset)]
            return wide[0], wide[1], wide[2]
        at += 4 + length
    raise ValueError("an entry lacks its zip64 lengths")


def data_offset(read_at: ReadAt, entry: ZipEntry) -> int:
    """Return where the bytes of an entry begin in the archive.

    Raises:
        ValueError: Its local header is damaged.
    """
    parts = _LOCAL.unpack(read_at(entry.header_offset, _LOCAL.size))
    if parts[0] != b"PK\x03\x04":
        raise ValueError(f"the header of entry {entry.name!r} is damaged")
    start = entry.header_offset + _LOCAL.size + int(parts[9]) + int(parts[10])
    if start + entry.nbytes > entry.limit:
        raise ValueError(f"the bytes of entry {entry.name!r} reach into the directory")
    return start

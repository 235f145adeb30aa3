"""The zip archives that torch reads, as pieces: small entries as they are, the elements of tensors left open.

Sources: PKWARE APPNOTE.TXT 6.3.10, 4.3 and 4.5.3; torch's `caffe2/serialize/inline_container.cc`: data begin at
multiples of 64, padded by an extra field "FB".
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from asyncckpt.format.crc import joined

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_CRC_IN_LOCAL, _CRC_IN_ENTRY = 14, 16
_UTF8 = 1 << 11


@dataclass(frozen=True, slots=True)
class Payload:
    """All elements of tensor number `tensor`, row-major."""

    tensor: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class TextPayload(Payload):
    """The same of bytes, as a text: each is a character. `nbytes` are those of its UTF-8.

    Attributes:
        starts: Where in it the text of each `step` bytes starts, and where it ends.
        step: See `starts`.
        crc: CRC-32 of the text.
    """

    starts: tuple[int, ...]
    step: int
    crc: int


class Mixed(NamedTuple):
    """What an entry holds, front to back, its length, and its CRC-32."""

    pieces: tuple[bytes | TextPayload, ...]
    nbytes: int
    crc: int


def mixed(pieces: Iterable[bytes | TextPayload]) -> Mixed:
    """Return the content of an entry."""
    found, nbytes, crc = [], 0, 0
    for piece in pieces:
        if isinstance(piece, TextPayload):
            crc, length = joined(crc, piece.crc, piece.nbytes), piece.nbytes
        else:
            crc, length = zlib.crc32(piece, crc), len(piece)
        found.append(piece)
        nbytes += length
    return Mixed(tuple(found), nbytes, crc)


class Archive:
    """One archive; `pieces` and `crc_at` are complete after `close`.

    Args:
        start: Where it begins in its file; the offsets in `crc_at` count from the file's start.
        first_piece: Pieces of the file before it.
        crc: False leaves zeros in the place of every CRC-32, as torch does when it is told not to compute them.
    """

    def __init__(self, start: int = 0, first_piece: int = 0, *, crc: bool = True) -> None:
        self._start, self._first, self._crc = start, first_piece, crc
        self.pieces: list[bytes | Payload] = []
        self.crc_at: list[tuple[int, int]] = []
        self.nbytes = 0
        self._entries: list[tuple[str, int, int, int | None, int]] = []

    def add(self, name: str, content: bytes | Payload | Mixed) -> None:
        """Add an entry."""
        encoded = name.encode()
        pieces = content.pieces if isinstance(content, Mixed) else (content,)
        nbytes = len(content) if isinstance(content, bytes) else content.nbytes
        crc: int | None = 0
        if self._crc:
            crc = zlib.crc32(content) if isinstance(content, bytes) else getattr(content, "crc", None)
        wide = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT else b""
        data = self._start + self.nbytes + _LOCAL.size + len(encoded) + len(wide) + 4
        padding = -data % _ALIGNMENT
        extra = wide + struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        shown = min(nbytes, _LIMIT)
        header = _LOCAL.pack(
            b"PK\x03\x04", 45 if wide else 0, _UTF8, 0, 0, 0, crc or 0, shown, shown, len(encoded), len(extra)
        )
        self._entries.append((name, self.nbytes, nbytes, crc, len(self.pieces) + 1))
        if crc is None:
            self.crc_at.append((self._first + len(self.pieces) + 1, self._start + self.nbytes + _CRC_IN_LOCAL))
        self.pieces += [header + encoded + extra, *pieces]
        self.nbytes += len(header) + len(encoded) + len(extra) + nbytes

    def close(self) -> None:
        """Add the directory."""
        start, parts, length = self.nbytes, [], 0
        for name, offset, nbytes, crc, piece in self._entries:
            encoded = name.encode()
            numbers = [nbytes, nbytes] if nbytes >= _LIMIT else []
            numbers += [offset] if offset >= _LIMIT else []
            extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
            shown = min(nbytes, _LIMIT)
            if crc is None:
                self.crc_at.append((self._first + piece, self._start + start + length + _CRC_IN_ENTRY))
            fixed = (b"PK\x01\x02", 0, 45 if extra else 0, _UTF8, 0, 0, 0, crc or 0, shown, shown)
            entry = _ENTRY.pack(*fixed, len(encoded), len(extra), 0, 0, 0, 0, min(offset, _LIMIT))
            parts.append(entry + encoded + extra)
            length += len(parts[-1])
        count = len(self._entries)
        if count >= 0xFFFF or start >= _LIMIT or length >= _LIMIT:
            end = struct.pack("<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, start)
            parts.append(end + struct.pack("<4sLQL", b"PK\x06\x07", 0, start + length, 1))
        shown = min(count, 0xFFFF)
        parts.append(
            struct.pack("<4s4H2LH", b"PK\x05\x06", 0, 0, shown, shown, min(length, _LIMIT), min(start, _LIMIT), 0)
        )
        self.pieces.append(b"".join(parts))
        self.nbytes += sum(map(len, parts))


def torch_archive(
    pickle: bytes | Mixed,
    payloads: Sequence[Payload],
    *,
    prefix: str = "archive",
    start: int = 0,
    first_piece: int = 0,
    crc: bool = True,
) -> Archive:
    """Return an archive as `torch.save` writes it: the pickle, then one entry per storage."""
    archive = Archive(start, first_piece, crc=crc)
    archive.add(f"{prefix}/data.pkl", pickle)
    archive.add(f"{prefix}/.format_version", b"1")
    archive.add(f"{prefix}/.storage_alignment", str(_ALIGNMENT).encode())
    archive.add(f"{prefix}/byteorder", b"little")
    for number, payload in enumerate(payloads):
        archive.add(f"{prefix}/data/{number}", payload)
    archive.add(f"{prefix}/version", b"3\n")
    archive.close()
    return archive

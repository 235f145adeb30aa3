"""Zip archives that torch reads. An archive is a list of pieces: bytes, and `Payload`s in place of tensors' elements.

Sources: PKWARE APPNOTE.TXT 6.3.10, 4.3 and 4.5.3; torch's `caffe2/serialize/inline_container.cc`: data begin at
multiples of 64, padded by an extra field "FB". `combined_crc32` is `crc32_combine` of zlib (crc32.c of version 1.2.12).
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from functools import lru_cache

from asyncckpt.format.layout import Payload

_ALIGNMENT = 64
_LIMIT = 0xFFFFFFFF
_LOCAL = struct.Struct("<4s5H3L2H")
_ENTRY = struct.Struct("<4s6H3L5H2L")
_UTF8 = 1 << 11


class Archive:
    """Writer of one archive. `pieces` is complete after `close`.

    Args:
        crc: Whether to store CRC-32 of the entries. False stores zeros, as `torch.save` can be told to do. An archive
            with payloads needs False.

    Attributes:
        pieces: The archive's bytes, with payloads in place of elements.
        nbytes: Length of the archive so far.
    """

    def __init__(self, *, crc: bool = True) -> None:
        self._crc = crc
        self.pieces: list[bytes | Payload] = []
        self.nbytes = 0
        self._entries: list[tuple[str, int, int, int]] = []

    def add(self, name: str, content: bytes | Payload) -> None:
        """Add an entry."""
        encoded = name.encode()
        nbytes = len(content) if isinstance(content, bytes) else content.nbytes
        assert isinstance(content, bytes) or not self._crc, "the CRC-32 of elements is not known"
        crc = zlib.crc32(content) if self._crc and isinstance(content, bytes) else 0
        wide = struct.pack("<2H2Q", 1, 16, nbytes, nbytes) if nbytes >= _LIMIT else b""
        data = self.nbytes + _LOCAL.size + len(encoded) + len(wide) + 4
        padding = -data % _ALIGNMENT
        extra = wide + struct.pack("<2s H", b"FB", padding) + b"Z" * padding
        shown = min(nbytes, _LIMIT)
        header = _LOCAL.pack(
            b"PK\x03\x04", 45 if wide else 0, _UTF8, 0, 0, 0, crc, shown, shown, len(encoded), len(extra)
        )
        self._entries.append((name, self.nbytes, nbytes, crc))
        self.pieces += [header + encoded + extra, content]
        self.nbytes += len(header) + len(encoded) + len(extra) + nbytes

    def close(self) -> None:
        """Add the central directory."""
        start, parts, length = self.nbytes, [], 0
        for name, offset, nbytes, crc in self._entries:
            encoded = name.encode()
            numbers = [nbytes, nbytes] if nbytes >= _LIMIT else []
            numbers += [offset] if offset >= _LIMIT else []
            extra = struct.pack(f"<2H{len(numbers)}Q", 1, 8 * len(numbers), *numbers) if numbers else b""
            shown = min(nbytes, _LIMIT)
            fixed = (b"PK\x01\x02", 0, 45 if extra else 0, _UTF8, 0, 0, 0, crc, shown, shown)
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


def torch_archive(pickle: bytes, payloads: Sequence[Payload], *, prefix: str = "archive", crc: bool = True) -> Archive:
    """Return an archive as `torch.save` writes it: the pickle, and one entry for each storage.

    Args:
        pickle: Content of `data.pkl`.
        payloads: The storages, in the order of their numbers in the pickle.
        prefix: Name of the folder in the archive.
        crc: As of `Archive`.
    """
    archive = Archive(crc=crc)
    archive.add(f"{prefix}/data.pkl", pickle)
    archive.add(f"{prefix}/.format_version", b"1")
    archive.add(f"{prefix}/.storage_alignment", str(_ALIGNMENT).encode())
    archive.add(f"{prefix}/byteorder", b"little")
    for number, payload in enumerate(payloads):
        archive.add(f"{prefix}/data/{number}", payload)
    archive.add(f"{prefix}/version", b"3\n")
    archive.close()
    return archive


_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combined_crc32(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of two byte strings joined, by their CRC-32 and the length of the second."""
    return _times(_x_to(8 * second_nbytes), first) ^ second


def _times(a: int, b: int) -> int:
    product = 0
    while a:
        if a & _ONE:
            product ^= b
        a = a << 1 & 0xFFFFFFFF
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@lru_cache(64)
def _x_to(power: int) -> int:
    """Return x to a power, as a polynomial modulo `_POLYNOMIAL`. Cached, because window sizes repeat."""
    found, square = _ONE, _X
    while power:
        if power & 1:
            found = _times(found, square)
        square = _times(square, square)
        power >>= 1
    return found

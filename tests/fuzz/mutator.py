"""Random changes to documents that are sound, by somebody who knows where parsers break. Pure; seeded by its caller."""

from __future__ import annotations

import random
import struct
from collections.abc import Sequence

_NUMBERS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, (1 << 60), (1 << 63) - 1, (1 << 64) - 1)
_WIDTHS = ("<B", "<H", ">H", "<I", ">I", "<Q", ">Q")
TOKENS = (
    *(b"\xdd\xff\xff\xff\xff", b"\xdf\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\xdb\x7f\xff\xff\xff", b"\xc1"),
    *(b"\xcf" + b"\xff" * 8, b"\xd3\x80" + bytes(7), b"\xc7\x00\xff", b"\xd6\xff\x00\x00\x00\x00", b"\x91" * 1100),
    *(b"1e999", b"-0", b"NaN", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b"\\ud800", b"\xff\xfe", b"\x00", b"null"),
    *(b"../../etc/passwd", b"/dev/zero", b"//", b"\n", b"rank-99999", b'"must"', b'"$"', b"@rank0"),
    *(
        b"PK\x05\x06",
        b"PK\x06\x06",
        b"PK\x01\x02",
        b"cos\nsystem\n",
        b"\x80\x04",
        b"(((((",
        b"2" * 60,
        b"R",
        b"b",
        b".",
    ),
)
"""msgpack's length fields and odd types; JSON's; names that lead elsewhere; a zip's records; a pickle's opcodes."""

MAX_NBYTES = 1 << 20


def mutated(seeds: Sequence[bytes], rng: random.Random) -> bytes:
    """Return one of `seeds` with up to four changes."""
    data = bytearray(rng.choice(seeds))
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        _change(data, seeds, rng)
        del data[MAX_NBYTES:]
    return bytes(data)


def _change(data: bytearray, seeds: Sequence[bytes], rng: random.Random) -> None:
    at, to = sorted((rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)))
    to = min(to, at + rng.choice((1, 4, 16, 256, 1 << 20)))
    kind = rng.randrange(10)
    if kind == 0 and at < len(data):
        data[at] ^= 1 << rng.randrange(8)
    elif kind == 1 and at < len(data):
        data[at] = rng.randrange(256)
    elif kind == 2:
        width = rng.choice(_WIDTHS)
        size = struct.calcsize(width)
        packed = struct.pack(width, rng.choice(_NUMBERS) & ((1 << 8 * size) - 1))
        data[at : at + size] = packed
    elif kind == 3:
        del data[at:to]
    elif kind == 4:
        data[at:at] = data[at:to]
    elif kind == 5:
        data[at:at] = bytes(data[at:to][:64]) * rng.choice((2, 10, 300))
    elif kind == 6:
        token = rng.choice(TOKENS)
        data[at : at + rng.choice((0, len(token)))] = token
    elif kind == 7:
        other = rng.choice(seeds)
        cut = rng.randrange(len(other) + 1)
        data[at:] = other[cut:]
    elif kind == 8:
        del data[at:]
    else:
        data[at:to] = rng.randbytes(to - at)

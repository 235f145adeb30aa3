"""The CRC-32 of two runs of bytes from those of each: threads sum a file's parts up at the same time. Pure.

Source: `crc32_combine` of zlib (crc32.c of version 1.2.12): the polynomial of the first is multiplied by x to the
number of bits that follow, modulo that of zip archives, lowest power in the highest bit.
"""

from __future__ import annotations

from functools import lru_cache

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def joined(first: int, second: int, second_nbytes: int) -> int:
    """Return the CRC-32 of bytes whose beginning has `first`, and whose last `second_nbytes` have `second`."""
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
    """Return x to a power; that of a whole window is wanted again and again."""
    found, square = _ONE, _X
    while power:
        if power & 1:
            found = _times(found, square)
        square = _times(square, square)
        power >>= 1
    return found

"""Bytes that a pickle of protocol 2 holds as a text: each is a character, in UTF-8 of one byte or two. Pure."""

from __future__ import annotations

import codecs
import zlib
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

STEP_NBYTES = 512 * 1024
"""So many bytes are looked at, encoded or decoded at once, and found again without those before. Chosen: each costs a
number, and whoever wants others than whole steps decodes two of them in vain."""


class Looked(NamedTuple):
    """What is known of a text: how many bytes it stands for, their CRC-32, and where in it they are.

    `firsts`: for each step the number of the first byte whose character begins in it or later.
    """

    nbytes: int
    crc: int
    firsts: tuple[int, ...]


def looked_through(text: Iterable[bytes]) -> Looked:
    """Look through a text, given as its UTF-8 in steps of equal length, but for the last.

    Raises:
        ValueError: No UTF-8, or characters that are no bytes.
    """
    decoder = codecs.getincrementaldecoder("utf-8")()
    firsts, count, crc = [], 0, 0
    for piece in text:
        firsts.append(count + bool(decoder.getstate()[0]))  # one that began in the step before may end here
        found = decoder.decode(piece).encode("latin1")
        count, crc = count + len(found), zlib.crc32(found, crc)
    decoder.decode(b"", True)
    return Looked(count, crc, tuple(firsts))


def span_of(firsts: Sequence[int], step: int, nbytes: int, low: int, high: int) -> tuple[int, int, int]:
    """Return which part of a text has its bytes `low` to `high`: its start, its end, the number of its first byte.

    Args:
        firsts, step: Of the text, whose UTF-8 has `nbytes`.
        nbytes: See `step`.
        low, high: At least one byte of those that it stands for.
    """
    at, behind = bisect_right(firsts, low) - 1, bisect_left(firsts, high)
    return at * step, min(behind * step + 1, nbytes), firsts[at]


def decoded(part: bytes | bytearray) -> bytes:
    """Return what a part of a text stands for, without characters of which it has only one half.

    Raises:
        ValueError: No such text.
    """
    start = part[:1] >= b"\x80" and part[:1] < b"\xc0"
    end = len(part) - (part[-1:] >= b"\xc0")
    return part[start:end].decode().encode("latin1")


def encoded(data: bytes) -> bytes:
    """Return bytes as such a text."""
    return data.decode("latin1").encode()

"""numpy's scalars as typed JSON and, without numpy, as the Python values that are nearest to them."""

from __future__ import annotations

import re
import struct
from typing import Any

_NUMBERS = {
    **{"|b1": "?", "|i1": "b", "|u1": "B", "<i2": "h", "<u2": "H", "<i4": "i", "<u4": "I", "<i8": "q", "<u8": "Q"},
    **{"<f2": "e", "<f4": "f", "<f8": "d", "<c8": "ff", "<c16": "dd"},
}
"""dtype strings of the array protocol -> how `struct` reads them, little endian."""

_SIZED = re.compile(r"(?:<U|\|S)(0|[1-9][0-9]{0,7})")
_TIMES = re.compile(r"<[mM]8(?:\[(?:[1-9][0-9]{0,8})?(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?")


def is_known(dtype: str) -> bool:
    """Whether scalars of a dtype, named as the array protocol does, little endian, can be stored."""
    return dtype in _NUMBERS or bool(_SIZED.fullmatch(dtype) or _TIMES.fullmatch(dtype))


def checked(payload: Any) -> tuple[str, bytes]:
    """Return (dtype, bytes) of a stored scalar.

    Raises:
        ValueError: Malformed.
    """
    if not isinstance(payload, list) or len(payload) != 2 or not all(isinstance(part, str) for part in payload):
        raise ValueError("a numpy scalar is [dtype, hex]")
    dtype, data = payload[0], bytes.fromhex(payload[1])
    if not is_known(dtype):
        raise ValueError(f"unknown dtype {dtype[:40]!r} of a numpy scalar")
    if len(data) != _itemsize(dtype):
        raise ValueError(f"{len(data)} bytes for a numpy scalar of dtype {dtype}")
    if dtype == "|b1" and data[0] > 1:
        raise ValueError("a bool is 0 or 1")
    return dtype, data


def _itemsize(dtype: str) -> int:
    if dtype in _NUMBERS:
        return struct.calcsize("<" + _NUMBERS[dtype])
    if dtype[1] in "mM":
        return 8
    return int(dtype[2:]) * (4 if dtype[1] == "U" else 1)


def python_value(dtype: str, data: bytes) -> Any:
    """Return what is nearest to a checked scalar: bool, int, float, complex, str, bytes; of a time its count of units.

    Raises:
        ValueError: A text with something that is no character.
    """
    if dtype in _NUMBERS:
        found = struct.unpack("<" + _NUMBERS[dtype], data)
        return complex(*found) if len(found) == 2 else found[0]
    if dtype[1] in "mM":
        return struct.unpack("<q", data)[0]
    return data.decode("utf-32-le", "surrogatepass") if dtype[1] == "U" else data

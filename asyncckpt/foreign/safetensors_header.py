"""The header of a safetensors file, checked whole. Source: the format's README, section "Format"."""

from __future__ import annotations

import json
import math
from typing import Any, NamedTuple

from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.zip_directory import ReadAt
from asyncckpt.format.layout import MAX_HEADER_NBYTES, METADATA_KEY
from asyncckpt.format.structure import MAX_DIMS

_F4 = "F4"
_NAMES = {row.safetensors: row.name for row in DTYPES.values() if row.safetensors} | {
    "F8_E8M0": "float8_e8m0fnu",
    _F4: "float4_e2m1fn_x2",
}
"""Two dtypes more than files of ours are written with: safetensors 0.5 does not know them, 0.6.2 does."""

_WRITTEN = {name: kind for kind, name in _NAMES.items()}


SAFETENSORS_START = 9
"""Bytes that are enough to tell: the header's length, and its first character."""


class HeaderEntry(NamedTuple):
    """One tensor: name, our dtype's name, shape in elements, where its bytes begin in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def is_safetensors(start: bytes, nbytes: int) -> bool:
    """Whether a file of `nbytes` that begins with these `SAFETENSORS_START` bytes may be a safetensors file."""
    return (
        len(start) >= SAFETENSORS_START
        and start[8:9] == b"{"
        and 2 <= int.from_bytes(start[:8], "little") <= nbytes - 8
    )


def read_header(read_at: ReadAt, nbytes: int) -> tuple[list[HeaderEntry], dict[str, Any]]:
    """Return the tensors in the header's order, and its metadata.

    Raises:
        ValueError: Damaged: no JSON, an unknown dtype, ranges that overlap, leave holes or lie outside of the file.
    """
    length = int.from_bytes(read_at(0, 8), "little")
    if not 2 <= length <= min(MAX_HEADER_NBYTES, nbytes - 8):
        raise ValueError(f"a header of {length} bytes in a file of {nbytes}")
    try:
        raw = json.loads(read_at(8, length), object_pairs_hook=_without_doubles)
    except RecursionError as error:
        raise ValueError("the header is nested too deeply") from error
    if not isinstance(raw, dict):
        raise ValueError("the header is no JSON object")
    metadata = raw.pop(METADATA_KEY, {})
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise ValueError("the header's metadata are no texts")
    begin = 8 + length
    entries = [_entry(name, entry, begin) for name, entry in raw.items()]
    at = begin
    for entry in sorted(entries, key=lambda e: (e.offset, e.nbytes)):
        if entry.offset != at:
            raise ValueError(f"the bytes of tensor {entry.name!r} begin at {entry.offset}, expected {at}")
        at += entry.nbytes
    if at != nbytes:
        raise ValueError(f"its tensors end at byte {at}, the file at {nbytes}: it was cut short or extended")
    return entries, metadata


def header_form(dtype: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]] | None:
    """Return safetensors' dtype and shape of a tensor, or None where it has none.

    Args:
        dtype: Our name, which is torch's.
        shape: In torch's elements. One of `float4_e2m1fn_x2` is two of F4, and so needs a dimension.
    """
    kind = _WRITTEN.get(dtype)
    if kind is None or (kind == _F4 and not shape):
        return None
    return kind, (*shape[:-1], 2 * shape[-1]) if kind == _F4 else shape


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name is in the header twice")
    return found


def _entry(name: str, raw: Any, begin: int) -> HeaderEntry:
    if not isinstance(raw, dict) or not {"dtype", "shape", "data_offsets"} <= set(raw):
        raise ValueError(f"tensor {name!r} lacks dtype, shape or offsets")
    kind, shape, offsets = raw["dtype"], raw["shape"], raw["data_offsets"]
    if not isinstance(kind, str) or kind not in _NAMES:
        raise ValueError(f"tensor {name!r} is of unknown dtype {str(kind)[:20]!r}")
    for numbers in (shape, offsets):
        if not isinstance(numbers, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in numbers):
            raise ValueError(f"shape or offsets of tensor {name!r} are no numbers")
    if len(shape) > MAX_DIMS or len(offsets) != 2:
        raise ValueError(f"tensor {name!r} has {len(shape)} dimensions and {len(offsets)} offsets")
    dtype = _NAMES[kind]
    if kind == _F4:  # two of them make one element of torch's
        if not shape or shape[-1] % 2:
            raise ValueError(f"tensor {name!r} has an odd number of 4-bit elements in a row")
        shape = [*shape[:-1], shape[-1] // 2]
    nbytes = math.prod(shape) * DTYPES[dtype].itemsize
    if offsets[1] - offsets[0] != nbytes:
        raise ValueError(f"tensor {name!r} has {offsets[1] - offsets[0]} bytes, its shape {shape} wants {nbytes}")
    return HeaderEntry(name, dtype, tuple(shape), begin + offsets[0], nbytes)

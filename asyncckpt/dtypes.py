"""The table of dtypes: name, item size, and name in safetensors.

Names are torch's without the `torch.` prefix. A dtype that safetensors lacks is stored as U8 with one more
dimension of `itemsize` bytes (none when the itemsize is 1), and the index keeps its true name.
Source of the safetensors names: safetensors 0.8, `torch.py`, `_TYPES`.
"""

from __future__ import annotations

from typing import NamedTuple


class DType(NamedTuple):
    """A dtype: torch's name, bytes per element, and safetensors' name or None."""

    name: str
    itemsize: int
    safetensors: str | None


SUB_BYTE = tuple(f"{sign}int{bits}" for sign in ("u", "") for bits in range(1, 8))
"""Integers of fewer than 8 bits. An element takes a byte, in torch and here; what the byte means is up to the user."""

UNCONVERTED = (*SUB_BYTE, "float4_e2m1fn_x2")
"""Dtypes that torch neither converts nor copies; their bytes can be copied."""

_ROWS = (
    DType("bool", 1, "BOOL"),
    DType("uint8", 1, "U8"),
    DType("int8", 1, "I8"),
    DType("uint16", 2, "U16"),
    DType("int16", 2, "I16"),
    DType("uint32", 4, "U32"),
    DType("int32", 4, "I32"),
    DType("uint64", 8, "U64"),
    DType("int64", 8, "I64"),
    DType("float16", 2, "F16"),
    DType("bfloat16", 2, "BF16"),
    DType("float32", 4, "F32"),
    DType("float64", 8, "F64"),
    DType("complex32", 4, None),
    DType("complex64", 8, "C64"),
    DType("complex128", 16, None),
    DType("float8_e4m3fn", 1, "F8_E4M3"),
    DType("float8_e4m3fnuz", 1, "F8_E4M3FNUZ"),
    DType("float8_e5m2", 1, "F8_E5M2"),
    DType("float8_e5m2fnuz", 1, "F8_E5M2FNUZ"),
    DType("float8_e8m0fnu", 1, None),
    DType("float4_e2m1fn_x2", 1, None),
    *(DType(name, 1, None) for name in SUB_BYTE),
)

DTYPES: dict[str, DType] = {row.name: row for row in _ROWS}


def stored_as(name: str, sizes: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Return the safetensors dtype and shape under which `sizes` elements of dtype `name` are stored.

    Args:
        name: A key of `DTYPES`.
        sizes: Shape in elements.

    Returns:
        safetensors' dtype name, and the shape in its elements.
    """
    row = DTYPES[name]
    if row.safetensors is not None:
        return row.safetensors, sizes
    return "U8", sizes if row.itemsize == 1 else (*sizes, row.itemsize)

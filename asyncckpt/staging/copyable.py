"""Tensors as torch can copy them in every version: some dtypes move as integers of the same width."""

from __future__ import annotations

import torch

_AS_INTEGERS = {
    name: integer
    for names, integer in (
        (("float8_e8m0fnu", "float4_e2m1fn_x2", "float8_e4m3fnuz", "float8_e5m2fnuz"), torch.uint8),
        (("complex32",), torch.int32),
    )
    for name in names
}
_COPIED_AS = {getattr(torch, name): integer for name, integer in _AS_INTEGERS.items() if hasattr(torch, name)}
"""Dtypes whose copy kernel is missing or partial in some torch versions move as integers of the same width."""


def is_special(dtype: torch.dtype) -> bool:
    """Whether `copyable` changes tensors of this dtype."""
    return dtype in _COPIED_AS


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of it as integers where its dtype has no copy kernel everywhere."""
    integer = _COPIED_AS.get(tensor.dtype)
    return tensor if integer is None else tensor.view(integer)

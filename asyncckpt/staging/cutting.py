"""What of a tensor is copied, and as what."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from asyncckpt.planning.save_plan import TensorBox

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


def nbytes_before(box: TensorBox, dtype: torch.dtype, shape: Sequence[int]) -> int:
    """Return where a box of a contiguous tensor begins in it."""
    elements = 0
    for offset, size in zip(box.offsets, shape, strict=True):
        elements = elements * size + offset
    return elements * dtype.itemsize


def cut_out(tensor: torch.Tensor, box: TensorBox) -> torch.Tensor:
    """Return the part of `tensor` that is the box."""
    for dimension, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
        if size != tensor.shape[dimension]:
            tensor = tensor.narrow(dimension, offset, size)
    return tensor


def is_special(dtype: torch.dtype) -> bool:
    """Whether `copyable` changes tensors of this dtype."""
    return dtype in _COPIED_AS


def copyable(tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, or a view of it as integers where its dtype has no copy kernel everywhere."""
    integer = _COPIED_AS.get(tensor.dtype)
    return tensor if integer is None else tensor.view(integer)


def runs(tensor: torch.Tensor, start: int, end: int) -> Iterator[torch.Tensor]:
    """Yield views that hold the elements `start` to `end` of a tensor, counted row by row, in their order."""
    if start >= end:
        return
    if (start, end) == (0, tensor.numel()):
        yield tensor
        return
    row = tensor.numel() // tensor.shape[0]
    first, last = -(-start // row), end // row
    if first > last:  # within one row
        yield from runs(tensor[last], start - last * row, end - last * row)
        return
    if start < first * row:
        yield from runs(tensor[first - 1], start - (first - 1) * row, row)
    if first < last:
        yield tensor[first:last]
    if last * row < end:
        yield from runs(tensor[last], 0, end - last * row)

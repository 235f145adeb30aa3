"""The copy of tensors into a slot: one batched call into views that are made once per slot and plan."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch

from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId
from asyncckpt.planning.plan import SavePlan

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


class SlotImage:
    """The images of a plan's shard files in memory at `address`: headers written, and a view for every tensor.

    The memory must outlive it; it belongs to whoever mapped it.

    Args:
        address: Where the slot starts in this process.
        plan: What to lay out.
    """

    def __init__(self, address: int, plan: SavePlan) -> None:
        self.plan = plan
        self._headers: list[int] = []
        ranges = plan.part_ranges()
        bases: list[torch.Tensor] = []
        for where, part in zip(ranges, plan.layout.parts, strict=True):
            start = address + where.offset
            ctypes.memmove(start, part.header, len(part.header))
            # The bytes behind the file's end go to disk for a moment before the file is cut: never old contents.
            ctypes.memset(start + part.nbytes, 0, part.padded_nbytes - part.nbytes)
            self._headers.append(start + SAVE_ID_OFFSET)
            bases.append(torch.frombuffer((ctypes.c_char * part.padded_nbytes).from_address(start), dtype=torch.uint8))
        self._targets = [
            _copyable(bases[c.part][c.offset_bytes : c.offset_bytes + c.nbytes].view(dtype).view(shape))
            for c, (dtype, shape) in zip(plan.layout.chunks, plan.signature[1], strict=True)
        ]
        self._has_special = any(dtype in _COPIED_AS for dtype, _ in plan.signature[1])
        self.body_end = PAGE_NBYTES + plan.body_nbytes

    def fill(self, tensors: Sequence[torch.Tensor], save_id: SaveId) -> None:
        """Copy `tensors`, by number, and put `save_id` into the headers. Blocks until the copies are done.

        Raises:
            RuntimeError: From torch, when a tensor cannot be copied.
        """
        mark = save_id_bytes(save_id)
        for address in self._headers:
            ctypes.memmove(address, mark, SAVE_ID_NBYTES)
        if not tensors:
            return
        # IMPORTANT: no_grad is per thread, and from a Parameter outside it the copy would hang an autograd chain on
        # the slot's views that grows with every save.
        with torch.no_grad():
            sources = [_copyable(t) for t in tensors] if self._has_special else list(tensors)
            torch._foreach_copy_(self._targets, sources)


def _copyable(tensor: torch.Tensor) -> torch.Tensor:
    integer = _COPIED_AS.get(tensor.dtype)
    return tensor if integer is None else tensor.view(integer)

"""What the items of a plan mean for the layout: boxes to store, and why some cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch.distributed.checkpoint.planner import WriteItem, WriteItemType

from asyncckpt.errors import DuplicateNameError, UnsupportedLeafError
from asyncckpt.format.layout import BoxSpec
from asyncckpt.format.names import is_reserved
from asyncckpt.planning.torch_types import dtype_name, why_unreadable


class Items(NamedTuple):
    """A plan's items: tensors with their boxes, and leaves that are bytes.

    `empty` are boxes without elements of tensors that have some: nothing of them is stored.
    """

    tensors: list[tuple[WriteItem, BoxSpec]]
    leaves: list[WriteItem]
    empty: list[WriteItem]


def sorted_out(items: Iterable[WriteItem]) -> Items:
    """Tell tensors from leaves.

    Raises:
        UnsupportedLeafError: A tensor of a dtype or layout that cannot be stored; `leaf` is its FQN.
        DuplicateNameError: A name that is reserved for tensors of one rank.
    """
    found = Items([], [], [])
    for item in items:
        if item.type is WriteItemType.BYTE_IO:
            found.leaves.append(item)
            continue
        spec = _spec(item)
        if 0 in spec.sizes and 0 not in spec.global_shape:
            found.empty.append(item)
        else:
            found.tensors.append((item, spec))
    return found


def _spec(item: WriteItem) -> BoxSpec:
    fqn, data = item.index.fqn, item.tensor_data
    if data is None:
        raise UnsupportedLeafError(f"the planner's item for tensor {fqn!r} says nothing of its shape", leaf=fqn)
    dtype = dtype_name(data.properties.dtype)
    if dtype is None or data.properties.layout is not torch.strided:
        raise UnsupportedLeafError(
            f"state dict leaf {fqn!r} cannot be stored: a tensor of layout {data.properties.layout}, dtype "
            f"{data.properties.dtype}",
            leaf=fqn,
            type_name=str(data.properties.dtype),
        )
    if is_reserved(fqn):
        raise DuplicateNameError(
            f"the tensor {fqn!r} ends in '@rank' and a number: such names are reserved for tensors that belong to one "
            "rank; rename the key",
            fqn=fqn,
        )
    return BoxSpec(
        fqn=fqn,
        dtype=dtype,
        global_shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(data.chunk.sizes),
    )


def bytes_of(tensor: torch.Tensor, spec: BoxSpec) -> torch.Tensor:
    """Return the elements of what a planner resolved as a flat uint8 tensor on its device: a copy only if need be.

    Raises:
        UnsupportedLeafError: It is not what the plan says, or has no elements that can be copied.
    """
    why = why_unreadable(tensor)
    if why is not None:
        kind = type(tensor).__name__
        raise UnsupportedLeafError(f"cannot store {spec.fqn!r}: {why}", leaf=spec.fqn, type_name=kind)
    if dtype_name(tensor.dtype) != spec.dtype or tuple(tensor.shape) != spec.sizes:
        raise UnsupportedLeafError(
            f"the planner resolves {spec.fqn!r} to {tensor.dtype}{list(tensor.shape)}, its plan says {spec.dtype}"
            f"{list(spec.sizes)}",
            leaf=spec.fqn,
            type_name=str(tensor.dtype),
        )
    with torch.no_grad():
        tensor = tensor.detach().resolve_conj().resolve_neg().contiguous()
        assert tensor.numel() * tensor.itemsize == spec.nbytes == math.prod(spec.sizes) * tensor.itemsize
        return tensor.reshape(-1).view(torch.uint8)

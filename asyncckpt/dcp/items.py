"""What the items of a plan mean for the layout: boxes to store, and why some cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint._traverse import traverse_state_dict
from torch.distributed.checkpoint.planner import ReadItem, WriteItem, WriteItemType

from asyncckpt.dcp.sharded_leaves import ShardsOf
from asyncckpt.errors import DuplicateNameError, UnsupportedLeafError
from asyncckpt.format.layout import BoxSpec
from asyncckpt.format.names import is_reserved
from asyncckpt.planning.sharding.recognising import describer, is_of_torch, local_tensors
from asyncckpt.planning.state_dict import PLAIN_TENSORS
from asyncckpt.planning.torch_types import dtype_name, flat_bytes, is_wrapper, why_unreadable


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


def refuse_wrappers(leaves: Iterable[tuple[str, Any]]) -> None:
    """Refuse tensors of subclasses whose elements are not their memory's.

    Args:
        leaves: Names and values, as a planner has them: of a sharded one, what this process holds counts.

    Raises:
        UnsupportedLeafError: Naming the first.
    """
    for fqn, value in leaves:
        for tensor in _parts_of(value):
            if is_wrapper(tensor):
                raise _wrapper(fqn, tensor)


def tensor_leaves(state_dict: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the names and values of a nested state, as stock planners name them, but for registered types."""
    found: list[tuple[str, Any]] = []
    traverse_state_dict(state_dict, lambda path, value: found.append((".".join(map(str, path)), value)))
    for fqn, value in found:
        if is_of_torch(type(value)) or describer(type(value)) is None:
            yield fqn, value


def _parts_of(value: Any) -> list[torch.Tensor]:
    if type(value) in PLAIN_TENSORS:
        return []
    if isinstance(value, ShardsOf):
        return [shard.tensor for shard in value.shards]
    return local_tensors(value) if isinstance(value, torch.Tensor) else []


def _wrapper(fqn: str, tensor: torch.Tensor) -> UnsupportedLeafError:
    kind = type(tensor).__name__
    text = f"state dict leaf {fqn!r} of type {kind} cannot be stored: it is {_STANDS_FOR}; save a plain tensor instead"
    return UnsupportedLeafError(text, leaf=fqn, type_name=kind)


_STANDS_FOR = "a tensor subclass with a __torch_dispatch__, which computes its elements; they do not lie in its memory"


def check_target(path: str, item: ReadItem, target: torch.Tensor) -> None:
    """Check that the elements of what a planner would have filled lie where its address says.

    Raises:
        UnsupportedLeafError: It is a tensor subclass that stands for others.
    """
    if is_wrapper(target):
        fqn, kind = item.dest_index.fqn, type(target).__name__
        text = f"{path}: target {fqn!r} of type {kind} cannot be filled: it is {_STANDS_FOR}"
        raise UnsupportedLeafError(text, leaf=fqn, type_name=kind)


def bytes_of(tensor: torch.Tensor, spec: BoxSpec) -> torch.Tensor:
    """Return the elements of what a planner resolved as a flat uint8 tensor on its device: a copy only if need be.

    Raises:
        UnsupportedLeafError: It is not what the plan says, or has no elements that can be copied.
    """
    tensor = next(iter(local_tensors(tensor)), tensor)
    if is_wrapper(tensor):
        raise _wrapper(spec.fqn, tensor)
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
        found = flat_bytes(tensor)
        assert found.numel() == spec.nbytes == math.prod(spec.sizes) * tensor.itemsize
        return found

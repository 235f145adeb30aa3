"""How a shard lies in a flattened state: which of its tensors are which boxes of it."""

from __future__ import annotations

from typing import NamedTuple

import torch

from asyncckpt.planning.claims import ShardClaim
from asyncckpt.planning.sharding.grid import Box, Grid
from asyncckpt.planning.sharding.shards import Sharded, refused
from asyncckpt.planning.torch_types import NO_MEMORY, SHRUNK, address_of, dtype_name, is_whole


class ShardLeaf(NamedTuple):
    """A tensor of which this process holds parts.

    Attributes:
        global_shape: In elements.
        grid: As of `Sharded`.
        boxes: The parts.
        sources: Aligned with `boxes`: where in `Flattened.tensors` each lies.
        is_first: As of `Sharded`.
    """

    global_shape: tuple[int, ...]
    grid: Grid | None
    boxes: tuple[Box, ...]
    sources: tuple[int, ...]
    is_first: bool

    def claim(self, fqn: str, dtype: str) -> ShardClaim:
        """Return what the other ranks are told."""
        boxes = () if self.grid is not None else self.boxes
        return ShardClaim(fqn, dtype, self.global_shape, self.grid, boxes, self.is_first)


def boxes_of(found: Sharded) -> tuple[Box, ...]:
    """Return the boxes of what a process holds."""
    return tuple((shard.offsets, tuple(shard.tensor.shape)) for shard in found.shards)


def sources_of(found: Sharded, *, is_target: bool = False) -> list[torch.Tensor]:
    """Return the tensors to be copied, aligned with the boxes; an empty one where there are no boxes.

    `is_target`: they are filled, and those on the meta device are taken too.

    Raises:
        UnsupportedLeafError: One of them cannot be stored.
    """
    if dtype_name(found.dtype) is None:
        raise refused(found.type_name, f"dtype {found.dtype}")
    sources = []
    for tensor, _ in found.shards:
        if is_target and tensor.is_meta and tensor.layout is torch.strided:
            sources.append(tensor)
            continue
        if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_nested:
            raise refused(found.type_name, f"a part of layout {tensor.layout} on {tensor.device}")
        if tensor.numel() and not address_of(tensor):
            raise refused(found.type_name, NO_MEMORY)
        if not is_whole(tensor):
            raise refused(found.type_name, SHRUNK)
        if tensor.is_conj() or tensor.is_neg():
            tensor = tensor.resolve_conj().resolve_neg()
        sources.append(tensor)
    return sources or [torch.empty(0, dtype=found.dtype, device="cpu")]


def identity_of(found: Sharded, value: object) -> object:
    """Return what is equal for two values that are one tensor: the same elements of the same boxes.

    IMPORTANT: also where this rank holds none of the elements. Were two names one tensor on some ranks and two on
    others, the second would be written by a few of them only.
    """
    places = tuple((place_of(t), t.shape, t.stride(), offsets) for t, offsets in found.shards)
    if not places and found.anchor is None:
        return id(value)
    return (found.dtype, found.global_shape, found.grid, places or place_of(found.anchor))


def place_of(tensor: torch.Tensor | None) -> object:
    """Return where a tensor lies, its address, or of an empty one its storage and where in it; and what it makes of it.

    A conjugated or negated view lies where the tensor does, and has other values.
    """
    if tensor is None:
        return None
    place = tensor.data_ptr() or (tensor.untyped_storage()._cdata, tensor.storage_offset())
    return place, tensor.is_conj(), tensor.is_neg()

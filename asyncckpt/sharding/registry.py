"""Is a value a tensor of which this process holds parts? And which."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from asyncckpt.errors import AsyncCkptError
from asyncckpt.sharding import dtensor
from asyncckpt.sharding.shard_types import (
    FlatShard,
    LocalShard,
    Sharded,
    ShardedSlice,
    of_flat,
    of_parts,
    of_slice,
    refused,
)

Describe = Callable[[Any], "Sharded | torch.Tensor"]
ToShards = Callable[[Any], Any]
FromShards = Callable[[Any, list[tuple[torch.Tensor, tuple[int, ...]]]], None]

_registered: dict[type, tuple[ToShards, FromShards]] = {}


def sharded(value: Any) -> Sharded | torch.Tensor | None:
    """Return what this process holds of `value`.

    Returns:
        None when its type is none that has shards (a plain tensor, for instance); a plain tensor when its type is one
        of these, and all of it is here.

    Raises:
        UnsupportedLeafError: Its shards cannot be stored; `leaf` is left to the caller.
        OverlappingShardsError: They overlap; so is `fqn`.
    """
    describe = describer(type(value))
    return None if describe is None else describe(value)


def describer(kind: type) -> Describe | None:
    """Return what describes values of type `kind`; None for types without shards."""
    if kind is ShardedSlice:
        return _of_slice
    if kind is FlatShard:
        return _of_flat
    if _registered:
        for one in kind.__mro__:
            if one in _registered:
                return lambda value: _of_registered(one, value)
    return _describer_of_torch(kind)


def _describer_of_torch(kind: type) -> Describe | None:
    # Whoever has one of these has imported its module; all others need not pay for that.
    for module, name, describe in _OF_TORCH:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return describe
    return None


def is_of_torch(kind: type) -> bool:
    """Whether stock planners know the shards of values of this type: DTensor and ShardedTensor."""
    return _describer_of_torch(kind) is not None


def local_tensors(value: Any) -> list[torch.Tensor]:
    """Return the tensors in this process that a DTensor or a ShardedTensor is made of; other tensors as they are.

    Blocks: for a collective that still fills one.
    """
    describe = _describer_of_torch(type(value))
    if describe is _of_sharded_tensor:
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if describe is not None else value
    return [local.wait() if hasattr(local, "wait") else local]


def _of_slice(value: ShardedSlice) -> Sharded:
    _check_plain(value)
    return of_slice(value)


def _of_flat(value: FlatShard) -> Sharded:
    _check_plain(value)
    return of_flat(value)


def _check_plain(value: ShardedSlice | FlatShard) -> None:
    kind = type(value.tensor)
    if kind is not torch.Tensor and describer(kind) is not None:
        text = f"its tensor is a {kind.__name__}, which says itself what this process holds: save that as it is, or "
        raise refused(type(value).__name__, text + "describe the plain tensor in it (to_local() of a DTensor)")


def register_shard_type(kind: type, to_shards: ToShards, from_shards: FromShards) -> None:
    """Teach save and load a framework's sharded tensor. Subclasses are meant too; registering again replaces.

    Args:
        kind: The type.
        to_shards: Called with a value; returns (global shape, parts), a part being (tensor, offsets), or (tensor,
            offsets, sizes) where the tensor is padded at the end of its dimensions: views of the value's memory, or
            copies of it. Or a plain tensor when the value is whole in this process. Called at each save and load.
        from_shards: Called once by a load with the value and the filled parts, as (tensor, offsets), when all of them
            are in: those that `to_shards` gave, without padding.

    Raises:
        TypeError: `kind` is no type.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_shard_type() takes a type, got {kind!r}")
    _registered[kind] = (to_shards, from_shards)


def committed(value: Any, shards: Sequence[LocalShard]) -> None:
    """Tell a registered type that all its shards are filled; does nothing for others, whose shards are views."""
    for one in type(value).__mro__:
        if one in _registered:
            _registered[one][1](value, [(shard.tensor, shard.offsets) for shard in shards])
            return


def _of_registered(kind: type, value: Any) -> Sharded | torch.Tensor:
    found = _registered[kind][0](value)
    if isinstance(found, torch.Tensor):
        return found
    name = type(value).__name__
    try:
        global_shape, parts = found
        return of_parts(name, tuple(int(n) for n in global_shape), [tuple(part) for part in parts])
    except AsyncCkptError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise refused(name, f"to_shards() returned something else than (global shape, parts): {error}") from error


def _of_sharded_tensor(value: Any) -> Sharded:
    metadata = value.metadata()
    parts = [
        (shard.tensor, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        for shard in value.local_shards()
    ]
    shape = tuple(metadata.size)
    if not parts:
        return Sharded(metadata.tensor_properties.dtype, shape, (), None, "ShardedTensor")
    return of_parts("ShardedTensor", shape, parts)


_OF_TORCH: tuple[tuple[str, str, Describe], ...] = (
    ("torch.distributed.tensor", "DTensor", dtensor.of_dtensor),
    ("torch.distributed._tensor", "DTensor", dtensor.of_dtensor),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor", _of_sharded_tensor),
)

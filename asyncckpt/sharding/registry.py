"""The types whose values are parts of a global tensor, and how each is described as `Sharded`."""

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
    ShardedComponent,
    ShardedSlice,
    describe_flat,
    describe_parts,
    describe_slice,
    unsupported_shard,
)

Describe = Callable[[Any], "Sharded | torch.Tensor"]
ToShards = Callable[[Any], Any]
FromShards = Callable[[Any, list[tuple[torch.Tensor, tuple[int, ...]]]], None]

_registered: dict[type, tuple[ToShards, FromShards]] = {}


def shards_of(value: Any) -> Sharded | torch.Tensor | None:
    """Return what this process holds of `value`.

    Returns:
        None if its type has no shards, such as a plain tensor. A plain tensor if its type has shards, but this process
        holds all of it.

    Raises:
        UnsupportedLeafError: Its shards cannot be stored; the caller sets `leaf`.
        OverlappingShardsError: Its shards overlap; the caller sets `fqn`.
    """
    describe = describer_of(type(value))
    return None if describe is None else describe(value)


def describer_of(kind: type) -> Describe | None:
    """Return the function that describes values of type `kind`; None for types without shards."""
    if kind is ShardedSlice:
        return _of_slice
    if kind is FlatShard:
        return _of_flat
    if kind is ShardedComponent:
        return _of_component
    if _registered:
        for one in kind.__mro__:
            if one in _registered:
                return lambda value: _of_registered(one, value)
    return _describer_of_torch(kind)


def _describer_of_torch(kind: type) -> Describe | None:
    # A process with a value of such a type has imported the type's module; other processes should not import it.
    for module, name, describe in _OF_TORCH:
        found = getattr(sys.modules.get(module), name, None)
        if found is not None and issubclass(kind, found):
            return describe
    return None


def is_torch_shard_type(kind: type) -> bool:
    """Whether a type is DTensor or ShardedTensor, whose shards the stock planners of torch know."""
    return _describer_of_torch(kind) is not None


def is_dtensor(value: Any) -> bool:
    """Whether a value is a DTensor."""
    return _describer_of_torch(type(value)) is dtensor.describe_dtensor


def local_tensors(value: Any) -> list[torch.Tensor]:
    """Return the local tensors of a DTensor or ShardedTensor; any other tensor as it is.

    Blocks while a collective still fills one of them.
    """
    describe = _describer_of_torch(type(value))
    if describe is _of_sharded_tensor:
        return [shard.tensor for shard in value.local_shards()]
    local = value._local_tensor if describe is not None else value
    return [local.wait() if hasattr(local, "wait") else local]


def _of_slice(value: ShardedSlice) -> Sharded:
    _check_plain(value)
    return describe_slice(value)


def _of_component(value: ShardedComponent) -> Sharded:
    return value.found


def _of_flat(value: FlatShard) -> Sharded:
    _check_plain(value)
    return describe_flat(value)


def _check_plain(value: ShardedSlice | FlatShard) -> None:
    kind = type(value.tensor)
    if kind is not torch.Tensor and describer_of(kind) is not None:
        text = f"its tensor is a {kind.__name__}, which is sharded already: save the {kind.__name__} itself, or pass "
        raise unsupported_shard(type(value).__name__, text + "the plain tensor in it (to_local() of a DTensor)")


def register_shard_type(kind: type, to_shards: ToShards, from_shards: FromShards) -> None:
    """Register a type of sharded tensors, and its subclasses, for save and load. A second call replaces the first.

    Args:
        kind: The type.
        to_shards: Called with a value at each save and load. Returns (global shape in elements, parts), or a plain
            tensor if this process holds the whole tensor. A part is (tensor, offsets), or (tensor, offsets, sizes) if
            the tensor is padded at the end of its dimensions. Its tensor is a view of the value's memory, or a copy.
        from_shards: Called once by a load, when all parts have been filled, with the value and its parts as (tensor,
            offsets): the tensors that `to_shards` returned, without padding.

    Raises:
        TypeError: `kind` is not a type.
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_shard_type() expects a type, got {kind!r}")
    _registered[kind] = (to_shards, from_shards)


def notify_filled(value: Any, shards: Sequence[LocalShard]) -> None:
    """Call `from_shards` of a registered type, once all its shards are filled; for other types do nothing."""
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
        return describe_parts(name, tuple(int(n) for n in global_shape), [tuple(part) for part in parts])
    except AsyncCkptError:
        raise
    except (TypeError, ValueError, IndexError) as error:
        raise unsupported_shard(name, f"to_shards() returned no (global shape, parts): {error}") from error


def _of_sharded_tensor(value: Any) -> Sharded:
    metadata = value.metadata()
    parts = [
        (shard.tensor, tuple(shard.metadata.shard_offsets), tuple(shard.metadata.shard_sizes))
        for shard in value.local_shards()
    ]
    shape = tuple(metadata.size)
    if not parts:
        return Sharded(metadata.tensor_properties.dtype, shape, (), None, "ShardedTensor")
    return describe_parts("ShardedTensor", shape, parts)


_OF_TORCH: tuple[tuple[str, str, Describe], ...] = (
    ("torch.distributed.tensor", "DTensor", dtensor.describe_dtensor),
    ("torch.distributed._tensor", "DTensor", dtensor.describe_dtensor),
    ("torch.distributed._shard.sharded_tensor", "ShardedTensor", _of_sharded_tensor),
)

"""Errors about one leaf of a state dict: its type, its name, the boxes of its shards."""

from __future__ import annotations

from asyncckpt.errors.root import AsyncCkptError


class UnsupportedLeafError(AsyncCkptError, TypeError, code="unsupported_leaf", fields=("leaf", "type_name")):
    """The state dict holds a value that cannot be stored; `leaf` is its path, `type_name` its type.

    In a load also: a new tensor would be of a class that is not registered.
    """


class ShardOutOfRangeError(
    UnsupportedLeafError, ValueError, code="shard_out_of_range", fields=("leaf", "type_name", "fqn", "boxes")
):
    """A shard of tensor `fqn` is not inside the tensor; `boxes` describes the shard and the tensor."""


class DuplicateNameError(AsyncCkptError, ValueError, code="duplicate_name", fields=("fqn",)):
    """Two different paths of the state dict, such as "a.b" and "b" in "a", give the same FQN, `fqn`."""


class OverlappingShardsError(AsyncCkptError, ValueError, code="overlapping_shards", fields=("fqn", "boxes")):
    """Two shards of tensor `fqn` have elements in common and are not equal boxes; `boxes` describes both."""

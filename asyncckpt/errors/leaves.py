"""Errors about one leaf of a state dict: what it is, what it is called, and where its shards lie."""

from __future__ import annotations

from asyncckpt.errors.root import AsyncCkptError


class UnsupportedLeafError(AsyncCkptError, TypeError, code="unsupported_leaf", fields=("leaf", "type_name")):
    """The state dict holds something that cannot be stored; `leaf` is the path to it."""


class ShardOutOfRangeError(
    UnsupportedLeafError, ValueError, code="shard_out_of_range", fields=("leaf", "type_name", "fqn", "boxes")
):
    """A shard does not lie in its tensor; `boxes` says where the shard lies, and where the tensor."""


class DuplicateNameError(AsyncCkptError, ValueError, code="duplicate_name", fields=("fqn",)):
    """Two different paths of the state dict join to the same FQN."""


class OverlappingShardsError(AsyncCkptError, ValueError, code="overlapping_shards", fields=("fqn", "boxes")):
    """Two shards of one tensor hold the same elements and are not the same box; `boxes` says which."""

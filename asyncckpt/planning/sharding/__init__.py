"""Tensors of which a process holds parts: DTensor, slices given by hand, flat ranges, registered types.

The names are imported on first use: `grid` is needed where torch is not imported.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncckpt.planning.sharding.grid import Grid as Grid
    from asyncckpt.planning.sharding.recognising import committed as committed
    from asyncckpt.planning.sharding.recognising import register_shard_type as register_shard_type
    from asyncckpt.planning.sharding.recognising import sharded as sharded
    from asyncckpt.planning.sharding.shards import FlatShard as FlatShard
    from asyncckpt.planning.sharding.shards import LocalShard as LocalShard
    from asyncckpt.planning.sharding.shards import Sharded as Sharded
    from asyncckpt.planning.sharding.shards import ShardedSlice as ShardedSlice
    from asyncckpt.planning.sharding.tensor_parallel import describe_tp as describe_tp

_WHERE = {
    "FlatShard": "shards",
    "Grid": "grid",
    "LocalShard": "shards",
    "Sharded": "shards",
    "ShardedSlice": "shards",
    "committed": "recognising",
    "describe_tp": "tensor_parallel",
    "register_shard_type": "recognising",
    "sharded": "recognising",
}


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_WHERE[name]}"), name)

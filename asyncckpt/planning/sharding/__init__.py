"""Tensors of which a process holds parts: DTensor, slices given by hand, flat ranges, registered types."""

from __future__ import annotations

from asyncckpt.planning.sharding.grid import Grid as Grid
from asyncckpt.planning.sharding.recognising import committed as committed
from asyncckpt.planning.sharding.recognising import register_shard_type as register_shard_type
from asyncckpt.planning.sharding.recognising import sharded as sharded
from asyncckpt.planning.sharding.shards import FlatShard as FlatShard
from asyncckpt.planning.sharding.shards import LocalShard as LocalShard
from asyncckpt.planning.sharding.shards import Sharded as Sharded
from asyncckpt.planning.sharding.shards import ShardedSlice as ShardedSlice
from asyncckpt.planning.sharding.tensor_parallel import describe_tp as describe_tp

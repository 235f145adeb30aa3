"""For stock `torch.distributed.checkpoint`: storage in asyncckpt's format, and planners for sharded values.

dcp.save(state, storage_writer=asyncckpt.dcp.StorageWriter(path))
dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader(path))
"""

from __future__ import annotations

from asyncckpt.dcp.reader import StorageReader
from asyncckpt.dcp.sharded_planners import ShardedLoadPlanner, ShardedSavePlanner
from asyncckpt.dcp.sliced import SlicedBufferedReader
from asyncckpt.dcp.writer import StorageWriter

__all__ = ["ShardedLoadPlanner", "ShardedSavePlanner", "SlicedBufferedReader", "StorageReader", "StorageWriter"]

"""Asynchronous, crash-safe checkpointing for PyTorch.

Names are imported on first use (PEP 562), so that `import asyncckpt` and the quick commands do not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from asyncckpt.async_checkpointer import AsyncCheckpointer as AsyncCheckpointer
    from asyncckpt.async_checkpointer import make_async_checkpointer as make_async_checkpointer
    from asyncckpt.checkpointer import Checkpointer as Checkpointer
    from asyncckpt.components import CheckpointProcess as CheckpointProcess
    from asyncckpt.components import CheckpointReader as CheckpointReader
    from asyncckpt.components import CheckpointStager as CheckpointStager
    from asyncckpt.components import CheckpointWriter as CheckpointWriter
    from asyncckpt.components import CommitHook as CommitHook
    from asyncckpt.config import CheckpointerConfig as CheckpointerConfig
    from asyncckpt.config import RankInfo as RankInfo
    from asyncckpt.errors import AsyncCkptError as AsyncCkptError
    from asyncckpt.interop.convert import ConversionReport as ConversionReport
    from asyncckpt.interop.convert import convert as convert
    from asyncckpt.interop.hf.architectures import hub_rules as hub_rules
    from asyncckpt.interop.hf.export import export_hf as export_hf
    from asyncckpt.interop.mapping.tensor_rules import TensorRule as TensorRule
    from asyncckpt.loading.load import load as load
    from asyncckpt.loading.open_checkpoint import OpenCheckpoint as OpenCheckpoint
    from asyncckpt.loading.open_checkpoint import open_checkpoint as open_checkpoint
    from asyncckpt.loading.plan_load import LoadPlan as LoadPlan
    from asyncckpt.loading.plan_load import plan_load as plan_load
    from asyncckpt.manager.manager import CheckpointManager as CheckpointManager
    from asyncckpt.manager.master_params import refresh_master_params as refresh_master_params
    from asyncckpt.manager.rng import RngState as RngState
    from asyncckpt.manager.save_policy import optimal_interval as optimal_interval
    from asyncckpt.per_rank import PerRank as PerRank
    from asyncckpt.recall.snapshots import HeldSnapshot as HeldSnapshot
    from asyncckpt.recall.snapshots import held_snapshots as held_snapshots
    from asyncckpt.restore import RestoredCheckpoint as RestoredCheckpoint
    from asyncckpt.restore import SkippedCheckpoint as SkippedCheckpoint
    from asyncckpt.restore import restore_latest as restore_latest
    from asyncckpt.save_handle import SaveHandle as SaveHandle
    from asyncckpt.save_handle import SaveReport as SaveReport
    from asyncckpt.sharding.registry import register_shard_type as register_shard_type
    from asyncckpt.sharding.shard_types import FlatShard as FlatShard
    from asyncckpt.sharding.shard_types import ShardedSlice as ShardedSlice
    from asyncckpt.sharding.shard_types import describe_tp as describe_tp
    from asyncckpt.state_dict.composite_tensors import register_subclass as register_subclass
    from asyncckpt.storage.catalog import latest_checkpoint as latest_checkpoint
    from asyncckpt.sync_checkpointer import SyncCheckpointer as SyncCheckpointer
    from asyncckpt.sync_checkpointer import make_sync_checkpointer as make_sync_checkpointer

_WHERE = {
    "AsyncCheckpointer": "async_checkpointer",
    "AsyncCkptError": "errors",
    "CheckpointManager": "manager.manager",
    "CheckpointProcess": "components",
    "CheckpointReader": "components",
    "CheckpointStager": "components",
    "CheckpointWriter": "components",
    "Checkpointer": "checkpointer",
    "CheckpointerConfig": "config",
    "CommitHook": "components",
    "ConversionReport": "interop.convert",
    "FlatShard": "sharding.shard_types",
    "HeldSnapshot": "recall.snapshots",
    "LoadPlan": "loading.plan_load",
    "OpenCheckpoint": "loading.open_checkpoint",
    "PerRank": "per_rank",
    "RankInfo": "config",
    "RestoredCheckpoint": "restore",
    "RngState": "manager.rng",
    "SaveHandle": "save_handle",
    "SaveReport": "save_handle",
    "ShardedSlice": "sharding.shard_types",
    "SkippedCheckpoint": "restore",
    "SyncCheckpointer": "sync_checkpointer",
    "TensorRule": "interop.mapping.tensor_rules",
    "convert": "interop.convert",
    "describe_tp": "sharding.shard_types",
    "export_hf": "interop.hf.export",
    "held_snapshots": "recall.snapshots",
    "hub_rules": "interop.hf.architectures",
    "latest_checkpoint": "storage.catalog",
    "load": "loading.load",
    "make_async_checkpointer": "async_checkpointer",
    "make_sync_checkpointer": "sync_checkpointer",
    "open_checkpoint": "loading.open_checkpoint",
    "optimal_interval": "manager.save_policy",
    "plan_load": "loading.plan_load",
    "refresh_master_params": "manager.master_params",
    "register_shard_type": "sharding.registry",
    "register_subclass": "state_dict.composite_tensors",
    "restore_latest": "restore",
}

_MODULES = ("dcp", "errors")

__all__ = [
    "AsyncCheckpointer",
    "AsyncCkptError",
    "CheckpointManager",
    "CheckpointProcess",
    "CheckpointReader",
    "CheckpointStager",
    "CheckpointWriter",
    "Checkpointer",
    "CheckpointerConfig",
    "CommitHook",
    "ConversionReport",
    "FlatShard",
    "HeldSnapshot",
    "LoadPlan",
    "OpenCheckpoint",
    "PerRank",
    "RankInfo",
    "RestoredCheckpoint",
    "RngState",
    "SaveHandle",
    "SaveReport",
    "ShardedSlice",
    "SkippedCheckpoint",
    "SyncCheckpointer",
    "TensorRule",
    "__version__",
    "convert",
    "describe_tp",
    "export_hf",
    "held_snapshots",
    "hub_rules",
    "latest_checkpoint",
    "load",
    "make_async_checkpointer",
    "make_sync_checkpointer",
    "open_checkpoint",
    "optimal_interval",
    "plan_load",
    "refresh_master_params",
    "register_shard_type",
    "register_subclass",
    "restore_latest",
]


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return importlib.import_module(f"asyncckpt.{name}")
    if name not in _WHERE:
        raise AttributeError(f"module 'asyncckpt' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"asyncckpt.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])

"""Classes to pass to stock `torch.distributed.checkpoint`, and replacements of the functions of its `format_utils`.

Example:
    import torch
    import torch.distributed.checkpoint as dcp

    import asyncckpt.dcp

    model = torch.nn.Linear(4, 4)
    dcp.save({"model": model.state_dict()}, storage_writer=asyncckpt.dcp.StorageWriter("runs/step-100"))
    state = {"model": model.state_dict()}
    dcp.load(state, storage_reader=asyncckpt.dcp.StorageReader("runs/step-100"))
    model.load_state_dict(state["model"])
    asyncckpt.dcp.dcp_to_torch_save("runs/step-100", "model.pt")
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from asyncckpt.dcp.broadcast_reader import BroadcastingTorchSaveReader as BroadcastingTorchSaveReader
    from asyncckpt.dcp.format_utils import dcp_to_torch_save as dcp_to_torch_save
    from asyncckpt.dcp.format_utils import torch_save_to_dcp as torch_save_to_dcp
    from asyncckpt.dcp.planners import DynamicMetaLoadPlanner as DynamicMetaLoadPlanner
    from asyncckpt.dcp.planners import ShardedLoadPlanner as ShardedLoadPlanner
    from asyncckpt.dcp.planners import ShardedSavePlanner as ShardedSavePlanner
    from asyncckpt.dcp.storage_reader import SlicedBufferedReader as SlicedBufferedReader
    from asyncckpt.dcp.storage_reader import StorageReader as StorageReader
    from asyncckpt.dcp.storage_writer import StorageWriter as StorageWriter

_WHERE = {
    "BroadcastingTorchSaveReader": "broadcast_reader",
    "DynamicMetaLoadPlanner": "planners",
    "ShardedLoadPlanner": "planners",
    "ShardedSavePlanner": "planners",
    "SlicedBufferedReader": "storage_reader",
    "StorageReader": "storage_reader",
    "StorageWriter": "storage_writer",
    "dcp_to_torch_save": "format_utils",
    "torch_save_to_dcp": "format_utils",
}

__all__ = [
    "BroadcastingTorchSaveReader",
    "DynamicMetaLoadPlanner",
    "ShardedLoadPlanner",
    "ShardedSavePlanner",
    "SlicedBufferedReader",
    "StorageReader",
    "StorageWriter",
    "dcp_to_torch_save",
    "torch_save_to_dcp",
]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'asyncckpt.dcp' has no attribute {name!r}")
    value = getattr(importlib.import_module(f"asyncckpt.dcp.{_WHERE[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)

"""`DynamicMetaLoadPlanner`: metadata built from the target, for files that have none."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from asyncckpt.dcp.unflattened import UnflattenedLoadPlanner


class DynamicMetaLoadPlanner(UnflattenedLoadPlanner):
    """As torch's planner of this name, with leaves that are no tensors, and for sharded targets.

    Every tensor of the target is taken for stored whole, so that each rank asks for the boxes of its own shards. Made
    for `BroadcastingTorchSaveReader`, which finds out whether the file holds what the target wants.

    Args:
        flatten_state_dict, flatten_sharded_tensors: As `DefaultLoadPlanner`'s.
        allow_partial_load: Leaves of the target that the file lacks stay as they are.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load into `state_dict`; `metadata` is not looked at."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        entries: dict[str, STORAGE_TYPES] = {}
        for fqn, value in self.state_dict.items():
            if torch.is_tensor(value):
                size = value.size()
                whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
                entries[fqn] = TensorStorageMetadata(TensorProperties(dtype=value.dtype), size, [whole])
            else:
                entries[fqn] = BytesStorageMetadata()
        self.metadata = Metadata(state_dict_metadata=entries)

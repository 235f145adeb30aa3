"""A stager without worker or slot: it clones into host memory, for a `checkpoint_process` of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.parts import CheckpointStager
from asyncckpt.sharding.shard_types import ShardedSlice
from asyncckpt.state_dict.flatten import flatten
from asyncckpt.state_dict.leaf_codecs import decode_leaf, encode_leaves
from asyncckpt.state_dict.pickling import unpickle
from asyncckpt.state_dict.unflatten import unflatten


class HostStager(CheckpointStager):
    """Returns a deep copy of the state dict whose tensors lie in host memory.

    In the place of a tensor of which this process holds a part stands a `ShardedSlice`, a list of them where it holds
    several parts, or none.

    Args:
        allow_pickle: Copies leaves of any type, by way of a pickle.
    """

    def __init__(self, *, allow_pickle: bool = False) -> None:
        self._allow_pickle = allow_pickle

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        """Copy `state_dict`. Blocks for the copy.

        Raises:
            UnsupportedLeafError: The state cannot be stored.
        """
        flat = flatten(state_dict, allow_pickle=self._allow_pickle)
        with torch.no_grad():
            tensors: list[Any] = [t.detach().to("cpu", copy=True) for t in flat.tensors]
        for number, leaf in flat.shards.items():
            parts = zip(leaf.sources, leaf.boxes, strict=True)
            slices = [ShardedSlice(tensors[source], leaf.global_shape, box[0]) for source, box in parts]
            tensors[number] = slices[0] if len(slices) == 1 else slices
        objects = [decode_leaf(raw, lambda _, data: unpickle(data)) for raw in encode_leaves(flat)]
        return unflatten(flat.tree, tensors, objects, marks=True)

    def close(self) -> None:
        """Nothing to free."""

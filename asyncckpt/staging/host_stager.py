"""A stager without worker or slot: it clones into host memory, for a `checkpoint_process` of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.parts import CheckpointStager
from asyncckpt.planning.leaves import decode_leaf, encode_leaves
from asyncckpt.planning.pickles import unpickle
from asyncckpt.planning.rebuilding import unflatten
from asyncckpt.planning.state_dict import flatten


class HostStager(CheckpointStager):
    """Returns a deep copy of the state dict whose tensors lie in host memory.

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
            tensors = [t.detach().to("cpu", copy=True) for t in flat.tensors]
        objects = [decode_leaf(raw, lambda _, data: unpickle(data)) for raw in encode_leaves(flat)]
        return unflatten(flat.tree, tensors, objects, marks=True)

    def close(self) -> None:
        """Nothing to free."""

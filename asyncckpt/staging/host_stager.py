"""A stager without worker or slot: it clones into host memory, for a `checkpoint_process` of the user's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from asyncckpt.parts import CheckpointStager
from asyncckpt.planning.leaves import encode_leaves
from asyncckpt.planning.state_dict import flatten, unflatten
from asyncckpt.planning.torch_types import decode_object


class HostStager(CheckpointStager):
    """Returns a deep copy of the state dict whose tensors lie in host memory."""

    def stage(self, state_dict: Mapping[str, Any], **kw: Any) -> Any:
        """Copy `state_dict`. Blocks for the copy.

        Raises:
            UnsupportedLeafError: The state cannot be stored.
        """
        flat = flatten(state_dict)
        with torch.no_grad():
            tensors = [t.detach().to("cpu", copy=True) for t in flat.tensors]
        return unflatten(flat.tree, tensors, [decode_object(raw) for raw in encode_leaves(flat)], marks=True)

    def close(self) -> None:
        """Nothing to free."""

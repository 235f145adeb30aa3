"""What `dcp.async_save` copies a state with, into memory that may be kept for the next save."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from asyncckpt.dcp.items import refuse_wrappers, tensor_leaves
from asyncckpt.errors import UnsupportedLeafError


class Stager(BlockingAsyncStager):
    """As torch's, which keeps its copies in pinned memory only, and fails where there is no device to pin it for."""

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy on the CPU; the state itself where the save will be refused for a tensor subclass in it.

        IMPORTANT: it is not refused here. The other ranks may have no such tensor, and would wait for this one.
        """
        try:
            refuse_wrappers(tensor_leaves(state_dict))
        except UnsupportedLeafError:
            return state_dict
        if self.cache_staged_state_dict and self.state_dict_cache is None and not torch.accelerator.is_available():
            # Where torch has dropped this name, which is its own, the first copy is made twice.
            allocate = getattr(staging, "_create_cpu_state_dict", BlockingAsyncStager().stage)
            self.state_dict_cache = allocate(state_dict)
        return super().stage(state_dict)

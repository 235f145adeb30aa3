"""What `DefaultLoadPlanner` misses where it does not flatten."""

from __future__ import annotations

import io

from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem


class UnflattenedLoadPlanner(DefaultLoadPlanner):
    """Puts leaves that are no tensors into the user's dict, also with `flatten_state_dict=False`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a leaf that is no tensor into the target."""
        super().load_bytes(read_item, value)
        if not self.flatten_state_dict:
            fqn = read_item.dest_index.fqn
            self.original_state_dict[fqn] = self.state_dict[fqn]

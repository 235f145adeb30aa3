"""What `DefaultLoadPlanner` misses of leaves that are no tensors: unflattened ones, and keys that are no text."""

from __future__ import annotations

import io
from collections.abc import Mapping
from typing import Any

from torch.distributed.checkpoint._traverse import get_element
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import ReadItem


class UnflattenedLoadPlanner(DefaultLoadPlanner):
    """Puts leaves that are no tensors into the user's dict, also with `flatten_state_dict=False`."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put a leaf that is no tensor into the target, under the key that it has there: torch makes texts of keys."""
        fqn = read_item.dest_index.fqn
        if not self.flatten_state_dict:
            super().load_bytes(read_item, value)
            self.original_state_dict[fqn] = self.state_dict[fqn]
            return
        path, found = self.mappings[fqn], dict[str, Any]()
        target, self.original_state_dict = self.original_state_dict, found
        try:
            super().load_bytes(read_item, value)
        finally:
            self.original_state_dict = target
        put(target, path, get_element(found, path))


def put(state_dict: Any, path: tuple[Any, ...], value: Any) -> None:
    """Put `value` in the place that has a path; in paths the keys of mappings are texts, as torch makes them."""
    container = state_dict
    for part in path[:-1]:
        container = container[_key_in(container, part)]
    container[_key_in(container, path[-1])] = value


def _key_in(container: Any, part: Any) -> Any:
    if not isinstance(container, Mapping) or part in container:
        return part
    return next((key for key in container if str(key) == part), part)

"""From paths and leaves back to a tree: texts are keys of dicts, numbers positions in lists, as DCP flattens them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from asyncckpt.format.tree import Node, Path

_Branch = dict[Any, Any]


def nested(leaves: Sequence[tuple[Path, Node]]) -> Node:
    """Return the tree of `leaves`; what stands under numbers alone that lack none is a list, else a dict.

    Raises:
        ValueError: A leaf stands where another has its container.
    """
    root: _Branch = {}
    for path, node in leaves:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{path!r} leads through a leaf")
        if path[-1] in branch:
            raise ValueError(f"two leaves stand at {path!r}")
        branch[path[-1]] = node
    return _node(root, is_root=True)


def _node(branch: Any, is_root: bool = False) -> Node:
    if not isinstance(branch, dict):
        return tuple(branch)
    keys = list(branch)
    if keys and not is_root and all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return ("l", tuple(_node(branch[n]) for n in range(len(keys))))
    return ("d", tuple(member for key in keys for member in (key, _node(branch[key]))))

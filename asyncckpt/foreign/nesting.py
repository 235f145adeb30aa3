"""From paths and leaves back to a tree: texts are keys of dicts, numbers positions in lists, as DCP flattens them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asyncckpt.format.tree import Node, Path

_Branch = dict[Any, Any]
_END = object()
"""Key of a branch at which a path ends."""


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


def led_through_leaves(paths: Mapping[str, Path]) -> list[str]:
    """Return the names of the paths on whose way another one ends."""
    root: _Branch = {}
    for path in paths.values():
        branch = root
        for key in path:
            branch = branch.setdefault(key, {})
        branch[_END] = None
    return [name for name, path in paths.items() if _meets_an_end(root, path)]


def _meets_an_end(root: _Branch, path: Path) -> bool:
    branch = root
    for key in path[:-1]:
        branch = branch[key]
        if _END in branch:
            return True
    return False


def _node(branch: Any, is_root: bool = False) -> Node:
    if not isinstance(branch, dict):
        return tuple(branch)
    keys = list(branch)
    if keys and not is_root and all(type(key) is int for key in keys) and sorted(keys) == list(range(len(keys))):
        return ("l", tuple(_node(branch[n]) for n in range(len(keys))))
    return ("d", tuple(member for key in keys for member in (key, _node(branch[key]))))

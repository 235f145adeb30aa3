"""The leaves of a target with their names and where their values lie, looked up once per container.

An empty mapping is a leaf here: a place that takes what was saved below its name.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncckpt.format.state_tree import CONTAINERS, Node, Path, python_key
from asyncckpt.loading.targets import Targets

TargetLeaf = tuple[Path, str, Node, Any, Any]
"""Path, FQN, node, and the container and the key under which the value lies there, a `PerRank` marked as such."""


def target_leaves(tree: Node, targets: Targets) -> Iterator[TargetLeaf]:
    """Yield every leaf of a target in its order, empty mappings among them; not the target itself when it is empty.

    Args:
        tree: What `flatten` made of it.
        targets: The target.
    """
    return _below(tree, (), "", targets)


def _below(node: Node, path: Path, prefix: str, targets: Targets) -> Iterator[TargetLeaf]:
    """`prefix`: of the names below `node`: empty, or with a dot at its end."""
    kind, members = node[0], node[1]
    holder = targets.value_at(path)
    for key, child in zip(members[::2], members[1::2], strict=True) if kind in ("d", "o") else enumerate(members):
        while child[0] == "r":
            child = child[1]
        if child[0] in CONTAINERS and (child[1] or child[0] not in ("d", "o")):
            yield from _below(child, (*path, key), f"{prefix}{key}.", targets)
        else:
            yield (*path, key), f"{prefix}{key}", child, holder, python_key(key)

"""The keys of mappings: from a state's to those of a tree, and whether the index can hold them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from asyncckpt.errors import UnsupportedLeafError
from asyncckpt.format.state_tree import (
    MAX_KEY_DEPTH,
    Key,
    Node,
    Path,
    fqn_of,
    is_storable,
    key_of,
    python_key,
)
from asyncckpt.planning.numpy_values import is_scalar


def typed_key(key: Any) -> Key | None:
    """Return the key of a tree for one of a state, numpy's scalars as Python's; None: it has no form."""
    return key_of(_without_numpy(key, 0))


def _without_numpy(key: Any, depth: int) -> Any:
    if is_scalar(key):
        return key.item()
    if isinstance(key, tuple) and depth < MAX_KEY_DEPTH:
        return tuple(_without_numpy(member, depth + 1) for member in key)
    return key


def check_keys(tree: Node) -> None:
    """Refuse keys that the index cannot hold; part of making a plan.

    Raises:
        UnsupportedLeafError: Naming the path.
    """
    for path, node in mappings(tree):
        for key in node[1][::2]:
            if not is_storable(key):
                leaf = fqn_of((*path, key))
                raise UnsupportedLeafError(
                    f"state dict leaf {leaf[:200]!r}: the key {python_key(key)!r:.80} is out of range, "
                    "too long or no valid text",
                    leaf=leaf,
                    type_name=type(python_key(key)).__name__,
                )


def mappings(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of `node` and everything below it that is a mapping."""
    if node[0] in ("d", "o"):
        yield path, node
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from mappings(child, (*path, key))
    elif node[0] in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from mappings(child, (*path, i))
    elif node[0] == "r":
        yield from mappings(node[1], path)

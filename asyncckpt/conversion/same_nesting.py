"""Whether two checkpoints hold their leaves in the same containers, and tie the same tensors. Pure."""

from __future__ import annotations

from typing import Any

from asyncckpt.conversion.opened_values import is_same_value
from asyncckpt.conversion.outline import Outline
from asyncckpt.format.tree import Node, Path, fqn_of

_Shape = tuple[Any, ...]
"""Of a container: its kind, its keys with their types or its length, and of an OrderedDict its `_metadata`."""


def other_nesting(wanted: Outline, found: Outline) -> str | None:
    """Return the name of something whose nesting differs, or None.

    Both have the same leaves; what is a leaf in one and a container in the other is not looked at.

    Args:
        wanted: What was to be written.
        found: What a reader finds.
    """
    shapes, others = _shapes(wanted), _shapes(found)
    for name in shapes.keys() & others.keys():
        shape, other = shapes[name], others[name]
        if shape[:2] != other[:2] or (shape[2] is None) != (other[2] is None):
            return name
        if shape[2] is not None and not is_same_value(wanted.objects[shape[2]], found.objects[other[2]]):
            return name
    return _untied(wanted, found)


def _shapes(outline: Outline) -> dict[str, _Shape]:
    """Return the containers by name."""
    shapes: dict[str, _Shape] = {}

    def visit(node: Node, path: Path) -> None:
        kind = node[0]
        if kind in ("d", "o"):
            keys = node[1][::2]
            shapes[fqn_of(path)] = (kind, tuple((type(key), key) for key in keys), node[2] if kind == "o" else None)
            children: Any = zip(keys, node[1][1::2], strict=True)
        elif kind in ("l", "t"):
            shapes[fqn_of(path)] = (kind, len(node[1]), None)
            children = enumerate(node[1])
        else:
            return
        for key, child in children:
            visit(child, (*path, key))

    visit(outline.tree, ())
    return shapes


def _untied(wanted: Outline, found: Outline) -> str | None:
    """Return a name of a tensor that was tied to another one, and is no more."""
    there = {fqn: node[1] for fqn, node in found.leaves() if node[0] in ("T", "N")}
    numbers: dict[int, int] = {}
    for fqn, node in wanted.leaves():
        if node[0] in ("T", "N") and fqn in there and numbers.setdefault(node[1], there[fqn]) != there[fqn]:
            return fqn
    return None

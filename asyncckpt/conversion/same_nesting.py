"""Whether two checkpoints hold their leaves in the same containers, and tie the same tensors. Pure."""

from __future__ import annotations

from asyncckpt.conversion.holding import TOP
from asyncckpt.conversion.opened_values import is_same_value
from asyncckpt.conversion.outline import Outline
from asyncckpt.format.tree import CONTAINERS, Node, Path, fqn_of
from asyncckpt.planning.containers import is_counter


def other_nesting(wanted: Outline, found: Outline) -> str | None:
    """Return the name of something whose nesting differs, or None.

    Both have the same leaves; what is a leaf in one and a container in the other is not looked at.

    Args:
        wanted: What was to be written.
        found: What a reader finds.
    """
    return _other(wanted, found, wanted.tree, found.tree, ()) or _untied(wanted, found)


def _other(wanted: Outline, found: Outline, one: Node, other: Node, path: Path) -> str | None:
    """Return the name of the first container at or below `path` that is another one."""
    if one[0] not in CONTAINERS or other[0] not in CONTAINERS:
        return None
    name = fqn_of(path) or TOP
    if one[0] != other[0] or len(one[1]) != len(other[1]):
        return name
    if one[0] in ("l", "t"):
        pairs = list(enumerate(zip(one[1], other[1], strict=True)))
    else:
        keys = one[1][::2]
        if [(type(key), key) for key in keys] != [(type(key), key) for key in other[1][::2]]:
            return name
        pairs = list(zip(keys, zip(one[1][1::2], other[1][1::2], strict=True), strict=True))
    if is_counter(one) is not is_counter(other):  # other forms are not kept everywhere, which the report says
        return name
    if one[0] == "o" and not _same_versions(wanted, found, one[2], other[2]):
        return name
    below = (_other(wanted, found, *nodes, (*path, key)) for key, nodes in pairs)
    return next((name for name in below if name is not None), None)


def _same_versions(wanted: Outline, found: Outline, one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return is_same_value(wanted.objects[one], found.objects[other])


def _untied(wanted: Outline, found: Outline) -> str | None:
    """Return a name of a tensor that was tied to another one, and is no more."""
    there = {fqn: node[1] for fqn, node in found.leaves() if node[0] in ("T", "N")}
    numbers: dict[int, int] = {}
    for fqn, node in wanted.leaves():
        if node[0] in ("T", "N") and fqn in there and numbers.setdefault(node[1], there[fqn]) != there[fqn]:
            return fqn
    return None

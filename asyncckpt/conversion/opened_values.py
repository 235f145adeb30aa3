"""Values that are one leaf in one checkpoint and a container of leaves in another: alike if they hold the same.

A tuple that holds a set is one leaf of a save through `asyncckpt.dcp.StorageWriter`, since torch's planners take no
tuple apart; whoever reads the same tuple from an item of a DCP directory, or from a file of `torch.save`, opens it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from asyncckpt.conversion.long_bytes import bytes_at
from asyncckpt.conversion.outline import Outline
from asyncckpt.format.keys import python_key
from asyncckpt.format.objects import encode_value
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.storage.files import Files
from asyncckpt.storage.unread import Unread


def alike_when_opened(one: Outline, other: Outline) -> set[str]:
    """Return the names of leaves that only one side has, and whose values the other side holds all the same.

    Args:
        one: A checkpoint.
        other: Another one.

    Raises:
        CorruptCheckpointError, OSError: Long `bytes` cannot be read.

    Returns:
        Those of the leaf on the one side, and of all that it was opened to on the other. Empty containers count as
        they are: what has lost one is not alike.
    """
    return _held_opened(one, other) | _held_opened(other, one)


def is_same_value(a: Any, b: Any) -> bool:
    """Whether two leaves' JSON forms say the same: True is not 1, and -0.0 not 0.0. A set has no order.

    What was not read (`storage.unread.Unread`) is like nothing else.
    """
    return not (isinstance(a, Unread) or isinstance(b, Unread)) and _as_text(a) == _as_text(b)


def _held_opened(closed: Outline, opened: Outline) -> set[str]:
    """Return the names, on both sides, of leaves of `closed` that are containers in `opened`."""
    containers: dict[str, list[tuple[Path, Node]]] = {}
    for fqn, place in _containers(opened.tree, ()):  # of one name there may be several: "a.b", and "b" in "a"
        containers.setdefault(fqn, []).append(place)
    found: set[str] = set()
    for fqn, node in closed.leaves():
        for path, container in containers.get(fqn, ()) if node[0] == "O" else ():
            try:
                value = _value_of(container, opened)
            except _HoldsMoreError:
                continue
            if is_same_value(value, closed.objects[node[1]]):
                found |= {fqn, *(fqn_of(at) for at, _ in leaves(container, path))}
                break
    return found


class _HoldsMoreError(Exception):
    """A container holds tensors, or what was not read."""


def _containers(node: Node, path: Path) -> Iterator[tuple[str, tuple[Path, Node]]]:
    if node[0] in ("d", "o"):
        members: Any = zip(node[1][::2], node[1][1::2], strict=True)
    elif node[0] in ("l", "t"):
        members = enumerate(node[1])
    else:
        return
    yield fqn_of(path), (path, node)
    for key, child in members:
        yield from _containers(child, (*path, key))


def _value_of(node: Node, outline: Outline) -> Any:
    """Return the JSON form that a container would have as one leaf."""
    kind = node[0]
    if kind == "O":
        raw = outline.objects[node[1]]
        if isinstance(raw, Unread):
            raise _HoldsMoreError
        return raw
    if kind == "B":
        return encode_value(bytes_at(outline, node, 0, outline.nbytes_of(node[1]), Files()))
    if kind == "l" and len(node) > 2:
        return {"$": "deque", "v": [node[2][1], [_value_of(child, outline) for child in node[1]]]}
    if kind == "l":
        return [_value_of(child, outline) for child in node[1]]
    if kind == "t":
        return {"$": "tuple", "v": [_value_of(child, outline) for child in node[1]]}
    if kind == "d" or (kind == "o" and node[2] is None):
        pairs = zip(node[1][::2], node[1][1::2], strict=True)
        return {"$": "dict", "v": [[encode_value(python_key(key)), _value_of(child, outline)] for key, child in pairs]}
    raise _HoldsMoreError


def _as_text(raw: Any) -> str:
    return json.dumps(_ordered(raw))


def _ordered(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_ordered(member) for member in raw]
    if not isinstance(raw, dict):
        return raw
    payload = raw.get("v")
    if raw.get("$") in ("set", "frozenset") and isinstance(payload, list):
        payload = sorted(map(_as_text, payload))
    return {**raw, "v": _ordered(payload)}

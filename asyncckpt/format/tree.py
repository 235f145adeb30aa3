"""The skeleton of a state dict: containers, typed keys, and where each leaf is stored.

A node is a plain nested tuple, so that it compares, hashes and packs as msgpack without further ado:

    ("d", (key, node, key, node, ...))           dict
    ("d", (key, node, ...), form)                a dict of another type: ("Counter",) or ("defaultdict", factory)
    ("o", (key, node, ...), meta)                OrderedDict; meta: object number of its `_metadata`, or None
    ("l", (node, ...))  ("t", (node, ...))       list, tuple
    ("l", (node, ...), ("deque", maxlen))        deque; maxlen: None for none
    ("r", node)                                  the node belongs to its rank (`PerRank`); never inside another "r"
    ("T", n)                                     tensor number n
    ("N", n)                                     numpy array, stored as tensor number n
    ("B", n)                                     bytes, stored as tensor number n of dtype uint8
    ("O", n)                                     object number n

A factory is one of `FACTORIES`, None, or "?": another one, which is not stored. Keys are those of `format.keys`. "r" is
transparent: it adds no key to the paths of what is in it.
"""

from __future__ import annotations

from collections.abc import Iterator
from operator import itemgetter
from typing import Any

from asyncckpt.format.hashes import Hashes
from asyncckpt.format.keys import MAX_KEY_CHARS, Key, TypedKey, checked_key, python_key

Path = tuple[Key, ...]
Node = tuple[Any, ...]

MAX_DEPTH = 64
"""Containers inside containers. Chosen, not measured: far above real states, far below msgpack's and json's limits."""

MAX_MAXLEN = (1 << 63) - 1
FACTORIES = (
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque"),
)
"""What a defaultdict may make for a key that it lacks."""

UNSTORED_FACTORY = "?"
CONTAINERS = ("d", "o", "l", "t", "r")


def fqn_of(path: Path) -> str:
    """Return the full name of a leaf: its keys joined by dots, those that are no text as Python writes them."""
    return ".".join(map(str, path))


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, leaf node) for every leaf below `node`, in the order of the state dict."""
    kind = node[0]
    if kind in ("d", "o"):
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] == "T":  # by far the most, without a generator of its own
                yield (*path, items[i]), child
            else:
                yield from leaves(child, (*path, items[i]))
    elif kind in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from leaves(child, (*path, i))
    elif kind == "r":
        yield from leaves(node[1], path)
    else:
        yield path, node


def named_leaves(node: Node) -> dict[str, Node]:
    """Return leaf nodes by FQN, in the order of the state dict; of two with one name, the last.

    A node of one member is a hole, which has no name.
    """
    found: dict[str, Node] = {}
    _name_leaves(node, "", found)
    return found


def _name_leaves(node: Node, prefix: str, found: dict[str, Node]) -> None:
    """`prefix`: of the names below `node`: empty, or with a dot at its end."""
    kind = node[0]
    while kind == "r":
        node = node[1]
        kind = node[0]
    if kind in ("d", "o"):
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] == "T":
                found[f"{prefix}{items[i]}"] = child
            else:
                _name_leaves(child, f"{prefix}{items[i]}.", found)
    elif kind in ("l", "t"):
        for i, child in enumerate(node[1]):
            _name_leaves(child, f"{prefix}{i}.", found)
    elif len(node) > 1:
        found[prefix[:-1]] = node


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node inside) for every "r" node at or below `node`."""
    kind = node[0]
    if kind in ("d", "o"):
        items = node[1]
        for i in range(0, len(items), 2):
            yield from per_rank_nodes(items[i + 1], (*path, items[i]))
    elif kind in ("l", "t"):
        for i, child in enumerate(node[1]):
            yield from per_rank_nodes(child, (*path, i))
    elif kind == "r":
        yield path, node[1]


def checked(raw: Any, n_tensors: int, n_objects: int, depth: int = 0, per_rank: bool = False) -> Node:
    """Turn a decoded msgpack value into a node.

    Args:
        raw: The value.
        n_tensors, n_objects: Numbers of leaves are below these.
        depth: Containers around it.
        per_rank: Whether it lies inside an "r" node.

    Raises:
        ValueError: Not a node: unknown kind, key of another type, a repeated key, a number out of range, too deep,
            "r" inside "r".
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"tree deeper than {MAX_DEPTH}")
    if not isinstance(raw, (list, tuple)) or not raw:
        raise ValueError("tree node is not a list")
    kind = raw[0]
    if kind in ("d", "o"):
        return _checked_mapping(raw, n_tensors, n_objects, depth, per_rank)
    form: tuple[Any, ...] = ()
    if kind == "l" and len(raw) == 3:
        form, raw = (_checked_deque(raw[2], raw[1]),), raw[:2]
    if len(raw) != 2:
        raise ValueError(f"tree node {kind!r} has {len(raw)} members, expected 2")
    if kind in ("l", "t"):
        if not isinstance(raw[1], (list, tuple)):
            raise ValueError("sequence node without members")
        members = tuple(checked(child, n_tensors, n_objects, depth + 1, per_rank) for child in raw[1])
        return (kind, members, *form)
    if kind == "r":
        if per_rank:
            raise ValueError("a per-rank node inside another")
        return (kind, checked(raw[1], n_tensors, n_objects, depth, True))
    if kind in ("T", "N", "B", "O"):
        return (kind, _checked_number(raw[1], n_objects if kind == "O" else n_tensors))
    raise ValueError(f"unknown tree node {kind!r}")


def _checked_mapping(raw: Any, n_tensors: int, n_objects: int, depth: int, per_rank: bool) -> Node:
    kind, items = raw[0], raw[1] if len(raw) > 1 else None
    form = (_checked_form(raw[2]),) if kind == "d" and len(raw) == 3 else ()
    if len(raw) != (3 if kind == "o" else 2 + len(form)) or not isinstance(items, (list, tuple)) or len(items) % 2:
        raise ValueError(f"malformed mapping node {kind!r}")
    if kind == "d" and depth < MAX_DEPTH and _are_tensors(items[::2], items[1::2], n_tensors):
        return (kind, tuple(items), *form)
    seen: set[Any] = set()  # as Python has them, to which 1 and True are one key
    hashes = Hashes()
    out: list[Any] = []
    for i in range(0, len(items), 2):
        key = items[i]
        if type(key) is not str or len(key) > MAX_KEY_CHARS:
            key = checked_key(key)
        plain = hashes.met(python_key(key)) if type(key) is TypedKey else key
        if plain in seen:
            raise ValueError(f"key {key!r} twice in one mapping")
        seen.add(plain)
        child = items[i + 1]
        if type(child) is tuple and len(child) == 2 and child[0] == "T":  # by far the most, without a call
            n = child[1]
            if type(n) is int and 0 <= n < n_tensors and depth < MAX_DEPTH:
                out += (key, child)
                continue
        out += (key, checked(child, n_tensors, n_objects, depth + 1, per_rank))
    if kind == "d":
        return (kind, tuple(out), *form)
    return (kind, tuple(out), None if raw[2] is None else _checked_number(raw[2], n_objects))


def _are_tensors(keys: Any, nodes: Any, n_tensors: int) -> bool:
    """Whether a mapping has tensors only, and nothing is wrong with them: most of a checkpoint's, without a loop."""
    if not nodes or set(map(type, nodes)) != {tuple} or set(map(len, nodes)) != {2}:
        return False
    numbers = [number for _, number in nodes]
    kinds = list(map(itemgetter(0), nodes))
    if set(map(type, kinds)) != {str} or set(kinds) != {"T"} or set(map(type, numbers)) != {int}:
        return False
    if set(map(type, keys)) != {str} or len(set(keys)) != len(keys) or max(map(len, keys)) > MAX_KEY_CHARS:
        return False
    return bool(min(numbers) >= 0 and max(numbers) < n_tensors)


def _checked_form(raw: Any) -> tuple[Any, ...]:
    form = tuple(raw) if isinstance(raw, (list, tuple)) else ()
    if form == ("Counter",):
        return form
    factories = (None, UNSTORED_FACTORY, *FACTORIES)
    if len(form) != 2 or form[0] != "defaultdict" or form[1] not in factories:
        raise ValueError(f"{raw!r} is no type of a dict")
    return form


def _checked_deque(raw: Any, members: Any) -> tuple[Any, ...]:
    form = tuple(raw) if isinstance(raw, (list, tuple)) else ()
    if len(form) != 2 or form[0] != "deque" or not is_maxlen(form[1], len(members)):
        raise ValueError(f"{raw!r} is no deque")
    return form


def is_maxlen(value: Any, length: int) -> bool:
    """Whether a deque of `length` members may have `value` as its `maxlen`."""
    return value is None or (type(value) is int and length <= value <= MAX_MAXLEN)


def _checked_number(raw: Any, limit: int) -> int:
    if type(raw) is not int or not 0 <= raw < limit:
        raise ValueError(f"leaf number {raw!r} out of range 0..{limit - 1}")
    return raw

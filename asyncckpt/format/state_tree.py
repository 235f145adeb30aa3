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

A factory is one of `FACTORIES`, None, or "?": another one, which is not stored. "r" is transparent: it adds no key to
the paths of what is in it.

Keys are strings and integers as they are, and all others as a tagged `TypedKey`: for Python 1, 1.0 and True are the
same key, in dicts and in comparisons of paths; as `TypedKey` they differ. On disk a typed key is an array that begins
with the tag (SPEC.md section 4):

    ["n"]  None          ["b", bool]          ["f", 16 hex digits: the double, big endian]
    ["y", bytes]         ["t", key, ...]      a tuple of keys, typed ones among them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any

MAX_ALIKE = 1000
"""Different keys of one hash. Chosen: floats reach some dozens by themselves; a thousand cost half a millisecond."""

_HARMLESS = frozenset({str, bytes, bool, type(None)})
_MAX_WORD = 1 << 64


class Hashes:
    """Counts the keys that come to a dict or a set, or to several of them."""

    __slots__ = ("_alike", "_first")

    def __init__(self) -> None:
        self._first: dict[int, Any] = {}
        self._alike: dict[int, set[Any]] = {}

    def met(self, key: Any) -> Any:
        """Return `key`.

        Raises:
            ValueError: Too many others have its hash.
            TypeError: It cannot be hashed.
        """
        kind = type(key)
        if kind in _HARMLESS or (kind is int and -_MAX_WORD < key < _MAX_WORD):
            return key
        number = hash(key)
        if self._first.setdefault(number, key) is key:
            return key
        alike = self._alike.setdefault(number, set())
        alike.add(key)
        if len(alike) > MAX_ALIKE:
            raise ValueError(f"more than {MAX_ALIKE} keys with one hash")
        return key


def all_met(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of one dict, or the members of one set.

    Raises:
        ValueError, TypeError: As `Hashes.met`.
    """
    hashes = Hashes()
    return [hashes.met(key) for key in keys]


MAX_KEY_CHARS = 4096
"""Of a string; of any other key its `repr`, which is its part of an FQN."""

_MAX_KEY_BITS = 12_000
"""Of a number. Python writes out none of more than 4,300 digits as text, and a key is part of its leaf's name."""

_MAX_INT_KEY = (1 << 63) - 1

MAX_KEY_DEPTH = 8
"""How deep tuples may be nested in a key. Chosen, not measured."""


_NONE_KEY, _BOOL_KEY, _FLOAT_KEY, _BYTES_KEY, _TUPLE_KEY = "n", "b", "f", "y", "t"
"""Tags of typed keys."""


class TypedKey(tuple[Any, ...]):
    """A key that is neither str nor int: the tag and its arguments. `repr` and `str` are those of `value`."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The Python value of the key."""
        kind, rest = self[0], self[1:]
        if kind == _TUPLE_KEY:
            return tuple(map(python_key, rest))
        if kind == _FLOAT_KEY:
            return struct.unpack(">d", bytes.fromhex(rest[0]))[0]
        return rest[0] if rest else None

    def __repr__(self) -> str:
        return repr(self.value)


Key = str | int | TypedKey


def python_key(key: Any) -> Any:
    """Return the Python value of a key of a tree or path."""
    return key.value if type(key) is TypedKey else key


def key_of(value: Any, depth: int = 0) -> Key | None:
    """Return the tree's key for a key of a dict; None: it cannot be stored.

    Subclasses of str, int, float, bytes and tuple become the type that they extend.
    """
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, bool):
        return TypedKey((_BOOL_KEY, value))
    if isinstance(value, int):
        return int(value) if value.bit_length() <= _MAX_KEY_BITS else None
    if value is None:
        return TypedKey((_NONE_KEY,))
    if isinstance(value, float):
        return None if math.isnan(value) else TypedKey((_FLOAT_KEY, struct.pack(">d", value).hex()))
    if isinstance(value, bytes):
        return TypedKey((_BYTES_KEY, bytes(value)))
    if not isinstance(value, tuple) or depth == MAX_KEY_DEPTH:
        return None
    members = [key_of(member, depth + 1) for member in value]
    return None if None in members else TypedKey((_TUPLE_KEY, *members))


def is_storable(key: Any) -> bool:
    """Whether the index can hold a key of a tree."""
    if isinstance(key, int):
        return -_MAX_INT_KEY <= key <= _MAX_INT_KEY
    if isinstance(key, str):
        return len(key) <= MAX_KEY_CHARS and _is_text(key)
    members = key[1:] if type(key) is TypedKey and key[0] == _TUPLE_KEY else ()
    return all(map(is_storable, members)) and len(str(key)) <= MAX_KEY_CHARS


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_key(raw: Any, depth: int = 0) -> Key:
    """Turn a decoded msgpack value into a key.

    Raises:
        ValueError: It is not a key.
    """
    if type(raw) is int or (type(raw) is str and len(raw) <= MAX_KEY_CHARS):
        return raw
    kind, rest = (raw[0], raw[1:]) if isinstance(raw, (list, tuple)) and raw else (None, ())
    if kind == _TUPLE_KEY and depth < MAX_KEY_DEPTH:
        found = TypedKey((_TUPLE_KEY, *(checked_key(member, depth + 1) for member in rest)))
    elif kind == _NONE_KEY and not rest:
        found = TypedKey((_NONE_KEY,))
    elif len(rest) == 1 and {_BOOL_KEY: bool, _FLOAT_KEY: str, _BYTES_KEY: bytes}.get(str(kind)) is type(rest[0]):
        found = TypedKey((kind, *rest))
        if kind == _FLOAT_KEY and (len(str(rest[0])) != 16 or key_of(found.value) != found):  # of another case, or NaN
            raise ValueError(f"{str(rest[0])[:40]!r} is no float of a key")
    else:
        raise ValueError(f"a key of type {type(raw).__name__}, or of an unknown tag")
    if not depth and len(str(found)) > MAX_KEY_CHARS:
        raise ValueError(f"a key of more than {MAX_KEY_CHARS} characters")
    return found


DICT, ORDERED_DICT, LIST, TUPLE, PER_RANK = "d", "o", "l", "t", "r"
TENSOR, ARRAY, BYTES, OBJECT = "T", "N", "B", "O"
MAPPINGS = (DICT, ORDERED_DICT)
SEQUENCES = (LIST, TUPLE)
CONTAINERS = (*MAPPINGS, *SEQUENCES, PER_RANK)
"""The kinds of nodes: the first member of each, as it is on disk."""

Path = tuple[Key, ...]
Node = tuple[Any, ...]
Form = tuple[Any, ...]
"""The third member of a container's node, which plain dicts and lists do not have."""

MAX_DEPTH = 64
"""Containers inside containers. Chosen, not measured: far above real states, far below msgpack's and json's limits."""

MAX_MAXLEN = (1 << 63) - 1
FACTORIES = (
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque"),
)
"""What a defaultdict may make for a key that it lacks."""

UNSTORED_FACTORY = "?"
_MAX_HOLES = 1024
"""A list with more members missing is kept as a dict with integer keys. Chosen, not measured."""


def fqn_of(path: Path) -> str:
    """Return the full name of a leaf: its keys joined by dots, those that are no text as Python writes them."""
    return ".".join(map(str, path))


def form_in(node: Node) -> Form | None:
    """Return the form that a node of a dict or list has."""
    return node[2] if len(node) > 2 else None


def is_counter(node: Node) -> bool:
    """Whether a node is a Counter."""
    return node[0] == DICT and form_in(node) == ("Counter",)


def members(node: Node) -> Iterator[tuple[Key, Node]]:
    """Return (key, node) of what is in a mapping or a sequence; nothing for any other node."""
    if node[0] in MAPPINGS:
        return zip(node[1][::2], node[1][1::2], strict=True)
    return enumerate(node[1] if node[0] in SEQUENCES else ())


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, leaf node) for every leaf below `node`, in the order of the state dict."""
    kind = node[0]
    if kind in MAPPINGS:
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] == TENSOR:  # by far the most, without a generator of its own
                yield (*path, items[i]), child
            else:
                yield from leaves(child, (*path, items[i]))
    elif kind in SEQUENCES:
        for i, child in enumerate(node[1]):
            yield from leaves(child, (*path, i))
    elif kind == PER_RANK:
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
    while kind == PER_RANK:
        node = node[1]
        kind = node[0]
    if kind in MAPPINGS:
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] == TENSOR:
                found[f"{prefix}{items[i]}"] = child
            else:
                _name_leaves(child, f"{prefix}{items[i]}.", found)
    elif kind in SEQUENCES:
        for i, child in enumerate(node[1]):
            _name_leaves(child, f"{prefix}{i}.", found)
    elif len(node) > 1:
        found[prefix[:-1]] = node


def tree_of(leaves: Iterable[tuple[Path, Node]], hole: Callable[[], Node] | None = None) -> Node:
    """Return the tree of leaves with paths of texts and numbers: a dict, in which numbers alone are a list's members.

    Args:
        leaves: In the order of the state dict.
        hole: Makes a member of a list that nobody has; without it such a list is a dict with the numbers as keys.

    Raises:
        ValueError: A leaf stands where another has its container, or another leaf.
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"{path!r} leads through a leaf")
        if path[-1] in branch:
            raise ValueError(f"two leaves stand at {path!r}")
        branch[path[-1]] = leaf
    return DICT, tuple(part for key, child in root.items() for part in (key, _subtree(child, hole)))


def _subtree(branch: Any, hole: Callable[[], Node] | None) -> Node:
    if not isinstance(branch, dict):
        return tuple(branch)
    members = {key: _subtree(child, hole) for key, child in branch.items()}
    if members and all(type(key) is int and key >= 0 for key in members):
        length = max(members) + 1
        if length == len(members) or (hole is not None and length - len(members) <= _MAX_HOLES):
            return LIST, tuple(members[n] if n in members or hole is None else hole() for n in range(length))
    return DICT, tuple(part for pair in members.items() for part in pair)


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node inside) for every "r" node at or below `node`."""
    kind = node[0]
    if kind in MAPPINGS:
        items = node[1]
        for i in range(0, len(items), 2):
            yield from per_rank_nodes(items[i + 1], (*path, items[i]))
    elif kind in SEQUENCES:
        for i, child in enumerate(node[1]):
            yield from per_rank_nodes(child, (*path, i))
    elif kind == PER_RANK:
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
    if kind in MAPPINGS:
        return _checked_mapping(raw, n_tensors, n_objects, depth, per_rank)
    form: tuple[Any, ...] = ()
    if kind == LIST and len(raw) == 3:
        form, raw = (_checked_deque(raw[2], raw[1]),), raw[:2]
    if len(raw) != 2:
        raise ValueError(f"tree node {kind!r} has {len(raw)} members, expected 2")
    if kind in SEQUENCES:
        if not isinstance(raw[1], (list, tuple)):
            raise ValueError("sequence node without members")
        members = tuple(checked(child, n_tensors, n_objects, depth + 1, per_rank) for child in raw[1])
        return (kind, members, *form)
    if kind == PER_RANK:
        if per_rank:
            raise ValueError("a per-rank node inside another")
        return (kind, checked(raw[1], n_tensors, n_objects, depth, True))
    if kind in (TENSOR, ARRAY, BYTES, OBJECT):
        return (kind, _checked_number(raw[1], n_objects if kind == OBJECT else n_tensors))
    raise ValueError(f"unknown tree node {kind!r}")


def _checked_mapping(raw: Any, n_tensors: int, n_objects: int, depth: int, per_rank: bool) -> Node:
    kind, items = raw[0], raw[1] if len(raw) > 1 else None
    form = (_checked_form(raw[2]),) if kind == DICT and len(raw) == 3 else ()
    if (
        len(raw) != (3 if kind == ORDERED_DICT else 2 + len(form))
        or not isinstance(items, (list, tuple))
        or len(items) % 2
    ):
        raise ValueError(f"malformed mapping node {kind!r}")
    if kind == DICT and depth < MAX_DEPTH and _are_tensors(items[::2], items[1::2], n_tensors):
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
        if type(child) is tuple and len(child) == 2 and child[0] == TENSOR:  # by far the most, without a call
            n = child[1]
            if type(n) is int and 0 <= n < n_tensors and depth < MAX_DEPTH:
                out += (key, child)
                continue
        out += (key, checked(child, n_tensors, n_objects, depth + 1, per_rank))
    if kind == DICT:
        return (kind, tuple(out), *form)
    return (kind, tuple(out), None if raw[2] is None else _checked_number(raw[2], n_objects))


def _are_tensors(keys: Any, nodes: Any, n_tensors: int) -> bool:
    """Whether a mapping has tensors only, and nothing is wrong with them: most of a checkpoint's, without a loop."""
    if not nodes or set(map(type, nodes)) != {tuple} or set(map(len, nodes)) != {2}:
        return False
    numbers = [number for _, number in nodes]
    kinds = list(map(itemgetter(0), nodes))
    if set(map(type, kinds)) != {str} or set(kinds) != {TENSOR} or set(map(type, numbers)) != {int}:
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

"""The tree of a state dict: its containers, their keys, and the number under which each leaf is stored.

A node is a nested tuple, which can be compared, hashed and packed as msgpack:

    ("d", (key, node, key, node, ...))           dict
    ("d", (key, node, ...), form)                a dict of another type: ("Counter",) or ("defaultdict", factory)
    ("o", (key, node, ...), meta)                OrderedDict; meta: object number of its `_metadata`, or None
    ("l", (node, ...))  ("t", (node, ...))       list, tuple
    ("l", (node, ...), ("deque", maxlen))        deque; maxlen: None for none
    ("s", (name, node, ...), n, kind)            tensor that is stored as its component tensors, see below
    ("s", (name, node, ...), n, kind, digest)    the same, of a DTensor
    ("r", node)                                  the node belongs to its rank (`PerRank`); never inside another "r"
    ("T", n)                                     tensor number n
    ("N", n)                                     numpy array, stored as tensor number n
    ("B", n)                                     bytes, stored as tensor number n of dtype uint8
    ("O", n)                                     object number n
    ("E", n)                                     a part without elements of a sharded tensor, in place of which other
                                                 ranks may have an "s" node; tensor number n, which has no elements

A factory is one of `FACTORIES`, None, or "?" for another one, which is not stored. An "r" node adds no key to the paths
of its leaves.

An "s" node is a tensor subclass with `__tensor_flatten__`, or a sparse, quantized or jagged tensor. Its members are its
component tensors by name: nodes "T" or "s". `kind` is one of `TENSOR_KINDS`, or the name of the class, with its module.
It is data: nothing is imported because a file has it. Object number n has what else is needed to rebuild the tensor.
The digest, of 8 bytes, is that of the context in this object and of the names of the components
(`objects.context_digest`). It is only in files, and not in all: only what has been sharded has one. Ranks whose digests
differ have stored parts that make no whole tensor.

Strings and integers are keys as they are. Other keys are a `TypedKey`, because 1, 1.0 and True are equal in Python, in
dicts and in paths; as `TypedKey` they differ. On disk a typed key is an array that begins with the tag
(format/SPEC.md section 4):

    ["n"]  None          ["b", bool]          ["f", 16 hex digits: the double, big endian]
    ["y", bytes]         ["t", key, ...]      a tuple of keys, typed ones among them
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Any

from asyncckpt.format.checksums import DIGEST_NBYTES

MAX_COLLISIONS = 1000
"""Most keys with the same hash in a dict or set. Chosen: floats have some dozens; 1,000 take half a millisecond."""

_SAFE_TYPES = frozenset({str, bytes, bool, type(None)})
"""Types of keys for which a file cannot be made to have many collisions."""

_MAX_WORD = 1 << 64


class CollisionLimit:
    """Limits hash collisions of keys, which would make building a dict or set quadratic."""

    __slots__ = ("_colliding", "_first")

    def __init__(self) -> None:
        self._first: dict[int, Any] = {}
        self._colliding: dict[int, set[Any]] = {}

    def check(self, key: Any) -> Any:
        """Count `key` and return it.

        Raises:
            ValueError: More than `MAX_COLLISIONS` other keys have its hash.
            TypeError: It cannot be hashed.
        """
        kind = type(key)
        if kind in _SAFE_TYPES or (kind is int and -_MAX_WORD < key < _MAX_WORD):
            return key
        number = hash(key)
        if self._first.setdefault(number, key) is key:
            return key
        colliding = self._colliding.setdefault(number, set())
        colliding.add(key)
        if len(colliding) > MAX_COLLISIONS:
            raise ValueError(f"more than {MAX_COLLISIONS} keys have the same hash")
        return key


def checked_hashes(keys: Iterable[Any]) -> list[Any]:
    """Return the keys of one dict, or the members of one set, after `CollisionLimit.check` of each.

    Raises:
        ValueError, TypeError: As `CollisionLimit.check`.
    """
    limit = CollisionLimit()
    return [key if type(key) in _SAFE_TYPES else limit.check(key) for key in keys]


MAX_KEY_CHARS = 4096
"""Most characters of a string key, or of the `repr` of another key, which is its part of an FQN."""

_MAX_KEY_BITS = 12_000
"""Most bits of an integer key. Python does not convert integers of more than 4,300 digits to text, as an FQN needs."""

_MAX_INT_KEY = (1 << 63) - 1

MAX_KEY_DEPTH = 8
"""Most nested tuples in a key. Chosen, not measured."""


_NONE_KEY, _BOOL_KEY, _FLOAT_KEY, _BYTES_KEY, _TUPLE_KEY = "n", "b", "f", "y", "t"
"""Tags of typed keys."""


class TypedKey(tuple[Any, ...]):
    """A key that is neither str nor int: a tuple of its tag and arguments. `repr` and `str` are those of `value`."""

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
    """Return the Python value of a tree's key."""
    return key.value if type(key) is TypedKey else key


def python_keys(path: Iterable[Any]) -> list[Any]:
    """Return the Python values of the keys of a path."""
    return [key.value if type(key) is TypedKey else key for key in path]


def key_of(value: Any, depth: int = 0) -> Key | None:
    """Return the tree's key for a Python key, or None if it cannot be stored.

    A key of a subclass of str, int, float, bytes or tuple is stored as one of the base class.
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
    """Whether a tree's key is within the limits of the format."""
    if isinstance(key, int):
        return -_MAX_INT_KEY <= key <= _MAX_INT_KEY
    if isinstance(key, str):
        return len(key) <= MAX_KEY_CHARS and (key.isascii() or is_text(key))
    members = key[1:] if type(key) is TypedKey and key[0] == _TUPLE_KEY else ()
    return all(map(is_storable, members)) and len(str(key)) <= MAX_KEY_CHARS


def is_text(value: str) -> bool:
    """Whether a str is valid Unicode, without lone surrogates. JSON would decode two of them as one character."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def checked_key(raw: Any, depth: int = 0) -> Key:
    """Return a decoded msgpack value as a tree's key.

    Raises:
        ValueError: It is not a valid key.
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
        if kind == _FLOAT_KEY and (len(str(rest[0])) != 16 or key_of(found.value) != found):  # upper case, or NaN
            raise ValueError(f"a float key is {str(rest[0])[:40]!r}, expected 16 lower-case hex digits of no NaN")
    else:
        raise ValueError(f"a key is of type {type(raw).__name__}, or has an unknown tag or too many nested tuples")
    if not depth and len(str(found)) > MAX_KEY_CHARS:
        raise ValueError(f"a key has more than {MAX_KEY_CHARS} characters")
    return found


DICT, ORDERED_DICT, LIST, TUPLE, PER_RANK, COMPOSITE = "d", "o", "l", "t", "r", "s"
TENSOR, ARRAY, BYTES, OBJECT, EMPTY_PART = "T", "N", "B", "O", "E"
MAPPINGS = (DICT, ORDERED_DICT)
SEQUENCES = (LIST, TUPLE)
CONTAINERS = (*MAPPINGS, *SEQUENCES, COMPOSITE, PER_RANK)
LEAVES = (TENSOR, OBJECT, ARRAY, BYTES, EMPTY_PART)
"""The kinds of nodes: the first member of each, as it is on disk."""

KEYED = (*MAPPINGS, COMPOSITE)
"""The kinds whose second member is (key, node, key, node, ...)."""

Path = tuple[Key, ...]
Node = tuple[Any, ...]
Form = tuple[Any, ...]
"""The third member of a container's node: the type, if it is not a plain dict or list."""

MAX_DEPTH = 64
"""Most nested containers. Chosen, not measured: far above real states, far below the limits of msgpack and json."""

MAX_MAXLEN = (1 << 63) - 1
FACTORIES = (
    *("bool", "bytes", "complex", "dict", "float", "frozenset", "int", "list", "set", "str", "tuple"),
    *("collections.Counter", "collections.OrderedDict", "collections.defaultdict", "collections.deque"),
)
"""Names of the `default_factory` of a defaultdict that are stored."""

UNSTORED_FACTORY = "?"
TENSOR_KINDS = (
    *("sparse_coo", "sparse_csr", "sparse_csc", "sparse_bsr", "sparse_bsc", "jagged"),
    *("per_tensor_affine", "per_channel_affine", "per_channel_affine_float_qparams"),
)
"""Kinds of "s" nodes that are no class: the names of torch's layouts and quantization schemes."""

SHARDED = "sharded"
"""Member of the object of an "s" node that was sharded: the names of the components that were cut with it."""

OFFSETS = "offsets"
"""Member of the same object: where the rank's part begins, if of the other components it is not known that they are
whole."""

MAX_KIND_CHARS = 1024
"""Most characters of the name of a class. Chosen, not measured."""

_MAX_HOLES = 1024
"""A list that lacks more members becomes a dict with integer keys. Chosen, not measured."""


def fqn_of(path: Path) -> str:
    """Return the full name of a leaf: its keys as text, joined by dots."""
    return ".".join(map(str, path))


def form_in(node: Node) -> Form | None:
    """Return the form of a dict's or list's node, or None if it has none."""
    return node[2] if len(node) > 2 else None


def is_counter(node: Node) -> bool:
    """Whether a node is a Counter."""
    return node[0] == DICT and form_in(node) == ("Counter",)


def members(node: Node) -> Iterator[tuple[Key, Node]]:
    """Yield (key, node) of the members of a mapping, a sequence or a tensor's components; nothing for other nodes."""
    if node[0] in KEYED:
        return zip(node[1][::2], node[1][1::2], strict=True)
    return enumerate(node[1] if node[0] in SEQUENCES else ())


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, leaf node) for every leaf below `node`, in the order of the state dict."""
    kind = node[0]
    if kind in KEYED:
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] in LEAVES:  # the usual case, without another generator
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


def whole_leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) as `leaves` does, but a composite tensor as one leaf."""
    if node[0] == PER_RANK:
        yield from whole_leaves(node[1], path)
    elif node[0] in CONTAINERS and node[0] != COMPOSITE:
        for key, child in members(node):
            yield from whole_leaves(child, (*path, key))
    else:
        yield path, node


def composite_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of each composite tensor at or below `node`, those in others included."""
    if node[0] == PER_RANK:
        yield from composite_nodes(node[1], path)
        return
    if node[0] == COMPOSITE:
        yield path, node
    for key, child in members(node):
        if child[0] in CONTAINERS:
            yield from composite_nodes(child, (*path, key))


def context_digest_of(node: Node) -> bytes | None:
    """Return the digest of the context of a composite tensor; None: it has none."""
    return node[4] if len(node) > 4 else None


def with_context_digests(node: Node, digests: Mapping[int, bytes]) -> Node:
    """Return a tree in which composite tensors have digests.

    Args:
        node: A tree without digests.
        digests: The digests, by number of the tensor's object.
    """
    kind = node[0]
    if kind in SEQUENCES:
        return (kind, tuple(with_context_digests(child, digests) for child in node[1]), *node[2:])
    if kind == PER_RANK:
        return (kind, with_context_digests(node[1], digests))
    if kind not in KEYED:
        return node
    items = tuple(with_context_digests(one, digests) if n % 2 else one for n, one in enumerate(node[1]))
    own = (digests[node[2]],) if kind == COMPOSITE and node[2] in digests else ()
    return (kind, items, *node[2:], *own)


def named_leaves(node: Node) -> dict[str, Node]:
    """Return leaf nodes by FQN, in the order of the state dict. Of two leaves with one FQN the first is returned.

    Missing members of lists, which are nodes with one member, are left out.
    """
    found: dict[str, Node] = {}
    _name_leaves(node, "", found)
    return found


def _name_leaves(node: Node, prefix: str, found: dict[str, Node]) -> None:
    """Add the leaves below `node` to `found`. `prefix`: the start of their names, empty or with a dot at its end."""
    kind = node[0]
    while kind == PER_RANK:
        node = node[1]
        kind = node[0]
    if kind in KEYED:
        items = node[1]
        for i in range(0, len(items), 2):
            child = items[i + 1]
            if child[0] in LEAVES:
                found.setdefault(f"{prefix}{items[i]}", child)
            else:
                _name_leaves(child, f"{prefix}{items[i]}.", found)
    elif kind in SEQUENCES:
        for i, child in enumerate(node[1]):
            _name_leaves(child, f"{prefix}{i}.", found)
    elif len(node) > 1:
        found.setdefault(prefix[:-1], node)


def tree_of(leaves: Iterable[tuple[Path, Node]], hole: Callable[[], Node] | None = None) -> Node:
    """Return the tree of leaves whose paths have strings and integers as keys.

    The root is a dict. A container below it is a list if its keys are the integers from 0 on, else a dict.

    Args:
        leaves: (path, leaf node) of each, in the order of the state dict.
        hole: Makes the node of a missing member of a list. Without it, a list with missing members becomes a dict.

    Raises:
        ValueError: Two leaves have the same path, or the path of a leaf leads through another leaf.
    """
    root: dict[Any, Any] = {}
    for path, leaf in leaves:
        branch = root
        for key in path[:-1]:
            branch = branch.setdefault(key, {})
            if not isinstance(branch, dict):
                raise ValueError(f"the path {path!r} leads through another leaf")
        if path[-1] in branch:
            raise ValueError(f"two leaves have the path {path!r}")
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


def mapping_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of each mapping at or below `node`."""
    if node[0] == PER_RANK:
        yield from mapping_nodes(node[1], path)
    elif node[0] in (*MAPPINGS, *SEQUENCES):
        if node[0] in MAPPINGS:
            yield path, node
        for key, child in members(node):
            if child[0] in CONTAINERS:
                yield from mapping_nodes(child, (*path, key))


def per_rank_nodes(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, inner node) for each "r" node at or below `node`."""
    if node[0] == PER_RANK:
        yield path, node[1]
    elif node[0] in (*MAPPINGS, *SEQUENCES):
        for key, child in members(node):
            if child[0] in CONTAINERS:
                yield from per_rank_nodes(child, (*path, key))


def has_own_nodes(node: Node) -> bool:
    """Whether there is an "r" or "E" node at or below `node`, which has a meaning for its rank only."""
    if node[0] in (PER_RANK, EMPTY_PART):
        return True
    inner = members(node) if node[0] in (*MAPPINGS, *SEQUENCES) else ()
    return any(has_own_nodes(child) for _, child in inner if child[0] in (*CONTAINERS, EMPTY_PART))


def with_empty_parts(node: Node, numbers: Collection[int]) -> Node:
    """Return a tree with "E" nodes in place of the "T" nodes of these numbers."""
    if node[0] == TENSOR:
        return (EMPTY_PART, node[1]) if node[1] in numbers else node
    if node[0] == PER_RANK:
        return (PER_RANK, with_empty_parts(node[1], numbers))
    if node[0] in MAPPINGS:
        items = (with_empty_parts(one, numbers) if i % 2 else one for i, one in enumerate(node[1]))
        return (node[0], tuple(items), *node[2:])
    if node[0] in SEQUENCES:
        return (node[0], tuple(with_empty_parts(child, numbers) for child in node[1]), *node[2:])
    return node


def checked(raw: Any, n_tensors: int, n_objects: int, depth: int = 0, per_rank: bool = False) -> Node:
    """Return a decoded msgpack value as a node.

    Args:
        raw: The value.
        n_tensors, n_objects: How many tensors and objects there are.
        depth: Number of containers around the node.
        per_rank: Whether it lies inside an "r" node.

    Raises:
        ValueError: It is not a valid node: an unknown kind, an invalid or repeated key, a number out of range, too many
            nested containers, an "r" node inside another.
    """
    if depth > MAX_DEPTH:
        raise ValueError(f"the tree has more than {MAX_DEPTH} nested containers")
    if not isinstance(raw, (list, tuple)) or not raw:
        raise ValueError("a tree node is not a list, or is empty")
    kind = raw[0]
    if kind in MAPPINGS:
        return _checked_mapping(raw, n_tensors, n_objects, depth, per_rank)
    if kind == COMPOSITE:
        return _checked_components(raw, n_tensors, n_objects, depth)
    form: tuple[Any, ...] = ()
    if kind == LIST and len(raw) == 3:
        form, raw = (_checked_deque(raw[2], raw[1]),), raw[:2]
    if len(raw) != 2:
        raise ValueError(f"tree node {kind!r} has {len(raw)} members, expected 2")
    if kind in SEQUENCES:
        if not isinstance(raw[1], (list, tuple)):
            raise ValueError(f"the members of tree node {kind!r} are not a list")
        members = tuple(checked(child, n_tensors, n_objects, depth + 1, per_rank) for child in raw[1])
        return (kind, members, *form)
    if kind == PER_RANK:
        if per_rank:
            raise ValueError("a per-rank node inside another")
        return (kind, checked(raw[1], n_tensors, n_objects, depth, True))
    if kind in LEAVES:
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
    seen: set[Any] = set()  # Python values: 1 and True are equal
    hashes = CollisionLimit()
    out: list[Any] = []
    for i in range(0, len(items), 2):
        key = items[i]
        if type(key) is not str or len(key) > MAX_KEY_CHARS:
            key = checked_key(key)
        plain = hashes.check(python_key(key)) if type(key) is TypedKey else key
        if plain in seen:
            raise ValueError(f"key {key!r} occurs twice in one mapping")
        seen.add(plain)
        child = items[i + 1]
        if type(child) is tuple and len(child) == 2 and child[0] in (TENSOR, OBJECT):  # the usual case, without a call
            n, limit = child[1], n_tensors if child[0] == TENSOR else n_objects
            if type(n) is int and 0 <= n < limit and depth < MAX_DEPTH:
                out += (key, child)
                continue
        out += (key, checked(child, n_tensors, n_objects, depth + 1, per_rank))
    if kind == DICT:
        return (kind, tuple(out), *form)
    return (kind, tuple(out), None if raw[2] is None else _checked_number(raw[2], n_objects))


def _checked_components(raw: Any, n_tensors: int, n_objects: int, depth: int) -> Node:
    items, kind = (raw[1], raw[3]) if len(raw) in (4, 5) else (None, None)
    if not isinstance(items, (list, tuple)) or not items or len(items) % 2:
        raise ValueError("malformed node of a tensor's components")
    if type(kind) is not str or not 0 < len(kind) <= MAX_KIND_CHARS or not is_text(kind):
        raise ValueError(f"the kind of a composite tensor is {str(kind)[:40]!r}")
    names = items[::2]
    if set(map(type, names)) != {str} or len(set(names)) != len(names) or max(map(len, names)) > MAX_KEY_CHARS:
        raise ValueError("the names of a tensor's components are not distinct strings")
    members = [checked(child, n_tensors, n_objects, depth + 1) for child in items[1::2]]
    if any(member[0] not in (TENSOR, COMPOSITE) for member in members):
        raise ValueError("a component of a tensor is no tensor")
    digest = tuple(raw[4:])
    if digest and (type(digest[0]) is not bytes or len(digest[0]) != DIGEST_NBYTES or kind in TENSOR_KINDS):
        raise ValueError(f"the digest of the context of a {kind[:40]} is {str(digest[0])[:40]!r}")
    parts = tuple(part for pair in zip(names, members, strict=True) for part in pair)
    return (COMPOSITE, parts, _checked_number(raw[2], n_objects), kind, *digest)


def _are_tensors(keys: Any, nodes: Any, n_tensors: int) -> bool:
    """Whether a mapping has only tensors with valid keys and numbers: the usual case, checked without a loop."""
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
        raise ValueError(f"{raw!r} is not a valid form of a dict")
    return form


def _checked_deque(raw: Any, members: Any) -> tuple[Any, ...]:
    form = tuple(raw) if isinstance(raw, (list, tuple)) else ()
    if len(form) != 2 or form[0] != "deque" or not is_maxlen(form[1], len(members)):
        raise ValueError(f"{raw!r} is not a valid form of a deque with {len(members)} members")
    return form


def is_maxlen(value: Any, length: int) -> bool:
    """Whether a deque of `length` members may have `value` as its `maxlen`."""
    return value is None or (type(value) is int and length <= value <= MAX_MAXLEN)


def _checked_number(raw: Any, limit: int) -> int:
    if type(raw) is not int or not 0 <= raw < limit:
        raise ValueError(f"a leaf has number {raw!r}, expected 0 to {limit - 1}")
    return raw

"""The keys of a state dict's mappings: strings and integers as they are, all others as a tagged `TypedKey`.

For Python 1, 1.0 and True are the same key, in dicts and in comparisons of paths; as `TypedKey` they differ. On disk a
typed key is an array that begins with the tag (SPEC.md section 4):

    ["n"]  None          ["b", bool]          ["f", 16 hex digits: the double, big endian]
    ["y", bytes]         ["t", key, ...]      a tuple of keys, typed ones among them
"""

from __future__ import annotations

import math
import struct
from typing import Any

MAX_KEY_CHARS = 4096
"""Of a string; of any other key its `repr`, which is its part of an FQN."""

MAX_KEY_DEPTH = 8
"""How deep tuples may be nested in a key. Chosen, not measured."""


class TypedKey(tuple[Any, ...]):
    """A key that is neither str nor int: the tag and its arguments. `repr` and `str` are those of `value`."""

    __slots__ = ()

    @property
    def value(self) -> Any:
        """The Python value of the key."""
        kind, rest = self[0], self[1:]
        if kind == "t":
            return tuple(map(python_key, rest))
        if kind == "f":
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
        return TypedKey(("b", value))
    if isinstance(value, int):
        return int(value)
    if value is None:
        return TypedKey(("n",))
    if isinstance(value, float):
        return None if math.isnan(value) else TypedKey(("f", struct.pack(">d", value).hex()))
    if isinstance(value, bytes):
        return TypedKey(("y", bytes(value)))
    if not isinstance(value, tuple) or depth == MAX_KEY_DEPTH:
        return None
    members = [key_of(member, depth + 1) for member in value]
    return None if None in members else TypedKey(("t", *members))


def checked_key(raw: Any, depth: int = 0) -> Key:
    """Turn a decoded msgpack value into a key.

    Raises:
        ValueError: It is not a key.
    """
    if type(raw) is int or (type(raw) is str and len(raw) <= MAX_KEY_CHARS):
        return raw
    kind, rest = (raw[0], raw[1:]) if isinstance(raw, (list, tuple)) and raw else (None, ())
    if kind == "t" and depth < MAX_KEY_DEPTH:
        found = TypedKey(("t", *(checked_key(member, depth + 1) for member in rest)))
    elif kind == "n" and not rest:
        found = TypedKey(("n",))
    elif len(rest) == 1 and {"b": bool, "f": str, "y": bytes}.get(str(kind)) is type(rest[0]):
        found = TypedKey((kind, *rest))
        if kind == "f" and (len(str(rest[0])) != 16 or key_of(found.value) != found):  # of another case, or NaN
            raise ValueError(f"{str(rest[0])[:40]!r} is no float of a key")
    else:
        raise ValueError(f"a key of type {type(raw).__name__}, or of an unknown tag")
    if not depth and len(str(found)) > MAX_KEY_CHARS:
        raise ValueError(f"a key of more than {MAX_KEY_CHARS} characters")
    return found

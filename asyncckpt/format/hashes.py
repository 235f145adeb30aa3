"""Keys that were made so that their hashes are equal: putting n of them into one dict takes n**2 comparisons.

Python's hash of numbers, and so of tuples of them, is a formula that everybody knows; that of texts and bytes is not.
"""

from __future__ import annotations

from collections.abc import Iterable
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

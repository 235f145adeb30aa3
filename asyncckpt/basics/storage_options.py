"""Options of object stores, such as `endpoint` and `access_key_id`: text by name, whose values are never shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from asyncckpt.errors import ConfigError

FIELD = "storage_options"
MAX_OPTIONS = 64
MAX_NAME_CHARS = 64
MAX_VALUES_NBYTES = 64 << 10
"""Of all values together. A service account's key, the longest that is usual, takes 3 KB."""


def fits(value: Any) -> bool:
    """Whether `value` is a map of a bounded number of texts by name."""
    return (
        isinstance(value, Mapping)
        and len(value) <= MAX_OPTIONS
        and all(type(name) is str and 0 < len(name) <= MAX_NAME_CHARS for name in value)
        and all(type(text) is str and "\0" not in text for text in value.values())
        and _nbytes(value.values()) <= MAX_VALUES_NBYTES
    )


def _nbytes(texts: Iterable[str]) -> int:
    try:
        return sum(len(text.encode()) for text in texts)
    except UnicodeEncodeError:
        return MAX_VALUES_NBYTES + 1


class StorageOptions(Mapping[str, str]):
    """Options by name. Immutable; `repr` and errors show the names only.

    Args:
        given: Texts by name; None: there are none.

    Raises:
        ConfigError: It is no such map, or a larger one than is allowed.
    """

    __slots__ = ("_values",)

    def __init__(self, given: Mapping[str, str] | None = None) -> None:
        values = {} if given is None else given
        if not fits(values):
            raise ConfigError(
                f"{FIELD}: expected a dict of at most {MAX_OPTIONS} names of at most {MAX_NAME_CHARS} characters, "
                f"whose values are text of at most {MAX_VALUES_NBYTES} bytes in all, without NUL; they are not shown",
                field=FIELD,
            )
        self._values = dict(values)

    def __getitem__(self, name: str) -> str:
        """Return the value of an option."""
        return self._values[name]

    def __iter__(self) -> Iterator[str]:
        """Iterate over the names."""
        return iter(self._values)

    def __len__(self) -> int:
        """Return how many there are."""
        return len(self._values)

    def __hash__(self) -> int:
        """Return a hash of names and values."""
        return hash(frozenset(self._values.items()))

    def __eq__(self, other: object) -> bool:
        """Compare names and values."""
        return isinstance(other, Mapping) and self._values == dict(other)

    def __repr__(self) -> str:
        """Return the names."""
        return "{" + ", ".join(f"{name!r}: ..." for name in sorted(self._values)) + "}"


NO_OPTIONS = StorageOptions()

"""Which leaves a caller asked for: FQNs, and prefixes of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.format.state_tree import Node, fqn_of

HOLE: Node = ("-",)
"""Stands in a sequence for a member that belongs to another rank than the reader: the others keep their places."""


def key_list(keys: str | Iterable[str] | None) -> list[str] | None:
    """Check the argument `keys`.

    Raises:
        ConfigError: It holds something else than str.
    """
    if keys is None:
        return None
    found = [keys] if isinstance(keys, str) else list(keys)
    wrong = [k for k in found if not isinstance(k, str)]
    if wrong:
        raise ConfigError(f"keys holds {wrong[0]!r}: FQNs and prefixes are str, such as 'model'", field="keys")
    return found


def prefixes(fqn: str) -> list[str]:
    """Return what stands before each dot of `fqn`, shortest first."""
    found, at = [], fqn.find(".")
    while at >= 0:
        found.append(fqn[:at])
        at = fqn.find(".", at + 1)
    return found


class Selection:
    """FQNs and prefixes that a user asked for; None asks for everything."""

    def __init__(self, keys: Iterable[str] | None) -> None:
        self._keys = None if keys is None else set(keys)
        self._used: set[str] = set()

    def __contains__(self, fqn: str) -> bool:
        if self._keys is None:
            return True
        hits = self._keys.intersection((*prefixes(fqn), fqn))
        self._used |= hits
        return bool(hits)

    def reaches_into(self, fqn: str) -> bool:
        """Whether a key names something below `fqn`."""
        return self._keys is not None and any(key.startswith(fqn + ".") for key in self._keys)

    @property
    def in_vain(self) -> bool:
        """Whether there are keys, and none of them has selected anything so far."""
        return bool(self._keys) and not self._used

    @property
    def everything(self) -> bool:
        """Whether nothing was left out."""
        return self._keys is None

    def unused(self) -> list[str]:
        """Return the keys that selected nothing so far."""
        return sorted((self._keys or set()) - self._used)


def selected(node: Node, selection: Selection, path: tuple[Any, ...] = ()) -> Node | None:
    """Return `node` with the leaves that `selection` names, and the containers around them; None without any."""
    kind = node[0]
    if node is HOLE:
        return None
    if selection.everything or (path and fqn_of(path) in selection):
        return node
    if kind in ("d", "o"):
        items: list[Any] = []
        for i in range(0, len(node[1]), 2):
            child = selected(node[1][i + 1], selection, (*path, node[1][i]))
            if child is not None:
                items += [node[1][i], child]
        return (kind, tuple(items), *node[2:]) if items or not path else None
    if kind in ("l", "t"):
        children = [selected(child, selection, (*path, i)) for i, child in enumerate(node[1])]
        kept = tuple(child for child in children if child is not None)
        return (kind, kept, *node[2:]) if kept else None
    return None

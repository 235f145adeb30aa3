"""Which leaves are requested (`keys`), how target names map to saved names (`key_map`), and hints on missing keys."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.format.state_tree import MAPPINGS, SEQUENCES, Node, fqn_of

OTHER_RANKS_ONLY: Node = ("-",)
"""Stands for a member of a sequence that belongs to another rank than the reader, so that the other members keep their
indices."""


def key_list(keys: str | Iterable[str] | None) -> list[str] | None:
    """Check the argument `keys`.

    Raises:
        ConfigError: A key is not a str.
    """
    if keys is None:
        return None
    found = [keys] if isinstance(keys, str) else list(keys)
    wrong = [k for k in found if not isinstance(k, str)]
    if wrong:
        raise ConfigError(f"keys holds {wrong[0]!r}: expected FQNs and prefixes as str, such as 'model'", field="keys")
    return found


def prefixes(fqn: str) -> list[str]:
    """Return the part of `fqn` before each of its dots, shortest first."""
    found, at = [], fqn.find(".")
    while at >= 0:
        found.append(fqn[:at])
        at = fqn.find(".", at + 1)
    return found


class Selection:
    """The FQNs and prefixes that a user requests; None requests everything."""

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
    def is_without_match(self) -> bool:
        """Whether there are keys, and none of them has selected anything so far."""
        return bool(self._keys) and not self._used

    @property
    def everything(self) -> bool:
        """Whether no keys were given, so that everything is selected."""
        return self._keys is None

    def unused(self, is_read: Callable[[str], bool] = lambda key: False) -> list[str]:
        """Return the keys that selected nothing so far.

        Args:
            is_read: Whether what a key names is read as a part of what another key has selected. Called for keys below
                such a key.
        """
        unused = (self._keys or set()) - self._used
        return sorted(key for key in unused if self._used.isdisjoint(prefixes(key)) or not is_read(key))


def selected(node: Node, selection: Selection, path: tuple[Any, ...] = ()) -> Node | None:
    """Return `node` with the selected leaves and the containers around them only; None: no leaf is selected."""
    kind = node[0]
    if node is OTHER_RANKS_ONLY:
        return None
    if selection.everything or (path and fqn_of(path) in selection):
        return node
    if kind in MAPPINGS:
        items: list[Any] = []
        for i in range(0, len(node[1]), 2):
            child = selected(node[1][i + 1], selection, (*path, node[1][i]))
            if child is not None:
                items += [node[1][i], child]
        return (kind, tuple(items), *node[2:]) if items or not path else None
    if kind in SEQUENCES:
        children = [selected(child, selection, (*path, i)) for i, child in enumerate(node[1])]
        kept = tuple(child for child in children if child is not None)
        return (kind, kept, *node[2:]) if kept else None
    return None


KeyMap = Mapping[str, str] | Callable[[str], str]
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_MAX_SHOWN = 4


def renamer(key_map: KeyMap | None) -> Callable[[str], str]:
    """Return a function that maps an FQN of the target to the saved FQN: the other way round than in a conversion.

    Raises:
        ConfigError: `key_map` is neither a mapping nor callable. The function raises it if `key_map` returns no str.
    """
    if key_map is None:
        return lambda fqn: fqn
    table = key_map
    if not isinstance(table, Mapping) and not callable(table):
        raise ConfigError(
            f"key_map is a {type(table).__name__}: expected a dict from the target's names to the saved ones, or a "
            "function",
            field="key_map",
        )

    def renamed(fqn: str) -> str:
        found = table.get(fqn, fqn) if isinstance(table, Mapping) else table(fqn)
        if not isinstance(found, str):
            raise ConfigError(f"key_map returns {found!r} for {fqn!r}: expected a str", field="key_map")
        return found

    return renamed


def missing_hint(
    missing: Sequence[str], saved_fqns: Collection[str], key_map: KeyMap | None, present: Collection[str] = ()
) -> str:
    """Return advice on keys of the target that were not saved; "" if there is none.

    Args:
        missing: The missing keys, by their FQNs in the target.
        saved_fqns: FQNs in the checkpoint.
        key_map: The argument of the load.
        present: Keys that were saved, by their FQNs in the target.
    """
    rename = renamer(key_map)
    looked_for = {}
    for key in missing:
        with contextlib.suppress(Exception):  # an unused key need not be a name that the user's function can map
            looked_for[key] = rename(key)
    if isinstance(key_map, Mapping) and key_map:
        reverse = next(((old, new) for old, new in key_map.items() if new in looked_for and old in saved_fqns), None)
        if reverse is not None:
            return (
                f"; key_map maps the target's names to the saved ones, and its entry {reverse[0]!r}: {reverse[1]!r} "
                f"is reversed: write {reverse[1]!r}: {reverse[0]!r}"
            )
    other = next(((key, name) for key, name in looked_for.items() if key != name), None)
    if other is not None:
        return f"; key_map maps {other[0]!r} to {other[1]!r}, and nothing was saved under that name"
    return _prefix_hint(missing, saved_fqns, present)


def _prefix_hint(missing: Sequence[str], saved_fqns: Iterable[str], present: Collection[str]) -> str:
    """Return advice if missing keys differ from saved ones only by a wrapper's prefix; else ""."""
    bare = {_unwrapped(fqn): fqn for fqn in saved_fqns}
    names = {key: bare[_unwrapped(key)] for key in missing if bare.get(_unwrapped(key), key) != key}
    if not names:
        return ""
    key, found = next(iter(names.items()))
    wrapper = next(p for p in _WRAPPER_PREFIXES if (p in key) != (p in found) or key.count(p) != found.count(p))
    where = "the target" if key.count(wrapper) > found.count(wrapper) else "the checkpoint"
    count = "all" if len(names) == len(missing) else str(len(names))
    return (
        f"; {count} of them were saved under another name: only {where} has the prefix {wrapper!r} (the target has "
        f"{key!r}, the checkpoint {found!r}): use the bare model's state_dict(), or pass "
        f"key_map={_advised_map(names, wrapper, present)}"
    )


def _advised_map(names: Mapping[str, str], wrapper: str, present: Collection[str]) -> str:
    """Return the source of a `key_map` that maps `names` and does not change the names in `present`."""
    key, found = next(iter(names.items()))
    common = next((n for n, (a, b) in enumerate(zip(key, found, strict=False)) if a != b), min(len(key), len(found)))
    before = key[: key.rfind(".", 0, common) + 1]
    functions: dict[str, Callable[[str], str]] = {
        f"lambda name: name.removeprefix({wrapper!r})": lambda name: name.removeprefix(wrapper),
        f"lambda name: name.replace({wrapper!r}, '')": lambda name: name.replace(wrapper, ""),
        f"lambda name: {wrapper!r} + name": lambda name: wrapper + name,
    }
    if before:
        there = before + wrapper
        functions[f"lambda name: name.replace({before!r}, {there!r}, 1)"] = lambda name: name.replace(before, there, 1)
    for text, function in functions.items():
        if all(function(key) == found for key, found in names.items()) and all(function(key) == key for key in present):
            return text
    shown = [f"{key!r}: {found!r}" for key, found in names.items()]
    return "{" + ", ".join(shown[:_MAX_SHOWN] + ["..."] * (len(shown) > _MAX_SHOWN)) + "}"


def _unwrapped(fqn: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        fqn = ("." + fqn).replace("." + prefix, ".")[1:]
    return fqn

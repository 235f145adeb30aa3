"""Which leaves are asked for (`keys`), how target names become saved names (`key_map`), and hints on missing ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from asyncckpt.errors import ConfigError
from asyncckpt.format.state_tree import Node, fqn_of

OTHER_RANKS_ONLY: Node = ("-",)
"""Takes the place of a member of a sequence that belongs to another rank than the reader: the others keep theirs."""


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
    """Return the part of `fqn` before each of its dots, shortest first."""
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
    if node is OTHER_RANKS_ONLY:
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


KeyMap = Mapping[str, str] | Callable[[str], str]
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")
_MAX_SHOWN = 4


def renamer(key_map: KeyMap | None) -> Callable[[str], str]:
    """Return what gives the saved FQN for one of the target.

    Raises:
        ConfigError: `key_map` is neither a mapping nor callable; or gives something else than a name, when called.
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
            raise ConfigError(f"key_map gives {found!r} for {fqn!r}: expected a name", field="key_map")
        return found

    return renamed


def missing_hint(
    missing: Sequence[str], saved_fqns: Collection[str], key_map: KeyMap | None, present: Collection[str] = ()
) -> str:
    """Return advice on keys of the target that were not saved; an empty string where there is none.

    Args:
        missing: The keys, as the target has them.
        saved_fqns: What the checkpoint has.
        key_map: The argument of the load.
        present: Keys of the target that were saved, as the target has them.
    """
    rename = renamer(key_map)
    looked_for = {}
    for key in missing:
        with contextlib.suppress(Exception):  # what `keys` selects in vain need be no name that a function knows
            looked_for[key] = rename(key)
    if isinstance(key_map, Mapping) and key_map:
        reverse = next(((old, new) for old, new in key_map.items() if new in looked_for and old in saved_fqns), None)
        if reverse is not None:
            return (
                f"; key_map goes from the target's names to the saved ones, and {reverse[0]!r}: {reverse[1]!r} in it "
                f"is the other way round: write {reverse[1]!r}: {reverse[0]!r}"
            )
    other = next(((key, name) for key, name in looked_for.items() if key != name), None)
    if other is not None:
        return f"; by key_map {other[0]!r} was looked for as {other[1]!r}, and no such name was saved"
    return _prefix_hint(missing, saved_fqns, present)


def _prefix_hint(missing: Sequence[str], saved_fqns: Iterable[str], present: Collection[str]) -> str:
    """Return advice when missing keys differ from saved ones by a wrapper's prefix only; else an empty string."""
    bare = {_unwrapped(fqn): fqn for fqn in saved_fqns}
    names = {key: bare[_unwrapped(key)] for key in missing if bare.get(_unwrapped(key), key) != key}
    if not names:
        return ""
    key, found = next(iter(names.items()))
    wrapper = next(p for p in _WRAPPER_PREFIXES if (p in key) != (p in found) or key.count(p) != found.count(p))
    where = "the target" if key.count(wrapper) > found.count(wrapper) else "the checkpoint"
    count = "all" if len(names) == len(missing) else str(len(names))
    return (
        f"; {count} of them are there under another name: only {where} has the prefix {wrapper!r} ({key!r} is wanted, "
        f"{found!r} was saved): use the bare model's state_dict(), or pass "
        f"key_map={_advised_map(names, wrapper, present)}"
    )


def _advised_map(names: Mapping[str, str], wrapper: str, present: Collection[str]) -> str:
    """Return a `key_map` as source: from `names` to theirs, which leaves those that are `present` as they are."""
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

"""Names of the target against names of the checkpoint: `key_map`, and what to say of those that are missing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from asyncckpt.errors import ConfigError

KeyMap = Mapping[str, str] | Callable[[str], str]
_WRAPPER_PREFIXES = ("module.", "_orig_mod.")


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


def missing_hint(missing: Sequence[str], saved_fqns: Collection[str], key_map: KeyMap | None) -> str:
    """Return advice on keys of the target that were not saved; an empty string where there is none.

    Args:
        missing: The keys, as the target has them.
        saved_fqns: What the checkpoint has.
        key_map: As it was given.
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
    return _prefix_hint(missing, saved_fqns)


def _prefix_hint(missing: Iterable[str], saved_fqns: Iterable[str]) -> str:
    """Return advice when missing keys differ from saved ones by a wrapper's prefix only; else an empty string."""
    bare = {_unwrapped(fqn): fqn for fqn in saved_fqns}
    for key in missing:
        found = bare.get(_unwrapped(key))
        if found is not None and found != key:
            wrapper = next(p for p in _WRAPPER_PREFIXES if (p in key) != (p in found) or key.count(p) != found.count(p))
            where = "the target" if key.count(wrapper) > found.count(wrapper) else "the checkpoint"
            return (
                f"; only {where} has the prefix {wrapper!r} ({key!r} is wanted, {found!r} was saved): "
                "use the bare model's state_dict(), or pass key_map"
            )
    return ""


def _unwrapped(fqn: str) -> str:
    for prefix in _WRAPPER_PREFIXES:
        fqn = ("." + fqn).replace("." + prefix, ".")[1:]
    return fqn

"""The objects with a `load_state_dict()` in a target: which part of their state is filled, and how they are given it.

A module's tensors are filled in place, in the bare module, as far as `modules` says. Everything else in its state (what
`get_extra_state` gave, parameters that are not yet initialised), and the whole state of any other object, is made new:
a fresh optimizer has no state yet that could be filled. Of one that has, the tensors that fit are filled, to save
memory. Then all of them get their state by `load_state_dict`.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping, MutableMapping, MutableSequence
from typing import Any

import torch

from asyncckpt.format.state_tree import Path, python_key
from asyncckpt.loading.modules import ModuleTarget, Whole
from asyncckpt.per_rank import PerRank


class Targets:
    """A target state dict, and the modules in it.

    Args:
        state_dict: The target.
    """

    def __init__(self, state_dict: Any) -> None:
        self._root = state_dict
        self._modules: dict[Path, ModuleTarget] = {}
        self._kept: set[int] = set()

    def open(self, value: Any, path: Path) -> Any:
        """Return what of an object with a `state_dict()` is filled: of a module its state, else the object itself.

        Raises:
            OpeningError: A module's `state_dict()` raised.
        """
        if not isinstance(value, torch.nn.Module) or not is_loadable(value):
            return value
        module = ModuleTarget(value, path)
        if module.state is None:
            return value
        self._modules[path] = module
        return module.state

    def value_at(self, path: Path) -> Any:
        """Return what stands at a path, a `PerRank`'s value for a `PerRank`."""
        value, rest = self._located(path)
        for key in rest:
            value = unmarked(value)[python_key(key)]
        return unmarked(value)

    def is_module(self, path: Path) -> bool:
        """Whether a module stands at a path, whose state is what is filled."""
        return path in self._modules

    def fixed_at(self, path: Path) -> str | None:
        """Return the type of the container in which the value at a path cannot be replaced; None if it can be."""
        for container in reversed(self._containers(path)):
            if isinstance(container, (MutableSequence, MutableMapping, PerRank)):
                return None
            if not isinstance(container, tuple):
                return type(container).__name__
        return None if isinstance(self._root, MutableMapping) else type(self._root).__name__

    def owner_of(self, path: Path) -> tuple[int, Any]:
        """Return what changes when the value at a path is replaced: the id of a container, and the keys below it."""
        depth = len(path)
        for container in reversed(self._containers(path)):
            depth -= not isinstance(container, PerRank)
            if not isinstance(container, tuple):
                return id(container), path[depth:]
        return id(self._root), path

    def _containers(self, path: Path) -> list[Any]:
        """Return the containers around the value at a path, the outermost first; a `PerRank` counts as one."""
        value, rest = self._located(path)
        found = []
        for key in rest:
            while isinstance(value, PerRank):
                found.append(value)
                value = value.value
            found.append(value)
            value = value[python_key(key)]
        while isinstance(value, PerRank):
            found.append(value)
            value = value.value
        return found

    def replace_at(self, path: Path, new: Any) -> None:
        """Put `new` at a path; an empty dict or list there takes its members instead."""
        root, rest = self._located(path)
        _replace_at(root, rest, new, self._kept)

    def keep_empty(self, container: Any) -> None:
        """Let an empty container stay so: in other places where it stands, too, another one takes its place."""
        self._kept.add(id(container))

    def _located(self, path: Path) -> tuple[Any, Path]:
        if self._modules:
            for length in range(len(path) + 1):
                module = self._modules.get(path[:length])
                if module is not None:
                    return module.state, path[length:]
        return self._root, path

    @property
    def modules(self) -> list[ModuleTarget]:
        """The modules whose tensors are filled in place."""
        return list(self._modules.values())

    def module_at(self, path: Path) -> ModuleTarget | None:
        """Return the module that a leaf belongs to."""
        if self._modules:
            for length in range(len(path)):
                module = self._modules.get(path[:length])
                if module is not None:
                    return module
        return None


def is_loadable(value: Any) -> bool:
    """Whether an object leaf of a target takes a state."""
    return isinstance(value, Whole) or (
        hasattr(value, "state_dict") and callable(getattr(value, "load_state_dict", None))
    )


def unmarked(value: Any) -> Any:
    """Return what `PerRank` marks, or the value itself."""
    while isinstance(value, PerRank):
        value = value.value
    return value


def _replace_at(value: Any, path: Path, new: Any, kept: set[int]) -> Any:
    """Put `new` at `path` inside `value`: in place where the container allows it, rebuilding tuples.

    Args:
        value, path, new: See above.
        kept: Ids of containers that take no members; added to.

    Returns:
        `value`, or the tuple that stands for it now. A `PerRank` stays one, and gets another value.
    """
    if isinstance(value, PerRank):
        value.value = _replace_at(value.value, path, new, kept)
        return value
    if not path:
        return _taken(value, new, kept)
    key = python_key(path[0])
    old = value[key]
    child = _replace_at(old, path[1:], new, kept)
    if child is old:
        return value
    if isinstance(value, tuple):
        members = [child if n == key else member for n, member in enumerate(value)]
        return type(value)(*members) if hasattr(value, "_fields") else tuple(members)
    value[key] = child
    return value


def _taken(old: Any, new: Any, kept: set[int]) -> Any:
    """Return what stands in the place of `old` from now on: itself, with the members of `new`, if it is empty.

    Whoever holds an empty dict, list or deque of the target sees what was saved there. One that stands in several
    places takes what was saved in the first of them; the others get a container of their own.
    """
    if id(old) in kept:
        return new
    kept.add(id(old))
    if isinstance(old, MutableMapping) and not old and isinstance(new, Mapping):
        for key, value in new.items():
            old[key] = value
        if isinstance(old, OrderedDict) and hasattr(new, "_metadata"):
            old._metadata = new._metadata  # type: ignore[attr-defined]
        return old
    if type(new) in (list, deque) and _has_room(old, len(new)) and not old:
        old.extend(new)
        return old
    return new


def _has_room(value: Any, n: int) -> bool:
    return type(value) is list or (type(value) is deque and (value.maxlen is None or value.maxlen >= n))

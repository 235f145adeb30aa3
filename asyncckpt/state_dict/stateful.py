"""Calls `state_dict()` of modules, optimizers and other objects: user code.

Wrappers that only add a prefix to the names (DistributedDataParallel, DataParallel, the result of `torch.compile`) are
removed, around the module and around its submodules, so that the names are those of the bare model.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import torch


class StateDictError(Exception):
    """`state_dict()` of an object raised, or returned a value that cannot be stored. Caught by `flatten`."""


def is_stateful(value: Any) -> bool:
    """Whether `value` is stored as what its `state_dict()` returns."""
    return (
        hasattr(value, "state_dict")
        and not isinstance(value, (type, tuple, list, torch.Tensor))
        and callable(value.state_dict)
    )


def _wrapper_attribute(value: Any) -> str | None:
    """Return the attribute of a wrapper that holds the wrapped module; None for any other value."""
    if isinstance(value, (torch.nn.parallel.DistributedDataParallel, torch.nn.DataParallel)):
        return "module"
    compiled = sys.modules.get("torch._dynamo.eval_frame")  # no module is compiled unless it is imported
    return "_orig_mod" if compiled is not None and isinstance(value, compiled.OptimizedModule) else None


def unwrapped(value: Any) -> Any:
    """Return the bare module of a wrapped one; any other value as it is."""
    while (attribute := _wrapper_attribute(value)) is not None:
        value = getattr(value, attribute)
    return value


class BareNames:
    """Maps names in a module's state to names without the wrappers of its submodules, and back."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._inner: list[str] = []
        for name, child in module.named_modules(remove_duplicate=False):
            attribute = _wrapper_attribute(child)
            if attribute is not None:
                self._inner.append(f"{name}.{attribute}")

    def of(self, name: str) -> str:
        """Return the name of an entry or a submodule without the parts that wrappers add."""
        for inner in reversed(self._inner):  # the innermost first, so that the outer ones still fit
            if name == inner or name.startswith(inner + "."):
                name = inner.rpartition(".")[0] + name[len(inner) :]
        return name

    def wrapped(self, name: str) -> str:
        """Return the module's name for a bare name: the inverse of `of`. The module need not have such an entry."""
        for inner in self._inner:  # the outermost first
            outer, _, attribute = inner.rpartition(".")
            if name == outer or name.startswith(outer + "."):
                name = f"{outer}.{attribute}{name[len(outer) :]}"
        return name

    def strip(self, state: Any) -> Any:
        """Return the state of a module under bare names; the same object if no submodule is wrapped."""
        if not self._inner or not isinstance(state, Mapping):
            return state
        bare = OrderedDict((self.of(name) if isinstance(name, str) else name, value) for name, value in state.items())
        metadata = getattr(state, "_metadata", None)
        if isinstance(metadata, Mapping):
            bare._metadata = OrderedDict((self.of(name), value) for name, value in metadata.items())  # type: ignore[attr-defined]
        return bare


def state_dict_of(value: Any) -> Any:
    """Return the state that is stored for an object with a `state_dict()`.

    Raises:
        StateDictError: Its `state_dict()` raised, or returned an object with a `state_dict()` of its own.
    """
    try:
        if isinstance(value, torch.nn.Module):
            bare = unwrapped(value)
            state = BareNames(bare).strip(bare.state_dict())
        else:
            state = value.state_dict()
    except Exception as error:
        raise StateDictError(f"its state_dict() raised {type(error).__name__}: {error}") from error
    if type(state) is not dict and type(state) is not OrderedDict and is_stateful(state):
        raise StateDictError(f"its state_dict() returned a {type(state).__name__}, which has a state_dict() itself")
    return state


class StateDictCache:
    """Calls `state_dict()` of each object only once, even if the state dict is walked several times. For one save."""

    __slots__ = ("_taken",)

    def __init__(self) -> None:
        self._taken: dict[int, tuple[Any, Any]] = {}  # the object is kept, so that no other one gets its id

    def __call__(self, value: Any, path: tuple[Any, ...] = ()) -> Any:
        """Return the state of `value`.

        Raises:
            StateDictError: The same as from `state_dict_of`.
        """
        found = self._taken.get(id(value))
        if found is None:
            found = self._taken[id(value)] = (value, state_dict_of(value))
        return found[1]

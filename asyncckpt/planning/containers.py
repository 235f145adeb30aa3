"""Containers other than dict, list and tuple: the form that a tree stores for them, and how they are made again.

A container comes back as the type that it extends: a subclass of `Counter` as a `Counter`. The factory of a
`defaultdict` is stored by name, and only if it is one of a few known types: nothing is imported for a name that is read
from a file. A mapping of any other type comes back as a dict.
"""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from asyncckpt.format.tree import FACTORIES, UNSTORED_FACTORY, Node

_TYPES: dict[str, type] = {
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)},
    **{f"collections.{kind.__name__}": kind for kind in (Counter, OrderedDict, defaultdict, deque)},
}
_FACTORIES: dict[str, Callable[[], Any]] = {name: _TYPES[name] for name in FACTORIES}
_NAMES = {factory: name for name, factory in _FACTORIES.items()}

Form = tuple[Any, ...]
"""The third member of a container's node, which plain dicts and lists do not have: see `format.tree`."""


def form_of(value: Mapping[Any, Any]) -> Form | None:
    """Return the form of a mapping that is no OrderedDict; None: it is stored as a dict."""
    if isinstance(value, Counter):
        return ("Counter",)
    if not isinstance(value, defaultdict):
        return None
    factory = value.default_factory
    try:
        return "defaultdict", None if factory is None else _NAMES.get(factory, UNSTORED_FACTORY)
    except TypeError:  # one that cannot be hashed
        return "defaultdict", UNSTORED_FACTORY


def form_in(node: Node) -> Form | None:
    """Return the form that a node of a dict or list has."""
    return node[2] if len(node) > 2 else None


def is_counter(node: Node) -> bool:
    """Whether a node is a Counter."""
    return node[0] == "d" and form_in(node) == ("Counter",)


def has_lost_factory(node: Node) -> bool:
    """Whether a node is a defaultdict whose factory could not be stored."""
    return node[0] == "d" and form_in(node) == ("defaultdict", UNSTORED_FACTORY)


def deque_form(value: deque[Any]) -> Form:
    """Return the form of a deque."""
    return "deque", value.maxlen


def mapping_of(form: Form | None, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Return a new mapping of a form; None: a dict. A defaultdict whose factory is not stored gets no factory."""
    if form is None:
        return dict(pairs)
    if form[0] == "Counter":
        found: Any = Counter()
        dict.update(found, pairs)  # its own would count
        return found
    return defaultdict(None if form[1] is None else _FACTORIES.get(form[1]), pairs)


def sequence_of(form: Form | None, members: list[Any]) -> Any:
    """Return the list, or deque, of a form."""
    return members if form is None else deque(members, form[1])

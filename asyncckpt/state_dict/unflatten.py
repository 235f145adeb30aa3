"""Tree, tensors and objects -> a nested state dict; the forms of containers other than dict, list and tuple.

An instance of a subclass is rebuilt as the standard type: a subclass of `Counter` as a `Counter`. The factory of a
`defaultdict` is stored by name, and only if it is one of a few known types: no name that is read from a file is
imported. A mapping of any other type is rebuilt as a dict.
"""

from __future__ import annotations

import ctypes
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from asyncckpt.format.state_tree import (
    ARRAY,
    COMPOSITE,
    DICT,
    FACTORIES,
    LIST,
    MAPPINGS,
    OBJECT,
    PER_RANK,
    SEQUENCES,
    TENSOR,
    UNSTORED_FACTORY,
    Form,
    Node,
    form_in,
    members,
    python_key,
)
from asyncckpt.per_rank import PerRank
from asyncckpt.state_dict.composite_tensors import TypeOf, compose, registered_type
from asyncckpt.state_dict.numpy_values import array_of

_TYPES: dict[str, type] = {
    **{kind.__name__: kind for kind in (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)},
    **{f"collections.{kind.__name__}": kind for kind in (Counter, OrderedDict, defaultdict, deque)},
}
_FACTORIES: dict[str, Callable[[], Any]] = {name: _TYPES[name] for name in FACTORIES}
_NAMES = {factory: name for name, factory in _FACTORIES.items()}


def mapping_form(value: Mapping[Any, Any]) -> Form | None:
    """Return the form of a mapping that is not an OrderedDict; None: it is stored as a dict."""
    if isinstance(value, Counter):
        return ("Counter",)
    if not isinstance(value, defaultdict):
        return None
    factory = value.default_factory
    try:
        return "defaultdict", None if factory is None else _NAMES.get(factory, UNSTORED_FACTORY)
    except TypeError:  # the factory is not hashable
        return "defaultdict", UNSTORED_FACTORY


def has_lost_factory(node: Node) -> bool:
    """Whether a node is a defaultdict whose factory could not be stored."""
    return node[0] == DICT and form_in(node) == ("defaultdict", UNSTORED_FACTORY)


def deque_form(value: deque[Any]) -> Form:
    """Return the form of a deque."""
    return "deque", value.maxlen


def mapping_of(form: Form | None, pairs: Iterable[tuple[Any, Any]]) -> Any:
    """Return a new mapping of a form; None: a dict. A defaultdict whose factory is not stored gets no factory."""
    if form is None:
        return dict(pairs)
    if form[0] == "Counter":
        found: Any = Counter()
        dict.update(found, pairs)  # `Counter.update` would add to the counts
        return found
    return defaultdict(None if form[1] is None else _FACTORIES.get(form[1]), pairs)


def sequence_of(form: Form | None, members: list[Any]) -> Any:
    """Return the list, or deque, of a form."""
    return members if form is None else deque(members, form[1])


ByNumber = Sequence[Any] | Mapping[int, Any]
"""Tensors or values of objects, by the numbers in a tree."""


class ComposeError(Exception):
    """A tensor cannot be made of its components; `node` is its node. Internal."""

    def __init__(self, node: Node, text: str) -> None:
        super().__init__(text)
        self.node = node


def unflatten(
    tree: Node,
    tensors: ByNumber,
    objects_: ByNumber,
    *,
    marks: bool = False,
    type_of: TypeOf = registered_type,
) -> Any:
    """Rebuild the state dict: containers, order, key types and aliases as saved.

    Args:
        tree: The tree.
        tensors: Tensors by number.
        objects_: Python values by object number.
        marks: Whether a `PerRank` value is returned as a `PerRank`; else the plain value.
        type_of: Returns the type of a full name, for composite tensors.

    Raises:
        ComposeError: A tensor cannot be made of its components.
    """
    return Unflattener(tensors, objects_, marks=marks, type_of=type_of).value_of(tree)


class Unflattener:
    """Rebuilds one tree, or several that share tensors. The arguments are those of `unflatten`.

    Attributes:
        composites: The composite tensors so far, by node; may be given before.
    """

    def __init__(
        self,
        tensors: ByNumber,
        objects_: ByNumber,
        *,
        marks: bool = False,
        type_of: TypeOf = registered_type,
    ) -> None:
        self._tensors, self._objects, self._marks, self._type_of = tensors, objects_, marks, type_of
        self._arrays: dict[int, Any] = {}
        self.composites: dict[Node, torch.Tensor] = {}

    def value_of(self, node: Node) -> Any:
        """Return the value of a node."""
        kind = node[0]
        if kind == TENSOR:
            return self._tensors[node[1]]
        if kind == OBJECT:
            return self._objects[node[1]]
        if kind in MAPPINGS:
            return self._mapping(node)
        if kind == PER_RANK:
            value = self.value_of(node[1])
            return PerRank(value) if self._marks else value
        if kind in SEQUENCES:
            inner = [self.value_of(child) for child in node[1]]
            return sequence_of(form_in(node), inner) if kind == LIST else tuple(inner)
        if kind == ARRAY:
            return self._array(node[1])
        if kind == COMPOSITE:
            return self._composite(node)
        hoisted = self._tensors[node[1]].contiguous()
        return ctypes.string_at(hoisted.data_ptr(), hoisted.numel())

    def _mapping(self, node: Node) -> Any:
        items = node[1]
        pairs = ((python_key(items[i]), self.value_of(items[i + 1])) for i in range(0, len(items), 2))
        if node[0] == DICT:
            return mapping_of(form_in(node), pairs)
        ordered = OrderedDict(pairs)
        if node[2] is not None:
            metadata = self._objects[node[2]]
            ordered._metadata = OrderedDict(metadata) if isinstance(metadata, dict) else metadata  # type: ignore[attr-defined]
        return ordered

    def _composite(self, node: Node) -> torch.Tensor:
        found = self.composites.get(node)
        if found is None:
            tensors = {str(name): self.value_of(child) for name, child in members(node)}
            try:
                found = compose(node[3], tensors, self._objects[node[2]], self._type_of)
            except Exception as error:  # whatever torch, or the class, raises
                raise ComposeError(node, f"{type(error).__name__}: {error}") from error
            self.composites[node] = found
        return found

    def _array(self, number: int) -> Any:
        if number not in self._arrays:
            self._arrays[number] = array_of(self._tensors[number])
        return self._arrays[number]

"""The leaves of a checkpoint under one numbering, whatever number of ranks wrote them."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from asyncckpt.format.tree import Node, fqn_of, leaves
from asyncckpt.storage.contents import Contents, SavedTensor

_logger = logging.getLogger("asyncckpt.loading")


class SavedTree:
    """See the module.

    Attributes:
        tree: The skeleton; its leaves number `tensors` and `objects`.
        tensors: By tensor number.
        objects: By object number: (rank, the rank's number of it). Of objects that several ranks hold, the lowest's.
    """

    def __init__(self, contents: Contents) -> None:
        self.tensors: list[SavedTensor] = list(contents.tensors.values())
        self.objects: list[tuple[int, int]] = []
        self._numbers = {tensor.fqn: n for n, tensor in enumerate(self.tensors)}
        self.tree: Node = ("d", ())
        for rank, part in enumerate(contents.ranks):
            structure = part.structure
            tensor_numbers = [self._numbers[entry.fqn] for entry in structure.tensors]
            first_object = len(self.objects)
            self.objects += [(rank, n) for n in range(structure.n_objects)]
            renumbered = _renumbered(structure.tree, tensor_numbers, first_object) if rank else structure.tree
            self.tree = _merged(self.tree, renumbered) if rank else renumbered

    @cached_property
    def leaves(self) -> dict[str, Node]:
        """Leaf nodes by FQN, in the order of the state dict."""
        return {fqn_of(path): node for path, node in leaves(self.tree)}

    @cached_property
    def containers(self) -> set[str]:
        """FQNs of all containers that hold a leaf."""
        return {prefix for fqn in self.leaves for prefix in prefixes(fqn)}


def prefixes(fqn: str) -> list[str]:
    """Return what stands before each dot of `fqn`, shortest first."""
    found, at = [], fqn.find(".")
    while at >= 0:
        found.append(fqn[:at])
        at = fqn.find(".", at + 1)
    return found


def kind_of(node: Node) -> str:
    """Name a leaf's kind for messages."""
    return "tensor" if node[0] == "T" else "object"


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
        return (kind, kept) if kept else None
    return None


def _renumbered(node: Node, tensors: list[int], first_object: int) -> Node:
    kind = node[0]
    if kind in ("d", "o"):
        items = tuple(_renumbered(m, tensors, first_object) if i % 2 else m for i, m in enumerate(node[1]))
        if kind == "d":
            return (kind, items)
        return (kind, items, None if node[2] is None else node[2] + first_object)
    if kind in ("l", "t"):
        return (kind, tuple(_renumbered(m, tensors, first_object) for m in node[1]))
    return (kind, node[1] + first_object) if kind == "O" else (kind, tensors[node[1]])


def _merged(mine: Node, other: Node) -> Node:
    """Join two ranks' trees: mappings by key, everything else as the lower rank has it."""
    if mine[0] not in ("d", "o") or other[0] not in ("d", "o"):
        return mine
    members = dict(zip(mine[1][::2], mine[1][1::2], strict=True))
    for key, child in zip(other[1][::2], other[1][1::2], strict=True):
        members[key] = _merged(members[key], child) if key in members else child
    return (mine[0], tuple(m for pair in members.items() for m in pair), *mine[2:])

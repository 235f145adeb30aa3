"""The leaves of a checkpoint as one reader sees them: under one numbering, whatever number of ranks wrote them.

The ranks' trees are joined, the reader's own number first, then the others in order; at one path the first wins.
Mappings are joined by key, sequences of one kind and length member by member. What a rank marked as its own (`"r"`) is
seen by the same rank number of a world of the same size only; for everybody else it is `away`.
"""

from __future__ import annotations

import contextlib
from bisect import bisect_right
from collections.abc import Callable, Iterator
from functools import cached_property
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.errors import AsyncCkptError
from asyncckpt.format.state_tree import Node, Path, fqn_of, leaves, named_leaves
from asyncckpt.loading.selection import HOLE, prefixes
from asyncckpt.storage.contents import Contents, SavedTensor

_INNER = ("d", "o", "l", "t")


class SavedTree:
    """See the module.

    Args:
        contents: The checkpoint.
        reader: Who reads it.

    Attributes:
        own: The rank whose values the reader gets first; None at another world size, when none is its own.
        tree: The skeleton, without `"r"`; its leaves number `tensors`, and objects for `object_at`.
        tensors: By tensor number.
        keeps_empty: Whether an empty container that was saved is in the tree: other formats may have no word for it.
        is_plain: There is one rank, and it is the reader's own.
    """

    def __init__(self, contents: Contents, reader: RankInfo) -> None:
        n_ranks = len(contents.ranks)
        self.own = reader.rank if reader.world_size == n_ranks else None
        self.is_plain = n_ranks == 1 and self.own == 0
        self.keeps_empty = contents.source is None
        self.tensors: list[SavedTensor] = list(contents.tensors.values())
        self._first_objects: list[int] = []
        self._away: dict[str, None] = {}
        first_object = 0
        for part in contents.ranks:
            self._first_objects.append(first_object)
            first_object += part.structure.n_objects
        numbers = {tensor.fqn: n for n, tensor in enumerate(self.tensors)}
        order = sorted(range(n_ranks), key=lambda rank: (rank != self.own, rank))
        joined: Node | None = None
        known: set[Node] = set()
        for rank in order:
            structure = contents.ranks[rank].structure
            if structure.tree in known:  # an earlier one has every path of it
                continue
            known.add(structure.tree)
            seen: Node | None = structure.tree
            if rank or _has_per_rank(structure.tree):  # else its numbers are right already
                tensors = [numbers[entry.fqn] for entry in structure.tensors]
                view = _View(tensors, self._first_objects[rank], own=rank == self.own)
                seen = view.of(structure.tree, ())
                self._away.update(dict.fromkeys(view.away))
            joined = seen if joined is None else joined if seen is None else _joined(joined, seen)
        self.tree: Node = joined or ("d", ())

    def restore_numbers(self, value_of: Callable[[int], Any]) -> None:
        """Let the states of optimizers have numbers as keys again, where they were saved under texts of them.

        IMPORTANT: `dcp.save` makes these texts, and an optimizer would take its parameters' state for that of others.

        Args:
            value_of: The value of an object, by its number.
        """
        self.tree = _numbered(self.tree, value_of)

    def object_at(self, number: int) -> tuple[int, int]:
        """Return (rank, the rank's own number) of an object."""
        rank = bisect_right(self._first_objects, number) - 1
        return rank, number - self._first_objects[rank]

    @cached_property
    def leaves(self) -> dict[str, Node]:
        """Leaf nodes by FQN, in the order of the state dict."""
        return named_leaves(self.tree)

    def node_at(self, fqn: str) -> tuple[Path, Node] | None:
        """Return (typed path, node) of a leaf or container, an empty one too."""
        return self._nodes.get(fqn)

    def gathered(self, fqn: str) -> tuple[Path, Node] | None:
        """Return (path, node) of a dict of all leaves whose names begin with `fqn`, where no container is called so.

        Other formats, and states of modules, have flat names with dots in them.
        """
        if fqn not in self._beginnings:
            return None
        below = [(name, node) for name, node in self.leaves.items() if name.startswith(f"{fqn}.")]
        return (fqn,), ("d", tuple(part for name, node in below for part in (name[len(fqn) + 1 :], node)))

    @cached_property
    def _beginnings(self) -> set[str]:
        return {prefix for fqn in self.leaves for prefix in prefixes(fqn)}

    @cached_property
    def _nodes(self) -> dict[str, tuple[Path, Node]]:
        found: dict[str, tuple[Path, Node]] = {}
        for path, node in _all_nodes(self.tree, ()):
            found.setdefault(fqn_of(path), (path, node))
        return found

    @cached_property
    def order(self) -> dict[str, int]:
        """Where each leaf or container stands, among all, by FQN."""
        return {fqn: n for n, fqn in enumerate(self._nodes)}

    @cached_property
    def away(self) -> tuple[str, ...]:
        """FQNs of leaves that belong to other ranks than the reader."""
        return tuple(fqn for fqn in self._away if fqn not in self.leaves) if self._away else ()

    def is_away(self, fqn: str) -> bool:
        """Whether `fqn`, which is neither leaf nor container of the tree, belongs to other ranks: or all in it does."""
        return bool(self.away) and (fqn in self._away_names or not self._away.keys().isdisjoint(prefixes(fqn)))

    @cached_property
    def _away_names(self) -> set[str]:
        return {name for fqn in self.away for name in (fqn, *prefixes(fqn))}

    def without_holes(self, node: Node) -> Node:
        """Return `node`, a part of the tree, as a state dict is built from it."""
        return _closed(node) if self._away else node


def kind_of(node: Node) -> str:
    """Name a node's kind for messages."""
    return "tensor" if node[0] == "T" else "container" if node[0] in _INNER else "object"


def _all_nodes(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    if node is not HOLE:
        yield path, node
    if node[0] in _INNER:
        keyed = zip(node[1][::2], node[1][1::2], strict=True) if node[0] in ("d", "o") else enumerate(node[1])
        for key, child in keyed:
            yield from _all_nodes(child, (*path, key))


def _numbered(node: Node, value_of: Callable[[int], Any]) -> Node:
    if node[0] not in _INNER:
        return node
    if node[0] not in ("d", "o"):
        members = tuple(_numbered(member, value_of) for member in node[1])
        return (node[0], members, *node[2:]) if any(a is not b for a, b in zip(members, node[1], strict=True)) else node
    entries = dict(zip(node[1][::2], node[1][1::2], strict=True))
    found = {key: _numbered(child, value_of) for key, child in entries.items()}
    state = found.get("state", HOLE)
    if "param_groups" in found and state[0] in ("d", "o") and state[1]:
        keys = state[1][::2]
        if all(type(key) is str and key.isdecimal() and str(int(key)) == key for key in keys):
            numbers = _parameter_numbers(found["param_groups"], value_of)
            if numbers.issuperset(map(int, keys)):
                items = tuple(int(one) if n % 2 == 0 else one for n, one in enumerate(state[1]))
                found["state"] = (state[0], items, *state[2:])
    if all(found[key] is entries[key] for key in entries):
        return node
    return (node[0], tuple(one for item in found.items() for one in item), *node[2:])


def _parameter_numbers(groups: Node, value_of: Callable[[int], Any]) -> set[int]:
    """Return by which numbers the groups of an optimizer know its parameters; none, where they know them by names."""
    leaves_of_groups = [
        node for path, node in leaves(groups) if node[0] == "O" and len(path) > 1 and path[1] == "params"
    ]
    numbers: set[int] = set()
    with contextlib.suppress(AsyncCkptError, OSError):  # who asks for what cannot be read is told then
        for node in leaves_of_groups:
            value = value_of(node[1])
            numbers.update(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
    return numbers


def _has_per_rank(node: Node) -> bool:
    kind = node[0]
    if kind == "r":
        return True
    if kind not in _INNER:
        return False
    members = node[1][1::2] if kind in ("d", "o") else node[1]
    return any(_has_per_rank(m) for m in members if m[0] in _INNER or m[0] == "r")


class _View:
    """One rank's tree under the numbering of all ranks.

    Args:
        tensors: The number of each of the rank's tensors.
        first_object: What its object numbers are counted from.
        own: Whether it is the reader's own rank.

    Attributes:
        away: FQNs of leaves that belong to this rank, when that is not the reader's.
    """

    def __init__(self, tensors: list[int], first_object: int, *, own: bool) -> None:
        self._tensors, self._first_object, self._own = tensors, first_object, own
        self.away: list[str] = []

    def of(self, node: Node, path: Path) -> Node | None:
        """Return `node` renumbered; None when there is nothing in it but what belongs to another rank."""
        kind = node[0]
        if kind in ("T", "N", "B"):
            return (kind, self._tensors[node[1]])
        if kind == "O":
            return (kind, node[1] + self._first_object)
        if kind == "r":
            if self._own:
                return self.of(node[1], path)
            self.away += [fqn_of(leaf) for leaf, _ in leaves(node[1], path)]
            return None
        if kind in ("l", "t"):
            members = [self.of(member, (*path, n)) for n, member in enumerate(node[1])]
            if members and all(m is None for m in members):
                return None
            return (kind, tuple(HOLE if m is None else m for m in members), *node[2:])
        items: list[Any] = []
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            seen = self.of(child, (*path, key))
            if seen is not None:
                items += (key, seen)
        if node[1] and not items:
            return None
        if kind == "d":
            return (kind, tuple(items), *node[2:])
        return (kind, tuple(items), None if node[2] is None else node[2] + self._first_object)


def _joined(first: Node, other: Node) -> Node:
    if first is HOLE:
        return other
    if first[0] in ("d", "o") and other[0] in ("d", "o"):
        members = dict(zip(first[1][::2], first[1][1::2], strict=True))
        for key, child in zip(other[1][::2], other[1][1::2], strict=True):
            members[key] = _joined(members[key], child) if key in members else child
        return (first[0], tuple(m for pair in members.items() for m in pair), *first[2:])
    if first[0] in ("l", "t") and first[0] == other[0] and len(first[1]) == len(other[1]):
        return (first[0], tuple(_joined(a, b) for a, b in zip(first[1], other[1], strict=True)), *first[2:])
    return first


def _closed(node: Node) -> Node:
    kind = node[0]
    if kind in ("d", "o"):
        return (kind, tuple(_closed(m) if i % 2 else m for i, m in enumerate(node[1])), *node[2:])
    if kind in ("l", "t"):
        return (kind, tuple(_closed(m) for m in node[1] if m is not HOLE), *node[2:])
    return node

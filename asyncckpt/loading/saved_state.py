"""A checkpoint as one reader sees it: its tree under one numbering, its objects, and new values built from them.

The trees of all saving ranks are joined: first that of the reader's rank number, then the others in order; if several
have a leaf at one path, the first is used. Mappings are joined by key, sequences of the same kind and length member by
member. A `PerRank` value (node kind "r") is seen only by a reader with the same rank number and world size; for all
other readers it belongs to other ranks. At another world size, `SavedTree.nodes_of_ranks` gives those of all ranks to a
`PerRank(reshard=...)` of the target.
"""

from __future__ import annotations

import contextlib
import json
import logging
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch

from asyncckpt.config import RankInfo
from asyncckpt.errors import (
    AliasMismatchError,
    AsyncCkptError,
    CorruptCheckpointError,
    PerRankUnavailableError,
    PickledLeafError,
    StateLoadError,
    UnsupportedLeafError,
)
from asyncckpt.format.manifest import PLANNER_KEY
from asyncckpt.format.names import per_rank_name, split_per_rank_name
from asyncckpt.format.objects import part_offsets, sharded_names
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
    CONTAINERS,
    DICT,
    EMPTY_PART,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    PER_RANK,
    SEQUENCES,
    TENSOR,
    TENSOR_KINDS,
    Key,
    Node,
    Path,
    composite_nodes,
    context_digest_of,
    fqn_of,
    has_own_nodes,
    leaves,
    members,
    named_leaves,
    whole_leaves,
)
from asyncckpt.format.structure import find_overlap
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf, unread_error, unread_leaves
from asyncckpt.loading.byte_ranges import SavedBox
from asyncckpt.loading.fetch import Filler, tensor_for
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, prefixes
from asyncckpt.loading.target_tensors import Filling, Reused, Tie, target_tensor
from asyncckpt.loading.tensor_writers import MapLocation, device_of, relocated
from asyncckpt.state_dict.composite_tensors import TypeOf, check_rest, how_to_register, registered_type, unknown_type
from asyncckpt.state_dict.flatten import object_fqn
from asyncckpt.state_dict.leaf_codecs import decode_leaf
from asyncckpt.state_dict.pickling import importable_type, unpickle
from asyncckpt.state_dict.unflatten import ComposeError, Unflattener
from asyncckpt.storage.contents import Contents, SavedTensor, corrupt, read_objects
from asyncckpt.storage.files import Files
from asyncckpt.torch_tensors import torch_dtype

_INNER = (*MAPPINGS, *SEQUENCES)


class DoubtfulComponent(NamedTuple):
    """A component of a composite tensor that several ranks have stored, maybe of incompatible shards.

    Attributes:
        fqn: FQN of the composite tensor.
        kind: Its kind.
        described_at: (rank, number) of its object in the tree that is read.
        component: Name of the component.
        ranks: Ranks that have stored elements of the component, and have another class, context or components of the
            composite tensor than this rank.
        own: Those of its components of which ranks have stored their own; that of this rank.
    """

    fqn: str
    kind: str
    described_at: tuple[int, int]
    component: str
    ranks: frozenset[int]
    own: tuple[SavedTensor, ...]


class SavedTree:
    """The leaves of a checkpoint as one reader sees them, whatever number of ranks has saved it.

    Args:
        contents: The checkpoint.
        reader: The rank that reads.

    Attributes:
        reader_rank: The saving rank with the reader's rank number; None at another world size.
        tree: The joined tree, without "r" nodes. Its leaves hold numbers of `tensors` and numbers for `object_at`.
        tensors: The saved tensors, by number.
        keeps_empty_containers: Whether empty containers are in the tree; other formats may not be able to store them,
            and planners of torch.distributed.checkpoint leave them out.
        is_single_rank: Whether only one rank has saved, and its number is the reader's.
        empty_parts: Numbers of tensors that this rank has stored for shards without elements, and that it sees where no
            other rank has stored a composite tensor.
        unlike: At another world size, FQNs under which a rank has another kind of value than the rank whose value is in
            the tree, or a list of another length.
    """

    def __init__(self, contents: Contents, reader: RankInfo) -> None:
        n_ranks = len(contents.ranks)
        self.reader_rank = reader.rank if reader.world_size == n_ranks else None
        self.is_single_rank = n_ranks == 1 and self.reader_rank == 0
        if contents.source is None:
            self.keeps_empty_containers = PLANNER_KEY not in contents.manifest.metadata
        else:
            self.keeps_empty_containers = contents.source.kind == "torch"
        self.tensors: list[SavedTensor] = list(contents.tensors.values())
        self._contents = contents
        self._first_objects: list[int] = []
        self._first_with_tree: dict[int, int] = {}
        self._kinds: dict[int, dict[str, dict[str, tuple[str, bytes]]]] = {}
        self._per_rank_names: dict[str, None] = {}
        self.unlike: set[str] = set()
        self.empty_parts: set[int] = set()
        self._namesakes: dict[str, dict[Path, Node]] = {}
        """FQN -> nodes at further paths that have this FQN. IMPORTANT: filled when `_nodes` is first read."""

        empty: dict[str, None] = {}
        first_object = 0
        for part in contents.ranks:
            self._first_objects.append(first_object)
            first_object += part.structure.n_objects
        self._numbers = {tensor.fqn: n for n, tensor in enumerate(self.tensors)}
        order = sorted(range(n_ranks), key=lambda rank: (rank != self.reader_rank, rank))
        joined: Node | None = None
        known: dict[Node, int] = {}
        for rank in order:
            structure = contents.ranks[rank].structure
            self._first_with_tree[rank] = known.setdefault(structure.tree, rank)
            if self._first_with_tree[rank] != rank:  # an equal tree has been joined already
                continue
            seen: Node | None = structure.tree
            if rank or has_own_nodes(structure.tree):  # else it has the common numbers
                view = self._view(rank, own=rank == self.reader_rank)
                seen = view.renumbered(structure.tree, ())
                self._check_empty_parts(rank, view)
                self._per_rank_names.update(dict.fromkeys(view.other_ranks_only))
                empty.update(dict.fromkeys(view.empty_of_other_ranks))
            if joined is None or seen is None:
                joined = seen if joined is None else joined
            else:
                joined = self._join(joined, seen, ())
        self._are_trees_equal = len(known) == 1
        self.tree: Node = joined or (DICT, ())
        absent = (fqn for fqn in empty if _node_at(self.tree, fqn) in (None, OTHER_RANKS_ONLY))
        self._per_rank_names.update(dict.fromkeys(absent))

    def _join(self, first: Node, other: Node, path: Path) -> Node:
        """Return `first` with what only `other` has.

        IMPORTANT: integer keys in states of optimizers are numbers of this rank's parameters. A reader that gets back
        what it has saved gets nothing else in such a state, and nothing in its groups: only states with names as keys
        are joined.
        """
        if first is OTHER_RANKS_ONLY:
            return other
        if first[0] == TENSOR and first[1] in self.empty_parts:
            return other if other[0] == COMPOSITE else first
        if first[0] in MAPPINGS and other[0] in MAPPINGS:
            if self.reader_rank is not None and is_optimizer_state(first) and not _are_joined(first, other):
                return self._with_composites(first, other) if self.empty_parts else first
            items = dict(zip(first[1][::2], first[1][1::2], strict=True))
            for key, child in zip(other[1][::2], other[1][1::2], strict=True):
                items[key] = self._join(items[key], child, (*path, key)) if key in items else child
            return (first[0], tuple(m for pair in items.items() for m in pair), *first[2:])
        if first[0] in SEQUENCES and first[0] == other[0] and len(first[1]) == len(other[1]):
            pairs = enumerate(zip(first[1], other[1], strict=True))
            return (first[0], tuple(self._join(a, b, (*path, n)) for n, (a, b) in pairs), *first[2:])
        are_unlike = other is not OTHER_RANKS_ONLY and (first[0] != other[0] or first[0] in SEQUENCES)
        if self.reader_rank is None and are_unlike:
            self.unlike.add(fqn_of(path))
        return first

    def _with_composites(self, first: Node, other: Node) -> Node:
        """Return `first` with the composite tensors that `other` has in place of shards without elements."""
        if first[0] == TENSOR and first[1] in self.empty_parts:
            return other if other[0] == COMPOSITE else first
        if first[0] in MAPPINGS and other[0] in MAPPINGS:
            theirs, items = dict(zip(other[1][::2], other[1][1::2], strict=True)), list(first[1])
            for n, key in enumerate(first[1][::2]):
                if key in theirs:
                    items[2 * n + 1] = self._with_composites(items[2 * n + 1], theirs[key])
            return (first[0], tuple(items), *first[2:])
        if first[0] in SEQUENCES and first[0] == other[0] and len(first[1]) == len(other[1]):
            both = zip(first[1], other[1], strict=True)
            return (first[0], tuple(self._with_composites(mine, theirs) for mine, theirs in both), *first[2:])
        return first

    def _check_empty_parts(self, rank: int, view: _RankView) -> None:
        for number in view.empty_parts:
            if not self.tensors[number].is_own_and_empty:
                name, index = self.tensors[number].fqn, self._contents.manifest.ranks[rank].index_name
                raise corrupt(
                    self._contents.path, index, f"{name!r} is marked as a part without elements, and has some"
                )
        self.empty_parts.update(view.empty_parts if rank == self.reader_rank else ())

    def _view(self, rank: int, *, own: bool) -> _RankView:
        entries = self._contents.ranks[rank].structure.tensors
        return _RankView(lambda n: self._numbers[entries[n].fqn], self._first_objects[rank], own=own)

    def nodes_of_ranks(self, fqn: str) -> list[Node] | None:
        """Return what each saving rank has saved under `fqn`, by rank, with its `PerRank` values.

        Returns:
            None: It is for no `reshard`: the reader has the world size of the save; or no rank saved a `PerRank` there,
            at it or below; or a rank saved nothing there.
        """
        if self.reader_rank is not None or not self.is_other_ranks_only(fqn):
            return None
        found: list[Node] = []
        for rank, part in enumerate(self._contents.ranks):
            node = _node_at(part.structure.tree, fqn)
            seen = None if node is None else self._view(rank, own=True).renumbered(node, ())
            if seen is None:
                return None
            found.append(seen)
        return found

    def restore_parameter_numbers(self, value_of: Callable[[int], Any]) -> None:
        """In states of optimizers, turn parameter numbers that were saved as strings into integers again.

        IMPORTANT: `dcp.save` turns these keys into strings. An optimizer would not find its parameters' state.

        Args:
            value_of: Returns the value of an object, by its number.
        """
        self.tree = _with_parameter_numbers(self.tree, value_of)

    def object_at(self, number: int) -> tuple[int, int]:
        """Return (rank, the object's number in that rank's structure) of an object."""
        rank = bisect_right(self._first_objects, number) - 1
        return rank, number - self._first_objects[rank]

    @cached_property
    def leaves(self) -> dict[str, Node]:
        """Leaf nodes by FQN, in the order of the state dict."""
        return named_leaves(self.tree)

    def node_at(self, fqn: str, path: Path = ()) -> tuple[Path, Node] | None:
        """Return (typed path, node) of a leaf or container; None: there is none of this FQN.

        Args:
            fqn: The FQN. Several containers may have it, since dots join the keys.
            path: The path that is preferred; if nothing of this FQN is there, the first path is taken.
        """
        found = self._nodes.get(fqn)
        other = self._namesakes.get(fqn, {}).get(path)
        return found if other is None else (path, other)

    def dict_of_prefix(self, fqn: str) -> tuple[Path, Node] | None:
        """Return (path, node) of a dict of all leaves whose FQNs begin with `fqn` and a dot; None: there are none.

        For names that are not containers: other formats, and states of modules, have flat names with dots in them.
        """
        if fqn not in self._prefixes:
            return None
        below: dict[str, Node] = {}
        for path, node in whole_leaves(self.tree):
            name = fqn_of(path)
            if name.startswith(f"{fqn}."):
                below.setdefault(name[len(fqn) + 1 :], node)  # of several paths with one name, the first counts
        return (fqn,), (DICT, tuple(part for item in below.items() for part in item))

    @cached_property
    def _prefixes(self) -> set[str]:
        return {prefix for fqn in self.leaves for prefix in prefixes(fqn)}

    @cached_property
    def _nodes(self) -> dict[str, tuple[Path, Node]]:
        found: dict[str, tuple[Path, Node]] = {}
        for path, node in all_nodes(self.tree, ()):
            fqn = fqn_of(path)
            if found.setdefault(fqn, (path, node))[0] is not path:
                self._namesakes.setdefault(fqn, {})[path] = node
        return found

    @cached_property
    def positions(self) -> dict[str, int]:
        """Position of each leaf and container in the order of the tree, by FQN."""
        return {fqn: n for n, fqn in enumerate(self._nodes)}

    @cached_property
    def other_ranks_only(self) -> tuple[str, ...]:
        """FQNs of leaves that belong to other ranks than the reader."""
        names = self._per_rank_names
        return tuple(fqn for fqn in names if fqn not in self.leaves) if names else ()

    def is_other_ranks_only(self, fqn: str) -> bool:
        """Whether `fqn`, which is not in the tree, is a leaf of other ranks, or a container of such leaves only."""
        if not self.other_ranks_only:
            return False
        return fqn in self._other_ranks_prefixes or not self._per_rank_names.keys().isdisjoint(prefixes(fqn))

    @cached_property
    def _other_ranks_prefixes(self) -> set[str]:
        return {name for fqn in self.other_ranks_only for name in (fqn, *prefixes(fqn))}

    @cached_property
    def doubtful_components(self) -> dict[str, list[DoubtfulComponent]]:
        """By stored name, the components that several ranks have stored, maybe of incompatible shards.

        Composite tensors may share a component; it is in the list once for each of them. `find_incompatible_shards`
        decides: it takes the objects to know which are sharded, and the values to compare.
        """
        first: dict[Node, str] = {}
        for path, node in composite_nodes(self.tree):
            first.setdefault(node, fqn_of(path))
        names = map(split_per_rank_name, self._numbers) if first else ()
        of_ranks = {name[0] for name in names if name is not None}
        found: dict[str, list[DoubtfulComponent]] = {}
        for node, fqn in first.items():
            components = {str(at[0]): self.tensors[leaf[1]] for at, leaf in leaves(node)}
            own = tuple(tensor for tensor in components.values() if _common_name(tensor.fqn) in of_ranks)
            for name, tensor in components.items():
                ranks = self._unlike_ranks(fqn, node, tensor)
                if ranks or own:
                    part = DoubtfulComponent(fqn, node[3], self.object_at(node[2]), name, ranks, own)
                    found.setdefault(tensor.fqn, []).append(part)
        return found

    def _unlike_ranks(self, fqn: str, node: Node, component: SavedTensor) -> frozenset[int]:
        """Return the ranks that have stored elements of a component, and have not the same composite tensor."""
        digest, first = context_digest_of(node), self._first_with_tree
        if digest is None or self._are_trees_equal:
            return frozenset()
        here, unlike = first[self.object_at(node[2])[0]], set()
        for rank in {rank for rank, _ in component.chunks if first[rank] != here}:
            kinds = self._kinds_in(first[rank]).get(component.fqn, {})
            if kinds and (node[3], digest) not in ([kinds[fqn]] if fqn in kinds else kinds.values()):
                unlike.add(rank)
        return frozenset(unlike)

    def _kinds_in(self, rank: int) -> dict[str, dict[str, tuple[str, bytes]]]:
        """Return kind and digest of each composite tensor in a rank's tree that has one: stored name -> FQN -> these.

        The stored names are those of the components; the FQNs those of the tensors that have the component. Ranks with
        equal trees have the same, except for the names of components of their own.
        """
        if rank not in self._kinds:
            structure, found = self._contents.ranks[rank].structure, self._kinds.setdefault(rank, {})
            for path, node in composite_nodes(structure.tree):
                digest = context_digest_of(node)
                if digest is None:
                    continue
                for _, leaf in leaves(node):
                    found.setdefault(structure.tensors[leaf[1]].fqn, {})[fqn_of(path)] = (node[3], digest)
        return self._kinds[rank]

    def fqn_of_node(self, node: Node) -> str:
        """Return the first FQN of a node of the tree, for messages."""
        return next((fqn for fqn, (_, found) in self._nodes.items() if found == node), "")

    def without_other_ranks(self, node: Node) -> Node:
        """Return `node`, a part of the tree, without members that stand for leaves of other ranks."""
        return _without_other_ranks(node) if self._per_rank_names else node


def _common_name(stored: str) -> str:
    own = split_per_rank_name(stored)
    return stored if own is None else own[0]


def kind_of(node: Node) -> str:
    """Return the name of a node's kind, for messages; of a composite tensor its own kind, such as its class."""
    if node[0] == COMPOSITE:
        return str(node[3])
    return "tensor" if node[0] == TENSOR else "container" if node[0] in _INNER else "object"


def _node_at(node: Node, fqn: str) -> Node | None:
    """Return the node at `fqn` in the tree of one rank; None: there is none."""
    while node[0] == PER_RANK:
        node = node[1]
    for key, child in members(node):
        name = str(key)
        if name == fqn:
            return child
        found = _node_at(child, fqn[len(name) + 1 :]) if fqn.startswith(f"{name}.") else None
        if found is not None:
            return found
    return None


def all_nodes(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield (typed path, node) of `node`, which is at `path`, and of every leaf and container below it."""
    if node is not OTHER_RANKS_ONLY:
        yield path, node
    for key, child in members(node):
        yield from all_nodes(child, (*path, key))


def _with_parameter_numbers(node: Node, value_of: Callable[[int], Any]) -> Node:
    if node[0] not in _INNER or not any(child[0] in _INNER for _, child in members(node)):
        return node  # neither a state of an optimizer nor a container of one
    if node[0] not in MAPPINGS:
        made = tuple(_with_parameter_numbers(member, value_of) for member in node[1])
        return (node[0], made, *node[2:]) if any(a is not b for a, b in zip(made, node[1], strict=True)) else node
    entries = dict(zip(node[1][::2], node[1][1::2], strict=True))
    found = {key: _with_parameter_numbers(child, value_of) for key, child in entries.items()}
    state = found.get("state", OTHER_RANKS_ONLY)
    if "param_groups" in found and state[0] in MAPPINGS and state[1]:
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
    """Return the parameter numbers in an optimizer's saved groups; empty if the groups hold names."""
    leaves_of_groups = [
        node for path, node in leaves(groups) if node[0] == OBJECT and len(path) > 1 and path[1] == "params"
    ]
    numbers: set[int] = set()
    with contextlib.suppress(AsyncCkptError, OSError):  # a leaf that cannot be read is reported when it is requested
        for node in leaves_of_groups:
            value = value_of(node[1])
            numbers.update(one for one in (value if isinstance(value, list) else [value]) if type(one) is int)
    return numbers


class _RankView:
    """One rank's tree under the numbering of all ranks.

    Args:
        tensor_number: Returns the common number of the rank's tensor of a number.
        first_object: Common number of the rank's object 0.
        own: Whether it is the reader's own rank.

    Attributes:
        other_ranks_only: FQNs of the rank's `PerRank` leaves, unless it is the reader's own rank.
        empty_of_other_ranks: FQNs of its `PerRank` values that hold no leaf, unless it is the reader's own rank.
        empty_parts: Common numbers of the rank's parts without elements. Only the own rank sees them, as tensors.
    """

    def __init__(self, tensor_number: Callable[[int], int], first_object: int, *, own: bool) -> None:
        self._tensor_number, self._first_object, self._own = tensor_number, first_object, own
        self.other_ranks_only: list[str] = []
        self.empty_of_other_ranks: list[str] = []
        self.empty_parts: list[int] = []

    def renumbered(self, node: Node, path: Path) -> Node | None:
        """Return `node` with common numbers; None if it holds only leaves that belong to another rank."""
        kind = node[0]
        if kind in (TENSOR, ARRAY, BYTES):
            return (kind, self._tensor_number(node[1]))
        if kind == OBJECT:
            return (kind, node[1] + self._first_object)
        if kind == EMPTY_PART:
            self.empty_parts.append(self._tensor_number(node[1]))
            return (TENSOR, self.empty_parts[-1]) if self._own else None
        if kind == PER_RANK:
            if self._own:
                return self.renumbered(node[1], path)
            names = [fqn_of(leaf) for leaf, _ in leaves(node[1], path)]
            self.other_ranks_only += names
            if not names:
                self.empty_of_other_ranks.append(fqn_of(path))
            return None
        if kind in SEQUENCES:
            members = [self.renumbered(member, (*path, n)) for n, member in enumerate(node[1])]
            if members and all(m is None for m in members):
                return None
            return (kind, tuple(OTHER_RANKS_ONLY if m is None else m for m in members), *node[2:])
        if kind == COMPOSITE:
            parts = (self.renumbered(m, path) if i % 2 else m for i, m in enumerate(node[1]))
            return (kind, tuple(parts), node[2] + self._first_object, *node[3:])
        items: list[Any] = []
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            seen = self.renumbered(child, (*path, key))
            if seen is not None:
                items += (key, seen)
        if node[1] and not items:
            return None
        if kind == DICT:
            return (kind, tuple(items), *node[2:])
        return (kind, tuple(items), None if node[2] is None else node[2] + self._first_object)


def is_optimizer_state(node: Node) -> bool:
    """Whether a node is the state that `state_dict()` of an optimizer returned."""
    return node[0] in MAPPINGS and {"state", "param_groups"}.issubset(node[1][::2])


def _are_joined(first: Node, other: Node) -> bool:
    """Whether what another rank saved is joined to the state of an optimizer: only if parameters have names in both."""
    keys = [key for node in (first, other) if is_optimizer_state(node) for key in _state_keys(node)]
    return not is_optimizer_state(other) or (bool(_state_keys(other)) and all(type(key) is str for key in keys))


def _state_keys(node: Node) -> tuple[Key, ...]:
    state = next(child for key, child in members(node) if key == "state")
    return state[1][::2] if state[0] in MAPPINGS else ()


def _without_other_ranks(node: Node) -> Node:
    kind = node[0]
    if kind in MAPPINGS:
        return (kind, tuple(_without_other_ranks(m) if i % 2 else m for i, m in enumerate(node[1])), *node[2:])
    if kind in SEQUENCES:
        return (kind, tuple(_without_other_ranks(m) for m in node[1] if m is not OTHER_RANKS_ONLY), *node[2:])
    return node


class SavedObjects:
    """The objects of a checkpoint: leaves that are not tensors. Each rank's file is read when needed, and cached.

    Args:
        contents: The checkpoint.
        files: The storage seam.
        allow_pickle: Whether pickled leaves are unpickled, which can run any code; else they are refused.
    """

    def __init__(self, contents: Contents, files: Files, *, allow_pickle: bool = False) -> None:
        self.contents, self.files, self._allow_pickle = contents, files, allow_pickle
        self._read: dict[int, list[Any]] = {}

    def type_of(self, name: str) -> type | None:
        """Return the type of a full name, for new composite tensors; imported only if pickles are allowed."""
        found = registered_type(name)
        return importable_type(name) if found is None and self._allow_pickle else found

    def raw(self, rank: int) -> list[Any]:
        """Return the JSON forms of `rank`'s objects, by their numbers in its structure.

        Raises:
            CorruptCheckpointError: The file is damaged or missing.
            UnsupportedFormatError: Written by a newer version.
            OSError: It cannot be read.
        """
        if rank not in self._read:
            self._read[rank] = read_objects(self.contents, rank, self.files)
        return self._read[rank]

    def value(self, rank: int, number: int) -> Any:
        """Return the value of `rank`'s object `number`, with the errors of `values`."""
        return self.values([(rank, number)])[0]

    def values(self, numbers: Collection[tuple[int, int]]) -> list[Any]:
        """Decode several objects. Returns new values at each call.

        Args:
            numbers: (rank, number in the rank's structure) of each.

        Raises:
            CorruptCheckpointError: A file is damaged or missing; or an object does not decode.
            PickledLeafError: One was pickled, and unpickling is not allowed, or failed.
            UnsupportedFormatError: Written by a newer version. Or some are leaves of another format that cannot be
                read; names all of them.
            OSError: A file cannot be read.
        """
        if self.contents.source is not None:
            unread = {number for rank, number in numbers if isinstance(self.raw(rank)[number], UnreadLeaf)}
            if unread:
                raise unread_error(self.contents.path, unread_leaves(self.contents, unread))
        return [self._decoded(rank, number) for rank, number in numbers]

    def _decoded(self, rank: int, number: int) -> Any:
        raw = self.raw(rank)[number]

        def from_pickle(kind: str, data: bytes) -> Any:
            if not self._allow_pickle:
                raise self._refusal(rank, number, kind)
            try:
                return unpickle(data)
            except Exception as error:
                raise self._refusal(rank, number, kind, f"{type(error).__name__}: {error}") from error

        try:
            return decode_leaf(raw, from_pickle)
        except AsyncCkptError:
            raise
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            name = self.contents.ranks[rank].index.objects.name
            raise corrupt(self.contents.path, name, f"object {number} does not decode: {error}") from error

    def _refusal(self, rank: int, number: int, kind: str, failure: str | None = None) -> PickledLeafError:
        path, fqn = self.contents.path, object_fqn(self.contents.ranks[rank].structure.tree, number)
        if failure is None:
            why = "and unpickling runs code. Pass allow_pickle=True if you trust its author, or leave it out by keys"
        else:
            why = f"and unpickling it failed: {failure}"
        return PickledLeafError(
            f"{path}: {fqn!r} was stored as a pickle of {kind}, {why}; nothing was changed",
            path=path,
            fqn=fqn,
            type_name=kind,
            detail=failure,
        )


MAX_SHOWN = 8
_logger = logging.getLogger("asyncckpt.loading")


def per_rank_unavailable(
    contents: Contents, saved: SavedTree, reader: RankInfo, fqns: Sequence[str]
) -> PerRankUnavailableError:
    """Return the error for leaves that belong to other ranks than the reader."""
    path, n_ranks = contents.path, len(contents.ranks)
    shown = ", ".join(map(repr, fqns[:MAX_SHOWN])) + (
        f" and {len(fqns) - MAX_SHOWN} more" if len(fqns) > MAX_SHOWN else ""
    )
    if saved.reader_rank is None:
        why = f"are PerRank values of {n_ranks} ranks, and this is rank {reader.rank} of {reader.world_size}"
        advice = "Give the target's PerRank a reshard=, if all ranks have saved one; load the rest"
    else:
        why, advice = f"belong to other ranks than {saved.reader_rank}", "Load the rest"
    return PerRankUnavailableError(
        f"{path}: {shown} {why}; nothing was changed. {advice} by naming it, as in keys=['model', 'optim']; "
        "or read the values of any rank with open_checkpoint(path): .objects_of(rank), and .tensor(name + '@rank0')",
        path=path,
        keys=list(fqns),
        saved=n_ranks,
        wanted=reader.world_size,
    )


Incompatible = tuple[DoubtfulComponent, str]
"""(component of which a reader would join incompatible shards, what differs)."""


def find_incompatible_shards(
    doubtful: Mapping[str, Sequence[DoubtfulComponent]],
    boxes: Iterable[SavedBox],
    reader: RankInfo,
    objects: SavedObjects,
) -> tuple[list[Incompatible], dict[tuple[str, str], tuple[Tie, Incompatible]]]:
    """Find the sharded composite tensors of which a reader would join incompatible shards.

    A shard of another rank is compatible if that rank had the same class, context and components, and equal components
    where they were not sharded. Ranks that have stored no element of what is read do not count.

    Args:
        doubtful: `SavedTree.doubtful_components` of the tree that is read.
        boxes: What is read.
        reader: The rank that reads.
        objects: The objects of the checkpoint.

    Returns:
        The incompatible ones; and by their stored names, pairs of unsharded components of two ranks whose values must
        be equal, as ties, with what is incompatible if they are not.
    """
    contents, n_ranks = objects.contents, len(objects.contents.ranks)
    reader_rank = reader.rank if reader.world_size == n_ranks else None
    refused: list[Incompatible] = []
    ties: dict[tuple[str, str], tuple[Tie, Incompatible]] = {}
    held: dict[int, set[str]] = {}
    pairs = ((box, part) for box in boxes for part in doubtful.get(box[0].fqn, ()))
    for (tensor, offsets, sizes), part in pairs:
        rank, number = part.described_at
        raw = objects.raw(rank)[number]
        sharded, own, others = sharded_names(raw), part.own, set(range(n_ranks))
        if sharded is None:
            continue
        if part.component in sharded:
            stored = ((other, (chunk.offsets, chunk.sizes)) for other, chunk in tensor.chunks)
            others = {other for other, box in stored if find_overlap([box, (offsets, sizes)]) is not None}
            if others & part.ranks:
                names = _ranks_text(sorted(others & part.ranks))
                why = f"rank {rank} has saved it with another class, context or components than {names}"
                if part_offsets(raw) is not None:
                    why = f"of rank {rank} it is not known which components are sharded: the class has no slice there"
                refused.append((part, why))
        elif tensor in own and rank != reader_rank:
            own = (tensor,)
        else:
            continue
        for mine in own:
            name = _common_name(mine.fqn)
            for other in sorted(others - {rank}):
                again = _held_by(contents, other, name, held)
                if again is None and part.component not in sharded:
                    continue
                unequal = part, _uncut(name, rank, other)
                if again is None or again[1:3] != mine[1:3]:
                    refused.append(unequal)
                elif again is not mine:
                    like = torch.empty(mine.global_shape, dtype=torch_dtype(mine.dtype), device="meta")
                    tie = Tie(mine.fqn, again.fqn, mine, again, [(like, (0,) * like.dim())])
                    ties.setdefault((mine.fqn, again.fqn), (tie, unequal))
    return refused, ties


def _held_by(contents: Contents, rank: int, name: str, held: dict[int, set[str]]) -> SavedTensor | None:
    """Return what a rank had under the FQN of an unsharded component: its own tensor, or the common one, or None.

    Args:
        contents: The checkpoint.
        rank: The rank.
        name: The FQN.
        held: Cache of the names that ranks have.
    """
    own = contents.tensors.get(per_rank_name(name, rank))
    if own is None and rank not in held:
        held[rank] = {tensor.fqn for tensor in contents.ranks[rank].structure.tensors}
    return contents.tensors[name] if own is None and name in held[rank] else own


def _uncut(component: str, rank: int, other: int) -> str:
    return f"its component {component!r}, which is not sharded, differs between ranks {rank} and {other}"


def _ranks_text(ranks: Sequence[int]) -> str:
    text = ", ".join(map(str, ranks[:MAX_SHOWN])) + (f" and {len(ranks) - MAX_SHOWN} more" if ranks[MAX_SHOWN:] else "")
    return f"ranks {text}" if len(ranks) > 1 else f"rank {text}"


def refuse_incompatible_shards(
    doubtful: Mapping[str, Sequence[DoubtfulComponent]],
    boxes: Iterable[SavedBox],
    reader: RankInfo,
    objects: SavedObjects,
    *,
    verify: bool = True,
    otherwise: str = "leave it out by keys",
) -> None:
    """Refuse to join incompatible shards. Reads the unsharded components that must be compared for that.

    Args:
        doubtful, boxes, reader, objects: As for `find_incompatible_shards`.
        verify: Whether checksums are compared.
        otherwise: What the user can do else, for the message.

    Raises:
        PerRankUnavailableError: Shards are incompatible; names the tensors, and class and ranks of the first.
        CorruptCheckpointError, OSError: What has to be compared cannot be read.
    """
    if not doubtful:
        return
    contents = objects.contents
    refused, ties = find_incompatible_shards(doubtful, boxes, reader, objects)
    if not refused:
        pairs = [tie for tie, _ in ties.values()]
        try:
            Filler(contents, objects.files, threads=None, verify=verify, low_memory=True).check_ties(pairs)
            return
        except AliasMismatchError as error:
            refused = [ties[error.fqn, error.other_fqn][1]]
    part, why = refused[0]
    keys = list(dict.fromkeys(found.fqn for found, _ in refused))
    more = f" (and {len(keys) - 1} more tensors)" if len(keys) > 1 else ""
    raise PerRankUnavailableError(
        f"{contents.path}: the shards of {part.fqn!r}, a {part.kind}, cannot be joined: {why}{more}; nothing was "
        f"changed. Load it with {len(contents.ranks)} ranks, each into the shard that it wrote, or {otherwise}",
        path=contents.path,
        keys=keys,
        saved=len(contents.ranks),
        wanted=reader.world_size,
    )


def report_rank_differences(
    contents: Contents, saved: SavedTree, objects: SavedObjects, files: Files, found: Iterable[tuple[str, Node]]
) -> None:
    """Log which leaves (FQN and node in `found`) are read from another rank although the ranks may have other values.

    They may be equal nevertheless: a tensor that the ranks did not agree on yet is each rank's own.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError, OSError: An objects file cannot be read.
    """
    differing: list[str] = []
    numbers: dict[str, int] = {}
    of_ranks = (name for name, tensor in contents.tensors.items() if not tensor.is_own_and_empty)
    of_one_rank = {own[0] for own in map(split_per_rank_name, of_ranks) if own is not None}
    ours = () if saved.reader_rank is None else contents.ranks[saved.reader_rank].structure.tensors
    our_names = {tensor.fqn for tensor in ours}
    for fqn, node in found:
        if saved.unlike and not saved.unlike.isdisjoint((fqn, *prefixes(fqn))):
            differing.append(fqn)
        elif node[0] == OBJECT:
            numbers[fqn] = node[1]
        else:
            name = saved.tensors[node[1]].fqn
            own = split_per_rank_name(name)
            if name not in our_names and (name if own is None else own[0]) in of_one_rank:
                differing.append(fqn)
    differing += _differing_objects(contents, saved, objects, files, numbers)
    if differing:
        shown = ", ".join(differing[:MAX_SHOWN]) + (
            f" and {len(differing) - MAX_SHOWN} more" if len(differing) > MAX_SHOWN else ""
        )
        _logger.warning(
            "%s: %d values may differ between the %d ranks that saved them; those of the lowest rank are loaded: %s",
            contents.path,
            len(differing),
            len(contents.ranks),
            shown,
        )


def _differing_objects(
    contents: Contents, saved: SavedTree, objects: SavedObjects, files: Files, numbers: dict[str, int]
) -> list[str]:
    """Return the FQNs of objects whose value on another rank differs from the one that is loaded."""
    chosen: dict[str, str] = {}
    sources: set[int] = set()
    for fqn, number in numbers.items():
        rank, own_number = saved.object_at(number)
        if rank != saved.reader_rank:
            chosen[fqn] = json.dumps(objects.raw(rank)[own_number])
            sources.add(rank)
    if not chosen:
        return []
    differing: dict[str, None] = {}
    wanted_in: dict[Node, dict[str, int]] = {}
    # Object files with equal checksums are equal, and with equal trees they hold equal values.
    known = {(contents.ranks[r].index.objects.checksum, contents.ranks[r].structure.tree) for r in sources}
    if len(sources) > 1:
        known = set()
    for rank, part in enumerate(contents.ranks):
        tree = part.structure.tree
        kind = (part.index.objects.checksum, tree)
        if kind in known:
            continue
        known.add(kind)
        if tree not in wanted_in:
            named = ((fqn_of(path), node) for path, node in leaves(tree))
            wanted_in[tree] = {fqn: node[1] for fqn, node in named if node[0] == OBJECT and fqn in chosen}
        if wanted_in[tree]:
            raw = SavedObjects(contents, files).raw(rank)
            for fqn, own_number in wanted_in[tree].items():
                if json.dumps(raw[own_number]) != chosen[fqn]:
                    differing[fqn] = None
    return [fqn for fqn in chosen if fqn in differing]


def rest_of(node: Node, value: Any, saved: SavedTree, path: str) -> dict[str, Any]:
    """Return what was saved beside the components of a tensor, checked.

    Args:
        node: The tensor's node.
        value: The decoded object.
        saved: The checkpoint.
        path: The checkpoint's path, for messages.

    Raises:
        CorruptCheckpointError: It is malformed.
    """
    try:
        return check_rest(node[3], value)
    except ValueError as error:
        fqn = saved.fqn_of_node(node)
        text = f"{path}: {fqn!r}, a {node[3]}, is malformed: {error}"
        raise CorruptCheckpointError(text, path=path, fqn=fqn, detail=str(error)) from error


def new_composites(node: Node, reused: Reused, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of the composite tensors at or below `node` that are made new."""
    if node[0] == COMPOSITE:
        if node in reused.composites:
            return
        yield path, node
    for key, child in members(node):
        if child[0] in CONTAINERS:
            yield from new_composites(child, reused, (*path, key))


def leaves_to_read(node: Node, reused: Reused) -> Iterator[Node]:
    """Yield the leaves below a container, without components of a tensor of which this process holds no elements."""
    is_reused = node[0] == COMPOSITE and node in reused.composites
    for _, child in members(node):
        if child[0] in CONTAINERS:
            yield from leaves_to_read(child, reused)
        elif not is_reused or child[1] in reused.tensors:
            yield child


def refuse_unknown_types(node: Node, rest: dict[str, Any], saved: SavedTree, path: str, type_of: TypeOf) -> None:
    """Refuse to make a composite tensor of a class that is not registered.

    Args:
        node, rest, saved, path: As for `rest_of`, `rest` being what that returns.
        type_of: Returns the type of a full name.

    Raises:
        UnsupportedLeafError: It, or a type in its context, is not registered.
    """
    name = unknown_type(node[3], rest, type_of)
    if name is not None:
        fqn = saved.fqn_of_node(node)
        raise UnsupportedLeafError(
            f"{path}: {fqn!r} was saved as a {node[3]}, and a new tensor of it needs the type {name}, which is not "
            f"registered: {how_to_register(name)}, or load into a target that holds such a tensor. Nothing was changed",
            leaf=fqn,
            type_name=name,
        )


class NewValues:
    """New values for parts of the saved tree: the tensors are allocated, then filled by the caller, then built in.

    A saved tensor becomes one tensor in all values that `build` returns.

    Args:
        nodes: The parts that will be built.
        saved, objects: The checkpoint.
        path: The checkpoint's path, for messages.
        map_location: Device of the tensors; arrays and bytes stay in host memory.
        reused: Existing tensors that are filled instead of new ones.

    Raises:
        CorruptCheckpointError, PickledLeafError, UnsupportedFormatError, UnsupportedLeafError, OSError: An object
            cannot be decoded, or a tensor cannot be allocated.

    Attributes:
        fillings: Saved tensors and the tensors to read them into, before anything is built.
        leaves: The leaves of all nodes, and the other objects that are needed to build them.
    """

    def __init__(
        self,
        nodes: Collection[Node],
        saved: SavedTree,
        objects: SavedObjects,
        path: str,
        map_location: MapLocation,
        reused: Reused,
    ) -> None:
        self.leaves: set[Node] = set()
        containers: list[Node] = []
        for node in nodes:
            if node[0] in CONTAINERS:
                containers.append(node)
                self.leaves.update(leaves_to_read(node, reused))
                self.leaves.update((OBJECT, number) for number in _numbers_in_containers(node))
            else:
                self.leaves.add(node)
        self._map_location = map_location
        wanted = {n: saved.object_at(n) for n in sorted(n for kind, n in self.leaves if kind == OBJECT)}
        self._objects = dict(zip(wanted, objects.values(wanted.values()), strict=True))
        self._saved, self._path, self._reused, self._type_of = saved, path, reused, objects.type_of
        for node in containers:
            for _, composite in new_composites(node, reused):
                rest = rest_of(composite, self._objects[composite[2]], saved, path)
                refuse_unknown_types(composite, rest, saved, path, objects.type_of)
        found = {n: reused.tensors[n] for kind, n in self.leaves if kind == TENSOR and n in reused.tensors}
        self._tensors: dict[int, Any] = {n: target.value for n, target in found.items()}
        self._moved = sorted({n for kind, n in self.leaves if kind == TENSOR} - set(self._tensors))
        device, host = device_of(map_location), torch.device("cpu")
        self._tensors |= {n: tensor_for(saved.tensors[n], path, device=device) for n in self._moved}
        for n in sorted({n for kind, n in self.leaves if kind in (BYTES, ARRAY)} - set(self._tensors)):
            self._tensors[n] = tensor_for(saved.tensors[n], path, device=host)
        self.fillings: list[Filling] = [
            (saved.tensors[n], found[n] if n in found else target_tensor(t, "")) for n, t in self._tensors.items()
        ]
        self._unflattener: Unflattener | None = None

    def build(self, node: Node) -> Any:
        """Return the value of one of the nodes. Call it after `fillings` have been read."""
        if self._unflattener is None:
            if callable(self._map_location):
                self._tensors |= {n: relocated(self._tensors[n], self._map_location) for n in self._moved}
            self._unflattener = Unflattener(self._tensors, self._objects, type_of=self._type_of)
            self._unflattener.composites.update(self._reused.composites)
        try:
            return self._unflattener.value_of(node)
        except ComposeError as error:
            fqn = self._saved.fqn_of_node(error.node)
            text = f"{self._path}: {fqn!r}, a {error.node[3]}, cannot be made of its components: {error}"
            if error.node[3] in TENSOR_KINDS:
                raise CorruptCheckpointError(text, path=self._path, fqn=fqn, detail=str(error)) from error.__cause__
            kind = str(error.node[3])
            raise StateLoadError(text, path=self._path, fqn=fqn, type_name=kind, detail=str(error)) from error.__cause__


def _numbers_in_containers(node: Node) -> list[int]:
    """Return the numbers of objects that are no leaves: `_metadata` of OrderedDicts, the rest of tensors."""
    own = [node[2]] if node[0] in (ORDERED_DICT, COMPOSITE) and node[2] is not None else []
    inner = (child for _, child in members(node) if child[0] in CONTAINERS)
    return own + [number for child in inner for number in _numbers_in_containers(child)]

"""`Outline`: the selected leaves of a checkpoint, under their new names, with the tensors and objects they refer to."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ConfigError, DuplicateNameError, MissingKeysError
from asyncckpt.format.state_tree import (
    COMPOSITE,
    CONTAINERS,
    DICT,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    SEQUENCES,
    TENSOR,
    Node,
    Path,
    composite_nodes,
    fqn_of,
    leaves,
    members,
    whole_leaves,
)
from asyncckpt.interop.mapping.made_tensors import AnyTensor
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, Selection, prefixes
from asyncckpt.loading.saved_state import DoubtfulComponent, SavedTree
from asyncckpt.storage.contents import Contents, SavedTensor, read_objects
from asyncckpt.storage.files import Files

KeyMap = Mapping[str, str] | Callable[[str], str]


@dataclass(slots=True)
class Outline:
    """The selected part of a checkpoint.

    Attributes:
        contents: The source.
        tree: The tree; its leaves hold indexes into `tensors` and `objects`.
        tensors: The tensors, in the order of the tree: those of the source, and those that rules make of them.
        names: For each tensor, the FQN of its first leaf.
        objects: The JSON form of each object, in the order of the tree.
        per_rank: FQNs of leaves that belong to single ranks; they are not in the tree.
        lost_metadata: FQNs of OrderedDicts with `_metadata` that have no leaf after renaming, and are not in the tree.
        became_dicts: FQNs of lists and tuples of which some members were left out; they are dicts from the members'
            original indexes to the members.
        doubtful_components: `SavedTree.doubtful_components` of the source.
    """

    contents: Contents
    tree: Node
    tensors: list[AnyTensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    per_rank: list[str] = field(default_factory=list)
    lost_metadata: list[str] = field(default_factory=list)
    became_dicts: list[str] = field(default_factory=list)
    doubtful_components: Mapping[str, Sequence[DoubtfulComponent]] = field(default_factory=dict)

    def leaves(self) -> list[tuple[str, Node]]:
        """Return (FQN, leaf node) of all leaves in order."""
        return [(fqn_of(path), node) for path, node in leaves(self.tree)]

    def saved(self, number: int) -> SavedTensor:
        """Return tensor `number` of an outline in which no rule has made a tensor."""
        found = self.tensors[number]
        assert isinstance(found, SavedTensor), f"{self.names[number]} is made of other tensors"
        return found

    def nbytes_of(self, number: int) -> int:
        """Return the length of the elements of tensor `number` in bytes."""
        tensor = self.tensors[number]
        return math.prod(tensor.global_shape) * DTYPES[tensor.dtype].itemsize

    def unread(self) -> dict[str, UnreadLeaf]:
        """Return the leaves that could not be read, by FQN; no target can hold them."""
        named = ((fqn, self.objects[node[1]]) for fqn, node in self.leaves() if node[0] == OBJECT)
        return {fqn: found for fqn, found in named if isinstance(found, UnreadLeaf)}


def outline_of(
    contents: Contents, files: Files, *, keys: Iterable[str] | None = None, key_map: KeyMap | None = None
) -> Outline:
    """Return the outline of the selected leaves of a checkpoint, renamed.

    Args:
        contents: The source.
        files: The storage seam.
        keys: FQNs and prefixes; None selects everything.
        key_map: From the source's FQNs to the target's; names that a mapping lacks stay.

    Raises:
        MissingKeysError: A key selects nothing.
        DuplicateNameError: Two leaves would have the same name.
        ConfigError: `key_map` returns something that is no name.
        CorruptCheckpointError, OSError: The objects cannot be read.
    """
    saved = SavedTree(contents, RankInfo(0, 1))
    names = None if keys is None else list(keys)
    selection, per_rank_selection = Selection(names), Selection(names)
    root = _branches_of(saved.tree, (), selection.__contains__, {})
    per_rank = [fqn for fqn in saved.other_ranks_only if fqn in per_rank_selection]
    missing = [key for key in selection.unused() if key in per_rank_selection.unused()]
    if missing:
        raise MissingKeysError(
            f"{contents.path}: nothing is called {', '.join(map(repr, missing))}", path=contents.path, keys=missing
        )
    selected = tree = _node_from(root) or (DICT, ())
    if key_map is not None:
        tree = _renamed(tree, renamer(key_map), contents.path)
    objects: dict[int, list[Any]] = {}

    def raw(number: int) -> Any:
        rank, own = saved.object_at(number)
        if rank not in objects:
            objects[rank] = read_objects(contents, rank, files)
        return objects[rank][own]

    lost = sorted(versioned(selected) - versioned(tree))
    whole = Outline(
        contents, saved.tree, per_rank=per_rank, lost_metadata=lost, doubtful_components=saved.doubtful_components
    )
    return _with_tree(whole, tree, saved.tensors, raw)


def pruned(outline: Outline, keep: Callable[[str], bool]) -> Outline:
    """Return the outline with only the leaves for whose FQN `keep` returns True."""
    tree = _node_from(_branches_of(outline.tree, (), keep, {})) or (DICT, ())
    return _with_tree(outline, tree, outline.tensors, outline.objects.__getitem__)


def replaced(outline: Outline, gone: Collection[str], arrivals: Iterable[tuple[str, AnyTensor]]) -> Outline:
    """Return the outline with other tensors in the place of some of its leaves.

    Args:
        outline: The outline.
        gone: FQNs of the leaves that are removed.
        arrivals: FQN and tensor of each new leaf. One that is in the outline already stays tied to its other names.

    Raises:
        DuplicateNameError: Two leaves would have the same name, or a leaf the name of a container.
    """
    tensors = list(outline.tensors)
    numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
    named = []
    for fqn, tensor in arrivals:
        if id(tensor) not in numbers:
            numbers[id(tensor)] = len(tensors)
            tensors.append(tensor)
        named.append((fqn, (TENSOR, numbers[id(tensor)])))
    tree = _moved(outline.tree, gone, named, outline.contents.path, "a rule")
    lost = {*outline.lost_metadata, *(versioned(outline.tree) - versioned(tree))}
    return _with_tree(replace(outline, lost_metadata=sorted(lost)), tree, tensors, outline.objects.__getitem__)


def readable(outline: Outline) -> Outline:
    """Return the outline without the leaves that could not be read."""
    unread = outline.unread()
    return pruned(outline, lambda fqn: fqn not in unread) if unread else outline


def versioned(tree: Node) -> set[str]:
    """Return the FQNs of the OrderedDicts that have `_metadata`."""
    return {fqn_of(path) for path, node in containers(tree) if node[0] == ORDERED_DICT and node[2] is not None}


def containers(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all containers at and below a node."""
    if node[0] in CONTAINERS:
        yield path, node
        for key, child in members(node):
            yield from containers(child, (*path, key))


def leaves_and_empty(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all leaves and all empty containers; their paths together hold every key of the tree."""
    if node[0] not in CONTAINERS or (path and not node[1]):
        yield path, node
    for key, child in members(node):
        yield from leaves_and_empty(child, (*path, key))


def rebuilt(
    node: Node,
    leaf: Callable[[Path, Node], Node],
    metadata: Callable[[Path, int], int | None],
    path: Path = (),
) -> Node:
    """Return a copy of a tree with other leaves and other `_metadata`.

    Args:
        node: The tree.
        leaf: Called with path and node of each leaf; returns the new leaf.
        metadata: Called with path and object number of each `_metadata` of an OrderedDict; returns the new number. The
            same for the object of each composite tensor.
        path: Path of `node`.
    """
    kind, _, *form = node
    if kind not in CONTAINERS:
        return leaf(path, node)
    found = [(key, rebuilt(child, leaf, metadata, (*path, key))) for key, child in members(node)]
    if kind in SEQUENCES:
        return (kind, tuple(child for _, child in found), *form)
    if kind in (ORDERED_DICT, COMPOSITE) and form[0] is not None:
        form = [metadata(path, form[0]), *form[1:]]
    return (kind, tuple(one for pair in found for one in pair), *form)


def without_composites(outline: Outline) -> tuple[Outline, list[str]]:
    """Return an outline with a dict of its components in place of each composite tensor, and FQN and kind of these."""
    found = [f"{fqn_of(path)} ({node[3]})" for path, node in composite_nodes(outline.tree)]
    if not found:
        return outline, []
    return _with_tree(outline, _as_dicts(outline.tree), outline.tensors, outline.objects.__getitem__), found


def _as_dicts(node: Node) -> Node:
    kind, inner, *form = node
    if kind not in CONTAINERS:
        return node
    if kind in SEQUENCES:
        return (kind, tuple(map(_as_dicts, inner)), *form)
    items = tuple(_as_dicts(one) if n % 2 else one for n, one in enumerate(inner))
    return (DICT, items) if kind == COMPOSITE else (kind, items, *form)


def _with_tree(outline: Outline, tree: Node, tensors: Sequence[AnyTensor], raw: Callable[[int], Any]) -> Outline:
    """Return the outline with another tree, with only the tensors and objects in that, renumbered.

    Args:
        outline: The outline; its sequences that are dicts in the new tree are added to `became_dicts`.
        tree: The new tree. It holds numbers of `tensors`, and numbers of objects that `raw` takes.
        tensors: The tensors.
        raw: Returns the JSON form of an object.
    """
    kinds = {path: node[0] for path, node in containers(tree)}
    sequences = (path for path, node in containers(outline.tree) if node[0] in SEQUENCES)
    became_dicts = {*outline.became_dicts, *(fqn_of(path) for path in sequences if kinds.get(path) == DICT)}
    found = replace(outline, tensors=[], names=[], objects=[], became_dicts=sorted(became_dicts))
    numbers: dict[int, int] = {}

    def number_of(path: Path, node: Node) -> Node:
        kind, old = node
        if kind == OBJECT:
            return kind, object_of(path, old)
        if old not in numbers:
            numbers[old] = len(found.tensors)
            found.tensors.append(tensors[old])
            found.names.append(fqn_of(path))
        return kind, numbers[old]

    def object_of(_: Path, old: int) -> int:
        found.objects.append(raw(old))
        return len(found.objects) - 1

    found.tree = rebuilt(tree, number_of, object_of)
    return found


class _Branch(dict[Any, Any]):
    """A container that can be changed: its members by key. `node` is the original node."""

    def __init__(self, node: Node) -> None:
        self.node = node


def _branches_of(node: Node, path: Path, stays: Callable[[str], bool], dicts_by_name: dict[str, _Branch] | None) -> Any:
    """Return a tree of branches and leaf nodes, without the leaves and empty containers for which `stays` is False.

    Args:
        node: The tree.
        path: Path of `node`.
        stays: Called with the FQN of a leaf or empty container.
        dicts_by_name: Gets, by FQN, all dicts of which every ancestor is a dict. None: an ancestor is a sequence.
    """
    is_container = node[0] in CONTAINERS and node[0] != COMPOSITE  # a composite tensor is one leaf
    is_open = is_container and (node[1] or not path)  # the top level may be empty, or a leaf called ""
    if node is OTHER_RANKS_ONLY or not (is_open or stays(fqn_of(path))):
        return None
    if not is_container:
        return node
    branch = _Branch(node)
    inner = dicts_by_name if node[0] in MAPPINGS else None
    if inner is not None and path:
        inner[fqn_of(path)] = branch
    for key, child in members(node):
        found = _branches_of(child, (*path, key), stays, inner)
        if found is not None:
            branch[key] = found
    return branch


def _node_from(found: Any) -> Node | None:
    """Return the node of a changed tree that `_branches_of` returned; None if nothing is left.

    Containers that lost all their members are left out. Sequences that lost some become dicts from index to member.
    """
    if not isinstance(found, _Branch):
        return None if found is None else tuple(found)
    kind, before, *form = found.node
    kept = [(key, node) for key, child in found.items() if (node := _node_from(child)) is not None]
    if before and not kept:
        return None
    if kind in SEQUENCES:
        if len(kept) == len(before):
            return (kind, tuple(node for _, node in kept), *form)
        kind, form = DICT, []
    return (kind, tuple(one for pair in kept for one in pair), *form)


def _renamed(tree: Node, rename: Callable[[str], str], path: str) -> Node:
    """Return the tree with new names. Leaves that keep their names keep their place and the types of their keys.

    Args:
        tree: The tree.
        rename: Returns the new FQN for an FQN.
        path: The checkpoint's path, for messages.

    Raises:
        DuplicateNameError: Two leaves would have the same name, or a leaf the name of a container.
        Exception: An error of `rename`.
    """
    named = [(fqn_of(at), node) for at, node in whole_leaves(tree)]
    moved = {fqn: new for fqn, _ in named if (new := rename(fqn)) != fqn}
    return _moved(tree, moved, [(moved[fqn], node) for fqn, node in named if fqn in moved], path, "key_map")


def _moved(tree: Node, gone: Collection[str], arrivals: Sequence[tuple[str, Node]], path: str, who: str) -> Node:
    """Return the tree without some of its leaves, and with new ones.

    A new leaf is put into the dict with the longest FQN that is a prefix of its name. The rest of the name becomes one
    key.

    Args:
        tree: The tree.
        gone: FQNs of the leaves that are removed.
        arrivals: FQN and node of each new leaf.
        path, who: The checkpoint's path, and what gives the new names, for messages.

    Raises:
        DuplicateNameError: Two leaves would have the same name, or a leaf the name of a container.
    """
    if not gone and not arrivals:
        return tree
    dicts_by_name: dict[str, _Branch] = {}
    root = _branches_of(tree, (), lambda fqn: fqn not in gone, dicts_by_name)
    if root is None:
        root = _Branch((DICT, ()))
    taken = {fqn for at, _ in whole_leaves(tree) if (fqn := fqn_of(at)) not in gone}
    empty_paths = [at for at, node in leaves_and_empty(tree) if node[0] in CONTAINERS]
    empty = {fqn_of(at[:n]) for at in empty_paths for n in range(1, len(at) + 1)}
    for name, node in arrivals:
        if name in taken:
            raise DuplicateNameError(f"{path}: two leaves would be called {name!r} by {who}", fqn=name)
        if name in empty:
            raise DuplicateNameError(
                f"{path}: {who} renames a leaf to {name!r}, which is an empty container or contains one", fqn=name
            )
        taken.add(name)
        home = next((prefix for prefix in reversed(prefixes(name)) if prefix in dicts_by_name), None)
        if home is None:
            root[name] = node
        else:
            dicts_by_name[home][name[len(home) + 1 :]] = node
    found = _node_from(root) or (DICT, ())
    there = [fqn_of(at) for at, _ in whole_leaves(found)]
    if len(set(there)) != len(there) or set(there) != taken:
        raise DuplicateNameError(f"{path}: {who} gives a leaf the name of another leaf or of a container", fqn=None)
    return found


def renamer(key_map: KeyMap) -> Callable[[str], str]:
    """Return a function that maps an FQN of the source to that in the target: the other way round than in a load."""
    if not isinstance(key_map, Mapping) and not callable(key_map):
        raise ConfigError(f"key_map={key_map!r}: expected a dict of names, or a callable", field="key_map")

    def checked(old: str, new: str) -> str:
        if not isinstance(new, str) or not new:
            raise ConfigError(f"key_map maps {old!r} to {new!r}: expected a name", field="key_map")
        return new

    if not isinstance(key_map, Mapping):
        return lambda fqn: checked(fqn, key_map(fqn))
    table = {old: checked(old, new) for old, new in key_map.items()}
    return lambda fqn: table.get(fqn, fqn)

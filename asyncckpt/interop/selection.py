"""What of a checkpoint is converted or compared: the chosen leaves under their new names, and what they refer to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ConfigError, DuplicateNameError, MissingKeysError
from asyncckpt.format.state_tree import (
    CONTAINERS,
    DICT,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    SEQUENCES,
    Node,
    Path,
    fqn_of,
    leaves,
    members,
)
from asyncckpt.interop.sources.unread_leaves import UnreadLeaf
from asyncckpt.loading.key_selection import OTHER_RANKS_ONLY, Selection, prefixes
from asyncckpt.loading.saved_state import SavedTree
from asyncckpt.storage.contents import Contents, SavedTensor, read_objects
from asyncckpt.storage.files import Files

KeyMap = Mapping[str, str] | Callable[[str], str]


@dataclass(slots=True)
class Outline:
    """The chosen part of a checkpoint.

    Attributes:
        contents: The source.
        tree: Its leaves number `tensors` and `objects`, in their order.
        tensors: By number.
        names: Of the tensors: the FQN of their first leaf.
        objects: JSON forms by number.
        away: FQNs of leaves that belong to single ranks, and are not in the tree.
        emptied: Names of OrderedDicts with `_metadata` that renaming left without a leaf, so that they are gone.
        opened: Names of lists and tuples that lack members, and so are dicts: every member keeps its number.
    """

    contents: Contents
    tree: Node
    tensors: list[SavedTensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)

    def leaves(self) -> list[tuple[str, Node]]:
        """Return (FQN, leaf) in order."""
        return [(fqn_of(path), node) for path, node in leaves(self.tree)]

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of a tensor's elements."""
        tensor = self.tensors[number]
        return math.prod(tensor.global_shape) * DTYPES[tensor.dtype].itemsize

    def unread(self) -> dict[str, UnreadLeaf]:
        """Return the leaves that were not read of the source, by FQN: no target can hold them."""
        named = ((fqn, self.objects[node[1]]) for fqn, node in self.leaves() if node[0] == OBJECT)
        return {fqn: found for fqn, found in named if isinstance(found, UnreadLeaf)}


def outline_of(
    contents: Contents, files: Files, *, keys: Iterable[str] | None = None, key_map: KeyMap | None = None
) -> Outline:
    """Choose and rename.

    Args:
        contents: The source.
        files: The storage seam.
        keys: FQNs and prefixes; None takes everything.
        key_map: From the source's FQNs to the target's; names that a mapping lacks stay.

    Raises:
        MissingKeysError: A key selects nothing.
        DuplicateNameError: Two leaves get one name.
        ConfigError: `key_map` makes something else than a name.
        CorruptCheckpointError, OSError: The objects cannot be read.
    """
    saved = SavedTree(contents, RankInfo(0, 1))
    names = None if keys is None else list(keys)
    selection, away_selection = Selection(names), Selection(names)
    root = _opened(saved.tree, (), selection.__contains__, {})
    away = [fqn for fqn in saved.other_ranks_only if fqn in away_selection]
    missing = [key for key in selection.unused() if key in away_selection.unused()]
    if missing:
        raise MissingKeysError(
            f"{contents.path}: nothing is called {', '.join(map(repr, missing))}", path=contents.path, keys=missing
        )
    opened: list[str] = []
    tree = _closed(root, (), opened) or (DICT, ())
    before = versioned(tree)
    if key_map is not None:
        tree = _renamed(tree, _renamer(key_map), contents.path, opened)

    objects: dict[int, list[Any]] = {}

    def raw(number: int) -> Any:
        rank, own = saved.object_at(number)
        if rank not in objects:
            objects[rank] = read_objects(contents, rank, files)
        return objects[rank][own]

    outline = Outline(contents, tree, away=away, emptied=sorted(before - versioned(tree)), opened=sorted(set(opened)))
    return _numbered(outline, saved.tensors, raw)


def pruned(outline: Outline, keep: Callable[[str], bool]) -> Outline:
    """Return the outline with only the leaves that `keep` wants."""
    opened = list(outline.opened)
    tree = _closed(_opened(outline.tree, (), keep, {}), (), opened) or (DICT, ())
    found = Outline(outline.contents, tree, away=outline.away, emptied=outline.emptied, opened=sorted(set(opened)))
    return _numbered(found, outline.tensors, outline.objects.__getitem__)


def readable(outline: Outline) -> Outline:
    """Return the outline without the leaves that were not read."""
    unread = outline.unread()
    return pruned(outline, lambda fqn: fqn not in unread) if unread else outline


def versioned(tree: Node) -> set[str]:
    """Return the names of the OrderedDicts that have `_metadata`."""
    return {fqn_of(path) for path, node in containers(tree) if node[0] == ORDERED_DICT and node[2] is not None}


def containers(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all containers at and below a node."""
    if node[0] in CONTAINERS:
        yield path, node
        for key, child in members(node):
            yield from containers(child, (*path, key))


def leaves_and_empty(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all leaves, and of the containers that hold nothing: together they have every key."""
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
    """Return a tree with other leaves, and other numbers of the `_metadata` of its OrderedDicts."""
    kind, _, *form = node
    if kind not in CONTAINERS:
        return leaf(path, node)
    found = [(key, rebuilt(child, leaf, metadata, (*path, key))) for key, child in members(node)]
    if kind in SEQUENCES:
        return (kind, tuple(child for _, child in found), *form)
    if kind == ORDERED_DICT and form[0] is not None:
        form = [metadata(path, form[0])]
    return (kind, tuple(one for pair in found for one in pair), *form)


def _numbered(outline: Outline, tensors: list[SavedTensor], raw: Callable[[int], Any]) -> Outline:
    """Give tensors and objects of the outline's tree, which numbers those given, numbers of their own."""
    numbers: dict[int, int] = {}

    def number_of(path: Path, node: Node) -> Node:
        kind, old = node
        if kind == OBJECT:
            return kind, object_of(path, old)
        if old not in numbers:
            numbers[old] = len(outline.tensors)
            outline.tensors.append(tensors[old])
            outline.names.append(fqn_of(path))
        return kind, numbers[old]

    def object_of(_: Path, old: int) -> int:
        outline.objects.append(raw(old))
        return len(outline.objects) - 1

    outline.tree = rebuilt(outline.tree, number_of, object_of)
    return outline


class _Branch(dict[Any, Any]):
    """The members of a container while leaves are taken out of it and put into it; `node`: as it was."""

    def __init__(self, node: Node) -> None:
        self.node = node


def _opened(node: Node, path: Path, stays: Callable[[str], bool], homes: dict[str, _Branch] | None) -> Any:
    """Return a tree that can be changed, without the leaves and the empty containers that do not stay.

    Args:
        node: The tree.
        path: Where it is.
        stays: Whether what has a name does.
        homes: Gets the dicts that are reached through dicts alone, by name. None: no dict does.
    """
    is_open = node[0] in CONTAINERS and (node[1] or not path)  # the top level may be empty, or a leaf called ""
    if node is OTHER_RANKS_ONLY or not (is_open or stays(fqn_of(path))):
        return None
    if node[0] not in CONTAINERS:
        return node
    branch = _Branch(node)
    inner = homes if node[0] in MAPPINGS else None
    if inner is not None and path:
        inner[fqn_of(path)] = branch
    for key, child in members(node):
        found = _opened(child, (*path, key), stays, inner)
        if found is not None:
            branch[key] = found
    return branch


def _closed(found: Any, path: Path, opened: list[str]) -> Node | None:
    """Return the tree again, without the containers that lost all that was in them; None if nothing is left.

    Args:
        found: As `_opened` has made it.
        path: Where it is.
        opened: Gets the names of sequences that lack members now: they are dicts, by their members' numbers.
    """
    if not isinstance(found, _Branch):
        return None if found is None else tuple(found)
    kind, before, *form = found.node
    kept = [(key, node) for key, child in found.items() if (node := _closed(child, (*path, key), opened)) is not None]
    if before and not kept:
        return None
    if kind in SEQUENCES:
        if len(kept) == len(before):
            return (kind, tuple(node for _, node in kept), *form)
        opened.append(fqn_of(path))
        kind, form = DICT, []
    return (kind, tuple(one for pair in kept for one in pair), *form)


def _renamed(tree: Node, rename: Callable[[str], str], path: str, opened: list[str]) -> Node:
    """Return the tree under new names: what keeps its name keeps its place and the types of its keys.

    A leaf with a new name goes into the dict whose name its own begins with, the one of the longest name, under what is
    left of it as one key.

    Args:
        tree: The tree.
        rename: From every FQN to the new one.
        path: The checkpoint's, for messages.
        opened: As `_closed` has it.

    Raises:
        DuplicateNameError: Two leaves get one name, or one stands where another has its container, or nothing in it.
        Exception: Whatever `rename` raises.
    """
    names = [fqn_of(at) for at, _ in leaves(tree)]
    moved = {fqn: new for fqn in names if (new := rename(fqn)) != fqn}
    if not moved:
        return tree
    homes: dict[str, _Branch] = {}
    root = _opened(tree, (), lambda fqn: fqn not in moved, homes)
    if root is None:
        root = _Branch((DICT, ()))
    taken = {fqn for fqn in names if fqn not in moved}
    hollow = [at for at, node in leaves_and_empty(tree) if node[0] in CONTAINERS]
    empty = {fqn_of(at[:n]) for at in hollow for n in range(1, len(at) + 1)}
    for at, node in leaves(tree):
        name = moved.get(fqn_of(at))
        if name is None:
            continue
        if name in taken:
            raise DuplicateNameError(f"{path}: two leaves would be called {name!r} by key_map", fqn=name)
        if name in empty:
            raise DuplicateNameError(
                f"{path}: key_map calls a leaf {name!r}, where an empty dict or list is, or what holds one", fqn=name
            )
        taken.add(name)
        home = next((prefix for prefix in reversed(prefixes(name)) if prefix in homes), None)
        if home is None:
            root[name] = node
        else:
            homes[home][name[len(home) + 1 :]] = node
    found = _closed(root, (), opened) or (DICT, ())
    there = [fqn_of(at) for at, _ in leaves(found)]
    if len(set(there)) != len(there) or set(there) != taken:
        raise DuplicateNameError(f"{path}: key_map puts a leaf where another one stands", fqn=None)
    return found


def _renamer(key_map: KeyMap) -> Callable[[str], str]:
    if not isinstance(key_map, Mapping) and not callable(key_map):
        raise ConfigError(f"key_map={key_map!r}: expected a dict of names, or a callable", field="key_map")

    def checked(old: str, new: str) -> str:
        if not isinstance(new, str) or not new:
            raise ConfigError(f"key_map makes {new!r} of {old!r}: expected a name", field="key_map")
        return new

    if not isinstance(key_map, Mapping):
        return lambda fqn: checked(fqn, key_map(fqn))
    table = {old: checked(old, new) for old, new in key_map.items()}
    return lambda fqn: table.get(fqn, fqn)

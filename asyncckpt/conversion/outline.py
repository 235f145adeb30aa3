"""What is converted: the tree of the chosen leaves under their new names, and the tensors that it refers to."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.config import RankInfo
from asyncckpt.conversion.renaming import renamed
from asyncckpt.conversion.torch_image import TorchView
from asyncckpt.dtypes import DTYPES
from asyncckpt.errors import ConfigError, MissingKeysError
from asyncckpt.foreign.as_saved import AsSaved
from asyncckpt.foreign.assembly import ForeignSource
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.loading.saved_objects import SavedObjects
from asyncckpt.loading.saved_tree import SavedTree
from asyncckpt.loading.selection import HOLE, Selection
from asyncckpt.planning.keys import mappings
from asyncckpt.storage.contents import Contents, SavedTensor
from asyncckpt.storage.files import Files

_NOTHING_SAID = AsSaved()

KeyMap = Mapping[str, str] | Callable[[str], str]


@dataclass(slots=True)
class Outline:
    """See the module.

    Attributes:
        contents: The source.
        tree: Its leaves number `tensors` and `objects`.
        tensors: By number.
        names: Of the tensors: the FQN of their first leaf.
        objects: JSON forms by number.
        away: FQNs of leaves that belong to single ranks, and are not in the tree.
        emptied: Names of OrderedDicts with `_metadata` that renaming left without a leaf, so that they are gone.
        opened: Names of lists and tuples that lack members, and so are dicts: every member keeps its number.
        former: By FQN: those of the source, of leaves that have another one now.
        views: By FQN: tensors in pickles that the target keeps as they were: see `torch_views`.
        shared: By path: of containers that are one object in the target the first path: see `shared_containers`.
    """

    contents: Contents
    tree: Node
    tensors: list[SavedTensor] = field(default_factory=list)
    names: list[str] = field(default_factory=list)
    objects: list[Any] = field(default_factory=list)
    away: list[str] = field(default_factory=list)
    emptied: list[str] = field(default_factory=list)
    opened: list[str] = field(default_factory=list)
    former: dict[str, str] = field(default_factory=dict)
    views: dict[str, TorchView] = field(default_factory=dict)
    shared: dict[Path, Path] = field(default_factory=dict)

    @property
    def as_saved(self) -> AsSaved:
        """What pickles said of the source's values; of one without pickles nothing."""
        source = self.contents.source
        return source.as_saved if isinstance(source, ForeignSource) else _NOTHING_SAID

    def leaves(self) -> list[tuple[str, Node]]:
        """Return (FQN, leaf) in order."""
        return [(fqn_of(path), node) for path, node in leaves(self.tree)]

    def nbytes_of(self, number: int) -> int:
        """Return the bytes of a tensor's elements."""
        tensor = self.tensors[number]
        return math.prod(tensor.global_shape) * DTYPES[tensor.dtype].itemsize


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
    selection = Selection(names)
    tree = _kept(saved.tree, (), selection.__contains__) or ("d", ())
    missing = selection.unused()
    away_selection = Selection(names)
    away = [fqn for fqn in saved.away if fqn in away_selection]
    missing = [key for key in missing if key in away_selection.unused()]
    if missing:
        raise MissingKeysError(
            f"{contents.path}: nothing is called {', '.join(map(repr, missing))}", path=contents.path, keys=missing
        )
    before = versioned(tree)
    names_now: dict[str, str] = {}
    if key_map is not None:
        rename = _renamer(key_map)
        names_now = {fqn: rename(fqn) for fqn in (fqn_of(path) for path, _ in leaves(tree))}
        tree = renamed(tree, names_now.__getitem__, contents.path)
    outline = _numbered(contents, files, saved, tree, away)
    outline.former = {new: old for old, new in names_now.items() if new != old}
    outline.emptied = sorted(before - versioned(tree))
    outline.opened = opened_sequences(saved.tree, tree)
    return outline


def versioned(tree: Node) -> set[str]:
    """Return the names of the OrderedDicts that have `_metadata`."""
    return {fqn_of(path) for path, node in mappings(tree) if node[0] == "o" and node[2] is not None}


def opened_sequences(before: Node, after: Node, path: Path = ()) -> list[str]:
    """Return the names of the lists and tuples that lack members now, and so are dicts."""
    if before[0] in ("l", "t"):
        members: Any = dict(enumerate(before[1]))
        found = [fqn_of(path)] if after[0] == "d" else []
    elif before[0] in ("d", "o"):
        members, found = dict(zip(before[1][::2], before[1][1::2], strict=True)), []
    else:
        return []
    if after[0] in ("d", "o"):
        there: Any = dict(zip(after[1][::2], after[1][1::2], strict=True))
    else:
        there = dict(enumerate(after[1])) if after[0] in ("l", "t") else {}
    for key in members.keys() & there.keys():
        found += opened_sequences(members[key], there[key], (*path, key))
    return sorted(found)


def pruned(outline: Outline, keep: Callable[[str], bool]) -> Outline:
    """Return the outline with the leaves alone that `keep` wants; numbers stay, names are those of the first left."""
    tree = _kept(outline.tree, (), keep) or ("d", ())
    names = list(outline.names)
    for path, node in reversed(list(leaves(tree))):
        if node[0] != "O":
            names[node[1]] = fqn_of(path)
    return replace(
        outline, tree=tree, names=names, opened=sorted({*outline.opened, *opened_sequences(outline.tree, tree)})
    )


def _kept(node: Node, path: Path, keep: Callable[[str], bool]) -> Node | None:
    """Return what `keep` wants of a tree, under the names that it has: a list that lacks members is a dict."""
    kind = node[0]
    if node is HOLE:
        return None
    if kind not in ("d", "o", "l", "t"):
        return node if keep(fqn_of(path)) else None
    if not node[1]:
        return node if not path or keep(fqn_of(path)) else None
    is_dict = kind in ("d", "o")
    pairs = zip(node[1][::2], node[1][1::2], strict=True) if is_dict else enumerate(node[1])
    found = [(key, child) for key, old in pairs if (child := _kept(old, (*path, key), keep)) is not None]
    if not found:
        return None
    if not is_dict and len(found) == len(node[1]):
        return (kind, tuple(child for _, child in found), *node[2:])
    members = tuple(part for pair in found for part in pair)
    return (kind, members, *node[2:]) if is_dict else ("d", members)


def _renamer(key_map: KeyMap) -> Callable[[str], str]:
    if isinstance(key_map, Mapping):
        table = key_map
        wrong = [(old, new) for old, new in table.items() if not isinstance(new, str) or not new]
        if wrong:
            raise ConfigError(f"key_map makes {wrong[0][1]!r} of {wrong[0][0]!r}: expected a name", field="key_map")
        return lambda fqn: table.get(fqn, fqn)
    function = key_map
    if not callable(function):
        raise ConfigError(f"key_map={function!r}: expected a dict of names, or a callable", field="key_map")

    def rename(fqn: str) -> str:
        found = function(fqn)
        if not isinstance(found, str) or not found:
            raise ConfigError(f"key_map makes {found!r} of {fqn!r}: expected a name", field="key_map")
        return found

    return rename


def _numbered(contents: Contents, files: Files, saved: SavedTree, tree: Node, away: list[str]) -> Outline:
    """Give tensors and objects of the tree numbers of their own, in the order of its leaves."""
    outline = Outline(contents, tree, away=away)
    read = SavedObjects(contents, files)
    numbers: dict[int, int] = {}

    def number_of(old: int, fqn: str) -> int:
        if old not in numbers:
            numbers[old] = len(outline.tensors)
            outline.tensors.append(saved.tensors[old])
            outline.names.append(fqn)
        return numbers[old]

    def object_of(old: int) -> int:
        rank, number = saved.object_at(old)
        outline.objects.append(read.raw(rank)[number])
        return len(outline.objects) - 1

    def walk(node: Node, path: tuple[Any, ...]) -> Node:
        kind = node[0]
        if kind in ("d", "o"):
            pairs = zip(node[1][::2], node[1][1::2], strict=True)
            members = tuple(m for key, child in pairs for m in (key, walk(child, (*path, key))))
            if kind == "d":
                return (kind, members, *node[2:])
            return (kind, members, None if node[2] is None else object_of(node[2]))
        if kind in ("l", "t"):
            return (kind, tuple(walk(child, (*path, n)) for n, child in enumerate(node[1])), *node[2:])
        return (kind, object_of(node[1]) if kind == "O" else number_of(node[1], fqn_of(path)))

    outline.tree = walk(tree, ())
    return outline

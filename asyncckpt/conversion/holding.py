"""What a target cannot hold: named, so that it is refused or left out because the user says so, never dropped."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from asyncckpt.conversion.outline import Outline, pruned
from asyncckpt.conversion.unreadable import readable, unread_of
from asyncckpt.errors import UnsupportedFormatError, UnsupportedLeafError
from asyncckpt.format.keys import MAX_KEY_CHARS
from asyncckpt.format.tree import CONTAINERS, Node, Path, fqn_of

TOP = "the top level"
_SHOWN = 1000
"""Leaves that an error names: a list of a million numbers has a million leaves."""


@dataclass(slots=True)
class Holding:
    """What became of the leaves.

    Attributes:
        cannot: By FQN: why the target cannot hold it.
        changed: What it holds in another form, one sentence each.
        unversioned: FQNs of OrderedDicts whose `_metadata` the target cannot hold; they are written without.
    """

    cannot: dict[str, str] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    unversioned: set[str] = field(default_factory=set)


def settled(outline: Outline, holding: Holding, *, to: str, partial: bool) -> Outline:
    """Return what is written: everything, or with `partial` what the target can hold.

    What was not read of the source is added to what `holding` has.

    Raises:
        UnsupportedLeafError: Something cannot be held, and `partial` is False; names all of it.
        UnsupportedFormatError: The same, and some of it was not even read.
    """
    if holding.unversioned:
        outline = replace(outline, tree=_without_versions(outline.tree, (), holding.unversioned))
    unread = unread_of(outline)
    holding.cannot.update((fqn, found.described()) for fqn, found in unread.items())
    cannot = dict(holding.cannot)
    for fqn in outline.away:
        cannot[fqn] = "it belongs to single ranks (PerRank)"
    if not cannot:
        return outline
    if not partial:
        lines = [f"{fqn}: {why}" for fqn, why in list(cannot.items())[:_SHOWN]]
        more = f"\n  and {len(cannot) - _SHOWN} more" if len(cannot) > _SHOWN else ""
        path = outline.contents.path
        said = (
            f"{path}: {to} cannot hold {len(cannot)} of the leaves:\n  "
            + "\n  ".join(lines)
            + more
            + "\nChoose others by keys, or leave them out by partial=True (--partial), whose report names all"
        )
        if unread:
            raise UnsupportedFormatError(said, path=path, found=next(iter(unread.values())).kind)
        raise UnsupportedLeafError(said, leaf=next(iter(cannot)))
    return pruned(readable(outline), lambda fqn: fqn not in cannot)


def _without_versions(node: Node, path: Path, names: Collection[str]) -> Node:
    kind = node[0]
    if kind in ("d", "o"):
        pairs = zip(node[1][::2], node[1][1::2], strict=True)
        members = tuple(m for key, child in pairs for m in (key, _without_versions(child, (*path, key), names)))
        if kind == "d":
            return (kind, members, *node[2:])
        return (kind, members, None if fqn_of(path) in names else node[2])
    if kind in ("l", "t"):
        children = tuple(_without_versions(child, (*path, n), names) for n, child in enumerate(node[1]))
        return (kind, children, *node[2:])
    return node


def refuse_long_keys(outline: Outline, holding: Holding) -> None:
    """Add the leaves with a key that is longer than readers of structures take."""
    for path, _ in leaves_and_empty(outline.tree):
        if any(len(str(key)) > MAX_KEY_CHARS for key in path):
            holding.cannot[fqn_of(path)] = f"its key has more than {MAX_KEY_CHARS} characters"


def leaves_and_empty(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all leaves, and of the containers that hold nothing: together they have every key."""
    if node[0] in ("d", "o"):
        members: Iterable[tuple[Any, Node]] = zip(node[1][::2], node[1][1::2], strict=True)
    elif node[0] in ("l", "t"):
        members = enumerate(node[1])
    else:
        members = ()
    if node[0] not in CONTAINERS or (path and not node[1]):
        yield path, node
    for key, child in members:
        yield from leaves_and_empty(child, (*path, key))


def listed(names: list[str]) -> str:
    """Return names for a sentence: all of them."""
    return ", ".join(names)


def forms_lost(found: Iterable[tuple[Path, Node]], kept: Collection[str] = ()) -> list[str]:
    """Return which types of containers a target does not keep.

    Args:
        found: (path, node) of containers.
        kept: Names of the types that it does.
    """
    names: dict[str, list[str]] = {}
    for path, node in found:
        if node[0] in ("d", "l") and len(node) > 2 and node[2][0] not in kept:
            names.setdefault(node[2][0], []).append(fqn_of(path) or TOP)
    plain = {"deque": "list"}
    return [f"a {kind} became a {plain.get(kind, 'dict')}: {listed(sorted(names[kind]))}" for kind in sorted(names)]


def containers(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of all containers at and below a node."""
    if node[0] in ("d", "o"):
        members: Iterable[tuple[Any, Node]] = zip(node[1][::2], node[1][1::2], strict=True)
    elif node[0] in ("l", "t"):
        members = enumerate(node[1])
    else:
        return
    yield path, node
    for key, child in members:
        yield from containers(child, (*path, key))


def ordered_lost(found: Iterable[tuple[Path, Node]]) -> list[str]:
    """Return what a target does not keep of OrderedDicts: their type, and the `_metadata` of some.

    Args:
        found: (path, node) of the containers that the target takes apart.
    """
    ordered = {fqn_of(path) or TOP: node for path, node in found if node[0] == "o"}
    lost = [f"an OrderedDict became a dict: {listed(sorted(ordered))}"] if ordered else []
    versions = sorted(name for name, node in ordered.items() if node[2] is not None)
    if versions:
        lost.append(f"the _metadata of modules' state dicts, their versions, are not kept: {listed(versions)}")
    return lost


def is_text(name: str) -> bool:
    """Whether UTF-8 has a name: lone surrogates, which a pickle may hold, it has not."""
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True

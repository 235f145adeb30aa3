"""Places of a target that are empty or None, lists of another length, and subtrees of which nothing was saved.

An empty place takes everything that was saved below its name. A list that was saved with more members than the target's
takes the additional ones, if they are objects. Any other list or tuple of another length is refused: none is cut or
padded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from asyncckpt.errors import ConfigError, LeafTypeMismatchError, ShapeMismatchError
from asyncckpt.format.state_tree import CONTAINERS, Node, Path, form_in, fqn_of, leaves
from asyncckpt.loading.key_selection import Selection, selected
from asyncckpt.loading.saved_state import SavedTree, kind_of

MAPPINGS = ("d", "o")
SEQUENCES = ("l", "t")
_SEQUENCE_TYPES = (list, tuple, deque)


def is_empty_object(value: Any) -> bool:
    """Whether an object leaf of a target holds nothing: it is None, or a list, tuple or deque of such values."""
    return value is None or (type(value) in _SEQUENCE_TYPES and all(map(is_empty_object, value)))


def container_mismatch(
    place: Node, value: Any, found: Node, fqn: str, path: str
) -> LeafTypeMismatchError | ShapeMismatchError | None:
    """Return why what was saved cannot stand in a place of the target; None if it can.

    Args:
        place: The node of the place in the target: an empty mapping or an object.
        value: The object.
        found: The node that was saved under its name.
        fqn: Its name in the target.
        path: The checkpoint's, for messages.
    """
    if place[0] in MAPPINGS:
        return None if found[0] in MAPPINGS else leaf_mismatch(fqn, kind_of(found), "container", path)
    if value is None or found[0] == "O":
        return None
    if found[0] not in SEQUENCES or type(value) not in _SEQUENCE_TYPES:
        return leaf_mismatch(fqn, kind_of(found), "object", path)
    if value and len(value) != len(found[1]):
        return length_mismatch(fqn, len(found[1]), len(value), path)
    members = zip(value, found[1], strict=False)
    refusals = (container_mismatch(place, member, node, f"{fqn}.{n}", path) for n, (member, node) in enumerate(members))
    return next((refusal for refusal in refusals if refusal is not None), None)


def selected_part(node: Node, selection: Selection, path: Path, fqn: str) -> Node | None:
    """Return the selected part of `node`, for an empty place at `path`; None: nothing of it is selected.

    Raises:
        ConfigError: The selection would shorten a list.
    """
    part = selected(node, selection, path)
    if part is not None and _is_cut(node, part):
        raise ConfigError(
            f"keys names a part of a list in {fqn!r}, which is empty in the target: name the whole list",
            field="keys",
        )
    return part


def _is_cut(node: Node, part: Node) -> bool:
    if node[0] in SEQUENCES:
        return len(node[1]) != len(part[1]) or any(map(_is_cut, node[1], part[1]))
    members = dict(_members(node)) if node[0] in MAPPINGS else {}
    return any(_is_cut(members[key], child) for key, child in (_members(part) if members else ()))


def lists_of_other_lengths(
    tree: Node, saved: SavedTree, selection: Selection, rename: Callable[[str], str] | None
) -> Iterator[tuple[Path, Node, Path, Node]]:
    """Yield every selected list or tuple that was saved with another length: path and node in the target, and saved.

    Args:
        tree: The target's.
        saved: The checkpoint.
        selection: What is filled.
        rename: From the target's names to the saved ones.
    """
    for path, node in _sequences(tree, ()):
        fqn = fqn_of(path)
        if not selection.everything and fqn not in selection:
            continue
        found = saved.node_at(_saved_name(fqn, node, rename))
        if found is not None and found[1][0] in SEQUENCES and len(found[1][1]) != len(node[1]):
            yield path, node, *found


def appended_members(tree: Node, path: Path, node: Node, found: Node) -> tuple[Node, ...] | None:
    """Return the saved members that a shorter list of a target takes after its own; None: it cannot take them.

    A history grows while a training runs, so objects at the end of a list are taken. The length of a tuple, of a list
    whose additional members hold tensors, and of an optimizer's groups is part of the structure and must not change. A
    deque may be full.

    Args:
        tree: The target's.
        path, node: Of the list in it.
        found: The saved list.
    """
    further: tuple[Node, ...] = found[1][len(node[1]) :]
    if node[0] != "l" or not further or (path[-1] == "param_groups" and is_optimizer_state(_node_at(tree, path[:-1]))):
        return None
    form = form_in(node)
    if form is not None and form[1] is not None and form[1] < len(found[1]):
        return None  # the deque would drop its first members
    return further if all(leaf[0] == "O" for member in further for _, leaf in leaves(member)) else None


def is_optimizer_state(node: Node) -> bool:
    """Whether a node is what `state_dict()` of an optimizer gives."""
    return node[0] in MAPPINGS and {"state", "param_groups"}.issubset(node[1][::2])


def _node_at(node: Node, path: Path) -> Node:
    for key in path:
        node = _inside(node)
        node = node[1][key] if node[0] in SEQUENCES else node[1][list(node[1][::2]).index(key) * 2 + 1]
    return _inside(node)


def _inside(node: Node) -> Node:
    while node[0] == "r":
        node = node[1]
    return node


def _sequences(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    node = _inside(node)
    if node[0] in SEQUENCES:
        yield path, node
    for key, child in _members(node):
        if child[0] in CONTAINERS:
            yield from _sequences(child, (*path, key))


def _members(node: Node) -> Iterable[tuple[Any, Node]]:
    if node[0] in MAPPINGS:
        return zip(node[1][::2], node[1][1::2], strict=True)
    return enumerate(node[1]) if node[0] in SEQUENCES else ()


def _saved_name(fqn: str, node: Node, rename: Callable[[str], str] | None) -> str:
    """Return the saved name of a list: `key_map` is asked for names of leaves only."""
    if rename is None:
        return fqn
    below = fqn_of(next(_places(node, ())))
    renamed = rename(f"{fqn}.{below}")
    return renamed[: -len(below) - 1] if renamed.endswith("." + below) else fqn


def _places(node: Node, path: Path) -> Iterator[Path]:
    """Yield the paths of leaves and of empty containers."""
    node = _inside(node)
    if node[0] not in CONTAINERS or not node[1]:
        yield path
        return
    for key, child in _members(node):
        yield from _places(child, (*path, key))


def absent_subtrees(
    tree: Node, missing: Iterable[Path], found: Iterable[Path], is_module: Callable[[Path], bool]
) -> list[str]:
    """Return the FQNs of the parts of a target of which nothing was found; that of the whole target is empty.

    A part is a container at the top level of the target, or one under a string key at any level. A module, and what
    `state_dict()` of a module or an optimizer returned, is one part as a whole. So is the whole target if several of
    its leaves are missing.

    Args:
        tree: The target's.
        missing: Paths of leaves that the checkpoint lacks.
        found: Paths of leaves that it has.
        is_module: Whether a module stands at a path.
    """
    kept = {at[:length] for at in found for length in range(len(at))}
    missing = list(missing)
    if () not in kept and len(missing) > 1:
        return [fqn_of(())]
    states = set(_states(tree, ()))
    parts: dict[Path, None] = {}
    if () in states:
        return []
    for at in missing:
        for length in range(1, len(at)):
            part = at[:length]
            is_whole = part in states or is_module(part)
            if (is_whole or length == 1 or isinstance(part[-1], str)) and part not in kept:
                parts[part] = None
            if is_whole:
                break
    return [fqn_of(at) for at in parts]


def _states(node: Node, at: Path) -> Iterator[Path]:
    node = _inside(node)
    if (node[0] == "o" and node[2] is not None) or is_optimizer_state(node):
        yield at
    for key, child in _members(node):
        if child[0] in CONTAINERS:
            yield from _states(child, (*at, key))


def leaf_mismatch(fqn: str, saved: str, wanted: str, path: str) -> LeafTypeMismatchError:
    """Return the error for a leaf of another kind than was saved."""
    return LeafTypeMismatchError(
        f"{path}: {fqn!r} was saved as {_article(saved)}, the target has {_article(wanted)} there; nothing was changed",
        path=path,
        fqn=fqn,
        saved=saved,
        wanted=wanted,
    )


def length_mismatch(fqn: str, saved: int, wanted: int, path: str) -> ShapeMismatchError:
    """Return the error for a list of another length than was saved."""
    return ShapeMismatchError(
        f"{path}: the list {fqn!r} was saved with {saved} members, the target has {wanted}; nothing was changed. Give "
        "the target as many, or an empty list, which takes all of them",
        path=path,
        fqn=fqn,
        saved=[saved],
        wanted=[wanted],
    )


def _article(kind: str) -> str:
    return f"an {kind}" if kind == "object" else f"a {kind}"

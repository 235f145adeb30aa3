"""Containers of a target that differ from the saved ones: empty ones, lists of another length, and absent subtrees.

An empty container or None in the target takes everything that was saved below its name. A list of the target that is
shorter than the saved one takes the additional members, if they are objects. Any other list or tuple of another length
is refused: none is cut or padded.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable
from typing import Any

from asyncckpt.errors import ConfigError, LeafTypeMismatchError, ShapeMismatchError
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    DICT,
    LIST,
    MAPPINGS,
    OBJECT,
    ORDERED_DICT,
    PER_RANK,
    SEQUENCES,
    Key,
    Node,
    Path,
    form_in,
    fqn_of,
    leaves,
    members,
)
from asyncckpt.loading.key_selection import Selection, selected
from asyncckpt.loading.saved_state import is_optimizer_state, kind_of

_SEQUENCE_TYPES = (list, tuple, deque)


def container_mismatch(
    node: Node, value: Any, found: Node, fqn: str, path: str
) -> LeafTypeMismatchError | ShapeMismatchError | None:
    """Return the error if a leaf of the target cannot take a saved container; None if it can.

    Args:
        node: The node of the leaf: an empty mapping or an object.
        value: The object.
        found: The node that was saved under the leaf's name.
        fqn: The leaf's FQN in the target.
        path: The checkpoint's path, for messages.
    """
    if node[0] in MAPPINGS:
        return None if found[0] in MAPPINGS else leaf_mismatch(fqn, kind_of(found), "container", path)
    if value is None or found[0] in (OBJECT, BYTES, ARRAY):
        return None
    if found[0] not in SEQUENCES or not isinstance(value, _SEQUENCE_TYPES):
        return leaf_mismatch(fqn, kind_of(found), "object", path)
    if value and len(value) != len(found[1]):
        return length_mismatch(fqn, len(found[1]), len(value), path)
    pairs = enumerate(zip(value, found[1], strict=False))
    refusals = (container_mismatch(node, member, inner, f"{fqn}.{n}", path) for n, (member, inner) in pairs)
    return next((refusal for refusal in refusals if refusal is not None), None)


def selected_part(node: Node, selection: Selection, path: Path, fqn: str) -> Node | None:
    """Return the selected part of the saved `node`, for an empty container at `path`; None: nothing in it is selected.

    Raises:
        ConfigError: The selection would shorten a list.
    """
    part = selected(node, selection, path)
    if part is not None and _is_cut(node, part):
        raise ConfigError(
            f"keys selects a part of a list in {fqn!r}, which is empty in the target; name the whole list in keys",
            field="keys",
        )
    return part


def _is_cut(node: Node, part: Node) -> bool:
    if node[0] in SEQUENCES:
        return len(node[1]) != len(part[1]) or any(map(_is_cut, node[1], part[1]))
    inner = dict(members(node))
    return any(_is_cut(inner[key], child) for key, child in (members(part) if inner else ()))


def appended_members(node: Node, found: Node, key: Key, parent: Node) -> tuple[Node, ...] | None:
    """Return the saved members that are appended to a shorter list of a target; None: the lengths must be equal.

    Lists of objects, such as a loss history, grow while a training runs, so additional objects at the end are taken.
    The length of a tuple, of a list whose additional members hold tensors, and of an optimizer's groups is part of the
    structure and must not change. A deque with a `maxlen` may have no room.

    Args:
        node: The node of the list in the target.
        found: The saved list.
        key: The key of the list in its container.
        parent: The node of that container.
    """
    appended: tuple[Node, ...] = found[1][len(node[1]) :]
    if node[0] != LIST or not appended or (key == "param_groups" and is_optimizer_state(parent)):
        return None
    form = form_in(node)
    if form is not None and form[1] is not None and form[1] < len(found[1]):
        return None  # the deque would drop its first members
    return appended if all(leaf[0] == OBJECT for member in appended for _, leaf in leaves(member)) else None


def is_returned_state(node: Node) -> bool:
    """Whether a node is the state that `state_dict()` of a module or an optimizer returned."""
    return (node[0] == ORDERED_DICT and node[2] is not None) or is_optimizer_state(node)


def with_optimizer_state(node: Node) -> Node:
    """Return the saved state of an optimizer; with an empty `state` if a format without empty containers had it."""
    keys = node[1][::2] if node[0] in MAPPINGS else ()
    if "param_groups" not in keys or "state" in keys:
        return node
    return (node[0], ("state", (DICT, ()), *node[1]), *node[2:])


def without_per_rank(node: Node) -> Node:
    """Return the node inside `PerRank` marks, or the node itself."""
    while node[0] == PER_RANK:
        node = node[1]
    return node


def absent_subtrees(
    states: Collection[Path], missing: Iterable[Path], found: Iterable[Path], is_module: Callable[[Path], bool]
) -> list[str]:
    """Return the FQNs of the subtrees of a target of which nothing was found; "" stands for the whole target.

    These subtrees are considered: a container at the top level of the target, and a container under a string key at any
    level. A module, and a state that `state_dict()` of a module or an optimizer returned, is considered only as a
    whole. The whole target is considered if several of its leaves are missing.

    Args:
        states: Paths of states that `state_dict()` returned.
        missing: Paths of leaves that the checkpoint lacks.
        found: Paths of leaves that the checkpoint has.
        is_module: Returns whether a module is at a path.
    """
    kept = {at[:length] for at in found for length in range(len(at))}
    missing = list(missing)
    if () not in kept and len(missing) > 1:
        return [fqn_of(())]
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


def leaf_mismatch(fqn: str, saved: str, wanted: str, path: str) -> LeafTypeMismatchError:
    """Return the error for a leaf whose kind differs from the saved one."""
    return LeafTypeMismatchError(
        f"{path}: {fqn!r} was saved as {_article(saved)}, the target has {_article(wanted)} there; nothing was changed",
        path=path,
        fqn=fqn,
        saved=saved,
        wanted=wanted,
    )


def composite_mismatch(fqn: str, kind: str, saved: str, wanted: str, path: str) -> LeafTypeMismatchError:
    """Return the error for a tensor subclass whose components or context differ from the saved ones."""
    return LeafTypeMismatchError(
        f"{path}: {fqn!r}, a {kind}, was saved with {saved}, the target has {wanted} there; nothing was changed. Make "
        "the target as it was when it was saved",
        path=path,
        fqn=fqn,
        saved=saved,
        wanted=wanted,
    )


def length_mismatch(fqn: str, saved: int, wanted: int, path: str) -> ShapeMismatchError:
    """Return the error for a list whose length differs from the saved one."""
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

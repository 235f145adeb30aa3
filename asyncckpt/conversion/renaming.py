"""A tree with some of its leaves under other names: what keeps its name keeps its place and the types of its keys.

A leaf with a new name goes into the dict whose name its own begins with, the deepest there is, under what is left of it
as one key.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from asyncckpt.errors import DuplicateNameError
from asyncckpt.format.tree import Node, Path, fqn_of, leaves


def renamed(tree: Node, rename: Callable[[str], str], path: str) -> Node:
    """Return the tree under new names.

    Args:
        tree: The tree.
        rename: From every FQN to the new one.
        path: The checkpoint's, for messages.

    Raises:
        DuplicateNameError: Two leaves get one name, or one stands where another has its container, or nothing in it.
        Exception: Whatever `rename` raises.
    """
    moved = {at: new for at, _ in leaves(tree) if (new := rename(fqn_of(at))) != fqn_of(at)}
    if not moved:
        return tree
    stays = {fqn_of(at) for at, _ in leaves(tree) if at not in moved}
    containers = _containers(tree, ())
    root = _opened(tree, (), moved)
    branches: dict[Path, dict[Any, Any]] = {at: branch for at, branch in _branches(root, ()) if at in containers}
    taken, empty = set(stays), _empty(tree, ())
    for at, node in leaves(tree):
        if at not in moved:
            continue
        name = moved[at]
        if name in taken:
            raise DuplicateNameError(f"{path}: two leaves would be called {name!r} by key_map", fqn=name)
        if name in empty:
            raise DuplicateNameError(
                f"{path}: key_map calls a leaf {name!r}, where an empty dict or list is, or what holds one", fqn=name
            )
        taken.add(name)
        home = max((p for p in branches if _is_below(name, p)), key=len)
        rest = name if not home else name[len(fqn_of(home)) + 1 :]
        branches[home][rest] = node
    found = _closed(root)
    names = [fqn_of(at) for at, _ in leaves(found)]
    if len(set(names)) != len(names) or set(names) != taken:
        raise DuplicateNameError(f"{path}: key_map puts a leaf where another one stands", fqn=None)
    return found


def _is_below(name: str, container: Path) -> bool:
    return not container or name.startswith(fqn_of(container) + ".")


def _containers(node: Node, path: Path) -> set[Path]:
    """Return the paths of all dicts that are reached through dicts alone."""
    if node[0] not in ("d", "o"):
        return set()
    found = {path}
    for key, child in zip(node[1][::2], node[1][1::2], strict=True):
        found |= _containers(child, (*path, key))
    return found


def _empty(node: Node, path: Path) -> set[str]:
    """Return the names of the containers that hold nothing, and of those that they are in."""
    if node[0] not in ("d", "o", "l", "t"):
        return set()
    is_dict = node[0] in ("d", "o")
    pairs = zip(node[1][::2], node[1][1::2], strict=True) if is_dict else enumerate(node[1])
    if path and not node[1]:
        return {fqn_of(path)}
    found = {name for key, child in pairs for name in _empty(child, (*path, key))}
    return found | {fqn_of(path)} if found and path else found


class _Branch(dict[Any, Any]):
    """A dict of the tree while it is changed.

    `shape`: its node's kind, what follows its members, and `emptied` where all its leaves are moved: it stays for those
    that may come, and goes if none does.
    """

    shape: tuple[Any, ...] = ("d",)


def _opened(node: Node, path: Path, moved: dict[Path, str]) -> Any:
    if node[0] in ("d", "o"):
        branch = _Branch()
        branch.shape = (node[0], *node[2:])
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            opened = _opened(child, (*path, key), moved)
            if opened is not None:
                branch[key] = opened
        if path and node[1] and all(map(_is_gone, branch.values())):
            branch.shape = (*branch.shape, "emptied")
        return branch
    if node[0] in ("l", "t"):
        children = [_opened(child, (*path, n), moved) for n, child in enumerate(node[1])]
        kept = {n: child for n, child in enumerate(children) if child is not None}
        if len(kept) == len(children):
            return (node[0], children, *node[2:])
        return _Branch(kept) if kept else None  # what stays keeps its number, and so its name
    return None if path in moved else node


def _branches(value: Any, path: Path) -> list[tuple[Path, _Branch]]:
    found = [(path, value)] if isinstance(value, _Branch) else []
    if isinstance(value, _Branch):
        for key, child in value.items():
            found += _branches(child, (*path, key))
    return found


def _closed(value: Any) -> Node:
    if isinstance(value, _Branch):
        kept = [(key, child) for key, child in value.items() if not _is_gone(child)]
        shape = tuple(part for part in value.shape if part != "emptied")
        return (shape[0], tuple(m for key, child in kept for m in (key, _closed(child))), *shape[1:])
    if isinstance(value, tuple) and isinstance(value[1], list):
        return (value[0], tuple(_closed(child) for child in value[1]), *value[2:])
    return tuple(value)


def _is_gone(value: Any) -> bool:
    return isinstance(value, _Branch) and "emptied" in value.shape and all(_is_gone(child) for child in value.values())

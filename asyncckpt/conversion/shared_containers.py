"""Which dicts, lists and sets of the source's pickles were one object, and in which targets they are so again."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asyncckpt.conversion.outline import Outline
from asyncckpt.format.tree import Node, Path, fqn_of, leaves


def shared_containers(outline: Outline, pickles: Sequence[tuple[Path, Node]]) -> dict[Path, Path]:
    """Return, by path, the first path of each object that stands at several in one pickle of the target.

    Where a choice of leaves left them different members, they are several objects from then on.

    Args:
        outline: What is written.
        pickles: (path, node) of what the target holds as one pickle each.
    """
    found: dict[Path, Path] = {}
    for path, node in pickles:
        firsts: dict[Path, list[tuple[Path, Node]]] = {}
        for at, own, there in _candidates(outline, node, path):
            different = firsts.setdefault(own, [])
            first = next((first for first, other in different if _is_alike(there, other)), None)
            if first is None:
                different.append((at, there))
            else:
                found[at] = found[first] = first
    return found


def containers_apart(outline: Outline) -> list[str]:
    """Return the names of containers that were one object, and are several in the target."""
    groups: dict[Path, list[Path]] = {}
    for at, own, _ in _candidates(outline, outline.tree, ()):
        groups.setdefault(own, []).append(at)
    found = {at for group in groups.values() if len({outline.shared.get(at, at) for at in group}) > 1 for at in group}
    there = {at[:n] for at in _kept_names(outline) for n in range(len(at) + 1)}
    for at, other in outline.as_saved.nested:
        is_one = at != other and _written_at(at, outline.shared) == _written_at(other, outline.shared)
        if not is_one and {at, other} <= there:
            found |= {at, other}
    return sorted(map(fqn_of, found))


def _kept_names(outline: Outline) -> Iterator[Path]:
    """Yield the paths of the leaves that have the names that they had."""
    yield from (at for at, _ in leaves(outline.tree) if fqn_of(at) not in outline.former)


def _written_at(path: Path, shared: Mapping[Path, Path]) -> Path:
    """Return the path at which the target has what stands at `path`."""
    for n in range(1, len(path) + 1):
        first = shared.get(path[:n], path[:n])
        if first != path[:n]:
            return _written_at((*first, *path[n:]), shared)
    return path


def _candidates(outline: Outline, node: Node, path: Path) -> Iterator[tuple[Path, Path, Node]]:
    """Yield (path, which object it was, node) of those that were met at several paths of the source's pickles.

    Not of those in which a leaf has another name now: they may have got members from elsewhere.
    """
    objects = outline.as_saved.shared
    if not objects:
        return
    renamed = {at[:n] for at, _ in leaves(outline.tree) if fqn_of(at) in outline.former for n in range(len(at) + 1)}
    todo = [(path, node)]
    while todo:
        at, there = todo.pop()
        if at in objects and at not in renamed:
            yield at, objects[at], there
        if there[0] in ("d", "o"):
            members = list(zip(there[1][::2], there[1][1::2], strict=True))
        else:
            members = list(enumerate(there[1])) if there[0] in ("l", "t") else []
        todo += (((*at, key), child) for key, child in reversed(members))


def _is_alike(node: Node, other: Node) -> bool:
    """Whether two nodes that one object was read as still have the same members."""
    if node[0] != other[0]:
        return False
    if node[0] in ("d", "o"):
        if node[1][::2] != other[1][::2]:
            return False
        return all(map(_is_alike, node[1][1::2], other[1][1::2]))
    if node[0] in ("l", "t"):
        return len(node[1]) == len(other[1]) and all(map(_is_alike, node[1], other[1]))
    return True

"""Which dicts, lists and sets of the source's pickles were one object, and in which targets they are so again."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence

from asyncckpt.conversion.outline import Outline
from asyncckpt.format.tree import Node, Path, fqn_of, leaves


def shared_containers(outline: Outline, pickles: Sequence[tuple[Path, Node]]) -> dict[Path, Path]:
    """Return, by path, the first path of each object that stands at several in one pickle of the target.

    Where a choice of leaves left them different members, or a leaf got another name, they are several from then on.

    Args:
        outline: What is written.
        pickles: (path, node) of what the target holds as one pickle each.
    """
    objects, found = outline.as_saved.shared, dict[Path, Path]()
    renamed = _renamed(outline) if objects else ()
    for path, node in pickles if objects else ():
        firsts: dict[Path, list[tuple[Path, Node]]] = {}
        for at, there in _nodes(node, path):
            if at not in objects or at in renamed:
                continue
            different = firsts.setdefault(objects[at], [])
            first = next((first for first, other in different if _is_alike(there, other)), None)
            if first is None:
                different.append((at, there))
            else:
                found[at] = found[first] = first
    return found


def containers_apart(outline: Outline) -> list[str]:
    """Return the names, in the source, of containers that were one object, and are several in the target."""
    saved = outline.as_saved
    if not saved.shared and not saved.nested:
        return []
    renamed = _renamed(outline)
    there = _Chosen(outline)
    groups: dict[Path, set[Path]] = {}
    for at, own in saved.shared.items():
        if at in there:
            groups.setdefault(own, set()).add(at)
    found: set[Path] = set()
    for group in groups.values():
        if len({outline.shared.get(at, at) for at in group}) > 1:
            found |= group
    for at, other in saved.nested:
        if at not in there or other not in there:
            continue
        may_be_one = at != other and not {at, other} & renamed
        if not may_be_one or _written_at(at, outline.shared) != _written_at(other, outline.shared):
            found |= {at, other} | groups.get(saved.shared.get(other, other), set())
    return sorted(map(fqn_of, found))


class _Chosen:
    """The source's containers and leaves of which the target has something."""

    def __init__(self, outline: Outline) -> None:
        self._names = sorted(outline.former.get(fqn, fqn) for fqn, _ in outline.leaves())
        self._paths = {at for at, _ in _nodes(outline.tree, ())}  # also of what is empty

    def __contains__(self, path: Path) -> bool:
        name, names = fqn_of(path), self._names
        places = [bisect_left(names, name), bisect_left(names, f"{name}.")]
        found = [names[place] for place in places if place < len(names)]
        return path in self._paths or found[:1] == [name] or any(one.startswith(f"{name}.") for one in found)


def _renamed(outline: Outline) -> set[Path]:
    """Return the paths of leaves that have another name now, and of what holds them: they may come from elsewhere."""
    if not outline.former:
        return set()
    return {at[:n] for at, _ in leaves(outline.tree) if fqn_of(at) in outline.former for n in range(len(at) + 1)}


def _written_at(path: Path, shared: Mapping[Path, Path]) -> Path:
    """Return the path at which the target has what stands at `path`."""
    for n in range(1, len(path) + 1):
        first = shared.get(path[:n], path[:n])
        if first != path[:n]:
            return _written_at((*first, *path[n:]), shared)
    return path


def _nodes(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of a node and of everything below it, in order."""
    todo = [(path, node)]
    while todo:
        at, there = todo.pop()
        yield at, there
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

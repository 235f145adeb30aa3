"""From torch's files to torch's: which tensors are views of one storage, and what else the source said of its values.

A storage of the target holds what the views of it share, without what lies before, between or behind them in the
source, so that the leaves that somebody chooses of a file do not bring all of it along. One tensor with gaps between
its elements, which nothing else looks at, is made row-major for the same reason.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from asyncckpt.conversion.outline import Outline
from asyncckpt.conversion.shared_containers import shared_containers
from asyncckpt.conversion.torch_image import TorchView, storage_dtype
from asyncckpt.dtypes import DTYPES
from asyncckpt.foreign.as_saved import SavedView
from asyncckpt.foreign.pickle_values import COUNTER, LAYOUT, PARAMETER, REQUIRES_GRAD, ROW_MAJOR, UNORDERED
from asyncckpt.format.dcp_items import items_of
from asyncckpt.format.structure import Chunk, row_major
from asyncckpt.format.tree import Node, Path, fqn_of, leaves
from asyncckpt.storage.contents import SavedTensor

Member = tuple[str, int, SavedView]
"""FQN, number of the tensor, what it was."""


def pickles(outline: Outline, to: str) -> Iterator[tuple[Path, Node]]:
    """Yield (path, node) of what a target holds as one pickle each; tensors that a DCP directory has as such are none.

    Args:
        outline: What is written.
        to: The target's kind: only `torch` and `dcp` hold pickles.
    """
    if to == "torch":
        yield (), outline.tree
    elif to == "dcp":
        yield from ((path, node) for path, node, _ in items_of(outline.tree) if node[0] not in ("T", "N"))


def with_views(outline: Outline, to: str) -> Outline:
    """Return the outline with what its target's pickles have as the source's had it: `views`, and what is `shared`.

    The storages that these need are tensors of bytes behind the others; no leaf has their numbers.
    """
    outline = replace(outline, tensors=list(outline.tensors), names=list(outline.names), views={})
    outline.shared = shared_containers(outline, list(pickles(outline, to)))
    for path, node in pickles(outline, to):
        for group in overlapping(saved_tensors(outline, node, path)):
            _place(outline, group)
    return outline


def saved_tensors(outline: Outline, node: Node, path: Path = ()) -> list[Member]:
    """Return the tensors below a node, which stands at `path`, of which a pickle said what they were."""
    saved, found = outline.as_saved.tensors, []
    for at, leaf in leaves(node, path) if saved else ():
        fqn = fqn_of(at)
        view = saved.get(outline.former.get(fqn, fqn)) if leaf[0] == "T" else None
        if view is not None:
            found.append((fqn, leaf[1], view))
    return found


def overlapping(members: list[Member]) -> Iterator[list[Member]]:
    """Yield groups of tensors whose extents overlap; those without elements one by one."""
    group: list[Member] = []
    end = -1
    for member in sorted(members, key=lambda m: (m[2].part, m[2].extent)):
        start, stop = member[2].extent
        if start == stop:
            yield [member]
            continue
        if group and (member[2].part != group[0][2].part or start >= end):
            yield group
            group, end = [], -1
        group.append(member)
        end = max(end, stop)
    if group:
        yield group


def _place(outline: Outline, group: list[Member]) -> None:
    """Give the tensors of a group their views."""
    dtype = storage_dtype({view.ref.dtype for _, _, view in group})
    fqn, number, first = group[0]
    if {n for _, n, _ in group} == {number} and (first.is_row_major or _has_gaps(first)):
        for fqn, _, view in group:
            stride = view.ref.stride if first.is_row_major else row_major(view.ref.size)
            outline.views[fqn] = TorchView(view, number, dtype, 0, stride)
        return
    widest = max(DTYPES[view.ref.dtype].itemsize for _, _, view in group)
    start = first.extent[0]
    start -= (start - first.storage_start) % widest  # where elements of every one of these dtypes may begin
    nbytes = max(view.extent[1] for _, _, view in group) - start
    chunk = Chunk(part=first.part, offset_bytes=start, nbytes=nbytes, offsets=(0,), sizes=(nbytes,))
    outline.tensors.append(SavedTensor(fqn=fqn, dtype="uint8", global_shape=(nbytes,), chunks=((0, chunk),)))
    outline.names.append(fqn)
    for fqn, _, view in group:
        offset = (view.extent[0] - start) // DTYPES[view.ref.dtype].itemsize
        outline.views[fqn] = TorchView(view, len(outline.tensors) - 1, dtype, offset, view.ref.stride)


def _has_gaps(view: SavedView) -> bool:
    """Whether more elements than its own lie between a tensor's first and last, or may."""
    start, end = view.extent
    return end - start > math.prod(view.ref.size) * DTYPES[view.ref.dtype].itemsize


def as_it_was(outline: Outline, node: Node, path: Path = ()) -> Node:
    """Return a node with the further kinds that `TorchImage` writes, where the source has them.

    Args:
        outline: What the node is of.
        node: Of what is one pickle.
        path: Where it stands.
    """
    found, first = _of_kind(outline, node, path), outline.shared.get(path)
    return found if first is None else ("S", first, found)


def _of_kind(outline: Outline, node: Node, path: Path) -> Node:
    kind, saved = node[0], outline.as_saved
    if kind in ("d", "o"):
        pairs = zip(node[1][::2], node[1][1::2], strict=True)
        members = tuple(m for key, child in pairs for m in (key, as_it_was(outline, child, (*path, key))))
        return (kind, members, *node[2:])
    if kind in ("l", "t"):
        return (kind, tuple(as_it_was(outline, child, (*path, n)) for n, child in enumerate(node[1])), *node[2:])
    fqn = fqn_of(path)
    if kind == "T" and fqn in outline.views:
        return ("V", outline.views[fqn])
    before = outline.former.get(fqn, fqn)
    return ("P", saved.values[before]) if kind == "O" and before in saved.values else node


def kept(outline: Outline, to: str) -> set[tuple[str, str]]:
    """Return what a target holds as it was in the source: (sentence that says of others that they changed, FQN there).

    Args:
        outline: What is written.
        to: The target's kind.
    """
    found: set[tuple[str, str]] = set()
    for path, node in pickles(outline, to):
        for at, leaf in _changed_leaves(as_it_was(outline, node, path), path):
            fqn = fqn_of(at)
            name = outline.former.get(fqn, fqn)
            if leaf[0] == "V":
                said = {PARAMETER, REQUIRES_GRAD}
                said |= {ROW_MAJOR} if leaf[1].stride == leaf[1].saved.ref.stride else set()
            else:
                said = {COUNTER, LAYOUT, UNORDERED}
            found |= {(sentence, name) for sentence in said}
    return found


def _changed_leaves(node: Node, path: Path) -> Iterator[tuple[Path, Node]]:
    if node[0] == "S":
        node = node[2]
    if node[0] in ("V", "P"):
        yield path, node
    if node[0] in ("d", "o"):
        for key, child in zip(node[1][::2], node[1][1::2], strict=True):
            yield from _changed_leaves(child, (*path, key))
    elif node[0] in ("l", "t"):
        for n, child in enumerate(node[1]):
            yield from _changed_leaves(child, (*path, n))

"""Opens a target as any reader would, and proves that it holds what the source held.

Every leaf must be there with its type, shape and value, in the same containers where the target keeps those, and the
elements of every tensor must lie where they were written. What lies there: see `reading_back`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.conversion.long_bytes import are_same_bytes
from asyncckpt.conversion.opened_values import alike_when_opened, is_same_value
from asyncckpt.conversion.outline import Outline, outline_of
from asyncckpt.conversion.pieces import Target
from asyncckpt.conversion.same_nesting import other_nesting
from asyncckpt.conversion.same_views import other_than_saved
from asyncckpt.conversion.windows import payload_places
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.foreign.kinds import read_any
from asyncckpt.format.tree import Node
from asyncckpt.storage.files import Files
from asyncckpt.storage.source import Located
from asyncckpt.uninterrupted import mapped

_Place = tuple[str, int]
"""File name, offset."""


def prove_structure(path: str, outline: Outline, to: str, target: Target, files: Files, threads: int) -> None:
    """Compare what a reader finds at `path` with what was to be written there; reads no elements.

    Args:
        path: The target, under its temporary name.
        outline: What was to be written.
        to: The target's kind.
        target: Where it was written.
        files: The storage seam.
        threads: That look for places.

    Raises:
        CorruptCheckpointError: A leaf is not there, differs, or is looked for elsewhere; names it.
        OSError: The target cannot be read.
    """
    found = outline_of(read_any(path, files), files)
    wanted, there = dict(outline.leaves()), dict(found.leaves())
    differing = set(wanted) ^ set(there)
    if differing:
        differing -= alike_when_opened(outline, found)
    if differing:
        raise failed(path, min(differing), "is there on one side only")
    numbers: dict[int, tuple[int, str]] = {}
    for fqn, node in wanted.items():
        if fqn not in there:
            continue  # alike when opened
        other = there[fqn]
        if node[0] in ("T", "N"):
            _compare_tensor(path, fqn, outline, node, found, other)
            if fqn not in outline.views:
                numbers[other[1]] = (node[1], fqn)
        elif "B" in (node[0], other[0]):
            if (node[0], other[0], to) == ("B", "B", "asyncckpt"):  # they lie in a file as they are
                numbers[other[1]] = (node[1], fqn)
            elif not are_same_bytes(outline, node, found, other, files):
                raise failed(path, fqn, "has another value")
        elif other[0] != "O" or not is_same_value(found.objects[other[1]], outline.objects[node[1]]):
            raise failed(path, fqn, "has another value")
    if target.keeps_nesting:
        name = other_nesting(outline, found)
        if name is not None:
            raise failed(path, name, "stands in another container, or is tied no more")
    written = _written(path, target)
    name = other_than_saved(outline, found, to, written)
    if name is not None:
        raise failed(
            path,
            name,
            "is not what it was in the source's pickle: a view, a Parameter, a Counter, a layout or an OrderedDict",
        )
    looked_for = _places(found, [number for number in numbers if found.nbytes_of(number)], files, threads)
    for at, place in looked_for:
        number, fqn = numbers[at]
        if place not in written[number]:
            raise failed(path, fqn, f"is looked for at {place}, and was not written there")


def _written(path: str, target: Target) -> dict[int, set[_Place]]:
    """Return where the elements of each tensor were written; of tied ones there may be several places."""
    found: dict[int, set[_Place]] = {}
    for file in target.files:
        name = file.name if target.is_directory else os.path.basename(path)
        for payload, offset in payload_places(file):
            found.setdefault(payload.tensor, set()).add((name, offset))
    return found


def _places(found: Outline, numbers: list[int], files: Files, threads: int) -> Iterator[tuple[int, _Place | None]]:
    """Yield where a reader finds the elements of each tensor; None: not in one piece of a file."""
    contents = found.contents

    def place(number: int) -> tuple[int, _Place | None]:
        saved = found.tensors[number]
        if len(saved.chunks) != 1:
            return number, None
        rank, chunk = saved.chunks[0]
        shards = contents.ranks[rank].index.shards
        if contents.source is None:
            return number, (shards[chunk.part].name, chunk.offset_bytes)
        where = contents.source.place(chunk.part, files)
        if not isinstance(where, Located):
            return number, None
        return number, (shards[where.part].name, where.offset + chunk.offset_bytes)

    with ThreadPoolExecutor(threads, "asyncckpt-prove") as pool:
        yield from mapped(pool, place, numbers)


def _compare_tensor(path: str, fqn: str, outline: Outline, node: Node, found: Outline, other: Node) -> None:
    mine = outline.tensors[node[1]]
    if other[0] not in ("T", "N"):
        raise failed(path, fqn, "is no tensor any more")
    theirs = found.tensors[other[1]]
    if (mine.dtype, mine.global_shape) != (theirs.dtype, theirs.global_shape):
        raise failed(path, fqn, f"became {theirs.dtype}{list(theirs.global_shape)}")


def failed(path: str, fqn: str | None, what: str) -> CorruptCheckpointError:
    detail = f"leaf {fqn!r} {what}, read back after it was written"
    return CorruptCheckpointError(
        f"{path}: {detail}; nothing was put into place. The storage cannot be trusted, or this is a bug of asyncckpt",
        path=path,
        fqn=fqn,
        detail=detail,
    )

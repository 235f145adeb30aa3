"""Opens a target as any reader would, and compares it with what the source holds, before it is put into place.

Every leaf must be there with its type, shape and value, in the same containers where the target keeps those, and the
elements of every tensor must lie where they were written (`verify_structure`), as they were written (`verify_bytes`).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.basics.deferred_signals import mapped
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksums import BLOCK_NBYTES
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import round_up
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    CONTAINERS,
    OBJECT,
    ORDERED_DICT,
    TENSOR,
    Node,
    Path,
    fqn_of,
    is_counter,
    members,
)
from asyncckpt.interop.copy_pipeline import OutputFile, Target, payload_places
from asyncckpt.interop.diff import alike_when_opened, bytes_at, is_same_value
from asyncckpt.interop.losses import TOP
from asyncckpt.interop.selection import Outline, outline_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage.contents import Located
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Wanted
from asyncckpt.storage.reader import read_shards

_PASS_NBYTES = 4 << 30
"""What is read back in one pass, whose plan is in memory: a megabyte. Whole blocks. After each pass the readers wait
for the last of them, and ask for new buffers: with 256 MiB that took a third of the time."""

_EXTENT_NBYTES = 8 << 20
"""One read. Of 512 MiB 2, 4 and 8 MiB take a twentieth less than the 16 of loads: there is less fresh memory."""

_REPORTED_NBYTES = 64 << 20
"""What is read back between two reports of progress, about."""

_Place = tuple[str, int]
"""File name, offset."""


def verify_structure(path: str, outline: Outline, to: str, target: Target, files: Files, threads: int) -> None:
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
    differing = wanted.keys() ^ there.keys()
    if differing:
        differing -= alike_when_opened(outline, found)
    if differing:
        raise _failed(path, min(differing), "is there on one side only")
    numbers: dict[int, tuple[int, str]] = {}
    for fqn, node in wanted.items():
        other = there.get(fqn)
        if other is None:
            continue  # alike when opened
        if node[0] in (TENSOR, ARRAY) or (node[0], other[0], to) == (BYTES, BYTES, "asyncckpt"):  # they lie in a file
            _compare_tensor(path, fqn, outline, node, found, other)
            numbers[other[1]] = (node[1], fqn)
        elif BYTES in (node[0], other[0]):
            if (value := bytes_at(outline, node, files)) is None or value != bytes_at(found, other, files):
                raise _failed(path, fqn, "has another value")
        elif other[0] != OBJECT or not is_same_value(found.objects[other[1]], outline.objects[node[1]]):
            raise _failed(path, fqn, "has another value")
    if target.keeps_nesting:
        name = other_nesting(outline, found)
        if name is not None:
            raise _failed(path, name, "stands in another container, or is tied no more")
    written = _written(path, target)
    for at, place in _places(found, [number for number in numbers if found.nbytes_of(number)], files, threads):
        number, fqn = numbers[at]
        if place not in written[number]:
            raise _failed(path, fqn, f"is looked for at {place}, and was not written there")


def _compare_tensor(path: str, fqn: str, outline: Outline, node: Node, found: Outline, other: Node) -> None:
    if node[0] != BYTES and other[0] not in (TENSOR, ARRAY):
        raise _failed(path, fqn, "is no tensor any more")
    mine, theirs = outline.tensors[node[1]], found.tensors[other[1]]
    if (mine.dtype, mine.global_shape) != (theirs.dtype, theirs.global_shape):
        raise _failed(path, fqn, f"became {theirs.dtype}{list(theirs.global_shape)}")


def _written(path: str, target: Target) -> dict[int, set[_Place]]:
    """Return where the elements of each tensor were written; of tied ones there may be several places."""
    found: dict[int, set[_Place]] = {}
    for file in target.files:
        for payload, offset in payload_places(file):
            found.setdefault(payload.tensor, set()).add((_name_in(path, file, target), offset))
    return found


def _name_in(path: str, file: OutputFile, target: Target) -> str:
    return file.name if target.is_directory else os.path.basename(path)


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


def other_nesting(wanted: Outline, found: Outline) -> str | None:
    """Return the name of something that is in another container, or is tied to other tensors; None: nothing is.

    Both have the same leaves; what is a leaf in one and a container in the other is not looked at.

    Args:
        wanted: What was to be written.
        found: What a reader finds.
    """
    return _other_container(wanted, found, wanted.tree, found.tree, ()) or _untied(wanted, found)


def _other_container(wanted: Outline, found: Outline, one: Node, other: Node, path: Path) -> str | None:
    """Return the name of the first container at or below `path` that is another one."""
    if one[0] not in CONTAINERS or other[0] not in CONTAINERS:
        return None
    mine, theirs = list(members(one)), list(members(other))
    if (
        one[0] != other[0]
        or [(type(key), key) for key, _ in mine] != [(type(key), key) for key, _ in theirs]
        or is_counter(one) is not is_counter(other)  # other forms are not kept everywhere, which the report says
        or (one[0] == ORDERED_DICT and not _same_versions(wanted, found, one[2], other[2]))
    ):
        return fqn_of(path) or TOP
    below = (
        _other_container(wanted, found, child, there, (*path, key))
        for (key, child), (_, there) in zip(mine, theirs, strict=True)
    )
    return next((name for name in below if name is not None), None)


def _same_versions(wanted: Outline, found: Outline, one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return is_same_value(wanted.objects[one], found.objects[other])


def _untied(wanted: Outline, found: Outline) -> str | None:
    """Return a name of a tensor that was tied to another one, and is no more."""
    there = {fqn: node[1] for fqn, node in found.leaves() if node[0] in (TENSOR, ARRAY)}
    numbers: dict[int, int] = {}
    for fqn, node in wanted.leaves():
        if node[0] in (TENSOR, ARRAY) and fqn in there and numbers.setdefault(node[1], there[fqn]) != there[fqn]:
            return fqn
    return None


def verify_bytes(
    path: str,
    outline: Outline,
    target: Target,
    blocks: Mapping[str, bytes],
    files: Files,
    threads: int,
    step: Callable[[int], None],
) -> None:
    """Read all files back, from the disk where O_DIRECT wrote them, and compare their blocks.

    Args:
        path: The target, under its temporary name.
        outline: What was written.
        target: Where it was written.
        blocks: By file name the digests of what was written.
        files: The storage seam.
        threads: That read.
        step: Called by this thread, with bytes that were read.

    Raises:
        CorruptCheckpointError: A block differs; names a leaf that it holds.
        OSError: A file cannot be read.

    Blocks: for the reads.
    """
    progress = _Progress(step)
    directory = path if target.is_directory else os.path.dirname(path)
    for requests in _passes(path, target, blocks, progress):
        try:
            read_shards(directory, None, requests, files=files, threads=threads, extent_nbytes=_EXTENT_NBYTES)
        except CorruptCheckpointError as error:
            request = next(request for request in requests if request.shard.name == error.file)
            offset = request.wanted[0].offset if error.offset is None else error.offset
            file = next(file for file in target.files if _name_in(path, file, target) == error.file)
            raise _failed(path, _held_at(outline, file, offset), f"holds other bytes: {error.detail}") from error
        progress.report()


def _passes(path: str, target: Target, blocks: Mapping[str, bytes], sink: _Progress) -> Iterator[list[ShardRequest]]:
    """Yield ranges of the files, which together are all of them, `_PASS_NBYTES` at a time."""
    requests: list[ShardRequest] = []
    room = _PASS_NBYTES
    for file in target.files:
        shard = ShardRecord(name=_name_in(path, file, target), nbytes=file.nbytes, digests=blocks[file.name])
        start = 0
        while start < file.nbytes:
            end = min(file.nbytes, start + room)
            wanted = [Wanted(start, end - start, "", sink)]
            requests.append(ShardRequest(shard=shard, block_nbytes=BLOCK_NBYTES, wanted=wanted))
            room -= round_up(end - start, BLOCK_NBYTES)
            start = end
            if room <= 0:
                yield requests
                requests, room = [], _PASS_NBYTES
    if requests:
        yield requests


class _Progress:
    """A sink that counts what passes; `step` gets it in the thread that made this, which is one of the readers."""

    def __init__(self, step: Callable[[int], None]) -> None:
        self._step, self._thread = step, threading.get_ident()
        self._lock = threading.Lock()
        self._nbytes = 0

    def deliver(self, position: int, address: int, nbytes: int) -> None:
        with self._lock:
            self._nbytes += nbytes
        if self._nbytes >= _REPORTED_NBYTES and threading.get_ident() == self._thread:
            self.report()

    def report(self) -> None:
        """Say what was counted since the last time."""
        with self._lock:
            nbytes, self._nbytes = self._nbytes, 0
        self._step(nbytes)


def _held_at(outline: Outline, file: OutputFile, offset: int) -> str | None:
    """Return the name of the first tensor that the block at `offset` holds something of."""
    for payload, at in payload_places(file):
        if at < offset + BLOCK_NBYTES and offset < at + payload.nbytes:
            return outline.names[payload.tensor]
    return None


def _failed(path: str, fqn: str | None, what: str) -> CorruptCheckpointError:
    detail = f"leaf {fqn!r} {what}, read back after it was written"
    return CorruptCheckpointError(
        f"{path}: {detail}; nothing was put into place. The storage cannot be trusted, or this is a bug of asyncckpt",
        path=path,
        fqn=fqn,
        detail=detail,
    )

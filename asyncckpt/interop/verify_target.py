"""Verifies a target before it is renamed to its path: opens it with the reader of its kind, and compares.

`verify_structure` checks that every leaf has its type, shape and value, that containers are the same if the target
keeps them, and that the reader finds the elements of each tensor at the offset where they were written. `verify_bytes`
reads all files back.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

from asyncckpt.basics.deferred_signals import mapped
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.index import ShardRecord
from asyncckpt.format.layout import round_up
from asyncckpt.format.state_tree import (
    ARRAY,
    BYTES,
    COMPOSITE,
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
from asyncckpt.interop.conversion_losses import TOP
from asyncckpt.interop.copy_pipeline import OutputFile, Target, payload_places
from asyncckpt.interop.diff import bytes_at, equal_to_containers, is_same_value
from asyncckpt.interop.outline import Outline, outline_of
from asyncckpt.interop.sources.detect import read_any
from asyncckpt.storage.contents import Located
from asyncckpt.storage.files import Files
from asyncckpt.storage.read_plan import ShardRequest, Wanted
from asyncckpt.storage.reader import read_shards

_PASS_NBYTES = 4 << 30
"""Bytes that are read back in one pass: a multiple of the block. The plan of a pass takes 1 MB of memory. After each
pass the threads wait for each other and allocate new buffers: with passes of 256 MiB this took a third of the time."""

_EXTENT_NBYTES = 8 << 20
"""Bytes of one read. Measured with 512 MiB: reads of 2, 4 and 8 MiB take 5% less time than the 16 MiB of loads, since
less new memory is touched."""

_REPORTED_NBYTES = 64 << 20
"""About as many bytes are read back between two reports of progress."""

_Place = tuple[str, int]
"""File name, offset in bytes."""


def verify_structure(path: str, outline: Outline, to: str, target: Target, files: Files, threads: int) -> None:
    """Compare what a reader finds at `path` with what should have been written; reads no elements.

    Args:
        path: The target, under its temporary name.
        outline: What should have been written.
        to: Kind of the target.
        target: The files that were written.
        files: The storage seam.
        threads: Number of threads that look up the offsets of tensors.

    Raises:
        CorruptCheckpointError: A leaf is missing, differs, or is found at another offset; names it.
        OSError: The target cannot be read.
    """
    found = outline_of(read_any(path, files), files)
    wanted, there = dict(outline.leaves()), dict(found.leaves())
    differing = wanted.keys() ^ there.keys()
    if differing:
        differing -= equal_to_containers(outline, found)
    if differing:
        raise _failed(path, min(differing), "is in only one of source and target")
    numbers: dict[int, tuple[int, str]] = {}
    for fqn, node in wanted.items():
        other = there.get(fqn)
        if other is None:
            continue  # it equals a container of the target
        if node[0] in (TENSOR, ARRAY) or (node[0], other[0], to) == (BYTES, BYTES, "asyncckpt"):  # stored as elements
            _compare_tensor(path, fqn, outline, node, found, other)
            numbers[other[1]] = (node[1], fqn)
        elif BYTES in (node[0], other[0]):
            if (value := bytes_at(outline, node, files)) is None or value != bytes_at(found, other, files):
                raise _failed(path, fqn, "has another value")
        elif other[0] != OBJECT or not is_same_value(found.objects[other[1]], outline.objects[node[1]]):
            raise _failed(path, fqn, "has another value")
    if target.keeps_nesting:
        name = nesting_mismatch(outline, found)
        if name is not None:
            raise _failed(path, name, "is in another container, or is no longer tied")
    written = _written(path, target)
    for at, place in _places(found, [number for number in numbers if found.nbytes_of(number)], files, threads):
        number, fqn = numbers[at]
        if place not in written[number]:
            raise _failed(path, fqn, f"is expected at {place} by the reader, but was not written there")


def _compare_tensor(path: str, fqn: str, outline: Outline, node: Node, found: Outline, other: Node) -> None:
    if node[0] != BYTES and other[0] not in (TENSOR, ARRAY):
        raise _failed(path, fqn, "is no longer a tensor")
    mine, theirs = outline.tensors[node[1]], found.tensors[other[1]]
    if (mine.dtype, mine.global_shape) != (theirs.dtype, theirs.global_shape):
        raise _failed(path, fqn, f"became {theirs.dtype}{list(theirs.global_shape)}")


def _written(path: str, target: Target) -> dict[int, set[_Place]]:
    """Return where the elements of each tensor were written, by its number; a tied tensor may be in several places."""
    found: dict[int, set[_Place]] = {}
    for file in target.files:
        for payload, offset in payload_places(file):
            found.setdefault(payload.tensor, set()).add((_name_in(path, file, target), offset))
    return found


def _name_in(path: str, file: OutputFile, target: Target) -> str:
    return file.name if target.is_directory else os.path.basename(path)


def _places(found: Outline, numbers: list[int], files: Files, threads: int) -> Iterator[tuple[int, _Place | None]]:
    """Yield the number of each tensor and where a reader finds its elements; None: not in one piece of a file."""
    contents = found.contents

    def place(number: int) -> tuple[int, _Place | None]:
        saved = found.saved(number)
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


def nesting_mismatch(wanted: Outline, found: Outline) -> str | None:
    """Return the FQN of a container that differs, or of a tensor that is no longer tied; None: there is none.

    Nodes that are a leaf in one outline and a container in the other are ignored.

    Args:
        wanted: What should have been written; has the same leaves as `found`.
        found: What a reader finds.
    """
    return _container_mismatch(wanted, found, wanted.tree, found.tree, ()) or _lost_tie(wanted, found)


def _container_mismatch(wanted: Outline, found: Outline, one: Node, other: Node, path: Path) -> str | None:
    """Return the FQN of the first container at or below `path` that differs."""
    if one[0] not in CONTAINERS or other[0] not in CONTAINERS:
        return None
    mine, theirs = list(members(one)), list(members(other))
    if (
        one[0] != other[0]
        or [(type(key), key) for key, _ in mine] != [(type(key), key) for key, _ in theirs]
        or is_counter(one) is not is_counter(other)  # not every target keeps other types; the report names them
        or (one[0] == COMPOSITE and not (one[3] == other[3] and _same_versions(wanted, found, one[2], other[2])))
        or (one[0] == ORDERED_DICT and not _same_versions(wanted, found, one[2], other[2]))
    ):
        return fqn_of(path) or TOP
    below = (
        _container_mismatch(wanted, found, child, there, (*path, key))
        for (key, child), (_, there) in zip(mine, theirs, strict=True)
    )
    return next((name for name in below if name is not None), None)


def _same_versions(wanted: Outline, found: Outline, one: int | None, other: int | None) -> bool:
    if one is None or other is None:
        return one is other
    return is_same_value(wanted.objects[one], found.objects[other])


def _lost_tie(wanted: Outline, found: Outline) -> str | None:
    """Return the FQN of a tensor that was tied to another one and no longer is; None: there is none."""
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
    """Read all files back and compare the digests of their blocks. Files written with O_DIRECT are read from the disk.

    Args:
        path: The target, under its temporary name.
        outline: What was written.
        target: The files that were written.
        blocks: The digests of the blocks that were written, by file name.
        files: The storage seam.
        threads: Number of threads that read.
        step: Called in the calling thread with a number of bytes that were read.

    Raises:
        CorruptCheckpointError: A block differs; names a leaf in it.
        OSError: A file cannot be read.

    Blocks: until all files are read.
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
            raise _failed(
                path, _held_at(outline, target, file, offset), f"holds other bytes: {error.detail}"
            ) from error
        progress.report()


def _passes(path: str, target: Target, blocks: Mapping[str, bytes], sink: _Progress) -> Iterator[list[ShardRequest]]:
    """Yield the read requests of each pass; together they cover all files."""
    requests: list[ShardRequest] = []
    room = _PASS_NBYTES
    for file in target.files:
        shard = ShardRecord(name=_name_in(path, file, target), nbytes=file.nbytes, digests=blocks[file.name])
        start = 0
        while start < file.nbytes:
            end = min(file.nbytes, start + room)
            wanted = [Wanted(start, end - start, "", sink)]
            requests.append(ShardRequest(shard=shard, block_nbytes=target.block_nbytes, wanted=wanted))
            room -= round_up(end - start, target.block_nbytes)
            start = end
            if room <= 0:
                yield requests
                requests, room = [], _PASS_NBYTES
    if requests:
        yield requests


class _Progress:
    """A sink that counts bytes. It calls `step` only in the thread that created it, which is one of the readers."""

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
        """Call `step` with the bytes that were counted since the last call."""
        with self._lock:
            nbytes, self._nbytes = self._nbytes, 0
        self._step(nbytes)


def _held_at(outline: Outline, target: Target, file: OutputFile, offset: int) -> str | None:
    """Return the FQN of the first tensor with elements in the block at `offset`; None: there is none."""
    for payload, at in payload_places(file):
        if at < offset + target.block_nbytes and offset < at + payload.nbytes:
            return outline.names[payload.tensor]
    return None


def _failed(path: str, fqn: str | None, what: str) -> CorruptCheckpointError:
    detail = f"leaf {fqn!r} {what}, read back after it was written"
    return CorruptCheckpointError(
        f"{path}: {detail}; nothing was published. The storage is faulty, or this is a bug of asyncckpt",
        path=path,
        fqn=fqn,
        detail=detail,
    )

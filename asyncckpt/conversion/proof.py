"""Reads a target back as any reader would, and compares every leaf with what the source held."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import xxhash

from asyncckpt.conversion.outline import Outline, outline_of
from asyncckpt.conversion.payloads import slabs
from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.foreign.kinds import read_any
from asyncckpt.format.tree import Node
from asyncckpt.storage.files import Files


def prove(
    path: str, outline: Outline, digests: dict[int, bytes], files: Files, threads: int, step: Callable[[int], None]
) -> None:
    """Compare what stands at `path` with what was read from the source.

    Args:
        path: The target, under its temporary name.
        outline: What was to be written.
        digests: Of the tensors' elements as the source gave them, by number.
        files: The storage seam.
        threads: That read.
        step: Called with the bytes of every tensor.

    Raises:
        CorruptCheckpointError: A leaf is not there, or differs; names it.
        OSError: The target cannot be read.
    """
    found = outline_of(read_any(path, files), files)
    wanted, there = dict(outline.leaves()), dict(found.leaves())
    differing = sorted(set(wanted) ^ set(there))
    if differing:
        raise _failed(path, differing[0], "is there on one side only")
    expected: dict[int, tuple[int, str]] = {}
    for fqn, node in wanted.items():
        other = there[fqn]
        if node[0] in ("T", "N"):
            _compare_tensor(path, fqn, outline, node, found, other)
            expected[other[1]] = (node[1], fqn)
        elif node[0] == "B":
            if other[0] == "B":
                expected[other[1]] = (node[1], fqn)
        elif other[0] != "O" or _compared(found.objects[other[1]]) != _compared(outline.objects[node[1]]):
            raise _failed(path, fqn, "has another value")
    order = sorted(expected)
    running: dict[int, Any] = {}
    for slab in slabs(found.contents, found.tensors, order, files, threads=threads):
        digest = running.setdefault(slab.tensor, xxhash.xxh3_128())
        digest.update(slab.data)
        step(len(slab.data))
        if slab.is_last:
            number, fqn = expected[slab.tensor]
            if running.pop(slab.tensor).digest() != digests.get(number):
                raise _failed(path, fqn, "holds other elements")


def _compared(raw: Any) -> str:
    """Return a leaf's JSON form as text: it tells True from 1 and -0.0 from 0.0. A set has no order."""
    return json.dumps(_ordered(raw))


def _ordered(raw: Any) -> Any:
    if isinstance(raw, list):
        return [_ordered(member) for member in raw]
    if not isinstance(raw, dict):
        return raw
    payload = raw.get("v")
    if raw.get("$") in ("set", "frozenset") and isinstance(payload, list):
        payload = sorted(map(_compared, payload))
    return {**raw, "v": _ordered(payload)}


def _compare_tensor(path: str, fqn: str, outline: Outline, node: Node, found: Outline, other: Node) -> None:
    mine = outline.tensors[node[1]]
    if other[0] not in ("T", "N"):
        raise _failed(path, fqn, "is no tensor any more")
    theirs = found.tensors[other[1]]
    if (mine.dtype, mine.global_shape) != (theirs.dtype, theirs.global_shape):
        raise _failed(path, fqn, f"became {theirs.dtype}{list(theirs.global_shape)}")


def _failed(path: str, fqn: str, what: str) -> CorruptCheckpointError:
    detail = f"leaf {fqn!r} {what}, read back after it was written"
    return CorruptCheckpointError(
        f"{path}: {detail}; nothing was put into place. The storage cannot be trusted, or this is a bug of asyncckpt",
        path=path,
        fqn=fqn,
        detail=detail,
    )

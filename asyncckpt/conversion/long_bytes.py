"""`bytes` that are a leaf: short ones are objects of a checkpoint, long ones lie where tensors do. Both are values."""

from __future__ import annotations

import base64
from collections.abc import Iterator

from asyncckpt.conversion.outline import Outline
from asyncckpt.format.tree import Node
from asyncckpt.loading.fetching import bytes_of
from asyncckpt.loading.slicing import read_tensor
from asyncckpt.storage import latin1
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from asyncckpt.storage.files import Files

PIECE_NBYTES = 4 * latin1.STEP_NBYTES
"""Of each there are a few copies at a time. Chosen."""


def nbytes_at(outline: Outline, node: Node) -> int | None:
    """Return the length of a leaf that is `bytes`; None of any other."""
    if node[0] == "B":
        return outline.nbytes_of(node[1])
    raw = outline.objects[node[1]] if node[0] == "O" else None
    return len(base64.b64decode(raw["v"])) if isinstance(raw, dict) and raw.get("$") == "bytes" else None


def bytes_at(outline: Outline, node: Node, start: int, end: int, files: Files) -> bytes:
    """Return bytes `start` to `end` of a leaf that is `bytes`.

    Raises:
        CorruptCheckpointError: They were changed since they were written.
        OSError: They cannot be read.
    """
    if node[0] == "O":
        return base64.b64decode(outline.objects[node[1]]["v"])[start:end]
    saved = outline.tensors[node[1]]
    chosen = (slice(start, end),)
    return bytes_of(read_tensor(outline.contents, saved, chosen, files, threads=DEFAULT_THREADS, verify=True))


def are_same_bytes(one: Outline, node: Node, other: Outline, there: Node, files: Files) -> bool:
    """Whether two leaves are `bytes`, and the same; in pieces.

    Raises:
        CorruptCheckpointError, OSError: As `bytes_at`.
    """
    nbytes = nbytes_at(one, node)
    if nbytes is None or nbytes_at(other, there) != nbytes:
        return False
    return all(bytes_at(one, node, *piece, files) == bytes_at(other, there, *piece, files) for piece in _pieces(nbytes))


def pieces_of(outline: Outline, number: int, *, files: Files) -> Iterator[bytes]:
    """Yield the bytes of a leaf that lies where tensors do, by that number, in pieces of whole steps.

    Raises:
        CorruptCheckpointError, OSError: As `bytes_at`.
    """
    for piece in _pieces(outline.nbytes_of(number)):
        yield bytes_at(outline, ("B", number), *piece, files)


def _pieces(nbytes: int) -> Iterator[tuple[int, int]]:
    for start in range(0, nbytes, PIECE_NBYTES):
        yield start, min(start + PIECE_NBYTES, nbytes)

"""The file manifest: which bytes and tensors of an asyncckpt checkpoint make up a framework's files. No torch.

The state of each rank holds a list of tensors, below `STOCK_KEY` and the rank's key. The first one, of bytes, is the
manifest: the length of a JSON text (8 bytes, little-endian), the text, and all pieces of files that are bytes. The text
lists for every file its name and pieces. A piece is either [offset, length] among these bytes, or the position of a
tensor in the list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.layout import Payload
from asyncckpt.format.state_tree import TENSOR, leaves
from asyncckpt.interop.copy_pipeline import OutputFile
from asyncckpt.interop.write_torch import crc_places
from asyncckpt.storage.contents import Contents, SavedTensor

STOCK_KEY, RANK_KEY = "stock", "rank{:05d}"

QUANTUM_NBYTES = 256 << 10
"""A manifest is padded to a multiple of this, so that a growing log file does not change the plan at every save."""

_LENGTH_NBYTES = 8


def encode_manifest(files: Mapping[str, Sequence[Any]]) -> tuple[bytearray, list[Any]]:
    """Return the manifest of the given files, and the tensors in them."""
    listed: list[tuple[str, list[int | list[int]]]] = []
    known, tensors = bytearray(), list[Any]()
    for name, pieces in files.items():
        listed.append((name, []))
        for piece in pieces:
            if isinstance(piece, bytes):
                listed[-1][1].append([len(known), len(piece)])
                known += piece
            else:
                tensors.append(piece)
                listed[-1][1].append(len(tensors))
    text = json.dumps(listed, separators=(",", ":")).encode()
    manifest = bytearray(len(text).to_bytes(_LENGTH_NBYTES, "little") + text + known)
    return manifest + bytes(-len(manifest) % QUANTUM_NBYTES), tensors


def files_in(
    contents: Contents, read_whole: Callable[[SavedTensor], bytes]
) -> tuple[list[SavedTensor], list[OutputFile]]:
    """Return the tensors to which payloads refer by number, and the files of all ranks.

    If several ranks have a file of one name, that of the lowest rank is returned.

    Args:
        contents: Contents of a committed checkpoint.
        read_whole: Returns the bytes of a byte tensor.

    Raises:
        CorruptCheckpointError: A manifest is damaged.
        Exception: An error of `read_whole`.
    """
    tensors: list[SavedTensor] = []
    found: dict[str, OutputFile] = {}
    for rank, part in enumerate(contents.ranks):
        key = (STOCK_KEY, RANK_KEY.format(rank))
        nodes = [node for path, node in leaves(part.structure.tree) if path[:2] == key and node[0] == TENSOR]
        mine = [contents.tensors[part.structure.tensors[number].fqn] for _, number in nodes]
        if not mine:
            continue
        first = len(tensors)
        tensors += mine
        try:
            for name, pieces in _decoded(read_whole(mine[0]), [one.global_shape[0] for one in mine], first):
                found.setdefault(name, OutputFile(name=name, pieces=pieces, crc_at=crc_places(pieces)))
        except (ValueError, TypeError, KeyError, IndexError) as error:
            path, detail = contents.path, f"the list of files of rank {rank}: {error}"
            raise CorruptCheckpointError(f"{path}: {detail}", path=path, detail=detail) from error
    return tensors, list(found.values())


def _decoded(manifest: bytes, lengths: list[int], first: int) -> list[tuple[str, tuple[bytes | Payload, ...]]]:
    """Return (name, pieces) of one rank's files; its tensors have these lengths, and are numbered from `first`."""
    known = _LENGTH_NBYTES + int.from_bytes(manifest[:_LENGTH_NBYTES], "little")
    decoded = []
    for name, listed in json.loads(manifest[_LENGTH_NBYTES:known]):
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name or not name:
            raise ValueError(f"{name!r} cannot be the name of a file below a directory")
        pieces: list[bytes | Payload] = []
        for piece in listed:
            start, nbytes = (piece, lengths[piece]) if isinstance(piece, int) else piece
            if start < 0 or (not isinstance(piece, int) and not 0 <= nbytes <= len(manifest) - known - start):
                raise ValueError(f"{name!r} refers to {nbytes} bytes at {start}, beyond the end of the manifest")
            if isinstance(piece, int):
                pieces.append(Payload(first + start, nbytes))
            else:
                pieces.append(manifest[known + start : known + start + nbytes])
        decoded.append((name, tuple(pieces)))
    return decoded

"""Which bytes and tensors of a checkpoint of ours make which file of a framework. Imports no torch.

Each rank has in its state, below `STOCK_KEY` and its own key, a list of tensors. The first one, of bytes, is the
manifest: the length of a JSON text (8 bytes, little-endian), the text, and all pieces of files that are known as bytes.
The text lists of every file its name, and of every piece either [offset, length] among these bytes, or the position of
a tensor in the list.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.layout import Payload
from asyncckpt.format.state_tree import leaves
from asyncckpt.interop.copy_pipeline import OutputFile
from asyncckpt.interop.write_torch import crc_places
from asyncckpt.storage.contents import Contents, SavedTensor

STOCK_KEY, RANK_KEY = "stock", "rank{:05d}"

QUANTUM_NBYTES = 256 << 10
"""A manifest is padded to a multiple of it, so that a log that grows makes no new plan at every save."""

_LENGTH_NBYTES = 8


def encode_manifest(files: Mapping[str, Sequence[Any]]) -> tuple[bytearray, list[Any]]:
    """Return the manifest of files that consist of bytes and tensors, and the tensors."""
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
    """Return the tensors that payloads number, and the files of all ranks; of files of one name the lowest rank's.

    Args:
        contents: A committed checkpoint of ours.
        read_whole: Returns the bytes of a tensor of bytes.

    Raises:
        CorruptCheckpointError: A manifest is not one of ours.
        Exception: Whatever `read_whole` raises.
    """
    tensors: list[SavedTensor] = []
    found: dict[str, OutputFile] = {}
    for rank, part in enumerate(contents.ranks):
        key = (STOCK_KEY, RANK_KEY.format(rank))
        nodes = [node for path, node in leaves(part.structure.tree) if path[:2] == key and node[0] == "T"]
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
    """Return (name, pieces) of the files of one rank, whose tensors have these lengths, and numbers from `first`."""
    known = _LENGTH_NBYTES + int.from_bytes(manifest[:_LENGTH_NBYTES], "little")
    decoded = []
    for name, listed in json.loads(manifest[_LENGTH_NBYTES:known]):
        if os.path.isabs(name) or ".." in name.split("/") or "\0" in name or not name:
            raise ValueError(f"{name!r} is no name of a file below a directory")
        pieces: list[bytes | Payload] = []
        for piece in listed:
            start, nbytes = (piece, lengths[piece]) if isinstance(piece, int) else piece
            if start < 0 or (not isinstance(piece, int) and not 0 <= nbytes <= len(manifest) - known - start):
                raise ValueError(f"{name!r} consists of {nbytes} bytes at {start}, where there are not so many")
            if isinstance(piece, int):
                pieces.append(Payload(first + start, nbytes))
            else:
                pieces.append(manifest[known + start : known + start + nbytes])
        decoded.append((name, tuple(pieces)))
    return decoded

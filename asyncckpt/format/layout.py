"""The slot is the file: where every tensor lies in the shard files, and their safetensors headers.

Pure and deterministic: from tensor specs to parts. A part's memory image is its header, padded so that the data begin
at a multiple of 4096, then the tensors back to back, widest dtype first, so that each is naturally aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.dtypes import DTYPES, stored_as
from asyncckpt.errors import ConfigError, DuplicateNameError
from asyncckpt.format.names import MAX_PARTS, SaveId
from asyncckpt.format.structure import Chunk

PAGE_NBYTES = 4096
"""Alignment of headers, parts and O_DIRECT I/O."""

_FIRST_NBYTES = 512
"""A header's members that are there whatever it holds, and the braces around."""


def header_nbytes(fqn: str, n_dims: int) -> int:
    """Return at least what a tensor takes of a part's header: it is named twice, and escaped when it is not ASCII."""
    return 2 * (12 * len(fqn) if not fqn.isascii() or "\\" in fqn or '"' in fqn else len(fqn)) + 50 * n_dims + 160


def room_for(fqn: str, n_dims: int, max_nbytes: int) -> int:
    """Return how many bytes of a tensor fit into a part that holds nothing else."""
    header = _FIRST_NBYTES + header_nbytes(fqn, n_dims)
    return max(1, max_nbytes - -(-header // PAGE_NBYTES) * PAGE_NBYTES)


def packed(boxes: Sequence[tuple[str, int, int]], n_parts: int, max_nbytes: int) -> list[list[int]]:
    """Spread boxes over parts, largest first to the least loaded one where it fits; more parts where it fits nowhere.

    Args:
        boxes: (FQN, number of dimensions, bytes of data).
        n_parts: At least so many parts, if there are as many boxes.
        max_nbytes: Of a part with its header. One that holds a single box may be larger.

    Returns:
        The numbers of the boxes of each part; two of one FQN are never in the same.

    Raises:
        ConfigError: More parts than a rank may have would be needed.
    """
    members: list[list[int]] = [[] for _ in range(n_parts)]
    names: list[set[str]] = [set() for _ in range(n_parts)]
    loads = [0] * n_parts
    headers = [_FIRST_NBYTES] * n_parts
    for n in sorted(range(len(boxes)), key=lambda n: (-boxes[n][2], n)):
        fqn, n_dims, nbytes = boxes[n]
        more = header_nbytes(fqn, n_dims)
        part = min(
            (
                p
                for p in range(len(members))
                if not members[p]
                or (fqn not in names[p] and loads[p] + nbytes + _pages(headers[p] + more) <= max_nbytes)
            ),
            key=lambda p: (loads[p], p),
            default=len(members),
        )
        if part == len(members):
            if part == MAX_PARTS:
                raise ConfigError(
                    f"max_shard_bytes={max_nbytes} is too small: this rank's part of the state needs more than "
                    f"{MAX_PARTS} files",
                    field="max_shard_bytes",
                    value=str(max_nbytes),
                )
            members.append([])
            names.append(set())
            loads.append(0)
            headers.append(_FIRST_NBYTES)
        members[part].append(n)
        names[part].add(fqn)
        loads[part] += nbytes
        headers[part] += more
    return members


def _pages(nbytes: int) -> int:
    return -(-nbytes // PAGE_NBYTES) * PAGE_NBYTES


MAX_HEADER_NBYTES = 100_000_000
"""safetensors refuses larger headers (safetensors 0.8, `MAX_HEADER_SIZE`); more parts are used instead."""

METADATA_KEY = "__metadata__"
SAVE_ID_PREFIX = b'{"__metadata__":{"asyncckpt_save_id":"'
SAVE_ID_OFFSET = 8 + len(SAVE_ID_PREFIX)
"""Where the 28 characters of the save id stand in every shard file: they tie a file to its checkpoint."""

SAVE_ID_NBYTES = 28
_NO_SAVE_ID = SaveId(0, 0, "0" * 12)
HEADER_PIECE = 512
"""Tensors of a header that are written at a time. As one value, those of 20,000 tensors took 18 MB for a moment."""


@dataclass(frozen=True, slots=True)
class Payload:
    """All elements of tensor number `tensor`, row-major."""

    tensor: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """A box of a global tensor that is to be stored: FQN, dtype name, shapes and offsets in elements."""

    fqn: str
    dtype: str
    global_shape: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the box's elements."""
        return math.prod(self.sizes) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class PartLayout:
    """One shard file: its header with a blank save id, its exact length, and what else is fixed, as (offset, bytes)."""

    header: bytes
    nbytes: int
    inserts: tuple[tuple[int, bytes], ...] = ()

    @property
    def padded_nbytes(self) -> int:
        """Length in the slot: whole pages."""
        return round_up(self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All parts of one rank; `chunks[i]` says where the i-th spec lies."""

    parts: tuple[PartLayout, ...]
    chunks: tuple[Chunk, ...]


def round_up(nbytes: int, unit: int = PAGE_NBYTES) -> int:
    """Return the least multiple of `unit` that is not below `nbytes`."""
    return -(-nbytes // unit) * unit


def save_id_bytes(save_id: SaveId) -> bytes:
    """Return the characters that stand at `SAVE_ID_OFFSET` of every shard file of `save_id`."""
    text = str(save_id).encode()
    assert len(text) == SAVE_ID_NBYTES
    return text


def build_layout(specs: Sequence[BoxSpec], *, n_parts: int = 1, max_nbytes: int | None = None) -> Layout:
    """Place every box into a part.

    Args:
        specs: Boxes in the order of the state dict.
        n_parts: Shard files to spread over, largest box first to the least loaded. More are used where a part's
            header would exceed `MAX_HEADER_NBYTES`, or where two boxes of one FQN would meet in a file.
        max_nbytes: No part is larger, unless it holds one box that is.

    Returns:
        The layout; empty without boxes.

    Raises:
        DuplicateNameError: An FQN that safetensors reserves for itself.
        ConfigError: `max_nbytes` is too small for these boxes.
    """
    if any(s.fqn == METADATA_KEY for s in specs):
        raise DuplicateNameError(
            f"a tensor is called {METADATA_KEY!r}, which safetensors keeps for itself; rename the key", fqn=METADATA_KEY
        )
    if not specs:
        return Layout(parts=(), chunks=())
    while True:
        placed = _place(specs, min(n_parts, len(specs), MAX_PARTS), max_nbytes)
        if max(len(p.header) for p in placed.parts) <= MAX_HEADER_NBYTES or n_parts >= MAX_PARTS:
            return placed
        n_parts = max(2, n_parts * 2)


def _place(specs: Sequence[BoxSpec], n_parts: int, max_nbytes: int | None) -> Layout:
    if max_nbytes is None:
        members = _assign(specs, n_parts)
    else:
        members = packed([(s.fqn, len(s.sizes) + 1, s.nbytes) for s in specs], n_parts, max_nbytes)
    chunks: list[Chunk | None] = [None] * len(specs)
    parts: list[PartLayout] = []
    for part, numbers in enumerate(members):
        ordered = sorted(numbers, key=lambda n: (-DTYPES[specs[n].dtype].itemsize, n))
        header, data_nbytes = _header([specs[n] for n in ordered])
        offset = len(header)
        for n in ordered:
            s = specs[n]
            chunks[n] = Chunk(part=part, offset_bytes=offset, nbytes=s.nbytes, offsets=s.offsets, sizes=s.sizes)
            offset += s.nbytes
        assert offset == len(header) + data_nbytes
        parts.append(PartLayout(header=header, nbytes=offset))
    return Layout(parts=tuple(parts), chunks=tuple(c for c in chunks if c is not None))


def _assign(specs: Sequence[BoxSpec], n_parts: int) -> list[list[int]]:
    fqns = {s.fqn for s in specs}
    if n_parts == 1 and len(fqns) == len(specs):
        return [list(range(len(specs)))]
    members: list[list[int]] = [[] for _ in range(n_parts)]
    names: list[set[str]] = [set() for _ in range(n_parts)]
    loads = [0] * n_parts
    for n in sorted(range(len(specs)), key=lambda n: (-specs[n].nbytes, n)):
        free = [p for p in range(len(members)) if specs[n].fqn not in names[p]]
        if not free:
            members.append([])
            names.append(set())
            loads.append(0)
            free = [len(members) - 1]
        part = min(free, key=lambda p: (loads[p], len(members[p]), p))
        members[part].append(n)
        names[part].add(specs[n].fqn)
        loads[part] += specs[n].nbytes
    return members


def _header(specs: Sequence[BoxSpec]) -> tuple[bytes, int]:
    sharding, body, begin = [], [], 0
    for first in range(0, len(specs), HEADER_PIECE):
        piece = specs[first : first + HEADER_PIECE]
        offsets, entries = {}, {}
        for s in piece:
            stored_dtype, shape = stored_as(s.dtype, s.sizes)
            offsets[s.fqn] = {"saved_offsets": [*s.offsets, 0] if len(shape) > len(s.sizes) else s.offsets}
            entries[s.fqn] = {"dtype": stored_dtype, "shape": shape, "data_offsets": (begin, begin + s.nbytes)}
            begin += s.nbytes
        sharding.append(_compact(offsets)[1:-1])
        body.append(_compact(entries)[1:-1])
    metadata = {
        "asyncckpt_save_id": str(_NO_SAVE_ID),
        "format": "pt",
        "DCP_SHARDING_INFO": "{" + ",".join(sharding) + "}",
    }
    text = ("{" + ",".join([_compact({METADATA_KEY: metadata})[1:-1], *body]) + "}").encode()
    assert text.startswith(SAVE_ID_PREFIX)
    length = round_up(8 + len(text)) - 8
    return length.to_bytes(8, "little") + text.ljust(length), begin


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))

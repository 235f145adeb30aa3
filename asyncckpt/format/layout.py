"""Plans a rank's shard files of layout "safetensors": the offset of each tensor, and the headers.

Pure and deterministic. A file is a header, padded so that the data begin at a multiple of 4096, and then the tensors
without gaps, widest dtype first, so that each is naturally aligned. A slot holds the same bytes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from asyncckpt.basics.limits import MAX_PARTS
from asyncckpt.dtypes import DTYPES, stored_as
from asyncckpt.errors import ConfigError, DuplicateNameError
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import Chunk

PAGE_NBYTES = 4096
"""Alignment of headers, parts and O_DIRECT I/O."""

SMALL_HEADER_UNIT = 64
"""Alignment of the header of a small shard that is written again in every save, while large ones are linked: of an
adapter of 64 KiB, a page would be 6 %."""

_FIRST_NBYTES = 512
"""At least the bytes of a header without its tensors."""


def header_nbytes(fqn: str, n_dims: int) -> int:
    """Return an upper bound of the bytes that a tensor takes in a header, which has its FQN twice, escaped as JSON."""
    return 2 * (12 * len(fqn) if not fqn.isascii() or "\\" in fqn or '"' in fqn else len(fqn)) + 50 * n_dims + 160


def room_for(fqn: str, n_dims: int, max_nbytes: int) -> int:
    """Return how many bytes of a tensor fit into a file of `max_nbytes` that holds nothing else."""
    header = _FIRST_NBYTES + header_nbytes(fqn, n_dims)
    return max(1, max_nbytes - -(-header // PAGE_NBYTES) * PAGE_NBYTES)


def packed(boxes: Sequence[tuple[str, int, int]], n_parts: int, max_nbytes: int) -> list[list[int]]:
    """Distribute boxes over files of bounded size.

    The largest box comes first. Each goes to the file with the fewest bytes into which it fits; if there is none, to a
    new file.

    Args:
        boxes: (FQN, number of dimensions, bytes of data) of each.
        n_parts: Least number of files, if there are as many boxes.
        max_nbytes: Largest length of a file, header included. A file with a single box may be larger.

    Returns:
        For each file the positions of its boxes in `boxes`. A file never has two boxes of one FQN.

    Raises:
        ConfigError: It takes more than `MAX_PARTS` files.
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
                    f"max_shard_bytes={max_nbytes} is too small: what this rank writes needs more than {MAX_PARTS} "
                    "files; choose a larger one",
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
"""safetensors refuses larger headers (safetensors 0.8, `MAX_HEADER_SIZE`). The boxes then go to more files."""

METADATA_KEY = "__metadata__"
SAVE_ID_PREFIX = b'{"__metadata__":{"asyncckpt_save_id":"'
SAVE_ID_OFFSET = 8 + len(SAVE_ID_PREFIX)
"""Offset of the save ID in each shard file, which readers compare with the manifest's."""

SAVE_ID_NBYTES = 28
_NO_SAVE_ID = SaveId(0, 0, "0" * 12)
HEADER_PIECE = 512
"""Number of tensors of a header that are encoded at a time. Encoding 20,000 tensors at once takes 18 MB of memory."""


@dataclass(frozen=True, slots=True)
class Payload:
    """All elements of tensor number `tensor`, row-major, as content of an archive."""

    tensor: int
    nbytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class BoxSpec:
    """A box of a global tensor to store: FQN and dtype name of the tensor; its shape, offsets and sizes in elements."""

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
    """One shard file.

    Attributes:
        header: Its first bytes; the save ID in it is zeros.
        nbytes: Its exact length.
        inserts: Other bytes that do not depend on elements, as (offset in the file, bytes).
    """

    header: bytes
    nbytes: int
    inserts: tuple[tuple[int, bytes], ...] = ()

    @property
    def padded_nbytes(self) -> int:
        """Length in the slot, in whole pages."""
        return round_up(self.nbytes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """All shard files of one rank. `chunks[i]` is the place of the i-th `BoxSpec`."""

    parts: tuple[PartLayout, ...]
    chunks: tuple[Chunk, ...]


def round_up(nbytes: int, unit: int = PAGE_NBYTES) -> int:
    """Return `nbytes` rounded up to a multiple of `unit`."""
    return -(-nbytes // unit) * unit


def save_id_bytes(save_id: SaveId) -> bytes:
    """Return the bytes that shard files of `save_id` have at `SAVE_ID_OFFSET`."""
    text = str(save_id).encode()
    assert len(text) == SAVE_ID_NBYTES
    return text


def build_layout(
    specs: Sequence[BoxSpec], *, n_parts: int = 1, max_nbytes: int | None = None, header_unit: int = PAGE_NBYTES
) -> Layout:
    """Assign a place in a shard file to each box.

    Args:
        specs: Boxes in the order of the state dict.
        n_parts: Number of shard files. The largest box comes first, and each goes to the file with the fewest bytes.
            There are more files if a header would exceed `MAX_HEADER_NBYTES`, or if a file would have two boxes of one
            FQN.
        max_nbytes: Largest length of a file in bytes. A file with a single box may be larger.
        header_unit: The length of a header is a multiple of it: `PAGE_NBYTES` or `SMALL_HEADER_UNIT`.

    Returns:
        The layout; without boxes it has no files.

    Raises:
        DuplicateNameError: A tensor has the name that safetensors reserves.
        ConfigError: With `max_nbytes`, the boxes need more than `MAX_PARTS` files.
    """
    if any(s.fqn == METADATA_KEY for s in specs):
        raise DuplicateNameError(
            f"a tensor is called {METADATA_KEY!r}, a name that safetensors reserves; rename the key", fqn=METADATA_KEY
        )
    if not specs:
        return Layout(parts=(), chunks=())
    while True:
        placed = _place(specs, min(n_parts, len(specs), MAX_PARTS), max_nbytes, header_unit)
        if max(len(p.header) for p in placed.parts) <= MAX_HEADER_NBYTES or n_parts >= MAX_PARTS:
            return placed
        n_parts = max(2, n_parts * 2)


def _place(specs: Sequence[BoxSpec], n_parts: int, max_nbytes: int | None, header_unit: int) -> Layout:
    if max_nbytes is None:
        members = _assign(specs, n_parts)
    else:
        members = packed([(s.fqn, len(s.sizes) + 1, s.nbytes) for s in specs], n_parts, max_nbytes)
    chunks: list[Chunk | None] = [None] * len(specs)
    parts: list[PartLayout] = []
    for part, numbers in enumerate(members):
        ordered = sorted(numbers, key=lambda n: (-DTYPES[specs[n].dtype].itemsize, n))
        header, data_nbytes = _header([specs[n] for n in ordered], header_unit)
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


def _header(specs: Sequence[BoxSpec], unit: int) -> tuple[bytes, int]:
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
    length = round_up(8 + len(text), unit) - 8
    return length.to_bytes(8, "little") + text.ljust(length), begin


def _compact(value: dict[str, Any]) -> str:
    return json.dumps(value, separators=(",", ":"))

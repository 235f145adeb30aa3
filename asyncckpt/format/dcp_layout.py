"""Layout "dcp": where every tensor lies in shard files that are runs of `torch.save`'s archives, one for each chunk.

The same idea as in `format.layout`, with other bytes around each payload: those before and behind it depend on dtype
and sizes only, so they are known when the plan is made. Nothing in an archive depends on the elements: CRC-32 are
left zero, which torch never looks at (`torch.serialization.set_crc32_options(False)`); blocks have checksums of ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.errors import ConfigError
from asyncckpt.format.archive import Payload, torch_archive
from asyncckpt.format.layout import (
    PAGE_NBYTES,
    SAVE_ID_NBYTES,
    SAVE_ID_OFFSET,
    BoxSpec,
    Layout,
    PartLayout,
    round_up,
)
from asyncckpt.format.names import MAX_PARTS
from asyncckpt.format.pickle_image import PickleImage
from asyncckpt.format.structure import Chunk

ALIGNMENT = 64
"""Of archives in a file, and of payloads."""

DCP_PREFIX = b"asyncckpt layout=dcp; torch.save archives; id ".ljust(SAVE_ID_OFFSET)
DCP_HEADER_NBYTES = round_up(SAVE_ID_OFFSET + SAVE_ID_NBYTES, ALIGNMENT)
"""Before the first archive of a file: the prefix, the save id, spaces and a line feed."""

_HEADER = (DCP_PREFIX + b"0" * SAVE_ID_NBYTES).ljust(DCP_HEADER_NBYTES - 1) + b"\n"
assert len(DCP_PREFIX) == SAVE_ID_OFFSET


class Frames:
    """The bytes around payloads, remembered by dtype and sizes."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, tuple[int, ...]], tuple[bytes, bytes]] = {}

    def around(self, dtype: str, sizes: tuple[int, ...], nbytes: int) -> tuple[bytes, bytes]:
        """Return what stands before and behind the elements of a chunk in its archive."""
        found = self._known.get((dtype, sizes))
        if found is None:
            pickle = PickleImage(lambda _: (dtype, sizes), (), lambda _: b"").of_node(("T", 0))
            pieces = torch_archive(pickle, [Payload(0, nbytes)], crc=False).pieces
            at = next(n for n, piece in enumerate(pieces) if isinstance(piece, Payload))
            head = b"".join(piece for piece in pieces[:at] if isinstance(piece, bytes))
            tail = b"".join(piece for piece in pieces[at + 1 :] if isinstance(piece, bytes))
            found = self._known[dtype, sizes] = (head, tail)
        return found


def room_for_dcp(max_nbytes: int) -> int:
    """Return how many bytes of a tensor fit into a part that holds nothing else: an archive adds less than a page."""
    return max(1, max_nbytes - PAGE_NBYTES)


def build_dcp_layout(specs: Sequence[BoxSpec], *, n_parts: int = 1, max_nbytes: int | None = None) -> Layout:
    """Place every box into a part; as `format.layout.build_layout`.

    Args:
        specs: Boxes in the order of the state dict.
        n_parts: Shard files to spread over, largest box first to the least loaded.
        max_nbytes: No part is larger, unless it holds one box that is.

    Returns:
        The layout; empty without boxes.

    Raises:
        ConfigError: `max_nbytes` is too small for these boxes.
    """
    frames = Frames()
    around = [frames.around(s.dtype, s.sizes, s.nbytes) for s in specs]
    lengths = [
        round_up(len(head) + s.nbytes + len(tail), ALIGNMENT) for s, (head, tail) in zip(specs, around, strict=True)
    ]
    chunks: list[Chunk | None] = [None] * len(specs)
    parts: list[PartLayout] = []
    for part, numbers in enumerate(_spread(lengths, min(n_parts, MAX_PARTS), max_nbytes)):
        inserts: list[tuple[int, bytes]] = []
        offset = DCP_HEADER_NBYTES
        for n in numbers:
            s, (head, tail) = specs[n], around[n]
            begin = offset + len(head)
            chunks[n] = Chunk(part=part, offset_bytes=begin, nbytes=s.nbytes, offsets=s.offsets, sizes=s.sizes)
            end = offset + lengths[n]
            inserts += [(offset, head), (begin + s.nbytes, tail.ljust(end - begin - s.nbytes, b"\0"))]
            offset = end
        parts.append(PartLayout(header=_HEADER, nbytes=offset, inserts=tuple(inserts)))
    return Layout(parts=tuple(parts), chunks=tuple(c for c in chunks if c is not None))


def _spread(lengths: Sequence[int], n_parts: int, max_nbytes: int | None) -> list[list[int]]:
    """Return the numbers of the boxes of each part, in order; no part is empty."""
    members: list[list[int]] = [[] for _ in range(n_parts)]
    loads = [DCP_HEADER_NBYTES] * n_parts
    for n in sorted(range(len(lengths)), key=lambda n: (-lengths[n], n)):
        fitting = [
            p
            for p in range(len(members))
            if not members[p] or max_nbytes is None or loads[p] + lengths[n] <= max_nbytes
        ]
        part = min(fitting, key=lambda p: (loads[p], p), default=len(members))
        if part == MAX_PARTS:
            raise ConfigError(
                f"max_shard_bytes={max_nbytes} is too small: this rank's part of the state needs more than "
                f"{MAX_PARTS} files",
                field="max_shard_bytes",
                value=str(max_nbytes),
            )
        if part == len(members):
            members.append([])
            loads.append(DCP_HEADER_NBYTES)
        members[part].append(n)
        loads[part] += lengths[n]
    return [sorted(found) for found in members if found]

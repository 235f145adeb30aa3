"""Checksums of the format: xxh3, 64 bits for each block of a shard file, 128 bits for a small file (docs/adr/0002)."""

from __future__ import annotations

import re
import struct
from typing import Any, Protocol

import xxhash

from asyncckpt.basics.urls import is_object_url

BLOCK_NBYTES = 256 * 1024
"""Bytes of a shard file that have one checksum. Two threads hash 256 KiB blocks at 30 GB/s, 1 MiB blocks at 33 GB/s
(docs/adr/0002)."""

OBJECT_BLOCK_NBYTES = 32 * 1024
"""The same of a checkpoint whose path or mirror is in an object store, where bytes that are read for nothing cost most;
a divisor of `BLOCK_NBYTES`. Files on disks keep the larger blocks: they are read quickly, indexes stay small, and
xxhash 4.1 releases the GIL only for more than 64 KiB (docs/adr/0062)."""

SMALL_BLOCKS_NBYTES = 8 << 30
"""Ranks with longer files have the larger blocks also there: their checksums would take more than 10 MB of the worker's
memory, and parts of tensors in them are long. Chosen."""

DIGEST_NBYTES = 8
"""Bytes of one block's checksum: xxh3_64, little endian, seed 0."""

FILE_CHECKSUM_PREFIX = "xxh3_128:"
_FILE_CHECKSUM = re.compile(r"xxh3_128:[0-9a-f]{32}\Z")


class Buffer(Protocol):
    """Anything with the buffer protocol; spelled out because `collections.abc.Buffer` needs Python 3.12."""

    def __len__(self) -> int: ...


def block_nbytes_at(path: str, mirror: str = "", nbytes: int = 0, *, reuse: bool = False) -> int:
    """Return how many bytes a block of a rank's new shard files has.

    Args:
        path: Path or URL of the checkpoint.
        mirror: Path or URL that it is copied to; "": none.
        nbytes: Length of all shard files of the rank.
        reuse: Whether unchanged shards are linked: each save then writes little besides the checksums of all blocks.
    """
    is_there = is_object_url(path) or is_object_url(mirror)
    is_small = is_there and nbytes <= SMALL_BLOCKS_NBYTES and not reuse
    return OBJECT_BLOCK_NBYTES if is_small else BLOCK_NBYTES


def block_count(nbytes: int, block_nbytes: int) -> int:
    """Return how many blocks cover `nbytes`; the last one may be short."""
    return -(-nbytes // block_nbytes)


def block_digest(block: Buffer) -> bytes:
    """Return the 8-byte checksum of one block. Releases the GIL for more than 64 KiB."""
    return xxhash.xxh3_64_intdigest(block).to_bytes(DIGEST_NBYTES, "little")  # type: ignore[arg-type]


def block_digests(blocks: memoryview, block_nbytes: int) -> bytes:
    """Return the checksums of consecutive blocks, concatenated.

    Args:
        blocks: The blocks' bytes; the last block may be short.
        block_nbytes: Bytes of a block.
    """
    digest = xxhash.xxh3_64_intdigest
    found = [digest(blocks[at : at + block_nbytes]) for at in range(0, len(blocks), block_nbytes)]
    return struct.pack(f"<{len(found)}Q", *found)


def file_checksum(data: Buffer) -> str:
    """Return the checksum of a small file's bytes as text: `xxh3_128:` and 32 hex digits."""
    return FILE_CHECKSUM_PREFIX + xxhash.xxh3_128_hexdigest(data)  # type: ignore[arg-type]


def is_file_checksum(value: Any) -> bool:
    """Whether `value` has the form of `file_checksum`'s result."""
    return type(value) is str and _FILE_CHECKSUM.match(value) is not None

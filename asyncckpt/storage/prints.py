"""What a rank's shard files hold, apart from the save that they belong to: equal prints mean equal snapshots.

A shard file differs between two saves of the same values in its save id only, which lies in the first block. So the
print takes that block without it, and of all others the checksums that there are already.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import xxhash

from asyncckpt.format.checksum import DIGEST_NBYTES
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET

PRINT_NBYTES = 16
"""xxh3_128: two snapshots that differ meet by accident once in 2**128."""


class Printed(Protocol):
    """A shard file that was written.

    Attributes:
        nbytes: Its length.
        digests: One checksum per block.
        first: What `first_block` returned for its first block.
    """

    nbytes: int
    digests: bytearray
    first: bytes


def first_block(block: memoryview) -> bytes:
    """Return the print of a shard's first block: all but the save id."""
    digest = xxhash.xxh3_128()
    with block[:SAVE_ID_OFFSET] as before, block[SAVE_ID_OFFSET + SAVE_ID_NBYTES :] as behind:
        digest.update(before)
        digest.update(behind)
    return digest.digest()


def shards_print(shards: Iterable[Printed]) -> bytes:
    """Return the print of a rank's shards, in order."""
    digest = xxhash.xxh3_128()
    for shard in shards:
        digest.update(shard.nbytes.to_bytes(8, "little"))
        # Of one that was kept, and not read: its own, which has the save id in it and equals no other's.
        digest.update(shard.first or bytes(shard.digests[:DIGEST_NBYTES]))
        digest.update(bytes(shard.digests[DIGEST_NBYTES:]))
    return digest.digest()

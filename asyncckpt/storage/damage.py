"""Which blocks of what was read differ from their checksums, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksum import DIGEST_NBYTES
from asyncckpt.storage.read_plan import ShardRequest, Step, Wanted, fqns_of


def damaged_blocks(path: str, request: ShardRequest, step: Step, found: bytes) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each block of a step whose digest is not that of the index.

    Args:
        path: The checkpoint's directory.
        request: Of the step's file.
        step: What was read.
        found: The digests of its blocks.
    """
    unit, digests = request.block_nbytes, request.shard.digests
    for n, start in enumerate(range(step.start, step.end, unit)):
        at = start // unit * DIGEST_NBYTES
        if found[n * DIGEST_NBYTES : (n + 1) * DIGEST_NBYTES] != digests[at : at + DIGEST_NBYTES]:
            yield damaged(path, request, step.wanted, start, min(start + unit, step.end))


def damaged(path: str, request: ShardRequest, wanted: Sequence[Wanted], start: int, end: int) -> CorruptCheckpointError:
    """Return the error of a block that differs from its checksum; `wanted`: what is read around there."""
    touched = [w for w in wanted if w.offset < end and start < w.offset + w.nbytes]
    detail = f"bytes {start} to {end} differ from their checksum"
    name = request.shard.name
    return CorruptCheckpointError(
        f"{path}/{name}: {detail}; they hold tensor {fqns_of(touched)}. Load an earlier checkpoint",
        path=path,
        file=name,
        fqn=touched[0].fqn if touched else None,
        offset=start,
        nbytes=end - start,
        detail=detail,
    )

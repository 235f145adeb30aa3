"""Which blocks of what was read differ from their checksums, and whose they are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.format.checksum import DIGEST_NBYTES, block_digests
from asyncckpt.storage.read_plan import ShardRequest, Step, Wanted, fqns_of


def is_sound(
    path: str,
    request: ShardRequest,
    step: Step,
    view: memoryview,
    on_corrupt: Callable[[CorruptCheckpointError], None] | None,
) -> bool:
    """Whether the blocks of a step are as their checksums say.

    Args:
        path: The checkpoint's directory.
        request: Of the step's file.
        step: What was read.
        view: Begins with its bytes; it may be longer.
        on_corrupt: Called for every damaged block; None: the first one is raised.

    Raises:
        CorruptCheckpointError: See `on_corrupt`.
    """
    unit, digests = request.block_nbytes, request.shard.digests
    first = step.start // unit * DIGEST_NBYTES
    with view[: step.end - step.start] as exact:
        found = block_digests(exact, unit)
    if found == digests[first : first + len(found)]:
        return True
    for error in _damaged_blocks(path, request, step, found):
        if on_corrupt is None:
            raise error
        on_corrupt(error)
    return False


def _damaged_blocks(path: str, request: ShardRequest, step: Step, found: bytes) -> Iterator[CorruptCheckpointError]:
    """Yield an error for each block of a step whose digest, one of those in `found`, is not that of the index."""
    unit, digests = request.block_nbytes, request.shard.digests
    for n, start in enumerate(range(step.start, step.end, unit)):
        at = start // unit * DIGEST_NBYTES
        if found[n * DIGEST_NBYTES : (n + 1) * DIGEST_NBYTES] != digests[at : at + DIGEST_NBYTES]:
            yield _damaged(path, request, step.wanted, start, min(start + unit, step.end))


def _damaged(
    path: str, request: ShardRequest, wanted: Sequence[Wanted], start: int, end: int
) -> CorruptCheckpointError:
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

"""The proof before a commit: the chunks of all ranks together hold every tensor exactly once. Pure."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator, Sequence

import msgpack

from asyncckpt.errors import CorruptCheckpointError
from asyncckpt.storage.coverage import Box, coverage_fault

_JUNK = (ValueError, TypeError, KeyError, IndexError, RecursionError, OverflowError, msgpack.UnpackException)


def uncovered(structures: Sequence[bytes]) -> list[tuple[str, str]]:
    """Look for tensors that a reader would refuse.

    Each structure by itself is taken for one: who wrote the rank's files has decoded it (`decode_structure`). Of
    thousands of ranks, each with thousands of tensors, it would take too long here to do so once more.

    Args:
        structures: Of every rank, as they will lie in the indexes.

    Returns:
        Stored name and what is wrong, in the order of the ranks and their structures; nothing when all is well.

    Raises:
        CorruptCheckpointError: One of them is obviously no structure.
    """
    with _no_collections():
        return _uncovered(structures)


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Keep the garbage collector from walking millions of tuples again and again, none of which is in a cycle.

    With it the proof took 1.6 microseconds a chunk for 200,000 of them and 3.2 for 2,000,000; without, 1.3 and 1.7.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def _uncovered(structures: Sequence[bytes]) -> list[tuple[str, str]]:
    kinds: dict[str, tuple[str, tuple[int, ...]]] = {}
    chunks: dict[str, list[Box]] = {}
    faults: dict[str, str] = {}
    try:
        for rank, data in enumerate(structures):
            for fqn, dtype, shape, here in msgpack.unpackb(data, strict_map_key=True, use_list=False)["tensors"]:
                known = kinds.get(fqn)
                if known is None:
                    kinds[fqn] = known = (dtype, shape)
                    chunks[fqn] = []
                elif known[1] != shape or known[0] != dtype:
                    faults.setdefault(fqn, _unlike(rank, dtype, shape, *known))
                for chunk in here:
                    chunks[fqn].append(chunk[3:] if len(chunk) > 3 else ((0,) * len(shape), shape))
        for fqn, (_, shape) in kinds.items():
            if fqn not in faults:
                fault = coverage_fault(shape, chunks.pop(fqn))
                if fault:
                    faults[fqn] = fault
    except _JUNK as error:
        raise CorruptCheckpointError(f"the structure of a rank does not decode: {error}", detail=str(error)) from error
    return [(fqn, faults[fqn]) for fqn in kinds if fqn in faults]


def _unlike(rank: int, dtype: str, shape: Sequence[int], other_dtype: str, other_shape: Sequence[int]) -> str:
    text = f"rank {rank} has it as {dtype}{list(shape)}, "
    return text + f"an earlier one as {other_dtype}{list(other_shape)}"

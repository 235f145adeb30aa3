"""The proof before a commit: the chunks of all ranks together hold every tensor exactly once. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from asyncckpt.format.structure import Chunk, TensorEntry, decode_structure
from asyncckpt.storage.coverage import coverage_fault


def uncovered(structures: Sequence[bytes]) -> list[tuple[str, str]]:
    """Look for tensors that a reader would refuse.

    Args:
        structures: Of every rank, as they will lie in the indexes.

    Returns:
        Stored name and what is wrong, in the order of the ranks and their structures; nothing when all is well.

    Raises:
        CorruptCheckpointError, UnsupportedFormatError: One of them is no structure.
    """
    entries: dict[str, TensorEntry] = {}
    chunks: dict[str, list[Chunk]] = {}
    faults: dict[str, str] = {}
    for rank, data in enumerate(structures):
        for entry in decode_structure(data).tensors:
            known = entries.setdefault(entry.fqn, entry)
            if (known.dtype, known.global_shape) != (entry.dtype, entry.global_shape):
                text = f"rank {rank} has it as {entry.dtype}{list(entry.global_shape)}, "
                text += f"an earlier one as {known.dtype}{list(known.global_shape)}"
                faults.setdefault(entry.fqn, text)
            chunks.setdefault(entry.fqn, []).extend(entry.chunks)
    for fqn, entry in entries.items():
        boxes = [(chunk.offsets, chunk.sizes) for chunk in chunks[fqn]]
        fault = faults.get(fqn) or coverage_fault(entry.global_shape, boxes)
        if fault:
            faults[fqn] = fault
    return [(fqn, faults[fqn]) for fqn in entries if fqn in faults]

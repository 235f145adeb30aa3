"""What one thread reads at a time of a shard file, the file that it is of, and who gets it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncckpt.memory.copying import copy_bytes
from asyncckpt.storage.read_plan import Batch, ShardRequest, Step, is_through, pages_of
from asyncckpt.storage.shard_reader import ShardReader

SAMPLES = 8
"""So many extents are looked at for whether all seem to be in memory: then there are no more threads than cores. With
six on two cores each waits for the interpreter of the others: a load of 1.5 GB from memory takes a quarter longer."""


@dataclass(slots=True)
class Source:
    """A shard file, open from its first extent to its last."""

    request: ShardRequest
    remaining: int = 0
    readers: dict[bool, ShardReader] = field(default_factory=dict)
    """One for what is read through, one for all else."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def close(self) -> None:
        """Close the file."""
        for reader in self.readers.values():
            reader.close()


class Extent(NamedTuple):
    """What one thread reads at a time of one file: consecutive steps, or a batch of short ranges."""

    source: Source
    steps: list[Step]
    batch: Batch | None = None


def are_at_hand(extents: Sequence[Extent], opened: Callable[[Extent], ShardReader]) -> bool:
    """Whether extents, by a few of them, seem to be in memory: no disk is waited for.

    Args:
        extents: At least one.
        opened: Opens the file of one.
    """
    return all(_is_at_hand(e, opened(e)) for e in extents[:: -(-len(extents) // SAMPLES)])


def _is_at_hand(extent: Extent, reader: ShardReader) -> bool:
    if extent.batch:
        return reader.has(extent.batch)
    start, end = extent.steps[0].start, extent.steps[-1].end
    if reader.is_in_memory:
        return True
    # Of a file that the process may not write, the kernel says yes. What is read through is not brought in then.
    seems = reader.is_cached(*pages_of(start, end, reader.nbytes))
    return seems and (not is_through(extent.steps) or reader.copies.is_there(end - 1))


def deliver(step: Step, address: int) -> None:
    """Give each range of a step its part of the step's bytes, which lie at `address`."""
    start, end, wanted = step
    for offset, nbytes, _, sink, _, _, _ in wanted:
        low = offset if offset > start else start
        high = min(offset + nbytes, end)
        if type(sink) is int:
            copy_bytes(sink + low - offset, address + low - start, high - low)
        elif sink is not None:
            sink.deliver(low - offset, address + low - start, high - low)  # type: ignore[union-attr]


@dataclass(frozen=True, kw_only=True, slots=True)
class ReadReport:
    """Bytes that were read, by way; blocks that are partly wanted count whole, batches of ranges as cached."""

    cached_nbytes: int
    disk_nbytes: int

"""What one thread reads at a time of a shard file, the file that it is of, and who gets it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from asyncckpt.memory.copying import copy_bytes
from asyncckpt.storage.read_plan import Batch, ShardRequest, Step, pages_of
from asyncckpt.storage.shard_reader import ShardReader


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


def is_at_hand(extent: Extent, reader: ShardReader) -> bool:
    """Whether an extent of a file that is open seems to be in memory: no disk is waited for."""
    if extent.batch:
        return reader.has(extent.batch)
    start, end = extent.steps[0].start, extent.steps[-1].end
    return reader.is_in_memory or reader.is_cached(*pages_of(start, end, reader.nbytes))


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

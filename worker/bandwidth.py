"""A limit on how fast the worker writes, so that others keep their share of a disk or a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from asyncckpt.storage.files import Files

PIECES_PER_S = 10
"""A call writes at most the bytes of a tenth of a second, so that the rate holds over any second. Chosen."""

ALIGNMENT = 1 << 20
"""Alignment of pieces: direct writes must begin and end at device blocks, and few calls are cheaper than many."""


class PacedFiles(Files):
    """Files whose writes take turns, all threads together. Reads, fsyncs and all else go on as they are.

    Args:
        rate: Bytes per second, `ALIGNMENT` or more.
        clock, sleep: `time.monotonic` and `time.sleep`.
    """

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._piece_nbytes = max(ALIGNMENT, rate // PIECES_PER_S // ALIGNMENT * ALIGNMENT)
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write some of it, when its turn has come. Blocks for that."""
        piece = buffer[: self._piece_nbytes]
        with self._lock:
            now = self._clock()
            begins = max(now, self._free_at)
            self._free_at = begins + len(piece) / self._rate
        if begins > now:
            self._sleep(begins - now)
        return super().pwrite(fd, piece, offset)


def files_for(rate: int) -> Files:
    """Return the file calls for so many bytes per second; 0: no limit."""
    return PacedFiles(rate) if rate else Files()

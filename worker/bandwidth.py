"""Limits the bandwidth of the worker, so that other processes keep their share of a disk or a network."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from asyncckpt.storage.files import Files

PIECES_PER_SECOND = 10
"""A call writes at most the bytes of 1/10 s, so that the rate holds over any second. Chosen."""

ALIGNMENT = 1 << 20
"""Alignment of pieces, since direct writes must begin and end at device blocks; large, since calls cost time."""


class RateLimiter:
    """Limits a rate of bytes, over all threads.

    Args:
        rate: Bytes per second; 0: no limit.
        clock, sleep: `time.monotonic` and `time.sleep`.
    """

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        self._rate, self._clock, self._sleep = rate, clock, sleep
        self._lock = threading.Lock()
        self._free_at = float("-inf")

    def wait(self, nbytes: int) -> None:
        """Wait until the rate allows `nbytes` more bytes."""
        if not self._rate:
            return
        with self._lock:
            now = self._clock()
            begins = max(now, self._free_at)
            self._free_at = begins + nbytes / self._rate
        if begins > now:
            self._sleep(begins - now)


class RateLimitedFiles(Files):
    """File calls whose writes are limited to a rate, over all threads. Other calls are not limited.

    Args:
        rate: Bytes per second, `ALIGNMENT` or more.
        clock, sleep: As of `RateLimiter`.
    """

    def __init__(
        self, rate: int, clock: Callable[[], float] = time.monotonic, sleep: Callable[[float], None] = time.sleep
    ) -> None:
        super().__init__()
        self._limiter = RateLimiter(rate, clock, sleep)
        self._piece_nbytes = max(ALIGNMENT, rate // PIECES_PER_SECOND // ALIGNMENT * ALIGNMENT)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write a piece of `buffer` when the rate allows it, and return its size. Blocks until then."""
        piece = buffer[: self._piece_nbytes]
        self._limiter.wait(len(piece))
        return super().pwrite(fd, piece, offset)


def files_for(rate: int) -> Files:
    """Return the file calls for so many bytes per second; 0: no limit."""
    return RateLimitedFiles(rate) if rate else Files()

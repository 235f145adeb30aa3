"""A disk that is read and written at once: of large reads and of writes, so many of each at a time.

A disk may read as fast while it writes as it does otherwise. Threads that each read, then write, fall into step, for
it serves all at once: all read while nothing is written, and then all write (ADR 0039).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from asyncckpt.storage.files import Files

_LARGE_NBYTES = 1 << 20
"""A shorter read, of a header say, does not wait for its turn; nor does a shorter write, of a block that was held back
for its checksum, while whoever comes next waits for it. Chosen, not measured."""


class BothWays(Files):
    """File calls of a conversion.

    Args:
        threads: How many may be at the disk at once: half of them read, and half of them write.
    """

    def __init__(self, threads: int) -> None:
        each = max(1, threads // 2)
        self._reads, self._writes = threading.Semaphore(each), threading.Semaphore(each)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` into `buffers`. Blocks: for its turn, where it is much and may wait for the disk."""
        if flags or len(buffers[0]) < _LARGE_NBYTES:
            return super().preadv(fd, buffers, offset, flags)
        with self._reads:
            return super().preadv(fd, buffers, offset)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at `offset`. Blocks: for its turn, where it is much."""
        if len(buffer) < _LARGE_NBYTES:
            return super().pwrite(fd, buffer, offset)
        with self._writes:
            return super().pwrite(fd, buffer, offset)

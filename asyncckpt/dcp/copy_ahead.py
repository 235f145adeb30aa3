"""Which tensors to fetch from the device before it is their turn to be written: a bound in bytes. Pure."""

from __future__ import annotations

import threading
from collections.abc import Sequence


class CopyAhead:
    """See the module. Safe to use from several threads.

    Args:
        sizes: Bytes of each tensor, in the order of writing.
        limit_nbytes: Fetched and not yet written at any time; tensors that are larger are never fetched ahead.
    """

    def __init__(self, sizes: Sequence[int], limit_nbytes: int) -> None:
        self._sizes, self._limit = sizes, limit_nbytes
        self._next = 0
        self._ahead: set[int] = set()
        self._nbytes = 0
        self._lock = threading.Lock()

    def begin(self, number: int) -> list[int]:
        """Return which to fetch now that `number` is being written; each is named once."""
        with self._lock:
            self._next = max(self._next, number + 1)
            found = []
            while self._next < len(self._sizes) and self._nbytes + self._sizes[self._next] <= self._limit:
                found.append(self._next)
                self._nbytes += self._sizes[self._next]
                self._ahead.add(self._next)
                self._next += 1
            return found

    def done(self, number: int) -> None:
        """Take note that `number` was written."""
        with self._lock:
            if number in self._ahead:
                self._ahead.remove(number)
                self._nbytes -= self._sizes[number]

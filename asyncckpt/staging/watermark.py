"""How far a slot is filled from its beginning on, while threads copy pieces of it in any order."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

STEP_NBYTES = 16 << 20
"""So often it is told: as `storage.rank_files.EXTENT_NBYTES`, one write."""


class Watermark:
    """See the module. Used for one copy.

    Args:
        start: Address of the first byte.
        end: Address behind the last one.
        tell: Called with how many bytes, from `start` on, nothing writes to any more. Under a lock, in any thread.
    """

    def __init__(self, start: int, end: int, tell: Callable[[int], None]) -> None:
        self._start, self._end, self._tell = start, end, tell
        self._lock = threading.Lock()
        self._left: list[int] = []
        self._done: set[int] = set()
        self._told = 0

    def expect(self, addresses: Iterable[int]) -> None:
        """Pieces that begin at `addresses` are still to be copied, each once, and everything else is there."""
        with self._lock:
            self._left = sorted(addresses, reverse=True)
            self._look()

    def done(self, address: int) -> None:
        """The piece that begins there is copied: nothing will write to it again."""
        with self._lock:
            self._done.add(address)
            self._look()

    def _look(self) -> None:
        while self._left and self._left[-1] in self._done:
            self._done.remove(self._left.pop())
        filled = (self._left[-1] if self._left else self._end) - self._start
        if filled > self._told and (filled - self._told >= STEP_NBYTES or not self._left):
            self._told = filled
            self._tell(filled)

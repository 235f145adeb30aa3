"""Which of two ways to do the same has taken less of the processor here: each is tried a few times."""

from __future__ import annotations

import threading
from collections.abc import Hashable

TRIALS = 4
"""Of each way. The least of so many is taken: whatever else happens makes one longer."""

_MAX_KINDS = 256


class Quicker:
    """Safe to use from several threads. Which way is quicker depends on machine and kernel, and does not change."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, tuple[list[float], list[float]]] = {}

    def is_first(self, kind: Hashable) -> bool:
        """Whether the first way is next, or the quicker, for work of a kind."""
        with self._lock:
            first, second = self._kinds.get(kind, ((), ()))
            if min(len(first), len(second)) < TRIALS:
                return len(first) <= len(second)
            return min(first) <= min(second)

    def took(self, kind: Hashable, seconds: float, *, first: bool) -> None:
        """Take what one try of a way took, in seconds of the processor for a unit of the work."""
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            tries = self._kinds.setdefault(kind, ([], []))[0 if first else 1]
            if len(tries) < TRIALS:
                tries.append(seconds)

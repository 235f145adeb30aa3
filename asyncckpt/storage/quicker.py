"""Which of two ways to do the same has taken less of the processor here: each is tried a few times."""

from __future__ import annotations

import threading
from collections.abc import Callable, Hashable, Sequence

TRIALS = 4
"""Of each way."""

_MAX_KINDS = 256


class Quicker:
    """Safe to use from several threads. What the first tries of each way say holds from then on.

    Args:
        judged: Makes one number of what the tries took. The least is that of the way alone: whatever else happens makes
            one longer. Their sum is for what only happens in some of them, and belongs to the way.
    """

    def __init__(self, judged: Callable[[Sequence[float]], float] = min) -> None:
        self._judged = judged
        self._lock = threading.Lock()
        self._kinds: dict[Hashable, tuple[list[float], list[float]]] = {}

    def is_first(self, kind: Hashable) -> bool:
        """Whether the first way is next, or the quicker, for work of a kind."""
        with self._lock:
            first, second = self._kinds.get(kind, ((), ()))
            if min(len(first), len(second)) < TRIALS:
                return len(first) <= len(second)
            return self._judged(first) <= self._judged(second)

    def took(self, kind: Hashable, seconds: float, *, first: bool) -> None:
        """Take what one try of a way took, in seconds of the processor for a unit of the work."""
        with self._lock:
            if kind not in self._kinds and len(self._kinds) >= _MAX_KINDS:
                self._kinds.clear()
            tries = self._kinds.setdefault(kind, ([], []))[0 if first else 1]
            if len(tries) < TRIALS:
                tries.append(seconds)

"""Checks whether the machine or the worker's cgroup is short of memory.

The check reads files of /proc, so it is done once in `CHECK_INTERVAL_S`.
"""

from __future__ import annotations

import psutil

from asyncckpt.memory.headroom import RESERVE_NBYTES, cgroup_limit

CHECK_INTERVAL_S = 1.0
SHORT_SHARE = 32
"""Memory is short if less than this fraction, 1/32 (3 %), is available. Chosen, not measured."""


class MemoryPressure:
    """Checks memory at intervals. Used from the control loop only."""

    def __init__(self) -> None:
        self._checked_at = float("-inf")

    def check(self, now: float) -> bool:
        """Return whether memory is short; False if the last check is younger than `CHECK_INTERVAL_S`."""
        if now - self._checked_at < CHECK_INTERVAL_S:
            return False
        self._checked_at = now
        memory = psutil.virtual_memory()
        total, available = int(memory.total), int(memory.available)
        limit, used = cgroup_limit()
        return is_short(total, available) or (limit is not None and is_short(limit, limit - used))


def is_short(total: int, available: int) -> bool:
    """Whether `available` of `total` bytes are too few."""
    return available < max(RESERVE_NBYTES, total // SHORT_SHARE)

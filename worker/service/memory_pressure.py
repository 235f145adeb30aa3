"""Whether the machine, or our cgroup, is short of memory; looked at rarely, since it reads files of /proc.

And what a trainer is told that gets none.
"""

from __future__ import annotations

import psutil

from asyncckpt.errors import AsyncCkptError, SaveFailedError
from asyncckpt.memory.headroom import RESERVE_NBYTES, cgroup_limit

LOOK_EVERY_S = 1.0
SHORT_SHARE = 32
"""Short is what has less than this part of all memory left, 3 %. Chosen, not measured."""


class MemoryPressure:
    """Used from the control loop only."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._short = False

    def is_there(self, now: float) -> bool:
        """Return whether memory is short; a look that is younger than `LOOK_EVERY_S` holds, and says so once only."""
        if now - self._looked_at < LOOK_EVERY_S:
            return False
        self._looked_at = now
        memory = psutil.virtual_memory()
        total, available = int(memory.total), int(memory.available)
        limit, used = cgroup_limit()
        self._short = is_short(total, available) or (limit is not None and is_short(limit, limit - used))
        return self._short


def is_short(total: int, available: int) -> bool:
    """Whether `available` bytes are too few, of `total`."""
    return available < max(RESERVE_NBYTES, total // SHORT_SHARE)


def slot_refused(error: BaseException, nbytes: int) -> AsyncCkptError:
    """Return what a trainer is told when the system gives no memory for a slot."""
    return SaveFailedError(
        f"the worker cannot make a slot of {nbytes:,} bytes: {error}", code="slot", detail=str(error)
    )

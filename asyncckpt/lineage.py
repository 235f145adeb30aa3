"""Which epoch a run's checkpoints carry."""

from __future__ import annotations

import os
import time
from collections.abc import Callable

BRIEF_S = 1.0
RETRY_AFTER_S = 60.0
"""While the directory cannot be looked at (a wedged disk, say), a save waits for `BRIEF_S` only: training goes on."""


class Lineage:
    """Remembers the epoch per directory, so that only the first save into one looks.

    Args:
        ask: Returns the epoch of a run (its id) for a checkpoint at a path; raises when it cannot tell. Its last
            argument says that it failed a moment ago: then it should wait for `BRIEF_S` only.
    """

    def __init__(self, ask: Callable[[str, str, bool], int]) -> None:
        self._ask = ask
        self._epochs: dict[str, int] = {}
        self._failed_at = float("-inf")

    def epoch_for(self, path: str, run: str) -> int:
        """Return the epoch of `run` for a checkpoint at `path`: above every sibling of another run.

        It depends on the directory alone, not on what was saved before: the ranks of a run must come to the same one
        although a save may have failed on some of them before it got here.

        Raises:
            AsyncCkptError, OSError: What `ask` raises.
        """
        parent = os.path.dirname(path)
        known = self._epochs.get(parent)
        if known is not None:
            return known
        brief = time.monotonic() - self._failed_at < RETRY_AFTER_S
        try:
            found = self._epochs[parent] = self._ask(path, run, brief)
        except Exception:
            self._failed_at = time.monotonic()
            raise
        return found

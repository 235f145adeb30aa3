"""Which epoch a run's checkpoints carry."""

from __future__ import annotations

import os
from collections.abc import Callable


class Lineage:
    """Remembers the epoch per directory, so that only the first save into one looks.

    Args:
        ask: Returns the epoch for a run whose first checkpoint goes to a path; raises when it cannot tell.
    """

    def __init__(self, ask: Callable[[str], int]) -> None:
        self._ask = ask
        self._seen: set[str] = set()
        self._epoch = 0

    def epoch_for(self, path: str) -> int:
        """Return the epoch for a checkpoint at `path`: above every sibling of another run, and never falling.

        A run's own later saves must stay the newest wherever they go.

        Raises:
            AsyncCkptError, OSError: What `ask` raises.
        """
        parent = os.path.dirname(path)
        if parent not in self._seen:
            self._epoch = max(self._epoch, self._ask(path))
            self._seen.add(parent)
        return self._epoch

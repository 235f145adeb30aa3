"""The epochs of this process's saves: asked for once per run and directory; above what it has found to restore."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass

from asyncckpt.basics.seen_saves import newest_seen
from asyncckpt.basics.urls import parent_of
from asyncckpt.format.names import SaveId

EPOCH_RETRY_TIMEOUT_S = 1.0
EPOCH_RETRY_PERIOD_S = 60.0
"""For so long after the epoch could not be read (the disk hangs, say), each save waits for it only for
`EPOCH_RETRY_TIMEOUT_S`, so that training goes on."""


@dataclass(frozen=True, slots=True)
class _Known:
    """What is known of a directory.

    Attributes:
        epoch: The epoch of saves to it; 0: it was not asked for.
        mirrors: Directories of mirrors for which it is large enough, and "" for none.
    """

    epoch: int
    mirrors: frozenset[str]


_NOTHING = _Known(0, frozenset())


def _next_to(newest: SaveId, run: str) -> int:
    return newest.epoch if newest.run_id == run else newest.epoch + 1


class EpochCache:
    """The epoch per run and directory, so that only a run's first save into a directory has to scan it.

    Args:
        ask: (path of a checkpoint, ID of its run, least epoch, brief) -> its epoch; raises if it cannot be found.
            `brief`: a call has failed less than `EPOCH_RETRY_PERIOD_S` ago, so wait for `EPOCH_RETRY_TIMEOUT_S` only.
    """

    def __init__(self, ask: Callable[[str, str, int, bool], int]) -> None:
        self._ask = ask
        self._known: dict[tuple[str, str], _Known] = {}
        self._failed_at = float("-inf")

    def epoch_for(self, path: str, run: str, mirror: str = "") -> int:
        """Return the epoch of `run` for a checkpoint at `path`: larger than that of every sibling of another run.

        `mirror`: where the checkpoint is copied to, "" for nowhere. What this process has found in the directory of
        mirrors counts too.

        It depends on run and directory alone, not on earlier saves: all ranks of a run must get the same epoch, even if
        a save has failed on some of them before this call. The run is another one after rank 0 has made a new
        checkpointer. One exception: the epoch becomes larger with the first save that has a mirror in another
        directory, if a later run was found there. A rank that has missed that save disagrees with the others in the
        next one, and then asks again; see `forget`.

        Raises:
            AsyncCkptError, OSError: What `ask` raises.
        """
        parent, mirror_parent = os.path.dirname(path), parent_of(mirror) if mirror else ""
        known = self._known.get((run, parent), _NOTHING)
        if mirror_parent in known.mirrors:
            return known.epoch
        seen = newest_seen(parent, mirror_parent)
        least, epoch = _next_to(SaveId.parse(seen), run) if seen else 0, known.epoch
        if not epoch or epoch < least:
            brief = time.monotonic() - self._failed_at < EPOCH_RETRY_PERIOD_S
            try:
                epoch = self._ask(path, run, max(least, epoch), brief)
            except Exception:
                self._failed_at = time.monotonic()
                raise
        self._known[run, parent] = _Known(epoch, known.mirrors | {mirror_parent, ""})
        return epoch

    def forget(self) -> None:
        """Ask again before the next save: the ranks disagreed, and one of them may have missed a larger epoch."""
        self._known.clear()

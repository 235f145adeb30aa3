"""The newest saves that this process has found where it looked for a checkpoint to go on from.

What it saves from then on must be newer. The directory that it saves to may be empty, and the mirror that the
checkpoint came from may not answer when the run's epoch is chosen.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Iterable

MAX_SEEN = 16
"""Directories that are remembered. Chosen: more than one process restores from."""

SECONDS_PER_HOUR = 3600

_LAST = f"-{'9' * 8}-{'f' * 12}"
"""End of the largest ID of an epoch. No save has it."""

_seen: OrderedDict[str, str] = OrderedDict()


def fallback_epoch() -> int:
    """Return the hours since 1970: an epoch that no earlier run has reached by counting, for want of a better one."""
    return int(time.time() // SECONDS_PER_HOUR)


def note_unanswered(directory: str) -> None:
    """Record that a directory of mirrors could not be listed.

    The next run's epoch is `fallback_epoch()` then, as if it held a save of the epoch before. So no save waits until
    the mirror does not answer once more.
    """
    note_seen([directory], [f"{fallback_epoch() - 1:06d}{_LAST}"])


def is_unanswered(newest: str) -> bool:
    """Whether what `newest_seen` has returned was recorded by `note_unanswered`."""
    return newest.endswith(_LAST)


def note_seen(directories: Iterable[str], save_ids: Iterable[str]) -> None:
    """Record the checkpoints among which this process chooses one to go on from.

    Args:
        directories: Directories of these checkpoints, and those where they were looked for.
        save_ids: IDs of their saves, whose order as strings is that of the lineage.
    """
    newest = max(save_ids, default="")
    if not newest:
        return
    for directory in directories:
        _seen[directory] = max(newest, _seen.pop(directory, ""))
    while len(_seen) > MAX_SEEN:
        _seen.popitem(last=False)


def newest_seen(*directories: str) -> str:
    """Return the ID of the newest save that was recorded for one of these directories; "": there is none."""
    return max((_seen.get(one, "") for one in directories), default="")


def all_seen() -> dict[str, str]:
    """Return what was recorded: directory -> ID of the newest save."""
    return dict(_seen)

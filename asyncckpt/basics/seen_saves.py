"""The newest saves that this process has found, or must expect, where it looked for a checkpoint to go on from.

What it saves from then on must be newer. The directory that it saves to may be empty, and the mirror that the
checkpoint came from may not answer when the run's epoch is chosen.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable

MAX_SEEN = 16
"""Directories that are remembered. Chosen: more than one process restores from."""

LOOK_S = 3.0
"""How long a meeting of the ranks waits for what is still being looked at; longer than that takes. Chosen."""

_seen: OrderedDict[str, str] = OrderedDict()
_looks: set[threading.Event] = set()


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


def note_look(ended: threading.Event) -> None:
    """Let `all_seen` wait for this event: until it is set, something may be recorded that all ranks need."""
    _looks.add(ended)


def all_seen() -> dict[str, str]:
    """Return what was recorded: directory -> ID of the newest save.

    Blocks: while looks have not ended, at most `LOOK_S` for each.
    """
    for look in list(_looks):
        look.wait(LOOK_S)
        _looks.discard(look)
    return dict(_seen)

"""The newest saves that this process has found, or must expect, where it looked for a checkpoint to go on from.

What it saves from then on must be newer. The directory that it saves to may be empty, and the mirror that the
checkpoint came from may not answer when the run's epoch is chosen.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from collections.abc import Iterable

MAX_SEEN = 16
"""Directories that are remembered. Chosen: more than one process restores from."""

LOOK_S = 3.0
"""How long `all_seen` waits for looks: longer than they take. Chosen."""

_seen: OrderedDict[str, str] = OrderedDict()
_to_tell: dict[str, str] = {}
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
    """Let `all_seen` wait for this event: until it is set, `note_to_tell` may be called."""
    _looks.add(ended)


def note_to_tell(directory: str, save_id: str) -> None:
    """Record what one rank has found out by itself. It counts, here too, once the ranks have told each other."""
    _to_tell[directory] = save_id


def all_seen(timeout_s: float = LOOK_S) -> dict[str, str]:
    """Return what all ranks must know: directory -> ID of the newest save.

    Blocks: while looks have not ended, at most `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    for look in list(_looks):
        look.wait(max(0.0, deadline - time.monotonic()))
        _looks.discard(look)
    found = dict(_seen)
    for directory, save_id in _to_tell.items():
        found[directory] = max(save_id, found.get(directory, ""))
    return found


os.register_at_fork(after_in_child=_looks.clear)

"""The newest saves that this process has found where it looked for a checkpoint to go on from.

What it saves from then on must be newer, also in a directory that is still empty.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

MAX_SEEN = 16
"""Directories that are remembered. Chosen: more than one process restores from."""

_seen: OrderedDict[str, str] = OrderedDict()


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
    """Return what all ranks must know: directory -> ID of the newest save."""
    return dict(_seen)

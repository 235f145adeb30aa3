"""Questions about the checkpoints of a directory. Imports no torch."""

from __future__ import annotations

import logging
import os

from asyncckpt.format.manifest import newest
from asyncckpt.paths import absolute_path
from asyncckpt.storage.catalog import ABANDONED, COMMITTED, INCOMPLETE, QUARANTINED, scan
from asyncckpt.storage.local import LocalStore

_log = logging.getLogger("asyncckpt")


def latest_checkpoint(root: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest committed checkpoint in `root`, or None.

    Newest by lineage (the run's epoch, then the save's number), not by step: after a rollback the new branch wins.
    Only the manifests are read, so that it may be one whose data is damaged or gone: `load` finds that out, and
    `restore_latest` goes on to the one before. Whose manifest is damaged or cannot be read is passed over with a
    warning.

    Args:
        root: The directory whose children are checkpoints, or a checkpoint itself.

    Raises:
        UnsupportedPathError: A URL or no path.
        OSError: The directory cannot be listed, for another reason than that it does not exist.
    """
    try:
        found = scan(absolute_path(root), LocalStore(), links=True)
    except FileNotFoundError:
        return None
    for one in found:
        if one.state not in (COMMITTED, INCOMPLETE, ABANDONED, QUARANTINED):
            _log.warning("%s is passed over, it is %s: %s", one.path, one.state, one.error)
    best = newest((f.path, f.manifest) for f in found if f.manifest is not None)
    return best[0] if best else None

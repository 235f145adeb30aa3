"""Whether memory holds a newer checkpoint than the disk: one that is being written, or could not be."""

from __future__ import annotations

import logging
import os

from asyncckpt.format.steps import lineage_key
from asyncckpt.recall.snapshots import held_snapshots
from asyncckpt.storage.files import Files
from asyncckpt.storage.standing import standing_at

_log = logging.getLogger("asyncckpt")


def newest_of_both(root: str, on_disk: str | None, endpoint: str | None) -> str | None:
    """Return the path of the newest checkpoint in `root`, on disk or whole in the worker's memory; None without any.

    A path where another save is committed loads as that, so it does not count for what is in memory.

    Args:
        root: Absolute path of the directory that holds the checkpoints' directories, or of one of these.
        on_disk: The newest one there.
        endpoint: Of the worker; None: this user's of this job.

    Blocks: for the worker's answer, as `held_snapshots`.
    """
    files = Files()
    standing = None if on_disk is None else standing_at(on_disk, files)
    for snapshot in held_snapshots(root, endpoint=endpoint):
        if standing is not None and lineage_key(snapshot.save_id) <= lineage_key(standing.save_id):
            break
        beside = snapshot.path == root or os.path.dirname(snapshot.path) == root
        if beside and snapshot.complete and standing_at(snapshot.path, files) is None:
            text = "%s: the newest snapshot, of step %d, is in the worker's memory only: save %s"
            _log.warning(text, snapshot.path, snapshot.step, snapshot.save_id)
            return snapshot.path
    return on_disk

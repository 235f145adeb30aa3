"""Putting a broken checkpoint aside: its directory gets another name, under which nobody looks for checkpoints."""

from __future__ import annotations

import errno
import os

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.names import SaveId, owner_of, quarantined_name
from asyncckpt.storage.checkpoint_dir import standing_at
from asyncckpt.storage.store import PREFIX, Store

_MAX_NUMBER = 999_999_999


def put_aside(path: str, save_id: SaveId, store: Store) -> str | None:
    """Rename the directory of a broken checkpoint to `<name>.broken-<n>`, in one step, and flush its parent.

    The caller has loaded another checkpoint: the last good one is never touched.

    Args:
        path: The checkpoint's directory.
        save_id: The save that was found broken there.
        store: Where it lies.

    Returns:
        The new path; None: it stays, because it is not what was found broken any more (another save's manifest stands
        there, or files of a newer one that may be under way), or nothing says that it is ours.

    Raises:
        OSError: A call failed. The directory has one of the two names.
    """
    if not _is_still(path, save_id, store):
        return None
    parent, name = os.path.split(path)
    for number in range(1, _MAX_NUMBER + 1):
        moved = os.path.join(parent, quarantined_name(name, number))
        reach("quarantine: renaming")
        try:
            store.move(path, moved)
        except FileExistsError:
            continue
        reach("quarantine: renamed")
        store.sync(parent)
        return moved
    raise OSError(errno.EEXIST, "there is no free name to put it aside under", path)


def _is_still(path: str, save_id: SaveId, store: Store) -> bool:
    if store.stat(path).kind != PREFIX:
        return False
    standing = standing_at(path, store)
    if standing is not None and standing.save_id != save_id:
        return False
    owners = {owner for name in store.names(path) if (owner := owner_of(name)) is not None}
    return save_id in owners and all(owner <= save_id for owner in owners)

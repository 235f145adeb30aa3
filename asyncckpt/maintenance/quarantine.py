"""Quarantine: the directory of a broken checkpoint is renamed, so that nothing takes it for a checkpoint any more."""

from __future__ import annotations

import errno
import os

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.names import SaveId, owner_of, quarantined_name
from asyncckpt.storage.checkpoint_dir import manifest_if_readable
from asyncckpt.storage.store import PREFIX, Store

_MAX_NUMBER = 999_999_999


def quarantine_checkpoint(path: str, save_id: SaveId, store: Store) -> str | None:
    """Rename the directory of a broken checkpoint to `<name>.broken-<n>`, in one step, and flush its parent.

    Call it only after another checkpoint was loaded, so that the last good one is never renamed.

    Args:
        path: Directory of the checkpoint.
        save_id: ID of the save that was found broken.
        store: Store that holds it.

    Returns:
        The new path. None if the directory stays: it holds another save's manifest by now, or files of a newer save,
        which may be in progress, or no file of this package.

    Raises:
        OSError: A call failed; the directory has either of the two names.
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
    raise OSError(errno.EEXIST, "no free name is left for the quarantined directory", path)


def _is_still(path: str, save_id: SaveId, store: Store) -> bool:
    if store.stat(path).kind != PREFIX:
        return False
    existing = manifest_if_readable(path, store)
    if existing is not None and existing.save_id != save_id:
        return False
    owners = {owner for name in store.names(path) if (owner := owner_of(name)) is not None}
    return save_id in owners and all(owner <= save_id for owner in owners)

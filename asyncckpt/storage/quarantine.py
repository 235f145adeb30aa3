"""Putting a broken checkpoint aside: its directory gets another name, under which nobody looks for checkpoints."""

from __future__ import annotations

import errno
import os
import stat

from asyncckpt.failpoints import reach
from asyncckpt.format.names import SaveId, owner_of, quarantined_name
from asyncckpt.format.steps import lineage_key
from asyncckpt.storage.files import Files, fsync_directory
from asyncckpt.storage.standing import standing_at

_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_MAX_NUMBER = 999_999_999


def put_aside(path: str, save_id: SaveId, files: Files) -> str | None:
    """Rename the directory of a broken checkpoint to `<name>.broken-<n>`, in one step, and flush its parent.

    The caller has loaded another checkpoint: the last good one is never touched.

    Args:
        path: The checkpoint's directory.
        save_id: The save that was found broken there.
        files: The storage seam.

    Returns:
        The new path; None: it stays, because it is not what was found broken any more (another save's manifest stands
        there, or files of a newer one that may be under way), or nothing says that it is ours.

    Raises:
        OSError: A call failed. The directory has one of the two names.
    """
    if not _is_still(path, save_id, files):
        return None
    parent, name = os.path.split(path)
    for number in range(1, _MAX_NUMBER + 1):
        moved = os.path.join(parent, quarantined_name(name, number))
        if _exists(files, moved):
            continue
        reach("quarantine: renaming")
        try:
            files.rename_noreplace(path, moved)
        except FileExistsError:
            continue
        except OSError as error:
            if error.errno not in _NO_SUCH_RENAME:
                raise
            files.rename(path, moved)  # at worst in the place of an empty directory that was made this instant
        reach("quarantine: renamed")
        fsync_directory(files, parent)
        return moved
    raise OSError(errno.EEXIST, "there is no free name to put it aside under", path)


def _is_still(path: str, save_id: SaveId, files: Files) -> bool:
    if not stat.S_ISDIR(files.lstat(path).st_mode):
        return False
    standing = standing_at(path, files)
    if standing is not None and standing.save_id != save_id:
        return False
    owners = {owner for name in files.listdir(path) if (owner := owner_of(name)) is not None}
    return save_id in owners and all(lineage_key(owner) <= lineage_key(save_id) for owner in owners)


def _exists(files: Files, path: str) -> bool:
    try:
        files.lstat(path)
    except FileNotFoundError:
        return False
    return True

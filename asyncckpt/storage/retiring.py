"""Removing a committed checkpoint that retention has given up: tombstone first, then its files, then the rest.

IMPORTANT: the order. Whoever dies in between leaves either the whole checkpoint, or a directory that nobody takes for
one; `retire_rest` goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable

from asyncckpt.errors import AsyncCkptError
from asyncckpt.failpoints import reach
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of
from asyncckpt.format.steps import lineage_key
from asyncckpt.storage import dcp_commit
from asyncckpt.storage.collecting import LOCK_TIMEOUT_S, write_tombstone
from asyncckpt.storage.commit import check_rank_files
from asyncckpt.storage.files import Files, fsync_directory
from asyncckpt.storage.overwrite_lock import overwrite_lock
from asyncckpt.storage.standing import known_standing_at, known_tombstone_at


def retire(
    path: str,
    save_id: SaveId,
    files: Files,
    *,
    umask: int,
    package: str,
    is_wanted: Callable[[], bool] = lambda: False,
) -> bool:
    """Remove the checkpoint at `path`, if it is still the one of `save_id` and nobody has come to want it.

    The caller knows of a newer one that is sound.

    Args:
        path: The checkpoint's directory.
        save_id: Of its manifest.
        files: The storage seam.
        umask: Of the mode of a tombstone.
        package: asyncckpt's version.
        is_wanted: Asked under the lock that who pins it takes as well.

    Returns:
        Whether it is gone: False: another save's manifest stands there, or none, or it is wanted; nothing was done.

    Raises:
        OSError: A call failed. It is whole, or no checkpoint any more; `retire_rest` removes what is left.

    Blocks: for who commits or pins there, at most `collecting.LOCK_TIMEOUT_S`.
    """
    with overwrite_lock(path, files=files, umask=umask, timeout_s=LOCK_TIMEOUT_S):
        standing = known_standing_at(path, files)
        if standing is None or standing.save_id != save_id or is_wanted():
            return False
        write_tombstone(path, save_id, files, umask=umask, package=package, is_taken=True, was_committed=True)
        # IMPORTANT: a power cut must not bring the manifest back once files that it names are gone.
        fsync_directory(files, path)
        reach("retention: delisted")
        _remove_rest(path, save_id, files)
    _remove_directory(path, files)
    return True


def retire_rest(path: str, files: Files, *, umask: int) -> bool:
    """Go on with a removal that was broken off.

    Args:
        path: A directory.
        files: The storage seam.
        umask: Of the mode of the lock's file, which goes again.

    Returns:
        Whether there was anything to do.

    Raises:
        OSError: As of `retire`.

    Blocks: as `retire`.
    """
    tombstone = known_tombstone_at(path, files)
    if tombstone is None or not tombstone.was_committed:
        return False
    with overwrite_lock(path, files=files, umask=umask, timeout_s=LOCK_TIMEOUT_S):
        tombstone = known_tombstone_at(path, files)
        if tombstone is None or not tombstone.was_committed:
            return False
        _remove_rest(path, tombstone.save_id, files)
    _remove_directory(path, files)
    return True


def _remove_rest(path: str, save_id: SaveId, files: Files) -> None:
    """The tombstone stands, and the caller holds the lock."""
    dcp_commit.remove_metadata_of(path, save_id, None, files, is_locked=True)
    later = False
    for name in files.listdir(path):
        owner = owner_of(name)
        if owner is None or not stat.S_ISREG(files.lstat(os.path.join(path, name)).st_mode):
            continue
        if lineage_key(owner) > lineage_key(save_id):
            later = True
            continue
        reach("retention: removing")
        with contextlib.suppress(FileNotFoundError):
            files.unlink(os.path.join(path, name))
    fsync_directory(files, path)
    reach("retention: emptied")
    if not later:  # else that save replaces it
        files.unlink(os.path.join(path, MANIFEST_NAME))


def _remove_directory(path: str, files: Files) -> None:
    """At worst an empty directory stays, or one with a lock's file: whoever removes it may die."""
    with contextlib.suppress(OSError):  # somebody else's files are in it, or a later save's
        reach("retention: removing directory")
        files.rmdir(path)


def is_whole(path: str, manifest: Manifest, files: Files) -> bool:
    """Whether every file that a standing manifest names is there in full, as far as sizes and indexes tell."""
    try:
        check_rank_files(path, manifest, files=files)
        return dcp_commit.is_finished(path, manifest, files)
    except (OSError, AsyncCkptError):
        return False

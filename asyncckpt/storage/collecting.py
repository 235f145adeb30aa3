"""Removing what `storage.garbage` finds: after nothing of it can be published any more, and at each step for good.

IMPORTANT: the order is: tombstone, flushed; `.metadata`, which stock readers trust; files. Whoever dies in between
leaves a directory that is not committed, or whose committed save is whole, and of which the rest is found again.
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass, replace
from datetime import datetime, timezone

from asyncckpt.failpoints import reach
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, owner_of, temporary_tombstone_name
from asyncckpt.format.tombstone import Tombstone, encode_tombstone
from asyncckpt.storage import dcp_commit
from asyncckpt.storage.files import MODE_FILE, Files, fsync_directory, write_new_file
from asyncckpt.storage.garbage import ATTEMPT, BROKEN, LOCK, TOMBSTONE, Garbage, Rules, garbage_at
from asyncckpt.storage.overwrite_lock import overwrite_lock
from asyncckpt.storage.put_if_absent import put_if_absent

LOCK_TIMEOUT_S = 1.0
"""Who holds the lock of a directory commits there just now, or is stopped in the middle of it. Chosen."""

_PRIVATE = 0o077
"""The umask of a lock file that is gone again at once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Collected:
    """What became of a directory's garbage.

    Attributes:
        garbage: As it was found right before.
        removed: Names that are gone.
        error: What stopped it.
    """

    garbage: Garbage
    removed: tuple[str, ...] = ()
    error: OSError | None = None


def collect(path: str, files: Files, rules: Rules, *, umask: int, package: str) -> Collected | None:
    """Remove the garbage of one directory; looks at it again first, and once more under its lock.

    Args:
        path: The directory.
        files: The storage seam.
        rules: What may go.
        umask: Of the mode of a tombstone.
        package: asyncckpt's version.

    Returns:
        What was done; None: there is nothing to remove any more.

    Raises:
        OSError: The directory cannot be looked at.

    Blocks: for who commits there, at most `LOCK_TIMEOUT_S`.
    """
    garbage = garbage_at(path, files, rules)
    if garbage is None or garbage.kept:
        return None if garbage is None else Collected(garbage=garbage)
    removed: list[str] = []
    try:
        if garbage.kind == BROKEN:
            _remove_broken(garbage, files, removed)
            return Collected(garbage=garbage, removed=tuple(removed))
        with overwrite_lock(path, files=files, umask=_PRIVATE, timeout_s=LOCK_TIMEOUT_S):
            now = garbage_at(path, files, rules, is_locked=True)
            if now is not None and now.kept:
                return Collected(garbage=now)
            if now is not None:
                _remove_locked(now, files, removed, umask=umask, package=package)
        if garbage.kind == LOCK and LOCK_NAME in garbage.names:
            removed.append(LOCK_NAME)  # whoever held it last does that
        if now is not None and now.kind == TOMBSTONE:
            with contextlib.suppress(OSError):  # somebody else's files are in it
                files.rmdir(path)
    except FileExistsError:
        return Collected(garbage=replace(garbage, kept="a save was committed there meanwhile"))
    except OSError as error:
        return Collected(garbage=garbage, removed=tuple(removed), error=error)
    return Collected(garbage=now or garbage, removed=tuple(removed))


def _remove_locked(garbage: Garbage, files: Files, removed: list[str], *, umask: int, package: str) -> None:
    path = garbage.path
    if garbage.kind == TOMBSTONE:
        _unlink(path, MANIFEST_NAME, files, removed)
        return
    if garbage.kind == ATTEMPT:
        put_tombstone(garbage, files, umask=umask, package=package)
    # IMPORTANT: what stands must outlive a power cut before anything goes that it makes worthless.
    fsync_directory(files, path)
    reach("gc: nothing removed")
    _remove_files(garbage, files, removed)


def put_tombstone(garbage: Garbage, files: Files, *, umask: int, package: str) -> None:
    """Put the tombstone of an attempt, under the lock of its directory: if nothing stands, or in the place of that.

    Raises:
        FileExistsError: A save has been committed there meanwhile.
        OSError: A call failed; the tombstone stands, or does not.
    """
    path, save_id = garbage.path, garbage.save_ids[-1]
    created = datetime.now(timezone.utc).isoformat(timespec="milliseconds")
    data = encode_tombstone(Tombstone(save_id=save_id, created=created, writer=f"asyncckpt {package}"))
    temporary = os.path.join(path, temporary_tombstone_name(save_id))
    final = os.path.join(path, MANIFEST_NAME)
    with contextlib.suppress(FileNotFoundError):
        files.unlink(temporary)  # of a run of this that died
    try:
        write_new_file(files, temporary, data, mode=MODE_FILE & ~umask, fsync=True)
        fsync_directory(files, path)
        reach("gc: tombstone written")
        if garbage.standing is not None:  # who replaces it holds the lock too
            files.rename(temporary, final)
        else:
            put_if_absent(temporary, final, files)
        reach("gc: tombstone put")
    finally:
        with contextlib.suppress(OSError):
            files.unlink(temporary)


def _remove_files(garbage: Garbage, files: Files, removed: list[str]) -> None:
    stands = garbage.standing.save_id if isinstance(garbage.standing, Manifest) and garbage.kind != ATTEMPT else None
    for save_id in garbage.save_ids:
        if save_id != stands:
            dcp_commit.remove_metadata_of(garbage.path, save_id, None, files, is_locked=True)
    for name in garbage.names:
        if owner_of(name) is not None:
            _unlink(garbage.path, name, files, removed)
    fsync_directory(files, garbage.path)


def _remove_broken(garbage: Garbage, files: Files, removed: list[str]) -> None:
    """The manifest goes first: what is left then is no checkpoint any more, not a damaged one."""
    if MANIFEST_NAME in garbage.names:
        _unlink(garbage.path, MANIFEST_NAME, files, removed)
        fsync_directory(files, garbage.path)
    _remove_files(garbage, files, removed)
    with contextlib.suppress(OSError):
        files.rmdir(garbage.path)


def _unlink(path: str, name: str, files: Files, removed: list[str]) -> None:
    reach("gc: removing")
    with contextlib.suppress(FileNotFoundError):  # by its save itself
        files.unlink(os.path.join(path, name))
        removed.append(name)

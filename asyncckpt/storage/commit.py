"""The commit: a checkpoint's manifest, last of all its files; other attempts' leftovers after it.

IMPORTANT: the manifest is put if absent, or in the place of an older one, after everything that it names is durable.
Whoever sees it may load.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
from collections.abc import Callable

from asyncckpt.errors import CommitUnknownError
from asyncckpt.failpoints import reach
from asyncckpt.format.checksum import file_checksum
from asyncckpt.format.index import decode_index
from asyncckpt.format.manifest import Manifest, encode_manifest
from asyncckpt.format.names import MANIFEST_NAME, SaveId, owner_of, temporary_manifest_name
from asyncckpt.format.steps import lineage_key
from asyncckpt.format.tombstone import Tombstone
from asyncckpt.storage import dcp_commit
from asyncckpt.storage.files import MODE_FILE, Files, fsync_directory, read_small_file, write_new_file
from asyncckpt.storage.overwrite_lock import overwrite_lock
from asyncckpt.storage.put_if_absent import NO_HARD_LINKS, put_if_absent
from asyncckpt.storage.standing import exists, overtaken, refuse_standing, standing_at

_SURELY_NOT_DONE = NO_HARD_LINKS | {
    errno.EACCES,
    errno.EDQUOT,
    errno.EINVAL,
    errno.ENAMETOOLONG,
    errno.ENOENT,
    errno.ENOSPC,
    errno.ENOTDIR,
    errno.EROFS,
}
"""Answers of link(2) and renameat2(2) that mean refusal; after any other (EIO, ESTALE, ...) nobody knows."""

_logger = logging.getLogger("asyncckpt.storage")


def check_rank_files(path: str, manifest: Manifest, *, files: Files) -> None:
    """Look at every file that `manifest` names: it is there, regular, and as long as its record says.

    Raises:
        OSError: It is not.
    """
    for record in manifest.ranks:
        index_path = os.path.join(path, record.index_name)
        data = read_small_file(files, index_path, record.index_nbytes)
        if len(data) != record.index_nbytes or file_checksum(data) != record.index_checksum:
            raise OSError(errno.EIO, "the index differs from what was written", index_path)
        index = decode_index(data)
        sizes = {shard.name: shard.nbytes for shard in index.shards} | {index.objects.name: index.objects.nbytes}
        if index.items is not None:
            sizes[index.items.name] = index.items.nbytes
        for name, nbytes in sizes.items():
            found = files.lstat(os.path.join(path, name))
            if not stat.S_ISREG(found.st_mode) or found.st_size != nbytes:
                text = f"{found.st_size} bytes long, {nbytes} were written"
                raise OSError(errno.EIO, text, os.path.join(path, name))


def publish(
    path: str,
    manifest: Manifest,
    *,
    files: Files,
    umask: int,
    overwrite: bool = False,
    dcp_metadata: bytes | None = None,
) -> None:
    """Commit: put `manifest` if no manifest is there. Doing it again for the same save succeeds.

    With `overwrite`, it takes the place of an older one, in one step, under a lock that all who overwrite take. So does
    layout "dcp", which puts two files; what died between them is replaced even without `overwrite`.

    Args:
        path: The checkpoint's directory. Every file that the manifest names must be durable.
        manifest: The commit record; `manifest.fsync` says whether to flush.
        files: The storage seam.
        umask: Of the manifest's mode 0666.
        overwrite: Whether to replace an older manifest. The old checkpoint's files are then leftovers.
        dcp_metadata: In layout "dcp" the content of `.metadata`, as `manifest.dcp` says.

    Raises:
        CheckpointExistsError: Another save's manifest is there, with `overwrite` a newer one; or a `.metadata` that is
            not ours. It was left untouched.
        CommitUnknownError: The put failed so that the manifest may or may not be there. Nothing was deleted.
        OSError: Failed before the put; nothing was published.

    Blocks: with `overwrite`, also for another one that publishes at `path`, at most `LOCK_TIMEOUT_S`.
    """
    reach("commit: begun")
    standing = refuse_standing(path, manifest.save_id, files, overwrite=overwrite)
    replaces = standing is not None and standing.save_id != manifest.save_id
    is_locked = overwrite or replaces or dcp_metadata is not None
    with overwrite_lock(path, files=files, umask=umask) if is_locked else contextlib.nullcontext():
        _publish(path, manifest, files, umask, dcp_metadata, overwrite=overwrite, is_locked=is_locked)


def _publish(
    path: str,
    manifest: Manifest,
    files: Files,
    umask: int,
    dcp_metadata: bytes | None,
    *,
    overwrite: bool,
    is_locked: bool,
) -> None:
    temporary = os.path.join(path, temporary_manifest_name(manifest.save_id))
    beside: str | None = None  # what is to become `.metadata`
    try:
        with overtaken(path, manifest.save_id, files, overwrite=overwrite):
            check_rank_files(path, manifest, files=files)
        reach("commit: files checked")
        if dcp_metadata is not None:
            beside = dcp_commit.write_temporary(path, manifest, dcp_metadata, files=files, umask=umask)
            reach("commit: metadata written")
        with contextlib.suppress(FileNotFoundError):
            files.unlink(temporary)  # of an earlier try of this very save
        write_new_file(files, temporary, encode_manifest(manifest), mode=MODE_FILE & ~umask, fsync=manifest.fsync)
        reach("commit: manifest written")
        if manifest.fsync:
            fsync_directory(files, path)
            fsync_directory(files, os.path.dirname(path))
        reach("commit: directories flushed")
        standing = refuse_standing(path, manifest.save_id, files, overwrite=overwrite) if is_locked else None
    except BaseException:
        _unlink_quietly(files, temporary)
        _unlink_quietly(files, beside)
        raise
    if beside is None:
        _put(path, temporary, manifest, files, replace=standing is not None)
    else:
        _put_both(path, temporary, beside, manifest, standing, files)
    try:
        reach("commit: put")
        # IMPORTANT: until the directory is flushed, a power cut may take the manifest away again.
        if manifest.fsync:
            fsync_directory(files, path)
        reach("commit: durable")
    except OSError as error:
        raise _unknown(path, manifest.save_id, error) from error
    _unlink_quietly(files, temporary)


def _put_both(
    path: str, temporary: str, beside: str, manifest: Manifest, standing: Manifest | Tombstone | None, files: Files
) -> None:
    """Put manifest and `.metadata`, in the order in which a checkpoint that is replaced stays whole until the last."""
    is_first = False
    try:
        if isinstance(standing, Manifest) and standing.save_id != manifest.save_id:
            is_first = dcp_commit.goes_first(path, standing, files)
        if is_first:
            dcp_commit.put(path, beside, manifest, files)
        _put(path, temporary, manifest, files, replace=standing is not None)
    except CommitUnknownError:
        raise
    except BaseException:
        if is_first:
            _is_gone(path, files, doomed=manifest.save_id, is_locked=True)
        _unlink_quietly(files, beside)
        _unlink_quietly(files, temporary)
        raise
    if not is_first:
        try:
            if manifest.fsync:  # IMPORTANT: else a power cut might keep `.metadata` alone
                fsync_directory(files, path)
            dcp_commit.put(path, beside, manifest, files)
        except OSError as error:
            raise _unknown(path, manifest.save_id, error) from error


def _put(path: str, temporary: str, manifest: Manifest, files: Files, *, replace: bool) -> None:
    """Give the temporary file its final name, unless that name is taken by what is not to be replaced."""
    final = os.path.join(path, MANIFEST_NAME)
    try:
        if replace:
            # IMPORTANT: one rename. Without the name for an instant, a crash would leave no checkpoint there at all.
            files.rename(temporary, final)
        else:
            put_if_absent(temporary, final, files)
    except OSError as error:
        standing = standing_at(path, files)
        if standing is not None and standing.save_id == manifest.save_id:
            return
        if error.errno == errno.EEXIST or error.errno in _SURELY_NOT_DONE:
            _unlink_quietly(files, temporary)
            refuse_standing(path, manifest.save_id, files, overwrite=replace)  # who came first, if anybody, says more
            if error.errno == errno.EEXIST:
                raise exists(path, manifest.save_id, standing, overwrite=False) from error
            raise
        raise _unknown(path, manifest.save_id, error) from error


def _unknown(path: str, save_id: SaveId, error: OSError) -> CommitUnknownError:
    return CommitUnknownError(
        f"{path}: putting the manifest of save {save_id} failed ({error}); whether the checkpoint is committed is not "
        "known until the storage answers again. Nothing was deleted; look with `asyncckpt ls`",
        code=errno.errorcode.get(error.errno or 0, "EIO"),
        path=path,
        detail=str(error),
        save_id=str(save_id),
    )


def _unlink_quietly(files: Files, path: str | None) -> None:
    if path is None:
        return
    try:
        files.unlink(path)
    except FileNotFoundError:
        pass
    except OSError as error:
        _logger.warning("cannot remove %s: %s", path, error)


def remove_leftovers(path: str, keep: SaveId, *, files: Files) -> list[str]:
    """Remove the files of earlier attempts, and of a checkpoint that was replaced, from a committed one.

    IMPORTANT: only once a manifest of `keep` stands, because from then on no earlier attempt can commit here; a later
    one, which overwrites, still can.

    Args:
        path: The checkpoint's directory.
        keep: The save that is committed there.
        files: The storage seam.

    Returns:
        The names that were removed. Files that are not ours by name, links and directories stay; so does everything
        when the manifest of `keep` is not there.
    """
    standing = standing_at(path, files)
    if standing is None or standing.save_id != keep:
        return []
    if standing.dcp is None and not _is_gone(path, files, before=keep):
        return []
    return _remove(path, files, lambda owner: lineage_key(owner) < lineage_key(keep))


def remove_files_of(path: str, save_id: SaveId, *, files: Files) -> list[str]:
    """Remove the files of one save that was not committed and never will be; a committed one is left alone.

    Returns:
        The names that were removed.
    """
    try:
        files.lstat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        pass
    except OSError:
        return []
    else:
        standing = standing_at(path, files)
        if standing is None or standing.save_id == save_id:
            return []
    if not _is_gone(path, files, doomed=save_id):
        return []
    return _remove(path, files, lambda owner: owner == save_id)


def _is_gone(
    path: str, files: Files, *, doomed: SaveId | None = None, before: SaveId | None = None, is_locked: bool = False
) -> bool:
    """Remove a `.metadata` of these saves, and say whether none is left."""
    try:
        dcp_commit.remove_metadata_of(path, doomed, before, files, is_locked=is_locked)
    except OSError as error:
        _logger.warning("cannot clean up %s: %s", path, error)
        return False
    return True


def _remove(path: str, files: Files, doomed: Callable[[SaveId], bool]) -> list[str]:
    removed = []
    try:
        for name in files.listdir(path):
            owner = owner_of(name)
            if owner is None or not doomed(owner):
                continue
            if stat.S_ISREG(files.lstat(os.path.join(path, name)).st_mode):
                reach("leftovers: removing")
                files.unlink(os.path.join(path, name))
                removed.append(name)
    except OSError as error:
        _logger.warning("cannot clean up %s: %s", path, error)
    return removed

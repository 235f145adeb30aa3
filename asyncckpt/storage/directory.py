"""A checkpoint's directory, before anything is written to it."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Sequence

from asyncckpt.failpoints import reach
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import MODE_DIRECTORY, Files, apply_mode, fsync_directory, opened
from asyncckpt.storage.standing import exists, refuse_around, refuse_inside, refuse_standing


def prepare_directory(
    path: str, *, save_id: SaveId, files: Files, umask: int, fsync: bool, overwrite: bool = False, resumed: bool = False
) -> list[str]:
    """Make the checkpoint's directory and its missing parents, each name flushed.

    Args:
        path: Absolute path of the checkpoint.
        save_id: Of the save that goes there.
        files: The storage seam.
        umask: Of the directories' mode 0777.
        fsync: Whether to flush.
        overwrite: Whether an older checkpoint may stand there.
        resumed: Whether the save's own manifest may: another process has begun this save, and died.

    Returns:
        The directories that this call has made, outermost first: for `remove_made`, if the save comes to nothing.

    Raises:
        CheckpointExistsError: A manifest is there that is not to be replaced; or the path lies inside a checkpoint, or
            is the directory that holds another one.
        OSError: A part of the path is no directory, or a call failed. What this call made is gone again.
    """
    refuse_inside(path, save_id, files)
    made: list[str] = []
    try:
        _make(path, made, files, MODE_DIRECTORY & ~umask, fsync=fsync)
        if not made:
            refuse_around(path, save_id, files)
        standing = refuse_standing(path, save_id, files, overwrite=overwrite)
        if isinstance(standing, Manifest) and standing.save_id == save_id and not resumed:
            raise exists(path, save_id, standing, overwrite=overwrite)
        reach("directory: made")
    except BaseException:
        remove_made(made, files)
        raise
    return made


def look_at_directory(path: str, *, save_id: SaveId, files: Files, overwrite: bool) -> None:
    """Refuse what `prepare_directory` would refuse, and make nothing: another process will.

    Raises:
        CheckpointExistsError: As there.
        OSError: It cannot be looked at.
    """
    refuse_inside(path, save_id, files)
    if _is_directory(files, path):
        refuse_around(path, save_id, files)
        refuse_standing(path, save_id, files, overwrite=overwrite)


def remove_made(made: Sequence[str], files: Files) -> None:
    """Remove directories that `prepare_directory` has made, as far as they are empty."""
    with contextlib.suppress(OSError):
        for directory in reversed(made):
            reach("failed: removing directory")
            files.rmdir(directory)


def _make(path: str, made: list[str], files: Files, mode: int, *, fsync: bool) -> None:
    """Make what is missing of `path`, and note it in `made`."""
    missing: list[str] = []
    current = path
    while not _is_directory(files, current):
        missing.append(current)
        current = os.path.dirname(current)
    for directory in reversed(missing):
        with contextlib.suppress(FileExistsError):  # by another rank at the same time
            files.mkdir(directory, mode)
            made.append(directory)
            with opened(files, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                apply_mode(files, fd, mode)
        if not _is_directory(files, directory):
            raise FileExistsError(errno.EEXIST, "a dangling symbolic link is in the way", directory)
        if fsync:
            fsync_directory(files, os.path.dirname(directory))


def _is_directory(files: Files, path: str) -> bool:
    """Whether `path` is a directory; False when it is absent, an error when it is something else."""
    try:
        found = files.stat(path)
    except FileNotFoundError:
        if os.path.dirname(path) == path:
            raise
        return False
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, "a file is where a directory is wanted", path)
    return True

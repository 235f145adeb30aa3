"""Pins: checkpoints that retention must not remove, kept in the root so that they survive every restart.

One file for each, `<root>/.pins/<name of the checkpoint's directory>`: made and removed in one step, and flushed. Who
pins and who removes hold the lock of the checkpoint's directory, so that one of the two comes first: a pin that has
returned holds.
"""

from __future__ import annotations

import contextlib
import os

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import MODE_DIRECTORY, MODE_FILE, Files, fsync_directory, write_new_file
from asyncckpt.storage.overwrite_lock import overwrite_lock

PINS_NAME = ".pins"


def pinned_in(root: str, files: Files) -> frozenset[str]:
    """Return the names of the directories in `root` that are pinned.

    Raises:
        OSError: It cannot be known; then nothing may be removed.
    """
    try:
        return frozenset(files.listdir(os.path.join(root, PINS_NAME)))
    except FileNotFoundError:
        return frozenset()


def is_pinned(path: str, files: Files) -> bool:
    """Whether the checkpoint at `path` is pinned.

    Raises:
        OSError: It cannot be known.
    """
    try:
        files.lstat(_pin_of(path))
    except FileNotFoundError:
        return False
    return True


def pin(path: str, files: Files, *, umask: int) -> None:
    """Pin the committed checkpoint at `path`; again is fine. It is durable when this returns.

    Args:
        path: Absolute path of its directory; the pin goes into the directory above it.
        files: The storage seam.
        umask: Of the modes of what is made.

    Raises:
        CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
        CorruptCheckpointError, UnsupportedFormatError: Its manifest cannot be read.
        OSError: A call failed; it may be pinned or not.

    Blocks: for who commits or removes there, at most `overwrite_lock.LOCK_TIMEOUT_S`.
    """
    read_manifest(path, files)
    root, directory = os.path.dirname(path), os.path.dirname(_pin_of(path))
    try:
        # IMPORTANT: the lock, and then the look: a checkpoint that is about to be removed must not get a pin.
        with overwrite_lock(path, files=files, umask=umask):
            read_manifest(path, files)
            with contextlib.suppress(FileExistsError):
                files.mkdir(directory, MODE_DIRECTORY & ~umask)
            fsync_directory(files, root)
            with contextlib.suppress(FileExistsError):
                write_new_file(files, _pin_of(path), b"", mode=MODE_FILE & ~umask, fsync=True)
            fsync_directory(files, directory)
    except FileNotFoundError as error:
        read_manifest(path, files)  # says that it is gone
        raise CheckpointNotFoundError(f"{path} was removed while it was pinned", path=path) from error


def unpin(path: str, files: Files) -> bool:
    """Take the pin off the checkpoint at `path`, which need not be there any more. Returns whether it was pinned.

    Raises:
        OSError: A call failed.
    """
    try:
        files.unlink(_pin_of(path))
    except FileNotFoundError:
        return False
    fsync_directory(files, os.path.dirname(_pin_of(path)))
    return True


def _pin_of(path: str) -> str:
    root, name = os.path.split(path)
    return os.path.join(root, PINS_NAME, name)

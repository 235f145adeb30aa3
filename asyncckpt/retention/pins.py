"""Pins: checkpoints that retention must not remove, kept in the root so that they survive every restart.

One file for each, `<root>/.pins/<name of the checkpoint's directory>`: made and removed in one step, and flushed. Who
pins, who removes and who replaces hold the lock of the checkpoint's directory, so that one of them comes first: a pin
that has returned holds.
"""

from __future__ import annotations

import contextlib
import os

from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import MODE_DIRECTORY, MODE_FILE, Files, fsync_directory, write_new_file
from asyncckpt.storage.overwrite_lock import overwrite_lock
from asyncckpt.storage.pinned import PINS_NAME, is_pinned, pin_of

__all__ = ["is_pinned", "pin", "pinned_in", "unpin"]


def pinned_in(root: str, files: Files) -> frozenset[str]:
    """Return the names of the directories in `root` that are pinned.

    Raises:
        OSError: It cannot be known; then nothing may be removed.
    """
    try:
        return frozenset(files.listdir(os.path.join(root, PINS_NAME)))
    except FileNotFoundError:
        return frozenset()


def pin(path: str, files: Files, *, umask: int) -> None:
    """Pin the committed checkpoint at `path`; again is fine. It is durable when this returns.

    Args:
        path: Absolute path of its directory; the pin goes into the directory above it.
        files: The storage seam.
        umask: Of the modes of what is made.

    A link to another directory of the same root stands for that one: what retention removes goes by its own name.

    Raises:
        CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
        CorruptCheckpointError, UnsupportedFormatError: Its manifest cannot be read.
        OSError: A call failed; it may be pinned or not.

    Blocks: for who commits or removes there, at most `overwrite_lock.LOCK_TIMEOUT_S`.
    """
    path = _meant(path)
    read_manifest(path, files)
    root, directory = os.path.dirname(path), os.path.dirname(pin_of(path))
    try:
        # IMPORTANT: the lock, and then the look: a checkpoint that is about to be removed must not get a pin.
        with overwrite_lock(path, files=files, umask=umask):
            read_manifest(path, files)
            with contextlib.suppress(FileExistsError):
                files.mkdir(directory, MODE_DIRECTORY & ~umask)
            fsync_directory(files, root)
            with contextlib.suppress(FileExistsError):
                write_new_file(files, pin_of(path), b"", mode=MODE_FILE & ~umask, fsync=True)
            fsync_directory(files, directory)
    except FileNotFoundError as error:
        read_manifest(path, files)  # says that it is gone
        raise CheckpointNotFoundError(f"{path} was removed while it was pinned", path=path) from error


def unpin(path: str, files: Files) -> bool:
    """Take the pin off the checkpoint at `path`, which need not be there any more. Returns whether it was pinned.

    Raises:
        OSError: A call failed.
    """
    path = _meant(path)
    try:
        files.unlink(pin_of(path))
    except FileNotFoundError:
        return False
    fsync_directory(files, os.path.dirname(pin_of(path)))
    return True


def _meant(path: str) -> str:
    """Return the directory that a name like `latest` stands for, if that lies beside it."""
    found = os.path.realpath(path)
    is_beside = os.path.dirname(found) == os.path.realpath(os.path.dirname(path))
    return os.path.join(os.path.dirname(path), os.path.basename(found)) if is_beside else path

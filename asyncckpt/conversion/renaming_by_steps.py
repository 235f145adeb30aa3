"""Renames where the file system cannot exchange two names, or not promise that nothing is replaced.

At each instant, what stood at the target stands there or beside it, and nothing that came there is replaced.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil

from asyncckpt.conversion.under_way import Look, look_at, refuse_arrivals
from asyncckpt.errors import CheckpointExistsError
from asyncckpt.format.names import kept_name, set_aside_name
from asyncckpt.storage.files import MODE_FILE, Files, fsync_directory
from asyncckpt.storage.put_if_absent import NO_HARD_LINKS

NOT_SO = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Answers of renameat2(2) where names can only be renamed, without the promise that was asked for."""

_logger = logging.getLogger("asyncckpt.conversion")


def put_where_nothing_is(temporary: str, path: str, files: Files) -> None:
    """Rename to a name that nobody has.

    Raises:
        CheckpointExistsError: Somebody has it.
        OSError: A call failed.
    """
    try:
        try:
            files.rename_noreplace(temporary, path)
        except OSError as error:
            if error.errno not in NOT_SO:
                raise
            _put_by_steps(temporary, path, files)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
            raise CheckpointExistsError(f"{path} came to exist meanwhile; it was left untouched", path=path) from error
        raise


def _put_by_steps(temporary: str, path: str, files: Files) -> None:
    """Rename where the file system cannot promise that nothing is replaced: each call here replaces nothing of others.

    Raises:
        FileExistsError: Something is at `path`.
        OSError: A call failed.
    """
    if not os.path.isdir(temporary):
        try:
            files.link(temporary, path)
        except OSError as error:
            if error.errno not in NO_HARD_LINKS:
                raise
        else:
            files.unlink(temporary)
            return
    _reserve(temporary, path, files)
    try:
        os.rename(temporary, path)  # onto an empty directory, or an empty file, of our own
    except BaseException:
        with contextlib.suppress(OSError):
            if os.path.isdir(path):
                files.rmdir(path)  # fails if something has come into it
            elif not files.lstat(path).st_size:
                files.unlink(path)
        raise


def _reserve(temporary: str, path: str, files: Files) -> None:
    """Take a name, by something empty of the sort that is about to be renamed onto it."""
    if os.path.isdir(temporary):
        files.mkdir(path)
    else:
        files.close(files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE_FILE))


def replace_by_steps(temporary: str, path: str, before: Look, files: Files) -> None:
    """Where names cannot be exchanged: a file by one rename, else the old one is aside for an instant.

    At the end the old one is at `temporary`, as after an exchange: for the caller to remove, once it holds no lock in
    it, whose open file keeps a directory from being removed on NFS.

    Raises:
        AsyncCkptError: Something came to what stands there, or into its place. It stands there.
        OSError: A call failed.
    """
    directory = os.path.dirname(path)
    if not os.path.isdir(path) and not os.path.isdir(temporary):
        refuse_arrivals(path, before, look_at(path, files))
        os.replace(temporary, path)
        fsync_directory(files, directory)
        return
    aside = set_aside_name(temporary)
    try:
        os.rename(path, aside)
        refuse_arrivals(path, before, look_at(aside, files))
        put_where_nothing_is(temporary, path, files)
        fsync_directory(files, directory)
    except BaseException:
        _put_back(aside, path, temporary)
        raise
    try:
        os.rename(aside, temporary)
    except OSError as error:
        _logger.warning("%s, which was replaced, stays behind: %s", aside, error)


def _put_back(aside: str, path: str, temporary: str) -> None:
    if not os.path.lexists(aside):  # it has never left its place
        return
    try:
        if os.path.lexists(path) and not os.path.lexists(temporary):
            os.rename(path, temporary)
        if not os.path.lexists(path):
            os.rename(aside, path)
            return
        why = "something else came there"
    except OSError as error:
        why = str(error)
    with contextlib.suppress(OSError):  # a name that says that nobody else has it, and which nobody removes
        os.rename(aside, kept_name(temporary))
        aside = kept_name(temporary)
    _logger.warning("what stood at %s is at %s now, and could not be put back: %s", path, aside, why)


def remove(path: str) -> None:
    """Remove a file, or a directory and all that is in it. Raises nothing: what stays is said in the log."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        _logger.warning("%s stays behind: %s", path, error)

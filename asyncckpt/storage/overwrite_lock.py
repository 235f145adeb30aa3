"""The lock of those that replace a manifest: between the look at the one that stands and its end, nobody else does.

It is an flock(2) on a file in the checkpoint's directory, so that a holder's death frees it, on every node. Who holds
it removes the file before it lets go; who then gets a lock on a file without a name takes the next one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import stat
import time
from collections.abc import Iterator

from asyncckpt.failpoints import reach
from asyncckpt.format.names import LOCK_NAME
from asyncckpt.storage.files import MODE_FILE, Files

LOCK_TIMEOUT_S = 30.0
"""Nobody holds it longer than it takes to flush a few directories. Chosen, not measured."""

_POLL_S = 0.02
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR})

_logger = logging.getLogger("asyncckpt.storage")


@contextlib.contextmanager
def overwrite_lock(path: str, *, files: Files, umask: int, timeout_s: float = LOCK_TIMEOUT_S) -> Iterator[None]:
    """Hold the lock of the checkpoint at `path`, an existing directory.

    Raises:
        OSError: EWOULDBLOCK: another save has held it for `timeout_s`. Others: there is no locking there.

    Blocks: for another holder, at most `timeout_s`.
    """
    name = os.path.join(path, LOCK_NAME)
    fd = _locked(name, files, umask, time.monotonic() + timeout_s)
    try:
        reach("lock: taken")
        yield
    finally:
        try:
            if files.fstat(fd).st_size == 0:  # else it is not ours: we never write into it
                files.unlink(name)
                reach("lock: removed")
        except OSError as error:
            _logger.warning("cannot remove %s: %s", name, error)
        with contextlib.suppress(OSError):  # nothing was written through it
            files.close(fd)


def _locked(name: str, files: Files, umask: int, deadline: float) -> int:
    while True:
        fd = files.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, MODE_FILE & ~umask)
        kept = False
        try:
            if not stat.S_ISREG(files.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            kept = _try(fd, name, files)
        finally:
            if not kept:
                with contextlib.suppress(OSError):
                    files.close(fd)
        if kept:
            return fd
        if time.monotonic() >= deadline:
            raise OSError(errno.EWOULDBLOCK, "another save is replacing this checkpoint", name)
        time.sleep(_POLL_S)


def _try(fd: int, name: str, files: Files) -> bool:
    """Return whether the lock was taken, on the file that has the name."""
    try:
        files.flock(fd)
    except OSError as error:
        if error.errno in _BUSY:
            return False
        raise
    try:
        there = files.lstat(name)
    except FileNotFoundError:
        return False
    mine = files.fstat(fd)
    # IMPORTANT: the holder before us removed the file; whoever made a new one holds another lock.
    return os.path.samestat(there, mine)

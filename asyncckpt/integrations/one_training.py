"""One training at a time in a framework's output directory: a lock that ends with the process that has it.

Two that are alive would publish under the same names, and each remove what the other one still needs.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket

from asyncckpt.errors import DirectoryInUseError

LOCK_NAME = ".asyncckpt.lock"
MAX_NBYTES = 4096
"""Of what its holder has written into it."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_TRIES = 100
"""So often it is opened anew at most, because who had it removed it meanwhile. Chosen."""

_held: set[str] = set()
"""Of this process, which its own locks do not keep out."""

_log = logging.getLogger("asyncckpt.integrations")


class OneTraining:
    """See the module. Made by one rank.

    A POSIX lock: children do not inherit it, file systems of several nodes keep it, and a dead one's is free.

    Args:
        directory: Made if it is not there.

    Raises:
        DirectoryInUseError: A training that is alive has it.
    """

    def __init__(self, directory: str) -> None:
        self._path = os.path.join(os.path.realpath(directory), LOCK_NAME)
        self._fd, self._pid = -1, os.getpid()
        if self._path in _held:
            raise self._refusal(os.getpid(), socket.gethostname())
        try:
            os.makedirs(directory, exist_ok=True)
            self._take()
        except DirectoryInUseError:
            raise
        except OSError as error:
            _log.warning("%s: whether another training saves there is not known: %s", directory, error)
            return
        _held.add(self._path)

    def _take(self) -> None:
        for _ in range(_TRIES):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if not self._is_there(fd):
                    os.close(fd)
                    continue
                os.ftruncate(fd, 0)
                os.pwrite(fd, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode(), 0)
            except OSError as error:
                said = os.pread(fd, MAX_NBYTES, 0)
                os.close(fd)
                if error.errno in _TAKEN:
                    raise self._refusal(*_holder(said)) from error
                raise
            self._fd = fd
            return
        raise OSError(errno.EBUSY, "it is removed again and again", self._path)

    def _is_there(self, fd: int) -> bool:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        return os.path.samestat(found, os.fstat(fd))

    def _refusal(self, pid: int | None, host: str | None) -> DirectoryInUseError:
        directory = os.path.dirname(self._path)
        return DirectoryInUseError(
            f"{directory}: another training saves there, process {pid} on {host}; wait for its end, or give this one "
            "a directory of its own",
            path=directory,
            pid=pid,
            host=host,
        )

    def release(self) -> None:
        """Let others have it. Twice is fine; does nothing in a forked child."""
        fd, self._fd = self._fd, -1
        if fd < 0 or os.getpid() != self._pid:
            return
        _held.discard(self._path)
        # IMPORTANT: removed before it is free. After that it may be another one's.
        with contextlib.suppress(OSError):
            os.unlink(self._path)
        os.close(fd)


def _holder(said: bytes) -> tuple[int | None, str | None]:
    try:
        found = json.loads(said)
        return int(found["pid"]), str(found["host"])
    except (ValueError, TypeError, KeyError):  # it is just being written
        return None, None

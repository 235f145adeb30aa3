"""The lock of a root, so that only one training at a time saves to a directory. It ends when its holder dies.

Two trainings would save under the same names, and each would remove checkpoints that the other one needs. The lock is
an open-file-description lock (fcntl, `F_OFD_SETLK`) on `.asyncckpt.lock`. Shared file systems enforce it between nodes,
the kernel frees it when its holder dies, and it stays if this process opens and closes the file elsewhere, for example
to copy the directory. Forked children close it.

If the file system has no locks, the file is a lease. Its holder writes a new number into it every `RENEW_S` seconds. A
process that finds a lease waits. If the lease is renewed meanwhile, the process is refused; if it is not renewed for
`LEASE_S` seconds, the process takes it. Clocks of other machines are not used. A holder that was stopped for longer
than `LEASE_S` loses the lease, and its next save raises an error.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import secrets
import socket
import struct
import threading
import time
import weakref

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.distributed.checkpoint_vote import same_answer
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import AsyncCkptError, DirectoryInUseError, from_wire, to_wire

ROOT_LOCK_NAME = ".asyncckpt.lock"
MAX_NBYTES = 4096
"""Most bytes of the lock file, which names the holder."""

LEASE_S = 30.0
RENEW_S = 5.0
"""Chosen: a second training is refused within `RENEW_S`; a restarted one waits `LEASE_S` for a dead one's lease."""

SETTLE_S = 1.0
"""Seconds to wait after taking a lease: of two processes that take it at the same time, the last one has it. Chosen:
longer than the time from reading a lease to taking it."""

POLL_S = 0.2
"""Seconds between reads of another process's lease."""

_TAKEN = (errno.EACCES, errno.EAGAIN)
_NO_LOCKS = (errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL)
"""Errors of file systems without locks: NFS without its lock service, Lustre without `-o flock`, FUSE."""

_TRIES = 100
"""Attempts to open and lock the file, which its holder may remove between the two. Chosen."""

_WHOLE_FILE = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
"""A `struct flock`."""

_held: weakref.WeakValueDictionary[str, RootLock] = weakref.WeakValueDictionary()
"""The locks that this process holds, by the path of the file."""

_log = logging.getLogger("asyncckpt")


class RootLock:
    """The lock of one directory, or a lease where the file system has no locks. Made by one rank; thread-safe.

    Args:
        directory: Directory to lock; `take` makes it if it is missing.
    """

    def __init__(self, directory: str) -> None:
        self._directory = directory
        self._path = os.path.join(os.path.realpath(directory), ROOT_LOCK_NAME)
        self._pid, self._lock = os.getpid(), threading.Lock()
        self._fd, self._token = -1, ""
        self._number = 0
        self._is_unknown = self._is_released = self._is_refused = False
        self._ended = threading.Event()

    def take(self) -> None:
        """Take the lock, unless it is held already.

        If the file system fails, so that it is unknown whether another training has the lock, a warning is logged once.

        Raises:
            DirectoryInUseError: A live training has the lock, or has taken it from this one.

        Blocks: not for a lock; for the lease of another process at most `LEASE_S`, and then `SETTLE_S`.
        """
        with self._lock:
            if self._is_released or (self._is_held() and not self._is_lost()):
                return
            self._drop()
            self._is_refused = True  # until the lock is taken
            if self._path in _held:
                raise self._refusal(os.getpid(), socket.gethostname())
            try:
                os.makedirs(self._directory, exist_ok=True)
                self._take()
                _held[self._path] = self
                self._is_refused = False
            except DirectoryInUseError:
                raise
            except OSError as error:
                self._is_refused = False
                if not self._is_unknown:
                    _log.warning(
                        "%s: cannot be locked, so another training may save there too: %s", self._directory, error
                    )
                self._is_unknown = True

    @property
    def is_lost(self) -> bool:
        """Whether the lock is no longer held: it was refused or released, or its file was removed or replaced."""
        with self._lock:
            return self._is_released or self._is_refused or (self._is_held() and self._is_lost())

    def _is_held(self) -> bool:
        return self._fd >= 0 or bool(self._token)

    def _is_lost(self) -> bool:
        if self._fd >= 0:
            return not self._is_there(self._fd)
        try:
            return _read(self._path).get("token") != self._token
        except FileNotFoundError:
            return True
        except OSError:  # the storage does not answer: the lease may still be held
            return False

    def _take(self) -> None:
        for _ in range(_TRIES):
            fd = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            try:
                fcntl.fcntl(fd, fcntl.F_OFD_SETLK, _WHOLE_FILE)
                if self._is_there(fd):
                    self._fd, fd = fd, -1
                    with contextlib.suppress(OSError):  # a full disk: the lock is held even without the text
                        os.ftruncate(self._fd, 0)
                        os.pwrite(self._fd, self._record(), 0)
                    return
            except OSError as error:
                if error.errno in _TAKEN:
                    raise self._refusal(*_holder(_parsed(os.pread(fd, MAX_NBYTES, 0)))) from error
                if error.errno in _NO_LOCKS:
                    self._take_lease()
                    return
                raise
            finally:
                if fd >= 0:
                    os.close(fd)
        raise OSError(
            errno.EBUSY, f"other processes removed the lock file {_TRIES} times while it was being locked", self._path
        )

    def _take_lease(self) -> None:
        first = seen = _read(self._path)
        deadline = time.monotonic() + LEASE_S
        if seen:
            _log.warning(
                "%s: no file locks here, and process %s on %s has a lease of it; waiting up to %.0f s to see whether "
                "that process is alive and renews it",
                self._directory,
                *_holder(seen),
                LEASE_S,
            )
        while first and time.monotonic() < deadline:
            time.sleep(POLL_S)
            try:
                seen = _read(self._path)
            except FileNotFoundError:  # the holder has released it
                break
            if seen and seen != first:  # if empty, the holder is writing it
                raise self._refusal(*_holder(seen))
        token = secrets.token_hex(8)
        mine = f"{self._path}.{token}"
        try:
            with open(mine, "xb") as file:
                file.write(self._record(token))
            os.replace(mine, self._path)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(mine)
            raise
        time.sleep(SETTLE_S)
        found = _read(self._path)
        if found.get("token") != token:  # another process took it at the same time, after this one
            raise self._refusal(*_holder(found))
        self._token = token
        thread = BackgroundThread(_renew, "asyncckpt-lease", (weakref.ref(self), self._ended), end=self._ended.set)
        try:
            thread.start()
        except RuntimeError as error:  # can't start new thread
            _log.warning("%s: the lease of this training is not renewed: %s", self._directory, error)

    def renew(self) -> bool:
        """Write a new number into the lease. Returns whether it is still held. Called by the lease's thread."""
        with self._lock:
            if not self._token:
                return False
            self._number += 1
            try:
                with open(self._path, "r+b", buffering=0) as file:
                    # IMPORTANT: check and write through one open file: if the file is replaced between the two, the
                    # write must not change the lease of another process.
                    if _parsed(file.read(MAX_NBYTES)).get("token") != self._token:
                        raise FileNotFoundError
                    file.seek(0)
                    file.write(self._record(self._token))
            except FileNotFoundError:
                _log.error(
                    "%s: the lease of this training was lost, since it was not renewed within %.0f s; another training "
                    "may save there",
                    self._directory,
                    LEASE_S,
                )
                return False
            except OSError as error:
                _log.warning("%s: renewing the lease of this training failed: %s", self._directory, error)
            return True

    def _record(self, token: str = "") -> bytes:
        holder = {"pid": os.getpid(), "host": socket.gethostname()}
        lease = {"token": token, "renewed": f"{self._number:012d}"} if token else {}  # of constant length
        return json.dumps({**holder, **lease}).encode()

    def _is_there(self, fd: int) -> bool:
        try:
            found = os.stat(self._path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        except OSError:  # the storage does not answer: the file may still be there
            return True
        return os.path.samestat(found, os.fstat(fd))

    def _refusal(self, pid: int | None, host: str | None) -> DirectoryInUseError:
        directory = os.path.dirname(self._path)
        if (pid, host) == (os.getpid(), socket.gethostname()):
            who, advice = "in this process", "close what saves there first"
        else:
            who = "an unknown process" if pid is None else f"process {pid} on {host}"
            advice = "wait for its end"
        return DirectoryInUseError(
            f"{directory}: another training saves there, {who}; {advice}, or give this one a directory of its own. A "
            "CheckpointManager that is to share it takes shared=True",
            path=directory,
            pid=pid,
            host=host,
        )

    def release(self) -> None:
        """Release the lock for good; it cannot be taken again. Idempotent; does nothing in a forked child."""
        if os.getpid() != self._pid:
            return
        with self._lock:
            self._is_released = True
            self._ended.set()
            # IMPORTANT: remove the file before it is unlocked. Afterwards another training may have locked it.
            if self._is_held() and not self._is_lost():
                with contextlib.suppress(OSError):
                    os.unlink(self._path)
            self._drop()

    def _drop(self) -> None:
        fd, self._fd, self._token = self._fd, -1, ""
        if _held.get(self._path) is self:
            del _held[self._path]
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    def leave_to_parent(self) -> None:
        """Close the lock file in a forked child, which would otherwise keep the parent's lock."""
        self._lock = threading.Lock()
        self._drop()

    def __del__(self) -> None:
        if hasattr(self, "_is_released") and self._is_held():
            with contextlib.suppress(Exception):
                self.release()


def claim(lock: RootLock | None, ranks: Coordination | None, timeout_s: float) -> None:
    """Take a lock on rank 0, and tell every rank whether that succeeded. A collective.

    Args:
        lock: The lock on rank 0; None on the others.
        ranks: How the ranks communicate; None: there is one rank.
        timeout_s: Seconds to wait for the other ranks.

    Raises:
        DirectoryInUseError: A live training has the lock; raised on every rank.
        PlanTimeoutError, SaveFailedError, ...: The ranks cannot agree. Rank 0 may have taken the lock.

    Blocks: for the other ranks; and as `RootLock.take`.
    """

    if ranks is None and lock is None:  # a checkpointer of the user's, whose ranks cannot communicate
        return

    def take() -> str:
        assert lock is not None
        try:
            lock.take()
        except DirectoryInUseError as error:
            return json.dumps(to_wire(error))
        return "null"

    refusal = json.loads(take() if ranks is None else same_answer(ranks, take, timeout_s, "save()"))
    if refusal is not None:
        error: AsyncCkptError = from_wire(refusal)
        raise error


def _renew(held: weakref.ref[RootLock], ended: threading.Event) -> None:
    while not ended.wait(RENEW_S):
        lock = held()
        if lock is None or not lock.renew():
            return
        del lock


def _forked() -> None:
    for lock in list(_held.values()):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_forked)


def _read(path: str) -> dict[str, object]:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        return _parsed(os.read(fd, MAX_NBYTES))
    finally:
        os.close(fd)


def _parsed(record: bytes) -> dict[str, object]:
    try:
        found = json.loads(record)
    except ValueError:  # its holder is writing it
        return {}
    return found if isinstance(found, dict) else {}


def _holder(record: dict[str, object]) -> tuple[int | None, str | None]:
    pid, host = record.get("pid"), record.get("host")
    return (pid, str(host)) if isinstance(pid, int) else (None, None)

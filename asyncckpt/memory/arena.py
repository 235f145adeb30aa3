"""Slots as sealed memfds: created by the worker, opened by the trainer through /proc/<pid>/fd/<n>.

The memory has no name: the kernel frees it when no process has an fd or a mapping of it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import secrets

from asyncckpt.errors import UnsupportedPlatformError
from asyncckpt.memory.mapping import Mapping
from asyncckpt.memory.slot import MAX_SLOT_NBYTES, MIN_SLOT_NBYTES, PAGE_NBYTES, TOKEN_NBYTES, SlotControl, SlotError

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""Neither side can change the size of a slot: a read from a shrunk memfd would raise SIGBUS in the other."""


class SlotMemory:
    """One slot: its fd, its mapping, its control pages. It has one owner, which calls `close()`.

    Attributes:
        fd: Close-on-exec file descriptor of the memfd.
        nbytes: Size of the slot, control pages included.
        token: 16 random bytes that prove the slot's identity.
        mapping, control: The mapped bytes and their control pages.
    """

    def __init__(self, fd: int, nbytes: int, token: bytes, *, writable: bool = True) -> None:
        self.fd = fd
        self.nbytes = nbytes
        self.token = token
        self.mapping = Mapping(fd, nbytes, writable=writable)
        self.control = SlotControl(self.mapping.address, nbytes)

    @classmethod
    def create(cls, nbytes: int) -> SlotMemory:
        """Make a new slot of `nbytes`, control pages included.

        Raises:
            SlotError: `nbytes` is not a multiple of the page size, or out of bounds.
            UnsupportedPlatformError: The kernel or a sandbox has no memfd_create(2).
            OSError: There is not enough memory, or no file descriptor is left.
        """
        _check_size(nbytes)
        try:
            fd = os.memfd_create("asyncckpt-slot", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EACCES, errno.ENOSYS):
                raise
            raise UnsupportedPlatformError(
                f"memory for snapshots cannot be allocated: memfd_create(2) failed ({error.strerror}). Allow it in the "
                "seccomp profile of this container; it needs Linux 3.17 or later. `asyncckpt doctor` checks it"
            ) from error
        try:
            os.ftruncate(fd, nbytes)
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
            slot = cls(fd, nbytes, secrets.token_bytes(TOKEN_NBYTES))
        except BaseException:
            os.close(fd)
            raise
        slot.control.initialise(slot.token)
        return slot

    @classmethod
    def attach(cls, pid: int, fd_number: int, nbytes: int, token: bytes, *, writable: bool = True) -> SlotMemory:
        """Open another process's slot and check that it is the expected one.

        Args:
            pid: The process that holds it; the caller watches its pidfd, so that the pid cannot be reused.
            fd_number: The fd's number there.
            nbytes: The expected size.
            token: The expected token.
            writable: False maps it for reading only.

        Raises:
            SlotError: It is another slot, or not a slot: owner, size, seals, magic, version or token differ.
            OSError: It cannot be opened.
        """
        _check_size(nbytes)
        mode = os.O_RDWR if writable else os.O_RDONLY
        # O_NONBLOCK: if the fd is something else, a FIFO say, opening it must not block.
        fd = os.open(f"/proc/{pid}/fd/{fd_number}", mode | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            found = os.fstat(fd)
            if found.st_uid != os.geteuid():
                raise SlotError(f"the slot belongs to user {found.st_uid}, expected {os.geteuid()}")
            if found.st_size != nbytes:
                raise SlotError(f"the slot has {found.st_size} bytes, expected {nbytes}")
            if _seals(fd) & SEALS != SEALS:
                raise SlotError("the slot is not sealed against resizing")
            slot = cls(fd, nbytes, token, writable=writable)
        except BaseException:
            os.close(fd)
            raise
        try:
            slot.control.check(token)
        except SlotError:
            slot.close()
            raise
        return slot

    def close_inherited_fd(self) -> None:
        """Close the fd in a forked child, so that the child does not keep the memory allocated."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def close(self) -> None:
        """Unmap and close. Idempotent. No view of the memory may be left."""
        self.mapping.close()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _check_size(nbytes: int) -> None:
    if not MIN_SLOT_NBYTES <= nbytes <= MAX_SLOT_NBYTES or nbytes % PAGE_NBYTES:
        raise SlotError(
            f"a slot of {nbytes} bytes; expected whole pages of {PAGE_NBYTES} bytes, from {MIN_SLOT_NBYTES} to "
            f"{MAX_SLOT_NBYTES} bytes"
        )


def _seals(fd: int) -> int:
    try:
        return fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        if error.errno == errno.EINVAL:  # not a memfd: fcntl(2)
            return 0
        raise

"""Mapped memory with one owner: libc's mmap, because Python's keeps an fd, unmaps after fork, and closes under views.

A `Mapping` never unmaps by itself while the process runs: its owner calls `close()` once every view is gone.
In a forked child the pages are not there (MADV_DONTFORK) and `close()` does nothing.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from types import TracebackType

from asyncckpt.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.libc import libc as _libc

_MADV_DONTNEED = 4
_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
"""Kernel 5.14, include/uapi/asm-generic/mman-common.h."""

_MADV_COLLAPSE = 25
"""Kernel 6.1, the same file."""

_MAP_NORESERVE = 0x4000

HUGE_NBYTES = 2 << 20
"""A huge page of x86-64, and of arm64 with pages of 4 KiB. Elsewhere the kernel refuses one of so many bytes."""


def populate_at(address: int, nbytes: int) -> None:
    """Fault in, for reading, the pages of a range of a mapping. Where the kernel cannot, they come one by one."""
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        _libc.madvise(start, address + nbytes - start, _MADV_POPULATE_READ)


def drop_at(address: int, nbytes: int) -> None:
    """Take the pages of a range of a shared mapping out of this process's tables; a later access brings them back.

    Done by several threads after use, it saves the one that unmaps all of it at the end most of its time. IMPORTANT: of
    a shared mapping only: what a private one holds would be gone.
    """
    start = address // mmap.PAGESIZE * mmap.PAGESIZE
    if nbytes > 0:
        _libc.madvise(start, address + nbytes - start, _MADV_DONTNEED)


def _raise_errno(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


def _where_huge(nbytes: int) -> int | None:
    """Return free addresses, from a multiple of `HUGE_NBYTES` on, for so many bytes of a file; None: anywhere.

    Only there can a huge page of it be mapped as such, and the kernel looks for such addresses by itself only where
    huge pages of shared memory are switched on. Another thread may take them first, and then they are others.
    """
    room = nbytes + HUGE_NBYTES
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    found = _libc.mmap(None, room, 0, flags, -1, 0)
    if found is None or found == _MAP_FAILED:
        return None
    _libc.munmap(found, room)
    return int(-(-found // HUGE_NBYTES) * HUGE_NBYTES)


class Mapping:
    """`nbytes` of mapped memory at `address`.

    Args:
        fd: What to map, shared; -1 for private anonymous memory.
        nbytes: Length, a multiple of the page size.
        writable: False maps for reading only.

    Raises:
        OSError: The kernel refused.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        where = _where_huge(nbytes) if fd >= 0 and nbytes >= HUGE_NBYTES else None
        address = _libc.mmap(where, nbytes, protection, flags, fd, 0)
        if address is None or address == _MAP_FAILED:
            _raise_errno(f"mmap of {nbytes} bytes")
        self.address: int = address
        self.nbytes = nbytes
        self._owner_pid = os.getpid()
        self._open = True
        _libc.madvise(address, nbytes, _MADV_DONTFORK)
        if fd < 0:
            _libc.madvise(address, nbytes, _MADV_HUGEPAGE)

    def view(self) -> memoryview:
        """Return all bytes as a writable memoryview. It does not keep the mapping alive.

        Raises:
            ValueError: The mapping is closed.
        """
        if not self._open:
            raise ValueError("the mapping is closed")
        return memoryview((ctypes.c_char * self.nbytes).from_address(self.address)).cast("B")

    def populate(self, offset: int, nbytes: int, *, writable: bool = True) -> bool:
        """Fault pages in ahead of use. Releases the GIL.

        Returns:
            False where the kernel cannot (before 5.14), or was interrupted: then some pages may not be there.

        Raises:
            OSError: No memory.
        """
        nbytes = min(nbytes, self.nbytes - offset)
        advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        if self._open and nbytes > 0 and _libc.madvise(self.address + offset, nbytes, advice):
            if ctypes.get_errno() in (errno.EINVAL, errno.EINTR, errno.EAGAIN):
                return False
            _raise_errno(f"populating {nbytes} bytes")
        return True

    def collapse(self, offset: int) -> bool:
        """Have the kernel put `HUGE_NBYTES` of a file, from a multiple of that on, on one huge page. Releases the GIL.

        Whoever maps them sees the same bytes, and waits if he looks at them meanwhile.

        Returns:
            Whether they lie on one now. False where the kernel cannot (before 6.1, or of another size), may not, has no
            huge page, or found the pages in use.
        """
        return self._open and not _libc.madvise(self.address + offset, HUGE_NBYTES, _MADV_COLLAPSE)

    def close(self) -> None:
        """Unmap; later calls, and calls in a forked child, do nothing. Every view must be gone."""
        if self._open and os.getpid() == self._owner_pid:
            self._open = False
            if _libc.munmap(self.address, self.nbytes):
                _raise_errno("munmap")

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return not self._open

    def __enter__(self) -> Mapping:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

"""Mapped memory with one owner, by libc's mmap. Python's `mmap` keeps an fd open, and is unmapped in forked children.

A `Mapping` is never unmapped by itself while the process runs: its owner calls `close()` once every view is gone. In a
forked child the pages are not mapped (MADV_DONTFORK) and `close()` does nothing. `copy_bytes` copies between addresses.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from types import TracebackType

from asyncckpt.basics.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.basics.libc import libc as _libc

_MADV_DONTFORK = 10
_MADV_HUGEPAGE = 14
_MADV_POPULATE_READ = 22
_MADV_POPULATE_WRITE = 23
"""Kernel 5.14, include/uapi/asm-generic/mman-common.h."""


def _raise_errno(what: str) -> None:
    code = ctypes.get_errno()
    raise OSError(code, f"{what}: {os.strerror(code)}")


class Mapping:
    """`nbytes` of mapped memory at `address`.

    Args:
        fd: The file to map, shared; -1 for private anonymous memory.
        nbytes: Length, a multiple of the page size.
        writable: False maps for reading only.

    Raises:
        OSError: The kernel refused.
    """

    def __init__(self, fd: int, nbytes: int, *, writable: bool = True) -> None:
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        flags = mmap.MAP_SHARED if fd >= 0 else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        address = _libc.mmap(None, nbytes, protection, flags, fd, 0)
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
        """Fault pages in before they are used. Releases the GIL.

        Returns:
            False if the kernel does not support it (before 5.14) or was interrupted: then some pages may be missing.

        Raises:
            OSError: There is not enough memory.
        """
        nbytes = min(nbytes, self.nbytes - offset)
        advice = _MADV_POPULATE_WRITE if writable else _MADV_POPULATE_READ
        if self._open and nbytes > 0 and _libc.madvise(self.address + offset, nbytes, advice):
            if ctypes.get_errno() in (errno.EINVAL, errno.EINTR, errno.EAGAIN):
                return False
            _raise_errno(f"populating {nbytes} bytes")
        return True

    def close(self) -> None:
        """Unmap. Idempotent; no-op in a forked child. No view of the memory may be left."""
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


_HOLD_GIL_BELOW_NBYTES = 64 * 1024
"""A shorter copy takes less time than releasing the GIL and taking it again. Chosen, not measured."""

_memmove_holding_gil = ctypes.PyDLL(None).memmove
_memmove_holding_gil.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
_memmove_holding_gil.restype = ctypes.c_void_p


def copy_bytes(target: int, source: int, nbytes: int) -> None:
    """Copy between addresses; long copies release the GIL."""
    (ctypes.memmove if nbytes >= _HOLD_GIL_BELOW_NBYTES else _memmove_holding_gil)(target, source, nbytes)

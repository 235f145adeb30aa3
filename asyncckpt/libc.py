"""The C library's calls that Python's own modules lack, declared once for all who use them; free descriptors.

They release the GIL. What went wrong with one is in `ctypes.get_errno()`.
"""

from __future__ import annotations

import ctypes
import os

libc = ctypes.CDLL(None, use_errno=True)
"""IMPORTANT: arguments are declared here and nowhere else: who declared them otherwise would do so for everybody."""

MAP_FAILED = ctypes.c_void_p(-1).value
"""What `mmap` returns for an error."""

libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_char_p]
libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
libc.process_vm_readv.restype = ctypes.c_ssize_t
libc.process_vm_readv.argtypes = [ctypes.c_int, *(ctypes.c_void_p, ctypes.c_ulong) * 2, ctypes.c_ulong]


def try_descriptors(wanted: int) -> tuple[int, OSError | None]:
    """Find out how many file descriptors are free, by opening them. Takes microseconds.

    Args:
        wanted: As many are tried at most.

    Returns:
        How many there were, and why no more.
    """
    found: list[int] = []
    try:
        while len(found) < wanted:
            found.append(os.eventfd(0, os.EFD_CLOEXEC))
    except OSError as error:
        return len(found), error
    finally:
        for fd in found:
            os.close(fd)
    return wanted, None

"""System calls that Python's own modules lack; which addresses are read-only, and how many descriptors are free.

The calls release the GIL. `ctypes.get_errno()` returns the error of the last one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
from collections.abc import Iterable, Sequence

libc = ctypes.CDLL(None, use_errno=True)
"""IMPORTANT: declare argument types here only. The object is shared: other declarations would apply to all callers."""

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
libc.process_vm_writev.restype = ctypes.c_ssize_t
libc.process_vm_writev.argtypes = libc.process_vm_readv.argtypes

_MAX_VECTORS = 1024
"""IOV_MAX of Linux."""


def read_only(addresses: Iterable[int]) -> set[int]:
    """Return those of `addresses` that are mapped read-only: a write there would end the process with SIGSEGV.

    The kernel is asked to overwrite one byte at each address with itself, and returns an error instead of sending a
    signal; takes about a microsecond each. Refused addresses are looked up in /proc/self/maps, since the kernel also
    refuses memory of devices that may be written to. Returns none if the call is filtered, or `/proc` is hidden.
    """
    refused, rest = [], list(dict.fromkeys(addresses))
    while rest:
        some = rest[:_MAX_VECTORS]
        vectors = (ctypes.c_uint64 * (2 * len(some)))(*(n for address in some for n in (address, 1)))
        written = libc.process_vm_writev(os.getpid(), vectors, len(some), vectors, len(some), 0)
        if written < 0 and ctypes.get_errno() != errno.EFAULT:
            return set()
        written = max(written, 0)
        refused += some[written : written + 1]
        rest = rest[written + 1 :] if written < len(some) else rest[len(some) :]
    return _without_permission(refused) if refused else set()


def _without_permission(addresses: Sequence[int]) -> set[int]:
    found: set[int] = set()
    with contextlib.suppress(OSError), open("/proc/self/maps", "rb") as maps:
        for line in maps:
            limits, permissions, _ = line.split(maxsplit=2)
            first, end = (int(limit, 16) for limit in limits.split(b"-"))
            if permissions[1:2] != b"w":
                found.update(address for address in addresses if first <= address < end)
    return found


def try_descriptors(wanted: int) -> tuple[int, OSError | None]:
    """Find out how many file descriptors are free, by opening and closing them. Takes microseconds.

    Args:
        wanted: How many to open at most.

    Returns:
        How many could be opened, and the error of the next one; None: all of them.
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

"""Memory that was freed, and that the C library still keeps: given back to the kernel where somebody would count it."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

LARGE_NBYTES = 256 << 10
"""What a worker allocates in pieces of this size and above goes back to the kernel when it is freed. glibc begins with
128 KiB, and goes up to 32 MiB as such pieces are freed: it then keeps them, in one arena for each thread."""

_M_MMAP_THRESHOLD = -3  # malloc.h


def give_back(*, collect: bool = False) -> None:
    """Give what is freed back to the kernel; glibc only. Blocks for milliseconds, other threads' allocations too.

    Args:
        collect: Of Python's memory too, which keeps freed tuples, and with each the megabyte around it, until its
            collector has walked everything: only for processes that hold little.
    """
    if collect:
        gc.collect()
    trim = _of_glibc("malloc_trim")
    if trim is not None:
        trim(0)


def keep_small() -> None:
    """From now on give large pieces back when they are freed, and keep none of them for later. glibc only."""
    option = _of_glibc("mallopt")
    if option is not None:
        option(_M_MMAP_THRESHOLD, LARGE_NBYTES)


def _of_glibc(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)

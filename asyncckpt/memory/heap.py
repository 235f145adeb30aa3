"""Returns freed memory to the kernel, which the C library otherwise keeps."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

LARGE_NBYTES = 256 << 10
"""Blocks of at least this size go back to the kernel when the worker frees them. By default glibc does so from 128 KiB
on, and raises that up to 32 MiB as such blocks are freed: smaller ones it keeps, in one arena for each thread."""

_M_MMAP_THRESHOLD = -3  # malloc.h


def trim_heap(*, collect: bool = False) -> None:
    """Return freed memory to the kernel. glibc only.

    Blocks: for milliseconds; allocations of other threads wait too.

    Args:
        collect: Run Python's cyclic garbage collector first. Python keeps freed tuples until then, and each may keep
            the megabyte around it allocated. Only for processes with few objects, since the collector visits all.
    """
    if collect:
        gc.collect()
    trim = _glibc_function("malloc_trim")
    if trim is not None:
        trim(0)


def return_large_blocks() -> None:
    """Make glibc return blocks of at least `LARGE_NBYTES` to the kernel as soon as they are freed."""
    option = _glibc_function("mallopt")
    if option is not None:
        option(_M_MMAP_THRESHOLD, LARGE_NBYTES)


def _glibc_function(name: str) -> Any:
    return getattr(ctypes.CDLL(None), name, None)

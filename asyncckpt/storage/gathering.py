"""Many short ranges, equally far apart, copied by one call: from this process's memory, or from cached pages of a file.

A call from Python for each range costs more than the range. The kernel takes a list of them where it copies between
processes (process_vm_readv(2)), and a process may name itself. It goes through the page tables itself, so pages of a
mapped file that are gone, because the file was cut short, are an error and no SIGBUS.
"""

from __future__ import annotations

import itertools
import mmap
import os
import struct

from asyncckpt.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.libc import libc as _libc
from asyncckpt.storage.bringing import UNIT_NBYTES

MAX_RANGES = 1024
"""Of one call: IOV_MAX, limits.h of Linux."""


def gather(target: int, source: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
    """Copy ranges of memory. Releases the GIL.

    Args:
        target: Address of the first range's place.
        source: Address of the first range.
        nbytes: Of each range, above 0.
        every: Bytes from one range to the next.
        times: How many there are.
        apart: Bytes from one place to the next; 0: they lie one behind the other.

    Returns:
        How many were copied, from the first on; fewer where a page is not there, or a sandbox refuses the call. What
        lies behind these in the target may have changed.
    """
    done, pid, apart = 0, os.getpid(), apart or nbytes
    while done < times:
        count = min(MAX_RANGES, times - done)
        ranges = _vectors(source + done * every, nbytes, every, count)
        start = target + done * apart
        whole = struct.pack("2Q", start, count * nbytes) if apart == nbytes else _vectors(start, nbytes, apart, count)
        found: int = _libc.process_vm_readv(pid, whole, len(whole) // 16, ranges, count, 0)
        done += max(0, found) // nbytes
        if found != count * nbytes:
            break
    return done


def _vectors(start: int, nbytes: int, every: int, count: int) -> bytes:
    """Return `count` of the kernel's struct iovec."""
    starts = range(start, start + count * every, every)
    pairs = itertools.chain.from_iterable(zip(starts, itertools.repeat(nbytes), strict=False))
    return struct.pack(f"{2 * count}Q", *pairs)


def gather_from_file(fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
    """Copy ranges of a file whose pages are cached, as `gather` does; the first one begins at `offset`.

    A page that is not cached is read: with its huge page where the ranges are `near`, else alone.
    """
    start = offset // UNIT_NBYTES * UNIT_NBYTES if near(nbytes, every) else offset // mmap.PAGESIZE * mmap.PAGESIZE
    length = offset + (times - 1) * every + nbytes - start
    if near(nbytes, every):  # a huge page is mapped by one entry only where all of it is
        length = -(-length // UNIT_NBYTES) * UNIT_NBYTES
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address is None or address == _MAP_FAILED:
        return 0
    try:
        _libc.madvise(address, length, mmap.MADV_HUGEPAGE if near(nbytes, every) else mmap.MADV_RANDOM)
        return gather(target, address + offset - start, nbytes, every, times, apart)
    finally:
        _libc.munmap(address, length)


def near(nbytes: int, every: int) -> bool:
    """Whether ranges lie so close together that they are brought into the page cache with what is between them.

    Every eighth byte is wanted then, at least. Chosen, not measured.
    """
    return every <= 8 * nbytes

"""Bringing a file into the page cache in pages as large as the kernel has them, without copying any of it.

A fault in a mapping that asks for huge pages has the kernel read 2 MiB at a time, into one page of that size where the
file system can, and the next 2 MiB too. Whoever reads the file then finds 512 small pages' worth by one look, and
several processes that do it read each byte from the disk once. Pages are faulted in by madvise(2), which says what is
wrong, where an access would be a SIGBUS. ADR 0034 has what it gives.
"""

from __future__ import annotations

import mmap

from asyncckpt.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.libc import libc as _libc

UNIT_NBYTES = 2 << 20
"""A huge page where small ones have 4 KiB. With others this is only how far apart pages are touched."""

_POPULATE_READ = 22
"""Kernel 5.14, include/uapi/asm-generic/mman-common.h."""


def bring(fd: int, offset: int, nbytes: int) -> bool:
    """Touch each unit of a file that holds some of a range, so that the kernel reads it. Releases the GIL.

    Returns:
        False where the kernel cannot, or a page cannot be read. True promises nothing: what a fault brings in is the
        kernel's and the file system's choice.

    Blocks: for the reads.
    """
    start = offset // UNIT_NBYTES * UNIT_NBYTES
    length = offset + nbytes - start
    address = _libc.mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, start)
    if address is None or address == _MAP_FAILED:
        return False
    try:
        if _libc.madvise(address, length, mmap.MADV_HUGEPAGE):  # a kernel without them
            return False
        firsts = (max(at, offset - start) // mmap.PAGESIZE for at in range(0, length, UNIT_NBYTES))
        return not any(_libc.madvise(address + page * mmap.PAGESIZE, mmap.PAGESIZE, _POPULATE_READ) for page in firsts)
    finally:
        _libc.munmap(address, length)

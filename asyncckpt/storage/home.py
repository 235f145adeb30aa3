"""Which directory a path means: whether it is still the one that it was, or was removed and made anew.

An inode's number alone does not tell: file systems give it to the next one. With the time of its birth it does. Device
numbers are left out, since some change when a file system is mounted again.
"""

from __future__ import annotations

import ctypes
import os
import struct
from typing import NamedTuple

from asyncckpt.libc import libc as _libc
from asyncckpt.storage.files import Files

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_STATX_NBYTES = 256
_MASK_OFFSET, _BIRTH_OFFSET = 0, 80
"""statx(2), `struct statx` of linux/stat.h: `stx_mask`, and `stx_btime`: seconds, nanoseconds."""


_SHORT = (1 << 63) - 1
"""What the worker's messages hold of a number. Overlays and network file systems give inodes that use all 64 bits."""


class Home(NamedTuple):
    """A directory, by its inode's number and birth in nanoseconds since 1970 (0: the file system does not tell).

    Of both the lowest 63 bits.
    """

    inode: int = 0
    birth_ns: int = 0


NO_HOME = Home()
"""None was there to be seen."""


def home_of(path: str, files: Files) -> Home:
    """Return what the directory at `path` is; where there is none, the one that was to hold it; else `NO_HOME`."""
    for directory in (path, os.path.dirname(path)):
        found = _home_at(directory, files)
        if found != NO_HOME:
            return found
    return NO_HOME


def is_at_home(path: str, home: Home, files: Files) -> bool:
    """Whether what `home_of` once returned for `path` is still there; `NO_HOME` always is."""
    return home == NO_HOME or any(
        _is_same(home, _home_at(directory, files)) for directory in (path, os.path.dirname(path))
    )


def _is_same(one: Home, other: Home) -> bool:
    return one.inode == other.inode and (one.birth_ns == other.birth_ns or not (one.birth_ns and other.birth_ns))


def _home_at(directory: str, files: Files) -> Home:
    try:
        return Home(files.stat(directory).st_ino & _SHORT, birth_ns(directory) & _SHORT)
    except OSError:
        return NO_HOME


def birth_ns(path: str) -> int:
    """Return when a file was made, in nanoseconds since 1970; 0: nobody knows."""
    if not hasattr(_libc, "statx"):  # glibc before 2.28
        return 0
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        return 0
    (mask,) = struct.unpack_from("=I", found, _MASK_OFFSET)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BIRTH_OFFSET)
    return max(0, int(seconds) * 1_000_000_000 + int(nanoseconds)) if mask & _STATX_BTIME else 0

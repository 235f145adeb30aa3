"""File calls as mounts have them that lack something: FUSE mounts of object stores, exFAT. For tests, without root.

`tests.fuse_memory` is the same as a file system, for root.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence
from typing import Any

from tests.storage_samples import RecordingFiles

FUSE = 0x65735546
"""`f_type` of FUSE: a mount that is probed."""

CALLS = {
    "links": {"link": errno.EOPNOTSUPP, "rename_noreplace": errno.EINVAL},
    "links of rclone": {"link": errno.EIO, "rename_noreplace": errno.EINVAL},
    "hard links": {"link": errno.EPERM},
    "renames": {"rename": errno.ENOSYS},
    "locks": {"flock": errno.ENOLCK},
    "removal": {"unlink": errno.EPERM},
    "modes": {"fchmod": errno.EPERM},
    "fsync": {"fsync": errno.EINVAL},
}
"""What a mount lacks -> the calls that fail there."""


class LimitedFiles(RecordingFiles):
    """The calls of a mount that lacks what is named: keys of `CALLS`, "random writes", or "cuts"."""

    def __init__(self, *lacks: str) -> None:
        super().__init__()
        self.lacks = lacks
        self.codes = {call: code for what in lacks for call, code in CALLS.get(what, {}).items()}

    def file_system_type(self, path: str) -> int:
        """Be no file system that is known."""
        return FUSE

    def before(self, name: str, args: Sequence[Any]) -> None:
        """Refuse."""
        if name in self.codes:
            raise OSError(self.codes[name], "refused", args[0])
        if name == "pwrite" and "random writes" in self.lacks and args[2] != os.fstat(args[0]).st_size:
            raise OSError(errno.EINVAL, "not at the end", args[0])

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Do nothing, where that is lacking: s3fs."""
        if "cuts" not in self.lacks:
            super().ftruncate(fd, nbytes)

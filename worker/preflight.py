"""What is looked at before a save begins: free disk and inodes, allowed roots."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

from asyncckpt.errors import SaveFailedError
from asyncckpt.storage.files import Files

RESERVE_INODES = 8


def check_root(path: str, roots: Sequence[str]) -> None:
    """Prove that `path` lies below one of `roots`, symbolic links followed.

    Raises:
        SaveFailedError: It does not; code EPERM.
    """
    real = os.path.realpath(path)
    if not roots or any(os.path.commonpath((real, r)) == r for r in map(os.path.realpath, roots)):
        return
    detail = f"it is not below the roots that this worker may write to: {', '.join(roots)}"
    raise SaveFailedError(
        f"cannot save to {path}: {detail}; choose a path there, or start the worker with another --root",
        code="EPERM",
        path=path,
        detail=detail,
    )


def check_disk(path: str, nbytes: int, files: Files) -> None:
    """Prove that the file system of the existing directory `path` has room for `nbytes`.

    Raises:
        OSError: ENOSPC when it has not; or statvfs failed.
    """
    found = files.statvfs(path)
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, {nbytes:,} are needed", path)
    if found.f_files and found.f_favail < RESERVE_INODES:
        raise OSError(errno.ENOSPC, f"{found.f_favail} inodes are free", path)

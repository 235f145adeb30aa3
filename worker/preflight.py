"""What is looked at before memory is lent or a save begins: free memory, cgroup limits, free disk, allowed roots."""

from __future__ import annotations

import errno
import os
from collections.abc import Sequence

import psutil

from asyncckpt.errors import InsufficientMemoryError, SaveFailedError
from asyncckpt.storage.files import Files

RESERVE_NBYTES = 64 << 20
"""Memory that must stay free beside a new slot: page tables, the worker itself. Chosen, not measured."""

RESERVE_INODES = 8
_UNLIMITED = 1 << 60
"""cgroup v1 writes its largest page-aligned number where there is no limit."""


def check_memory(nbytes: int, promised: int, *, cgroup_root: str = "/sys/fs/cgroup") -> None:
    """Prove that a slot of `nbytes` fits into free memory and into the cgroup's limit.

    Args:
        nbytes: Size of the new slot.
        promised: Bytes that other slots were promised and have not used yet: they are not free.
        cgroup_root: Where the cgroup file system is mounted.

    Raises:
        InsufficientMemoryError: It does not fit.
    """
    available = int(psutil.virtual_memory().available)
    limit, used = cgroup_limit(cgroup_root)
    if limit is not None:
        available = min(available, limit - used)
    available = max(0, available - promised - RESERVE_NBYTES)
    if nbytes > available:
        of = f" under the cgroup's limit of {limit:,}" if limit is not None else ""
        raise InsufficientMemoryError(
            f"a slot of {nbytes:,} bytes does not fit into memory: {available:,} bytes are available{of}, "
            f"{promised:,} are promised to other slots; save less, use fewer slots, or give the job more memory",
            nbytes=nbytes,
            available=available,
            limit=limit,
        )


def cgroup_limit(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> tuple[int | None, int]:
    """Return (limit, bytes in use that cannot be reclaimed) of the tightest cgroup that we are in, v1 or v2.

    Returns:
        (None, 0) when there is no limit.
    """
    try:
        with open(membership) as f:
            lines = [line.rstrip("\n").split(":", 2) for line in f]
    except OSError:
        return None, 0
    tightest: tuple[int | None, int] = (None, 0)
    for _, controllers, path in (line for line in lines if len(line) == 3):
        if controllers == "":
            base, names = root, ("memory.max", "memory.current")
        elif "memory" in controllers.split(","):
            base, names = os.path.join(root, "memory"), ("memory.limit_in_bytes", "memory.usage_in_bytes")
        else:
            continue
        for directory in _upwards(base, path):
            found = _limit_of(directory, *names)
            if found and (tightest[0] is None or found[0] - found[1] < tightest[0] - tightest[1]):
                tightest = found
    return tightest


def _upwards(base: str, path: str) -> list[str]:
    """Return the cgroup's directory and its ancestors up to `base`; inside a container only `base` may exist."""
    parts = [p for p in path.split("/") if p and p != ".."]
    return [os.path.join(base, *parts[:n]) for n in range(len(parts), -1, -1)]


def _limit_of(directory: str, limit_name: str, usage_name: str) -> tuple[int, int] | None:
    try:
        limit = _number(os.path.join(directory, limit_name))
        usage = _number(os.path.join(directory, usage_name))
        if limit is None or usage is None or limit >= _UNLIMITED:
            return None
        with open(os.path.join(directory, "memory.stat")) as f:
            stat = dict(line.split(None, 1) for line in f)
    except (OSError, ValueError):
        return None
    reclaimable = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))
    return limit, max(0, usage - reclaimable)


def _number(path: str) -> int | None:
    with open(path) as f:
        text = f.read().strip()
    return None if text == "max" else int(text)


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

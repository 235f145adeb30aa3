"""Checks that there is memory for a slot: free memory of the machine, and the limits of our cgroups, v1 and v2."""

from __future__ import annotations

import os

import psutil

from asyncckpt.errors import InsufficientMemoryError

RESERVE_NBYTES = 64 << 20
"""Memory that must stay free besides a new slot: for page tables and the worker itself. Chosen, not measured."""

_UNLIMITED = 1 << 60
"""A limit of at least this is no limit: cgroup v1 shows its largest page-aligned number if there is none."""


def check_memory(nbytes: int, promised: int, *, cgroup_root: str = "/sys/fs/cgroup") -> None:
    """Check that a slot of `nbytes` fits into free memory and into the cgroup's limit.

    Args:
        nbytes: Size of the new slot.
        promised: Bytes of other slots whose pages are not allocated yet. They count as used memory.
        cgroup_root: Mount point of the cgroup file system.

    Raises:
        InsufficientMemoryError: The slot does not fit.
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
            f"{promised:,} are reserved for other slots; save less, use fewer slots, or give the job more memory",
            nbytes=nbytes,
            available=available,
            limit=limit,
        )


def cgroup_limit(root: str = "/sys/fs/cgroup", membership: str = "/proc/self/cgroup") -> tuple[int | None, int]:
    """Return (limit, bytes in use that cannot be reclaimed) of the tightest of this process's cgroups, v1 or v2.

    Returns:
        (None, 0) if there is no limit.
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
    """Return the cgroup's directory and its ancestors up to `base`; in a container, maybe only `base` exists."""
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

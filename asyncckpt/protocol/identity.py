"""Which process a pid means: the pid and its start time, since pids are used again."""

from __future__ import annotations

import os


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot (proc(5), field 22), or None when it is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return int(after_name[19]) if len(after_name) > 19 and after_name[0] not in (b"Z", b"X") else None


def open_pidfd(pid: int, started: int) -> int | None:
    """Return a pidfd of process `pid` if it is still the one that started at `started` ticks.

    Returns:
        A file descriptor that polls readable when the process ends; None when it is gone already.

    Raises:
        OSError: The kernel has no pidfds (before 5.3), or fds are exhausted.
    """
    try:
        fd = os.pidfd_open(pid)
    except (ProcessLookupError, OverflowError):  # the second: beyond what any pid can be
        return None
    # IMPORTANT: compared after the pidfd is open; before, the pid could become another process in between.
    if start_ticks(pid) != started:
        os.close(fd)
        return None
    return fd

"""The umask of this process, read without changing it."""

from __future__ import annotations


def current_umask() -> int:
    """Return this process's umask without changing it (proc(5): Umask in status, since Linux 4.7)."""
    with open("/proc/self/status", "rb") as file:
        for line in file:
            if line.startswith(b"Umask:"):
                return int(line.split()[1], 8)
    return 0o022

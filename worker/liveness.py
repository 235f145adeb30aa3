"""Who is alive: a pidfd per session, or start times from /proc where the kernel has none (before 5.3).

A pid alone proves nothing, since numbers are used again; pid and start time together name one process.
"""

from __future__ import annotations

import contextlib
import os
import select

from asyncckpt.protocol.identity import open_pidfd, start_ticks

POLL_S = 0.2
"""How often start times are looked at where there are no pidfds."""


def _is_dead(pid: int, pid_start: int) -> bool:
    """Whether the process is gone. One whose first thread has ended while others still run is not: they can write."""
    found = start_ticks(pid)
    if found is not None:
        return found != pid_start
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return True


class Liveness:
    """Watches the processes of sessions. Used from the control loop only.

    Args:
        use_pidfd: None finds out; False takes the other way, for tests.
    """

    def __init__(self, *, use_pidfd: bool | None = None) -> None:
        self.uses_pidfd = hasattr(os, "pidfd_open") if use_pidfd is None else use_pidfd
        self._watched: dict[str, tuple[int, int, int]] = {}  # session -> pid, start, pidfd or -1

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Begin to watch; False when the process is dead or another one."""
        self.unwatch(session)
        fd: int | None = -1
        if self.uses_pidfd:
            with contextlib.suppress(OSError):  # a sandbox, or no fd left: start times do
                fd = open_pidfd(pid, pid_start)
        if fd is None or start_ticks(pid) != pid_start:
            if fd is not None and fd >= 0:
                os.close(fd)
            return False
        self._watched[session] = (pid, pid_start, fd)
        return True

    def unwatch(self, session: str) -> None:
        """Stop watching; a session that is not watched is left alone."""
        _, _, fd = self._watched.pop(session, (0, 0, -1))
        if fd >= 0:
            os.close(fd)

    def fds(self) -> list[int]:
        """Return the pidfds: one becomes readable when its process dies."""
        return [fd for _, _, fd in self._watched.values() if fd >= 0]

    @property
    def poll_s(self) -> float | None:
        """How often `dead` must be called although no pidfd is readable; None: never."""
        return POLL_S if any(fd < 0 for _, _, fd in self._watched.values()) else None

    def dead(self) -> list[str]:
        """Return the sessions whose processes are dead, and stop watching them."""
        poller = select.poll()
        sessions: dict[int, list[str]] = {}
        gone = []
        for session, (pid, start, fd) in self._watched.items():
            if fd >= 0:
                poller.register(fd, select.POLLIN)
                sessions.setdefault(fd, []).append(session)
            elif _is_dead(pid, start):
                gone.append(session)
        if sessions:
            gone += [s for fd, _ in poller.poll(0) for s in sessions[fd]]
        for session in gone:
            self.unwatch(session)
        return gone

    def close(self) -> None:
        """Stop watching everybody."""
        for session in list(self._watched):
            with contextlib.suppress(OSError):
                self.unwatch(session)

"""Who is alive: a pidfd per session, or start times from /proc where there are none (`ProcessWatch`).

A pid alone proves nothing, since numbers are used again; pid and start time together name one process.
"""

from __future__ import annotations

import contextlib
import select

from asyncckpt.protocol.identity import POLL_S, ProcessWatch, watch


class Liveness:
    """Watches the processes of sessions. Used from the control loop only.

    Args:
        use_pidfd: False takes the other way, for tests.
    """

    def __init__(self, *, use_pidfd: bool = True) -> None:
        self._use_pidfd = use_pidfd
        self._watched: dict[str, ProcessWatch] = {}

    @property
    def uses_pidfd(self) -> bool:
        """Whether every end is learnt at once."""
        return self._use_pidfd and all(one.fd >= 0 for one in self._watched.values())

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Begin to watch; False when the process is dead or another one."""
        self.unwatch(session)
        found = watch(pid, pid_start, use_pidfd=self._use_pidfd)
        if found is not None:
            self._watched[session] = found
        return found is not None

    def unwatch(self, session: str) -> None:
        """Stop watching; a session that is not watched is left alone."""
        found = self._watched.pop(session, None)
        if found is not None:
            found.close()

    def fds(self) -> list[int]:
        """Return the pidfds: one becomes readable when its process dies."""
        return [one.fd for one in self._watched.values() if one.fd >= 0]

    @property
    def poll_s(self) -> float | None:
        """How often `dead` must be called although no pidfd is readable; None: never."""
        return POLL_S if any(one.fd < 0 for one in self._watched.values()) else None

    def dead(self) -> list[str]:
        """Return the sessions whose processes are dead, and stop watching them."""
        poller = select.poll()
        sessions: dict[int, list[str]] = {}
        gone = []
        for session, one in self._watched.items():
            if one.fd >= 0:
                poller.register(one.fd, select.POLLIN)
                sessions.setdefault(one.fd, []).append(session)
            elif one.has_ended():
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

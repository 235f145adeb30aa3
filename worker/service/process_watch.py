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
        self._sessions: dict[int, str] = {}
        self._polled: dict[str, ProcessWatch] = {}
        self._epoll: select.epoll | None = None

    @property
    def uses_pidfd(self) -> bool:
        """Whether every end is learnt at once."""
        return self._use_pidfd and not self._polled

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Begin to watch; False when the process is dead or another one."""
        self.unwatch(session)
        found = watch(pid, pid_start, use_pidfd=self._use_pidfd)
        if found is None:
            return False
        self._watched[session] = found
        if found.fd >= 0:
            try:
                self._epoll = self._epoll or select.epoll()
                self._epoll.register(found.fd, select.EPOLLIN)
                self._sessions[found.fd] = session
            except OSError:  # no descriptor, or too many watches: its start time is looked at
                found.close()
        if found.fd < 0:
            self._polled[session] = found
        return True

    def unwatch(self, session: str) -> None:
        """Stop watching; a session that is not watched is left alone."""
        found = self._watched.pop(session, None)
        if found is None:
            return
        self._polled.pop(session, None)
        if found.fd >= 0 and self._epoll is not None:
            del self._sessions[found.fd]
            with contextlib.suppress(OSError):  # a death is told, whatever becomes of its descriptor
                self._epoll.unregister(found.fd)
        found.close()

    def fds(self) -> list[int]:
        """Return what becomes readable when a process dies: one descriptor, however many are watched."""
        return [] if self._epoll is None else [self._epoll.fileno()]

    @property
    def poll_s(self) -> float | None:
        """How often `dead` must be called although no descriptor is readable; None: never."""
        return POLL_S if self._polled else None

    def dead(self) -> list[str]:
        """Return the sessions whose processes are dead, and stop watching them."""
        gone = [session for session, one in self._polled.items() if one.has_ended()]
        if self._epoll is not None:
            gone += [self._sessions[fd] for fd, _ in self._epoll.poll(0)]
        for session in gone:
            self.unwatch(session)
        return gone

    def close(self) -> None:
        """Stop watching everybody."""
        for session in list(self._watched):
            with contextlib.suppress(OSError):
                self.unwatch(session)
        if self._epoll is not None:
            self._epoll.close()
            self._epoll = None

"""Watches the processes of sessions: by pidfd, or where there is none, by start times from /proc (`ProcessWatch`).

PIDs are reused; PID and start time together identify a process.
"""

from __future__ import annotations

import contextlib
import select

from asyncckpt.protocol.identity import POLL_S, ProcessWatch, watch


class Liveness:
    """Watches the processes of sessions. Used from the control loop only.

    Args:
        use_pidfd: False uses start times only, for tests.

    Attributes:
        fds: Descriptors that become readable when a watched process dies: one epoll descriptor at most.
    """

    def __init__(self, *, use_pidfd: bool = True) -> None:
        self._use_pidfd = use_pidfd
        self._watched: dict[str, ProcessWatch] = {}
        self._sessions: dict[int, str] = {}
        self._polled: dict[str, ProcessWatch] = {}
        self._epoll: select.epoll | None = None
        self.fds: list[int] = []

    @property
    def uses_pidfd(self) -> bool:
        """Whether all processes are watched by pidfd, so that deaths are noticed at once."""
        return self._use_pidfd and not self._polled

    def watch(self, session: str, pid: int, pid_start: int) -> bool:
        """Watch a process; return False if it is dead, or its PID belongs to another process."""
        self.unwatch(session)
        found = watch(pid, pid_start, use_pidfd=self._use_pidfd)
        if found is None:
            return False
        self._watched[session] = found
        if found.fd >= 0:
            try:
                if self._epoll is None:
                    self._epoll = select.epoll()
                    self.fds = [self._epoll.fileno()]
                self._epoll.register(found.fd, select.EPOLLIN)
                self._sessions[found.fd] = session
            except OSError:  # no descriptor, or too many watches: its start time is polled
                found.close()
        if found.fd < 0:
            self._polled[session] = found
        return True

    def unwatch(self, session: str) -> None:
        """Stop watching a session. Idempotent."""
        found = self._watched.pop(session, None)
        if found is None:
            return
        self._polled.pop(session, None)
        if found.fd >= 0 and self._epoll is not None:
            del self._sessions[found.fd]
            with contextlib.suppress(OSError):  # the death must be reported although its descriptor fails
                self._epoll.unregister(found.fd)
        found.close()

    @property
    def poll_s(self) -> float | None:
        """Interval at which `dead` must be called although no descriptor is readable; None: not needed."""
        return POLL_S if self._polled else None

    def dead(self) -> list[str]:
        """Return the sessions whose processes are dead, and stop watching them."""
        dead = [session for session, one in self._polled.items() if one.has_ended()]
        if self._epoll is not None:
            dead += [self._sessions[fd] for fd, _ in self._epoll.poll(0)]
        for session in dead:
            self.unwatch(session)
        return dead

    def close(self) -> None:
        """Stop watching all processes."""
        for session in list(self._watched):
            with contextlib.suppress(OSError):
                self.unwatch(session)
        if self._epoll is not None:
            self._epoll.close()
            self._epoll, self.fds = None, []

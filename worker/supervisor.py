"""What a service manager is told: sd_notify(3), by hand. Without `$NOTIFY_SOCKET` nothing is said.

Only a worker in the foreground speaks: one that a trainer has started has inherited a socket that is the trainer's.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping

from asyncckpt_worker import logs

SHARE = 0.5
"""Of `WATCHDOG_USEC` after which the manager is told that all is well: what sd_watchdog_enabled(3) advises."""

MIN_INTERVAL_S = 0.1


class Supervisor:
    """The manager that started this process, or nobody.

    Args:
        environ: Has `NOTIFY_SOCKET`, `WATCHDOG_USEC` and `WATCHDOG_PID` where there is one.
        pid: Of this process.

    Attributes:
        interval_s: How often `alive` is to be called; None: the manager does not watch.
    """

    def __init__(self, environ: Mapping[str, str], pid: int) -> None:
        self._address = environ.get("NOTIFY_SOCKET", "")
        self.interval_s = _interval(environ, pid) if self._address else None
        self._told_at = float("-inf")

    def ready(self, endpoint: str) -> None:
        """The socket is bound: trainers can connect."""
        self._tell(f"READY=1\nSTATUS=serving {endpoint}")

    def stopping(self, text: str) -> None:
        """It drains, or leaves."""
        self._tell(f"STOPPING=1\nSTATUS={text}")

    def alive(self, now: float) -> None:
        """The control loop turns: say so, if it is time for it."""
        if self.interval_s is not None and now - self._told_at >= self.interval_s:
            self._told_at = now
            self._tell("WATCHDOG=1")

    def _tell(self, text: str) -> None:
        """Send one datagram. Never waits: a full queue costs this message."""
        if not self._address:
            return
        address = "\0" + self._address[1:] if self._address.startswith("@") else self._address
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC) as sender:
                sender.setblocking(False)
                sender.sendto(text.encode(), address)
        except (OSError, ValueError) as error:
            with contextlib.suppress(Exception):
                logs.write("warning", f"the service manager was not told {text.split('=', maxsplit=1)[0]}: {error}")


def _interval(environ: Mapping[str, str], pid: int) -> float | None:
    try:
        period_s = int(environ.get("WATCHDOG_USEC", "0")) / 1e6
        watched = int(environ.get("WATCHDOG_PID", str(pid)))
    except ValueError:
        return None
    return max(MIN_INTERVAL_S, period_s * SHARE) if period_s > 0 and watched == pid else None

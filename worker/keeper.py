"""The process that a worker was started for (`--while-pid`): while it lives, the worker does not leave for idleness."""

from __future__ import annotations

from asyncckpt.protocol.identity import start_ticks
from asyncckpt_worker import logs
from asyncckpt_worker.liveness import Liveness


class Keeper:
    """Watches one process. Used from the control loop only.

    Args:
        pid: The process; 0: there is none. One that is dead already is as good as none.
        liveness: For tests.
    """

    def __init__(self, pid: int, liveness: Liveness | None = None) -> None:
        self._pid = pid
        self._liveness = liveness or Liveness()
        ticks = start_ticks(pid) if pid else None
        self._lives = ticks is not None and self._liveness.watch("keeper", pid, ticks)

    def lives(self) -> bool:
        """Whether the process lives; its end is logged once."""
        if self._lives and self._liveness.dead():
            self._lives = False
            logs.write("info", f"process {self._pid}, which this worker was started for, has ended")
        return self._lives

    def fds(self) -> list[int]:
        """Return what becomes readable when the process ends."""
        return self._liveness.fds()

    @property
    def poll_s(self) -> float | None:
        """How often `lives` must be called although no fd is readable; None: never."""
        return self._liveness.poll_s

    def close(self) -> None:
        """Stop watching."""
        self._liveness.close()

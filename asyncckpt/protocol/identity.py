"""Identity of a process: its pid and start time, since pids are reused; and a watch that tells when it ends."""

from __future__ import annotations

import contextlib
import os
import select

from asyncckpt.errors import WorkerUnavailableError

POLL_S = 0.2
"""How often a process without a pidfd is looked at. P6 promises that a death is noticed within a second."""


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot (proc(5), field 22). None: it is gone, or hidden."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return int(after_name[19]) if len(after_name) > 19 and after_name[0] not in (b"Z", b"X") else None


def own_start_ticks() -> int:
    """Return when this process started.

    Raises:
        WorkerUnavailableError: /proc does not show it.
    """
    found = start_ticks(os.getpid())
    if found is None:
        raise WorkerUnavailableError(
            f"no worker can be reached: /proc/{os.getpid()}/stat cannot be read. Trainer and worker open each other's "
            "memory through /proc/<pid>/fd: mount proc there (mount -t proc proc /proc), or raise the limit of open "
            "files (ulimit -n) where that is used up",
            detail="proc",
        )
    return found


def is_gone(pid: int, started: int) -> bool:
    """Whether the process `pid` that started at `started` ticks has ended. Works without a free descriptor.

    A process whose main thread has ended while others run has not ended: these can write. Where /proc cannot be read
    (it is hidden, or no descriptor is free), a process counts as alive as long as any process has that pid.
    """
    found = start_ticks(pid)
    if found is not None:
        return found != started
    if pid <= 0:  # for kill(2) a process group
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: larger than any pid
        return True
    except OSError:  # EPERM: a process of another user
        pass
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return False


class ProcessWatch:
    """Tells when a process ends: by a pidfd, or by its start time where the kernel or a sandbox gives no pidfd.

    Args:
        pid: The process. IMPORTANT: the caller checks with `is_gone` after this, not before, that it is the process
            that is meant: before, the pid could be reused in between.
        started: When it started, in ticks.
        use_pidfd: False uses the start time, for tests.

    Attributes:
        fd: Becomes readable when the process ends; -1: there is none, and `has_ended` must be asked every `POLL_S`.
    """

    def __init__(self, pid: int, started: int, *, use_pidfd: bool = True) -> None:
        self.pid, self.started, self.fd = pid, started, -1
        if use_pidfd and pid > 0 and hasattr(os, "pidfd_open"):
            # Before Linux 5.3 there are none; seccomp may refuse them; no descriptor may be left.
            with contextlib.suppress(OSError, OverflowError):
                self.fd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether it has ended. Does not wait."""
        if self.fd < 0:
            return is_gone(self.pid, self.started)
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Stop watching. Twice is fine."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def watch(pid: int, started: int, *, use_pidfd: bool = True) -> ProcessWatch | None:
    """Begin to watch a process; None when it has ended, or is another one than started at `started` ticks."""
    found = ProcessWatch(pid, started, use_pidfd=use_pidfd)
    if is_gone(pid, started):
        found.close()
        return None
    return found

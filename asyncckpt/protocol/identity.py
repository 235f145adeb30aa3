"""Identity of a process: PID and start time, since PIDs are reused; and a watch that detects its end."""

from __future__ import annotations

import contextlib
import os
import select

from asyncckpt.errors import WorkerUnavailableError

POLL_S = 0.2
"""Poll interval for a process without a pidfd. P6 promises that a death is noticed within a second."""


def start_ticks(pid: int) -> int | None:
    """Return when process `pid` started, in clock ticks since boot (proc(5), field 22); None: ended, or not visible."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            after_name = file.read().rpartition(b")")[2].split()
    except (OSError, ValueError):
        return None
    return int(after_name[19]) if len(after_name) > 19 and after_name[0] not in (b"Z", b"X") else None


def own_start_ticks() -> int:
    """Return when this process started.

    Raises:
        WorkerUnavailableError: /proc cannot be read.
    """
    found = start_ticks(os.getpid())
    if found is None:
        raise WorkerUnavailableError(
            f"no worker can be reached: /proc/{os.getpid()}/stat cannot be read. Trainer and worker open each other's "
            "memory through /proc/<pid>/fd: mount proc there (mount -t proc proc /proc), or raise the limit of open "
            "files (ulimit -n) if it is reached",
            detail="proc",
        )
    return found


def has_exited(pid: int, started: int) -> bool:
    """Whether the process `pid` that started at `started` ticks has ended. Works without a free descriptor.

    A process whose main thread has ended while other threads run has not ended: they can write. If /proc cannot be read
    (not visible, or no free descriptor), a process counts as alive as long as any process has that PID.
    """
    found = start_ticks(pid)
    if found is not None:
        return found != started
    if pid <= 0:  # kill(2) would signal a process group
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):  # OverflowError: larger than any PID
        return True
    except OSError:  # EPERM: a process of another user
        pass
    try:
        return len(os.listdir(f"/proc/{pid}/task")) <= 1
    except OSError:
        return False


class ProcessWatch:
    """Detects the end of a process: by a pidfd, or by its start time if the kernel or a sandbox gives no pidfd.

    Args:
        pid: PID of the process. IMPORTANT: the caller must check with `has_exited` after this call, not before, that
            it is the right process: the PID could be reused in between.
        started: When it started, in ticks.
        use_pidfd: False uses the start time, for tests.

    Attributes:
        fd: A pidfd, readable when the process has ended; -1: none, and `has_ended` must be called every `POLL_S`.
    """

    def __init__(self, pid: int, started: int, *, use_pidfd: bool = True) -> None:
        self.pid, self.started, self.fd = pid, started, -1
        if use_pidfd and pid > 0 and hasattr(os, "pidfd_open"):
            # Fails before Linux 5.3, with seccomp filters, or without a free descriptor.
            with contextlib.suppress(OSError, OverflowError):
                self.fd = os.pidfd_open(pid)

    def has_ended(self) -> bool:
        """Whether the process has ended. Does not wait."""
        if self.fd < 0:
            return has_exited(self.pid, self.started)
        poller = select.poll()
        poller.register(self.fd, select.POLLIN)
        return bool(poller.poll(0))

    def close(self) -> None:
        """Stop watching. Idempotent."""
        fd, self.fd = self.fd, -1
        if fd >= 0:
            os.close(fd)


def watch(pid: int, started: int, *, use_pidfd: bool = True) -> ProcessWatch | None:
    """Watch a process; None if it has ended, or has another start time than `started`."""
    found = ProcessWatch(pid, started, use_pidfd=use_pidfd)
    if has_exited(pid, started):
        found.close()
        return None
    return found

"""Resets what a worker inherits from the trainer that started it: signal mask, CPU affinity, limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

MAX_CORES = 4096
"""More than any machine has; the kernel uses those that exist and are in the cpuset (sched_setaffinity(2))."""


def reset_inherited_limits() -> None:
    """Reset inherited limits, as far as the system allows.

    A worker of a trainer that blocks SIGTERM would not receive it; a worker of a trainer that is bound to one core
    would compete with the training for that core.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(MAX_CORES))
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

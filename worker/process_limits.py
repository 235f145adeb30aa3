"""What a worker that a trainer started must not keep of that trainer: signal mask, cores, limit of open files."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

MAX_CORES = 4096
"""More than any machine has; the kernel takes those that exist and that the cpuset allows (sched_setaffinity(2))."""


def reset_inherited_limits() -> None:
    """Undo what was inherited, as far as the system allows.

    A trainer that blocks SIGTERM would make the worker deaf to it; one that is bound to one core would make it write
    on that core, in the trainer's way, for as long as it lives.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(MAX_CORES))
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))

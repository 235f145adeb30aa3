"""What the system gives the worker's process: inherited limits are reset, and its priority is lowered."""

from __future__ import annotations

import contextlib
import os
import resource
import signal

import psutil

MAX_CORES = 4096
"""More than any machine has; the kernel uses those that exist and are in the cpuset (sched_setaffinity(2))."""

LOWEST_BEST_EFFORT = 7
"""The lowest of the eight priorities of the best-effort class, ionice(1). The idle class could starve."""

NICENESS = 5
"""Increment of the nice value, so that training and data loaders go first. Chosen, not measured."""


def reset_inherited_limits() -> None:
    """Reset signal mask, CPU affinity and limit of open files, as far as the system allows.

    A worker of a trainer that blocks SIGTERM would not receive it; a worker of a trainer that is bound to one core
    would compete with the training for that core.
    """
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(MAX_CORES))
    with contextlib.suppress(OSError, ValueError):
        _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def lower_priority() -> None:
    """Lower the priority on CPU and disk, so that the training goes first. Errors are ignored."""
    process = psutil.Process()
    with contextlib.suppress(psutil.Error, OSError):
        process.nice(min(19, process.nice() + NICENESS))
    with contextlib.suppress(psutil.Error, OSError, AttributeError, ValueError):
        process.ionice(psutil.IOPRIO_CLASS_BE, LOWEST_BEST_EFFORT)

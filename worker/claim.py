"""Claiming an endpoint: its directory, and the lock that only one living worker can hold. Imports no zmq."""

from __future__ import annotations

import sys
import time

from asyncckpt.errors import EndpointError
from asyncckpt.protocol.endpoint import acquire_lock, make_directory
from asyncckpt_worker.old_endpoints import forget_dead
from asyncckpt_worker.supervisor import Supervisor

TAKEN = "taken"
LOOK_EVERY_S = 0.5
ALREADY_SERVED = "is already served by a running worker"
"""`asyncckpt.launcher` looks for these words."""


def claim(endpoint: str) -> tuple[str, int]:
    """Make the endpoint's directory, take its lock, and tidy up beside it. The lock is held as long as the fd, or
    a fork's copy, is open.

    Returns:
        The socket's path, and the lock's fd.

    Raises:
        EndpointError: Another worker has it, or the directory is not safe to use.
        ConfigError: The endpoint is malformed.
    """
    path = make_directory(endpoint)
    try:
        fd = acquire_lock(path)
    except OSError as error:
        raise EndpointError(f"cannot lock {path}.lock: {error.strerror}", endpoint=endpoint, path=path) from error
    if fd is None:
        raise EndpointError(
            f"{endpoint} {ALREADY_SERVED}; use it, drain it first, or choose another --endpoint",
            endpoint=endpoint,
            path=path,
            detail=TAKEN,
        )
    forget_dead(path)
    return path, fd


def await_free(endpoint: str, supervisor: Supervisor) -> tuple[str, int]:
    """As `claim`; while another worker has the endpoint, wait for its end. Trainers are served meanwhile: by that one.

    Blocks: as long as the other worker lives. A signal ends this process.

    Raises:
        EndpointError, ConfigError: As `claim`, but not because it is taken.
    """
    waiting = False
    while True:
        try:
            return claim(endpoint)
        except EndpointError as error:
            if error.detail != TAKEN:
                raise
        if not waiting:
            waiting = True
            print(f"asyncckpt-worker: {endpoint} {ALREADY_SERVED}; waiting for its end", file=sys.stderr, flush=True)
            supervisor.ready(f"{endpoint}, by another worker, whose end this one waits for")
        supervisor.alive(time.monotonic())
        time.sleep(LOOK_EVERY_S)

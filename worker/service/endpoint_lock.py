"""The endpoint: its directory, the lock that only one living worker can hold, and what dead workers left there.

Imports no zmq.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time

from asyncckpt.errors import EndpointError
from asyncckpt.protocol.endpoint import acquire_lock, is_users_directory, make_directory
from asyncckpt_worker.service.observers import Supervisor

MAX_KEPT = 32
"""Endpoints, this one included, whose files stay: a log is wanted when its worker is dead. Chosen, not measured."""

_NAME = re.compile(r"([0-9a-f]{16}|run-[0-9a-z]+)\.(?:sock|sock\.lock|log|log\.1)\Z")

TAKEN = "taken"
LOOK_EVERY_S = 0.5
ALREADY_SERVED = "is already served by a running worker"
"""`asyncckpt.client.launcher` looks for these words."""


def forget_dead(path: str) -> None:
    """Remove the files of workers that are dead and not among the last ones to have lived here. Errors are ignored.

    Args:
        path: The socket of this worker. In a directory that users chose themselves, nothing is removed.
    """
    directory = os.path.dirname(path)
    if not is_users_directory(directory, os.geteuid()):
        return
    with contextlib.suppress(OSError):
        used: dict[str, float] = {}
        for name in os.listdir(directory):
            if found := _NAME.match(name):
                used[found[1]] = max(used.get(found[1], 0.0), os.lstat(os.path.join(directory, name)).st_mtime)
        used.pop(os.path.basename(path).removesuffix(".sock"), None)
        for stem in sorted(used, key=lambda s: used[s], reverse=True)[MAX_KEPT - 1 :]:
            _remove(os.path.join(directory, stem))


def _remove(stem: str) -> None:
    """Remove one endpoint's files, if nobody serves it; its lock last, and held until then."""
    lock = acquire_lock(f"{stem}.sock")
    if lock is None:
        return
    try:
        for ending in ("log", "log.1", "sock", "sock.lock"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{stem}.{ending}")
    finally:
        os.close(lock)


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

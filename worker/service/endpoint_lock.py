"""The endpoint: its directory, the lock that makes one worker its owner, and removal of the files of dead workers.

Imports no zmq, since `cli` forks after it has taken the lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import time

from asyncckpt.errors import EndpointError
from asyncckpt.protocol.endpoint import ALREADY_SERVED, acquire_lock, is_users_directory, make_directory
from asyncckpt_worker.service.observers import Supervisor

MAX_KEPT = 32
"""Number of endpoints, with this one, whose files are kept: the log of a dead worker may be needed. Chosen."""

_NAME = re.compile(r"([0-9a-f]{16}|run-[0-9a-z]+)\.(?:sock|sock\.lock|log|log\.1)\Z")

TAKEN = "taken"
POLL_S = 0.5


def remove_stale_files(path: str) -> None:
    """Remove the files of dead workers, except of the most recent `MAX_KEPT` endpoints. Errors are ignored.

    Args:
        path: Path of this worker's socket. In a directory that the user has chosen, nothing is removed.
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
    """Remove the files of an endpoint that has no worker, with its lock held; the lock file last."""
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
    """Create the endpoint's directory, take its lock, and remove stale files. The lock is held until its descriptor is
    closed, in forked processes too.

    Returns:
        Path of the socket, and descriptor of the lock.

    Raises:
        EndpointError: Another worker has the lock, or the directory is not safe to use.
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
    remove_stale_files(path)
    return path, fd


def wait_for_endpoint(endpoint: str, supervisor: Supervisor) -> tuple[str, int]:
    """Claim the endpoint; if another worker has it, wait until that one has ended.

    Blocks: as long as the other worker runs. A signal ends this process.

    Returns:
        As `claim`.

    Raises:
        EndpointError, ConfigError: As `claim`, except that another worker has the lock.
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
            supervisor.ready(f"{endpoint} by another worker; this one waits for its end")
        supervisor.alive()
        time.sleep(POLL_S)

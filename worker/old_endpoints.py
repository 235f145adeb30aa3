"""What dead workers left beside an endpoint: lock files, logs, sockets. Only so many of them are kept."""

from __future__ import annotations

import contextlib
import os
import re

from asyncckpt.protocol.endpoint import acquire_lock, is_users_directory

MAX_KEPT = 32
"""Endpoints, this one included, whose files stay: a log is wanted when its worker is dead. Chosen, not measured."""

_NAME = re.compile(r"([0-9a-f]{16}|run-[0-9a-z]+)\.(?:sock|sock\.lock|log|log\.1)\Z")


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

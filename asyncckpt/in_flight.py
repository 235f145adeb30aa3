"""Waits for saves that a worker has in flight, by its status report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping
from typing import Any

from asyncckpt.client import WorkerProcess
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import messages, save_phases

POLL_S = 0.05
"""How often the worker is asked. Chosen: saves take longer, and the question costs it next to nothing."""

_log = logging.getLogger("asyncckpt")


def await_saves_below(root: str, deadline: float, process: WorkerProcess) -> None:
    """Wait until every save to a child of `root` has ended; while no worker can be reached, nobody writes there.

    Args:
        root: Absolute path.
        deadline: `time.monotonic()` after which to go on all the same, with a warning.
        process: The worker.
    """
    try:
        while left := _unfinished(root, process):
            if time.monotonic() >= deadline:
                _log.warning("saves to %s are still unfinished: %s", root, ", ".join(left[:8]))
                return
            time.sleep(POLL_S)
    except WorkerUnavailableError as error:
        _log.warning("saves to %s that may be under way cannot be waited for: %s", root, error)


def _unfinished(root: str, process: WorkerProcess) -> list[str]:
    reply = process.call(lambda n: messages.Status(id=n), process.config.worker_timeout_s)
    assert isinstance(reply, messages.StatusReport)
    rows: list[Mapping[str, Any]] = list(reply.report.get("saves") or ())
    return [
        str(row.get("save_id"))
        for row in rows
        if os.path.dirname(str(row.get("path"))) == root and row.get("phase") not in save_phases.ENDED
    ]

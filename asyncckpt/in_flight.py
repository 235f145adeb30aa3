"""Waits for saves that a worker has in flight, by its status report."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any

from asyncckpt.protocol import lifecycle, messages

POLL_S = 0.05
"""How often the worker is asked. Chosen: saves take longer, and the question costs it next to nothing."""

_log = logging.getLogger("asyncckpt")


def await_saves_below(
    root: str, deadline: float, call: Callable[[Callable[[int], messages.Message]], messages.Message]
) -> None:
    """Wait until every save to a child of `root` has ended.

    Args:
        root: Absolute path.
        deadline: `time.monotonic()` after which to go on all the same, with a warning.
        call: Sends a request and returns the reply.

    Raises:
        WorkerUnavailableError: The worker does not answer.
    """
    while left := _unfinished(root, call):
        if time.monotonic() >= deadline:
            _log.warning("saves to %s are still unfinished: %s", root, ", ".join(left[:8]))
            return
        time.sleep(POLL_S)


def _unfinished(root: str, call: Callable[[Callable[[int], messages.Message]], messages.Message]) -> list[str]:
    reply = call(lambda n: messages.Status(id=n))
    assert isinstance(reply, messages.StatusReport)
    rows: list[Mapping[str, Any]] = list(reply.report.get("saves") or ())
    return [
        str(row.get("save_id"))
        for row in rows
        if os.path.dirname(str(row.get("path"))) == root and row.get("phase") not in lifecycle.ENDED
    ]

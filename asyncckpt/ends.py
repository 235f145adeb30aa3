"""What happens to living checkpointers when the interpreter exits, and in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import time
import weakref
from typing import Protocol

EXIT_WAIT_S = 4.5
"""Interpreter exit, and leaving by an exception, wait no longer, all checkpointers together.

GUARANTEES P13 gives an exit 5 s: what is left of them is for ending threads and unmapping, on a machine that is busy.
"""

_log = logging.getLogger("asyncckpt")


class Ending(Protocol):
    """What is remembered here."""

    def leave(self, timeout_s: float, *, at_exit: bool) -> None:
        """Called at interpreter exit; may take `timeout_s`."""

    def close_inherited_fds(self) -> None:
        """Called in a forked child."""


_living: weakref.WeakSet[Ending] = weakref.WeakSet()


def remember(checkpointer: Ending) -> None:
    """Let `checkpointer` take part until `forget`, or until nobody holds it."""
    _living.add(checkpointer)


def forget(checkpointer: Ending) -> None:
    """It was closed."""
    _living.discard(checkpointer)


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for checkpointer in list(_living):
        try:
            checkpointer.leave(max(0.1, deadline - time.monotonic()), at_exit=True)
        except Exception:
            _log.exception("a checkpointer did not end in order")


def _in_child() -> None:
    # The child shares the slots' fds; kept open they would keep the memory alive after the trainer is gone.
    for checkpointer in list(_living):
        checkpointer.close_inherited_fds()
    _living.clear()


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

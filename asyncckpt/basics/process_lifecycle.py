"""What happens to living checkpointers, and to our threads, when the interpreter exits, and in a forked child."""

from __future__ import annotations

import atexit
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from typing import Any, Protocol

EXIT_WAIT_S = 4.5
"""Interpreter exit, and leaving by an exception, wait no longer, all checkpointers together.

GUARANTEES P13 gives an exit 5 s: what is left of them is for ending threads and unmapping, on a machine that is busy.
"""

GIVE_UP_S = 0.25
"""How long a thread may take to end after `give_up`. The rest of the 5 s is for what follows."""

_log = logging.getLogger("asyncckpt")


class BackgroundThread(threading.Thread):
    """A daemon thread that is ended before the interpreter is finalised.

    IMPORTANT: every thread of this package is one. Before Python 3.14 a daemon thread that waits for the GIL while the
    interpreter is finalised is unwound at that point. If a destructor of torch is on its stack (the thread drops or
    copies a tensor), that aborts the process: "terminate called without an active exception", exit code 134.

    Args:
        target: The function that the thread runs.
        name: The thread's name, for debuggers.
        args: Arguments of `target`.
        end: Called when the interpreter exits, after checkpointers have ended: the thread should end soon, whatever it
            waits for. None: it ends by itself. Must not block.
        give_up: Called when the time for that is over: the thread should drop its work. Must not block.
    """

    def __init__(
        self,
        target: Callable[..., object],
        name: str,
        args: Iterable[Any] = (),
        *,
        end: Callable[[], None] | None = None,
        give_up: Callable[[], None] | None = None,
    ) -> None:
        super().__init__(target=target, name=name, args=args, daemon=True)
        self.end, self.give_up = end, give_up

    def start(self) -> None:
        """As `threading.Thread.start`.

        Raises:
            RuntimeError: The system has no thread left, or the interpreter exits.
        """
        _running.add(self)  # IMPORTANT: before the check; an exit sets `_exiting` first, and then reads `_running`
        try:
            if _exiting.is_set():
                raise RuntimeError("can't start new thread: the interpreter exits")
            super().start()
        except BaseException:
            if self.ident is None:
                _running.discard(self)
            raise

    def run(self) -> None:
        """As `threading.Thread.run`."""
        try:
            super().run()
        finally:
            self.end = self.give_up = None  # break reference cycles through the owner
            _running.discard(self)


class ExitHandler(Protocol):
    """What is remembered here."""

    def leave(self, timeout_s: float, *, at_exit: bool) -> None:
        """Called at interpreter exit; may take `timeout_s`."""

    def close_inherited_fds(self) -> None:
        """Called in a forked child."""


_living: weakref.WeakSet[ExitHandler] = weakref.WeakSet()
_running: set[BackgroundThread] = set()
_exiting = threading.Event()


def register(checkpointer: ExitHandler) -> None:
    """Let `checkpointer` take part until `forget`, or until nobody holds it."""
    _living.add(checkpointer)


def unregister(checkpointer: ExitHandler) -> None:
    """It was closed."""
    _living.discard(checkpointer)


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for checkpointer in list(_living):
        try:
            checkpointer.leave(max(0.1, deadline - GIVE_UP_S - time.monotonic()), at_exit=True)
        except Exception:
            _log.exception("a checkpointer did not end in order")
    _exiting.set()
    _end_threads(deadline)


def _end_threads(deadline: float) -> None:
    """End what still runs: of checkpointers that were dropped, or whose user is called back, and of no checkpointer."""
    for call, until in (("end", deadline - GIVE_UP_S), ("give_up", deadline)):
        threads = [one for one in list(_running) if one is not threading.current_thread()]
        for thread in threads:
            told = getattr(thread, call)
            if told is not None:
                told()
        for thread in threads:
            if thread.ident is not None:  # else it is just being started, and ends with what starts it
                thread.join(max(0.0, until - time.monotonic()))


def _in_child() -> None:
    # The child shares the slots' fds; kept open they would keep the memory alive after the trainer is gone.
    for checkpointer in list(_living):
        checkpointer.close_inherited_fds()
    _living.clear()
    _running.clear()  # none of them lives there


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

"""Ends live checkpointers and our threads when the interpreter exits, and cleans up in a forked child."""

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
"""How long interpreter exit, or leaving a checkpointer by an exception, waits for all checkpointers together.

docs/guarantees.md, P13, allows 5 s: the rest is for ending threads and unmapping, on a busy machine.
"""

GIVE_UP_S = 0.25
"""How long a thread may take to end after `give_up`."""

_log = logging.getLogger("asyncckpt")


class BackgroundThread(threading.Thread):
    """A daemon thread that is ended before the interpreter is finalised.

    IMPORTANT: use it for every thread of this package. Before Python 3.14, a daemon thread that waits for the GIL while
    the interpreter is finalised is unwound at that point. If a destructor of torch is on its stack (the thread drops or
    copies a tensor), that aborts the process: "terminate called without an active exception", exit code 134.

    Args:
        target: The function that the thread runs.
        name: The thread's name, for debuggers.
        args: Arguments of `target`.
        end: Called at interpreter exit, once checkpointers have ended: it should make the thread end soon, whatever the
            thread waits for. None: the thread ends by itself. Must not block.
        give_up: Called if the thread has not ended in time: it should make the thread drop its work. Must not block.
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
            RuntimeError: The limit of threads is reached, or the interpreter exits.
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
    """A checkpointer, as seen from here."""

    def leave(self, timeout_s: float, *, at_exit: bool) -> None:
        """Called at interpreter exit; may take `timeout_s`."""

    def close_inherited_fds(self) -> None:
        """Called in a forked child."""


_living: weakref.WeakSet[ExitHandler] = weakref.WeakSet()
_running: set[BackgroundThread] = set()
_exiting = threading.Event()


def register(checkpointer: ExitHandler) -> None:
    """Call `checkpointer` at exit and in forked children, until `unregister` or its garbage collection."""
    _living.add(checkpointer)


def unregister(checkpointer: ExitHandler) -> None:
    """Do not call `checkpointer` any more: it was closed."""
    _living.discard(checkpointer)


def _at_exit() -> None:
    deadline = time.monotonic() + EXIT_WAIT_S
    for checkpointer in list(_living):
        try:
            checkpointer.leave(max(0.1, deadline - GIVE_UP_S - time.monotonic()), at_exit=True)
        except Exception:
            _log.exception("a checkpointer could not be closed at interpreter exit")
    _exiting.set()
    _end_threads(deadline)


def _end_threads(deadline: float) -> None:
    """End all threads that still run: of checkpointers that were dropped, in the user's callbacks, and all others."""
    for call, until in (("end", deadline - GIVE_UP_S), ("give_up", deadline)):
        threads = [one for one in list(_running) if one is not threading.current_thread()]
        for thread in threads:
            callback = getattr(thread, call)
            if callback is not None:
                callback()
        for thread in threads:
            if thread.ident is not None:  # else it is being started, and ends with the thread that starts it
                thread.join(max(0.0, until - time.monotonic()))


def _in_child() -> None:
    # The child has copies of the slots' fds; open, they would keep the memory alive after the trainer has ended.
    for checkpointer in list(_living):
        checkpointer.close_inherited_fds()
    _living.clear()
    _running.clear()  # a forked child has none of these threads


atexit.register(_at_exit)
os.register_at_fork(after_in_child=_in_child)

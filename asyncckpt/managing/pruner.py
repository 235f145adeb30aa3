"""The thread in which rank 0 removes what retention gives up: after a commit, never before, and never in `save()`."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from asyncckpt.ends import BackgroundThread

LOOK_S = 0.2
"""How often who waits looks whether there is a hurry. Chosen."""

_log = logging.getLogger("asyncckpt")


class Pruner:
    """Does a piece of work in a thread of its own, once more for all requests that came meanwhile.

    The thread ends when there is nothing to do: who drops this, and what the work refers to, drops all of it.

    Args:
        work: What it does. What it raises is logged.
    """

    def __init__(self, work: Callable[[], None]) -> None:
        self._work = work
        self._changed = threading.Condition()
        self._wanted = self._done = 0
        self._ended = False
        self._thread: threading.Thread | None = None

    def request(self) -> None:
        """Ask for it. Does not wait. Thread-safe; after `close` it does nothing."""
        with self._changed:
            if self._ended:
                return
            if self._thread is None:
                thread = BackgroundThread(self._run, "asyncckpt-retention", end=self._end)
                try:
                    thread.start()
                except RuntimeError:  # can't start new thread: the next commit asks again
                    _log.warning("there is no thread for retention now; it is tried again after the next commit")
                    return
                self._thread = thread
            self._wanted += 1
            self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                if self._done == self._wanted:
                    self._thread = None
                    return
                wanted = self._wanted
            try:
                self._work()
            except Exception:
                _log.exception("retention failed; it is tried again after the next commit")
            with self._changed:
                self._done = wanted
                self._changed.notify_all()

    def wait(self, timeout_s: float, is_hurried: Callable[[], bool] = lambda: False) -> bool:
        """Wait until all that was asked for is done. Returns whether it is.

        Args:
            timeout_s: Seconds.
            is_hurried: Ends the wait; a signal does not wake who waits.

        Blocks: at most `timeout_s`.
        """
        deadline = time.monotonic() + timeout_s
        with self._changed:
            while self._done != self._wanted:
                left = deadline - time.monotonic()
                if left <= 0 or is_hurried():
                    return False
                self._changed.wait(min(left, LOOK_S))
        return True

    def _end(self) -> None:
        with self._changed:
            self._ended = True
            self._changed.notify_all()

    def close(self, timeout_s: float) -> None:
        """Finish what was asked for, and end. Twice is fine.

        Blocks: at most `timeout_s`; what is not done by then ends with the process, and is done by the next manager.
        """
        self._end()
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)
            if thread.is_alive():
                _log.warning(
                    "retention is not done after %.0f s; the next manager of this directory goes on", timeout_s
                )

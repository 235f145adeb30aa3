"""The thread in which a rank looks at the noticeboard, so that its training thread need not."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence

from asyncckpt.ends import BackgroundThread
from asyncckpt.errors import AsyncCkptError
from asyncckpt.managing.noticeboard import Noticeboard

POLL_S = 0.5
"""How often it looks while there is nothing to agree on: how late a rank hears that another one was told to stop. The
grace time of most schedulers is 30 s. Chosen; a look costs a message to the store or worker."""

HURRIED_S = 0.01
"""How often while the training waits."""

HURRY_FOR_S = 2.0
WARN_AFTER = 3
"""Looks in vain, one after the other: where a training ends, the rank that has the store may end a moment earlier."""

_log = logging.getLogger("asyncckpt")


class Watch:
    """See the module.

    Args:
        find: Returns the noticeboard, at the first look.
        turns: Each is called with the noticeboard, again and again.
        is_urgent: Whether to look often.
    """

    def __init__(
        self,
        find: Callable[[], Noticeboard],
        turns: Sequence[Callable[[Noticeboard], None]],
        is_urgent: Callable[[], bool] = lambda: False,
    ) -> None:
        self._find, self._turns, self._is_urgent = find, turns, is_urgent
        self._board: Noticeboard | None = None
        self._wake = threading.Event()
        self._hurried_until = float("-inf")
        self._ended = False
        self._failed = 0
        self._thread: threading.Thread | None = None
        self._lacks_thread = False

    def start(self) -> None:
        """Begin, once. Without a thread for it, which is said once, the next call tries again."""
        if self._thread is None and not self._ended:
            thread = BackgroundThread(self._run, "asyncckpt-watch", end=self._end)
            try:
                thread.start()
            except RuntimeError as error:  # can't start new thread
                if not self._lacks_thread:
                    self._lacks_thread = True
                    _log.warning("the ranks cannot agree on when to save or to stop for now: %s", error)
                return
            self._thread = thread

    def wake(self) -> None:
        """Look at once."""
        self._wake.set()

    def hurry(self) -> None:
        """Look at once, and often for a while."""
        self._hurried_until = time.monotonic() + HURRY_FOR_S
        self._wake.set()

    def _run(self) -> None:
        while not self._ended:
            self._look()
            often = self._is_urgent() or time.monotonic() < self._hurried_until
            self._wake.wait(HURRIED_S if often else POLL_S)
            self._wake.clear()

    def _look(self) -> None:
        try:
            if self._board is None:
                self._board = self._find()
            for turn in self._turns:
                turn(self._board)
            self._failed = 0
        except AsyncCkptError as error:
            self._failed += 1
            if self._failed == WARN_AFTER and not self._ended:
                _log.warning("the ranks cannot agree on when to save or to stop for now: %s", error)
            self._hurried_until = float("-inf")
        except Exception:
            _log.exception("the ranks cannot agree on when to save or to stop any more")
            self._ended = True

    def _end(self) -> None:
        self._ended = True
        self._wake.set()

    def close(self, last: Callable[[Noticeboard], None], timeout_s: float) -> None:
        """End. Twice is fine.

        Args:
            last: Called with the noticeboard after the last look, if there was one.
            timeout_s: How long to wait for a look that is under way.
        """
        thread, self._thread = self._thread, None
        self._end()
        if thread is None:
            return
        thread.join(timeout_s)
        if not thread.is_alive() and self._board is not None:
            try:
                last(self._board)
            except AsyncCkptError as error:
                _log.debug("the other ranks are not told that this one has ended: %s", error)

"""Runs deferred copies, one after the other in the order of the saves, in a thread that lives while there are any."""

from __future__ import annotations

import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from asyncckpt.ends import BackgroundThread
from asyncckpt.errors import CheckpointerClosedError
from asyncckpt.staging.deferred import DeferredCopy, OnEnd

WAIT_STEP_S = 1.0
"""How often who waits looks up, since copies go on or do not."""


class Copier:
    """See the module. It holds at most as many copies as there are slots, since each has taken one."""

    def __init__(self) -> None:
        self._lock = threading.RLock()  # a signal handler may close in the middle of a save
        self._copies: list[DeferredCopy] = []
        self._queue: deque[DeferredCopy] = deque()
        self._thread: threading.Thread | None = None
        self._when_idle: list[Callable[[], None]] = []

    @property
    def busy(self) -> bool:
        """Whether there are copies that have not ended. Costs nothing: it is asked in every step."""
        return bool(self._copies)

    def in_thread(self) -> bool:
        """Whether the caller runs in the copier's thread: a callback of `staged`."""
        return threading.current_thread() is self._thread

    def take(self, copy: DeferredCopy, staged: Future[Any], on_end: OnEnd) -> None:
        """Run `copy` when those before it have ended. Does not wait; where no thread can be started, runs it here.

        An interrupt that comes to a copy that runs here fails its save, and is raised when it has ended.

        Args:
            copy: The rest of a save.
            staged: Done, by `on_end`, when the tensors may be changed: who waits for the copy waits for this.
            on_end: See `OnEnd`; called in the copier's thread.
        """
        copy.staged, copy.on_end = staged, on_end
        try:
            copy.entrust()
            self._take(copy)
        except BaseException as error:  # an interrupt
            if copy in self._copies:
                copy.give_up(error)
            elif not copy.ended:
                copy.disown()
            raise

    def _take(self, copy: DeferredCopy) -> None:
        with self._lock:
            self._copies.append(copy)
            self._queue.append(copy)
            if self._thread is not None:
                return
            self._thread = thread = BackgroundThread(self._run, "asyncckpt-overlap", give_up=self._abort)
        try:
            thread.start()
        except BaseException as error:
            if thread.ident is None:  # else an interrupt came while it was starting: it runs
                with self._lock:
                    self._thread = None
                    if not isinstance(error, RuntimeError):
                        self._copies.remove(copy)
                        self._queue.remove(copy)
                if isinstance(error, RuntimeError):  # can't start new thread
                    interrupt = self._run()
                    if interrupt is not None:
                        raise interrupt from None
                    return
            raise

    def _run(self) -> BaseException | None:
        """Run what is queued; returns the last interrupt that came meanwhile. A thread has nobody to raise it to."""
        interrupt: BaseException | None = None
        while True:
            with self._lock:
                if not self._queue:
                    self._thread = None
                    calls, self._when_idle = self._when_idle, []
                    break
                copy = self._queue.popleft()
            try:
                interrupt = copy.run() or interrupt
            finally:
                with self._lock:
                    self._copies.remove(copy)

        for call in calls:
            call()
        return interrupt

    def when_idle(self, call: Callable[[], None]) -> None:
        """Call `call` once no copy runs: now, or in the copier's thread. Does not wait."""
        with self._lock:
            if self._thread is not None:
                self._when_idle.append(call)
                return
        call()

    def places(self) -> set[int]:
        """Return the addresses of the storages that copies still read from."""
        return {place for copy in list(self._copies) for place in copy.places() if place}

    def wait(self, timeout_s: float, *, ordered: bool = False, patient: bool = False) -> list[DeferredCopy]:
        """Wait until the copies that there are have ended; returns those that have not within `timeout_s`.

        Args:
            timeout_s: For all of them.
            patient: One that waits for storage is waited for as long as it goes on (`Copies.patience`).
            ordered: Those that streams of devices can put before what the calling thread does next need not have ended.
        """
        deadline = time.monotonic() + timeout_s
        copies = [copy for copy in list(self._copies) if not (ordered and copy.release(deadline))]
        while left := [copy for copy in copies if not copy.staged.done()]:
            until = max(deadline, *(copy.patience() for copy in left)) if patient else deadline
            if time.monotonic() >= until:
                break
            concurrent.futures.wait([copy.staged for copy in left], min(WAIT_STEP_S, until - time.monotonic()))
        return [copy for copy in copies if not copy.staged.done()]

    def give_up(self, error: BaseException) -> None:
        """Let every save whose copy has not ended fail with `error`. Does not wait."""
        for copy in list(self._copies):
            copy.give_up(error)

    def _abort(self) -> None:
        self.give_up(CheckpointerClosedError("the interpreter ended while the state was being copied"))

    def join(self, timeout_s: float) -> bool:
        """Wait until the thread has ended, at most `timeout_s`; says whether it has."""
        deadline = time.monotonic() + timeout_s
        with self._lock:
            thread = self._thread
        if thread is None or thread is threading.current_thread() or thread.ident is None:
            return True
        thread.join(max(0.0, deadline - time.monotonic()))
        return not thread.is_alive()

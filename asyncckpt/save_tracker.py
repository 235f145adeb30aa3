"""Tracks the handles of one checkpointer: pending saves, and errors that were not fetched from a future."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import Future

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.errors import CheckpointerClosedError, PendingSavesError, SaveSkippedError, WaitTimeoutError
from asyncckpt.save_handle import SaveFuture, SaveHandle, SaveReport

CALLBACK_S = 1.0
"""How long after a future is done `_ended` may be called. Chosen: far above the usual time."""

UNCHANGED = (
    "save of step %d to %s: the state is bit for bit that of step %s. Check that the saved state is the one that is "
    "trained: a state dict that was cloned once never changes"
)
"""Logged with step, path, and the step whose state is equal."""

_log = logging.getLogger("asyncckpt")


class SaveTracker:
    """Tracks every handle from `save()` to its end, and logs the outcome of each save.

    Args:
        on_error: "warn" or "raise", as in `CheckpointerConfig`.
    """

    def __init__(self, *, on_error: str) -> None:
        self._raises = on_error == "raise"
        self._lock = threading.RLock()  # `with self._changed` could leave it taken: see `SlotPool`
        self._changed = threading.Condition(self._lock)
        self._pending: list[SaveHandle] = []
        self._failed: list[SaveHandle] = []

    def add(self, handle: SaveHandle) -> None:
        """Track `handle` until its `written` is done."""
        with signals_deferred():  # an interrupt between the two would leave it pending for ever
            with self._lock:
                self._pending.append(handle)
            handle.written.add_done_callback(lambda done: self._ended(handle, done))

    def _ended(self, handle: SaveHandle, done: Future[SaveReport]) -> None:
        assert isinstance(done, SaveFuture)
        report, error = done.peek()
        try:
            _log_outcome(handle, report, error)
        finally:  # a handler of the log may raise
            with self._lock:
                self._pending.remove(handle)
                if self._raises and error is not None and not isinstance(error, SaveSkippedError):
                    self._failed.append(handle)
                self._changed.notify_all()

    def pending(self) -> list[SaveHandle]:
        """Return the handles whose `written` is not done, oldest first."""
        with self._lock:
            return self._open()

    @property
    def n_pending(self) -> int:
        """Number of saves whose `written` is not done. Takes no lock."""
        return len(self._open())

    def _open(self) -> list[SaveHandle]:
        # A thread that waits for a future may wake up before its callbacks, such as `_ended`, have run.
        return [h for h in self._pending if not h.written.done()]

    def settle(self, timeout_s: float | None) -> list[SaveHandle]:
        """Wait until no save is pending, at most `timeout_s`; return the handles of pending saves."""
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        with self._lock:
            while self._pending:
                left = None if deadline is None else deadline - time.monotonic()
                if left is not None and left <= 0 and (self._open() or left < -CALLBACK_S):
                    break
                self._changed.wait(1.0 if left is None else min(max(left, 0.01), 1.0))
            return self._open()

    def wait(self, timeout_s: float | None) -> None:
        """As `settle`.

        Raises:
            WaitTimeoutError: Saves are still pending.
        """
        left = self.settle(timeout_s)
        if left:
            raise WaitTimeoutError(
                f"{len(left)} saves are still pending after {timeout_s:g} s; they continue",
                save_ids=[str(h.save_id) for h in left],
                timeout_s=timeout_s,
            )

    def raise_errors(self) -> None:
        """With `on_error="raise"`, raise the errors of saves none of whose futures was fetched; each error once.

        Raises:
            PendingSavesError: There are such errors, in `errors`.
        """
        with self._lock:
            failed, self._failed = self._failed, []
        found = [e for h in failed if not any(f.fetched for f in h.futures()) and (e := h.written.peek()[1])]
        if found:
            text = "; ".join(str(e) for e in found)
            raise PendingSavesError(f"{len(found)} saves failed: {text}", errors=found)


def _log_outcome(handle: SaveHandle, report: SaveReport | None, error: BaseException | None) -> None:
    if error is None:
        _log.info("save of step %d to %s is committed: %s", handle.step, handle.path, report)
        if isinstance(report, SaveReport) and report.details.get("unchanged"):  # a custom process returns any type
            _log.warning(UNCHANGED, handle.step, handle.path, report.details.get("same_tensors_as_step"))
    elif isinstance(error, SaveSkippedError):
        _log.info("%s", error)
    elif isinstance(error, CheckpointerClosedError):
        _log.warning("save of step %d to %s was not waited for: %s", handle.step, handle.path, error)
    else:
        text = str(error) or type(error).__name__  # an interrupt has no text
        known = handle.path in text  # most errors of ours name the path already
        _log.warning("%s%s", "" if known else f"save of step {handle.step} to {handle.path} failed: ", text)

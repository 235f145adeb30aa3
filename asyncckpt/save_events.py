"""Rank 0's part of `events.jsonl` (docs/observability.md): stalls of saves, and steps between saves.

Nothing here waits: a thread writes the lines. A step costs one read of the clock.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from concurrent.futures import Future
from typing import Any

from asyncckpt.basics.paths import current_umask
from asyncckpt.errors import SaveSkippedError
from asyncckpt.maintenance.event_log import EventLog
from asyncckpt.save_handle import SaveFuture, SaveHandle, SaveReport
from asyncckpt.staging.overlap import Overlap

CLOSE_S = 0.5
"""How long `close` waits for the last lines to be written. Chosen: a line takes a millisecond."""

MAX_ERROR_CHARS = 1000


class SaveEvents:
    """Writes events of one checkpointer. For the training thread; saves may end in any thread.

    Args:
        on: Whether events are written.
        overlap: Its fence knows how long steps have waited for copies; None: they do not wait.
    """

    def __init__(self, on: bool, overlap: Overlap | None = None) -> None:
        self._log = EventLog() if on else None
        self._overlap = overlap
        self._umask = current_umask() if on else 0o077
        self._hooks: list[Any] = []
        self._last: tuple[int, float, float] | None = None
        self._steps, self._longest_s, self._ticked_at = 0, 0.0, 0.0

    def watch(self, attached: Iterable[Any]) -> None:
        """Count the steps of the first optimizer that was attached."""
        first = next((one for one in attached if hasattr(one, "register_step_post_hook")), None)
        if self._log is None or first is None or self._hooks:
            return

        def tick(*_: Any, **__: Any) -> None:
            now = time.perf_counter()
            if self._ticked_at:
                self._longest_s = max(self._longest_s, now - self._ticked_at)
            self._steps, self._ticked_at = self._steps + 1, now

        tick._torchdynamo_disable = True  # type: ignore[attr-defined]  # as of the fence's hooks
        self._hooks.append(first.register_step_post_hook(tick))

    def unwatch(self) -> None:
        """Remove the hook."""
        hooks, self._hooks = self._hooks, []
        for hook in hooks:
            hook.remove()

    def saved(self, handle: SaveHandle, began: float) -> SaveHandle:
        """Record a save whose `save()` is about to return; return the handle.

        Args:
            handle: Handle of the save.
            began: `time.perf_counter()` when `save()` was called.
        """
        if self._log is None:
            return handle
        now, waited_s = time.perf_counter(), self._overlap.fence.waited_s if self._overlap is not None else 0.0
        if self._last is not None:
            step, ended, waited_before = self._last
            facts: dict[str, Any] = {"rank": 0, "from_step": step, "step": handle.step}
            facts |= {"seconds": round(began - ended, 6), "waited_s": round(waited_s - waited_before, 6)}
            if self._steps:
                facts |= {"steps": self._steps, "longest_s": round(self._longest_s, 6)}
            self._log.add(os.path.dirname(handle.path), "steps", facts, umask=self._umask)
        self._last = (handle.step, now, waited_s)
        self._steps, self._longest_s, self._ticked_at = 0, 0.0, now
        handle.written.add_done_callback(lambda done: self._ended(handle, done, now - began))
        return handle

    def _ended(self, handle: SaveHandle, done: Future[SaveReport], stall_s: float) -> None:
        assert isinstance(done, SaveFuture) and self._log is not None
        report, error = done.peek()
        staged = handle.staged.peek()[0] if handle.staged.done() else None
        facts: dict[str, Any] = {"rank": 0, "save_id": str(handle.save_id), "step": handle.step}
        facts |= {"name": os.path.basename(handle.path), "stall_s": round(stall_s, 6)}
        facts["outcome"] = (
            "written" if error is None else "skipped" if isinstance(error, SaveSkippedError) else "failed"
        )
        seconds = {**(staged.seconds if staged else {}), **(report.seconds if report else {})}
        facts["seconds"] = {name: round(value, 6) for name, value in seconds.items()}
        if report is not None and report.details.get("unchanged"):
            facts["unchanged"] = True
        if error is not None:
            facts["error"] = str(error)[:MAX_ERROR_CHARS]
        self._log.add(os.path.dirname(handle.path), "save", facts, umask=self._umask)

    def close(self) -> None:
        """Write the remaining lines, and end the thread. Idempotent. Blocks: at most `CLOSE_S`."""
        self.unwatch()
        if self._log is not None:
            self._log.close(CLOSE_S)

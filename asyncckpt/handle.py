"""SaveHandle: what a caller holds of one save."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.format.names import SaveId


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a phase of a save amounted to.

    Attributes:
        save_id: Which save.
        nbytes: Bytes of this rank's files (`staged`: of its slot's images).
        seconds: Seconds per phase: "plan", "acquire", "copy", "seal", "write", "commit" as far as they are known, and
            "total" since `save()` was called.
        details: Further facts, such as "direct" (O_DIRECT was used).
    """

    save_id: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)


class SaveHandle:
    """Three futures of one save; unpacks to `(staged, written)`.

    Attributes:
        staged: Done when tensors may be mutated: the snapshot outlives this process.
        durable: Done when this rank's files are fsynced.
        written: Done when the whole checkpoint is committed.
        step, path, save_id: Which save this is; `save_id` has epoch 0 when no worker could be asked for one.

    Each future's result is a `SaveReport`; a failed save sets a typed exception on all that have not completed.
    Callbacks run in the client thread and must not block.
    """

    def __init__(self, *, step: int, path: str, save_id: SaveId) -> None:
        self.step, self.path, self.save_id = step, path, save_id
        self.staged: Future[SaveReport] = Future()
        self.durable: Future[SaveReport] = Future()
        self.written: Future[SaveReport] = Future()
        for future in (self.staged, self.durable, self.written):
            future.set_running_or_notify_cancel()  # from here cancel() answers False: a save is not taken back

    def __iter__(self) -> Iterator[Future[SaveReport]]:
        return iter((self.staged, self.written))

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, path={self.path!r}, save_id={str(self.save_id)!r}, phase={self.phase!r})"

    @property
    def phase(self) -> str:
        """ "staging", "staged", "durable", "written" or "failed"."""
        if self.written.done():
            return "failed" if self.written.exception() else "written"
        if self.durable.done():
            return "durable"
        return "staged" if self.staged.done() else "staging"

    def fail(self, error: BaseException) -> None:
        """Set `error` on every future that has not completed."""
        for future in (self.staged, self.durable, self.written):
            if not future.done():
                future.set_exception(error)

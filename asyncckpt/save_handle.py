"""SaveHandle: what a caller holds of one save."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, InvalidStateError
from dataclasses import dataclass, field
from typing import Any

from asyncckpt.errors import SaveFailedError
from asyncckpt.format.names import SaveId

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True)
class SaveReport:
    """What a phase of a save amounted to.

    Attributes:
        save_id: Which save.
        nbytes: Bytes of this rank's files (`staged`: of its slot's images).
        seconds: Seconds per phase: "plan", "acquire", "copy", "seal", "write", "commit" as far as they are known, and
            "total" since `save()` was called.
        details: Further facts. "direct": O_DIRECT was used. "ring_nbytes": the state was larger than
            `arena_limit_bytes`, and went through so much memory in segments. Of a commit whose tensors all are bit for
            bit those that the run committed before at another step, "same_tensors_as_step": that one; "unchanged": the
            rest is equal too, but for the step.
    """

    save_id: str
    nbytes: int
    seconds: dict[str, float] = field(default_factory=dict)
    details: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        phases = {name: value for name, value in self.seconds.items() if name != "total"}
        total = self.seconds.get("total", sum(phases.values()))
        listed = ", ".join(f"{name} {value:.3f} s" for name, value in phases.items())
        size = f"{self.nbytes / 1e6:.1f} MB" if self.nbytes >= 100_000 else f"{self.nbytes / 1e3:.1f} kB"
        return f"{size} in {total:.3f} s ({listed})"


class SaveFuture(Future[SaveReport]):
    """A future that knows whether anybody has looked at its outcome."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = False
        self.set_running_or_notify_cancel()  # from here cancel() answers False: a save is not taken back

    def add_done_callback(self, fn: Callable[[Future[SaveReport]], object]) -> None:
        """As `Future.add_done_callback`; a callback that exits, with `sys.exit()` say, ends no thread of ours."""

        def guarded(done: Future[SaveReport]) -> None:
            try:
                fn(done)
            except Exception:
                raise  # concurrent.futures logs it
            except BaseException:
                if threading.current_thread() is threading.main_thread():
                    raise
                _log.exception("a callback wanted to end the thread that completes saves; it goes on")

        super().add_done_callback(guarded)

    def result(self, timeout: float | None = None) -> SaveReport:
        """As `Future.result`."""
        try:
            return super().result(timeout)
        finally:
            self.fetched = self.fetched or self.done()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `Future.exception`."""
        try:
            return super().exception(timeout)
        finally:
            self.fetched = self.fetched or self.done()

    def peek(self) -> tuple[SaveReport | None, BaseException | None]:
        """Return (result, exception) of a future that is done, without counting as a look."""
        error = super().exception(0)
        return (None, error) if error is not None else (super().result(0), None)


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
        self.staged, self.durable, self.written = SaveFuture(), SaveFuture(), SaveFuture()

    def __iter__(self) -> Iterator[SaveFuture]:
        return iter((self.staged, self.written))

    def __repr__(self) -> str:
        return f"SaveHandle(step={self.step}, path={self.path!r}, save_id={str(self.save_id)!r}, phase={self.phase!r})"

    def futures(self) -> tuple[SaveFuture, SaveFuture, SaveFuture]:
        """Return `staged`, `durable`, `written`."""
        return self.staged, self.durable, self.written

    @property
    def phase(self) -> str:
        """One of "staging", "staged", "durable", "written", "failed"."""
        if self.written.done():
            return "failed" if self.written.peek()[1] else "written"
        if self.durable.done():
            return "durable"
        return "staged" if self.staged.done() else "staging"

    def fail(self, error: BaseException) -> None:
        """Set `error` on every future that has not completed; its traceback goes to the debug log only."""
        _log.debug("save %s failed", self.save_id, exc_info=error)
        _drop_frames(error)
        for future in self.futures():
            with contextlib.suppress(InvalidStateError):  # it has completed
                future.set_exception(error)

    def follow(self, written: Future[Any]) -> None:
        """Take over the outcome of `written`, and of its attribute `durable` where it has one."""
        getattr(written, "durable", written).add_done_callback(_copy_to(self.durable))
        written.add_done_callback(_copy_to(self.written))


def _drop_frames(error: BaseException) -> None:
    """Forget where `error` was raised: the frames would keep the whole state alive as long as the handle is."""
    seen: set[int] = set()
    todo: list[BaseException | None] = [error]
    while todo:
        found = todo.pop()
        if found is not None and id(found) not in seen:
            seen.add(id(found))
            found.__traceback__ = None
            todo += [found.__cause__, found.__context__]


def _copy_to(target: SaveFuture) -> Callable[[Future[Any]], None]:
    def copy(done: Future[Any]) -> None:
        with contextlib.suppress(InvalidStateError):  # it has completed
            complete(done)

    def complete(done: Future[Any]) -> None:
        if done.cancelled():
            target.set_exception(SaveFailedError("the process cancelled this save", code="cancelled"))
            return
        error = done.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(done.result())

    return copy

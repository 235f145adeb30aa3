"""SaveHandle: the futures of one save, which `save()` returns."""

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
    """The result of a save's future.

    Attributes:
        save_id: ID of the save.
        nbytes: Size of this rank's files (`staged`: of its files' images in the slot).
        seconds: Seconds per phase: "plan", "acquire", "copy", "seal", "write", "commit" as far as they are known, and
            "total" since `save()` was called.
        details: Further facts. "direct": O_DIRECT was used. "ring_nbytes": the state was larger than
            `arena_limit_bytes`, and was copied in segments through a ring of so many bytes. "reused_nbytes", with
            `reuse="auto"`: so many of this rank's bytes were linked instead of written. If all tensors of a committed
            save are bit for bit those that the run has committed at another step: "same_tensors_as_step" is that step,
            and "unchanged" says that the other leaves are equal too, except for the step. "resubmitted": so many
            further workers got the slot, since those before them had died. "kept": the files that a dead worker had
            completed were used.
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
    """A future that knows whether its outcome was fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.fetched = False
        self.set_running_or_notify_cancel()  # from here on cancel() returns False: a save cannot be cancelled

    def add_done_callback(self, fn: Callable[[Future[SaveReport]], object]) -> None:
        """As `Future.add_done_callback`; a callback that calls `sys.exit()`, say, does not end a thread of ours."""

        def guarded(done: Future[SaveReport]) -> None:
            try:
                fn(done)
            except Exception:
                raise  # concurrent.futures logs it
            except BaseException:
                if threading.current_thread() is threading.main_thread():
                    raise
                _log.exception("a callback of a save's future tried to end the thread that completes saves; ignored")

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
        """Return (result, exception) of a future that is done; does not set `fetched`."""
        error = super().exception(0)
        return (None, error) if error is not None else (super().result(0), None)


class SaveHandle:
    """Three futures of one save; unpacks to `(staged, written)`.

    Attributes:
        staged: Done when tensors may be mutated: the snapshot outlives this process.
        durable: Done when this rank's files are fsynced.
        written: Done when the whole checkpoint is committed.
        mirrored: Done when its copy in the mirror is committed; None without a mirror.
        step, path, save_id: Step, directory and ID of the save; the ID has epoch 0 if no worker could be reached.

    Each future's result is a `SaveReport`; a failed save sets a typed exception on all futures that are not done.
    Callbacks run in the client thread and must not block.
    """

    def __init__(self, *, step: int, path: str, save_id: SaveId, has_mirror: bool = False) -> None:
        self.step, self.path, self.save_id = step, path, save_id
        self.staged, self.durable, self.written = SaveFuture(), SaveFuture(), SaveFuture()
        self.mirrored = SaveFuture() if has_mirror else None

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
        """Set `error`, without its traceback, on every future that is not done; the debug log gets the traceback."""
        _log.debug("save %s failed", self.save_id, exc_info=error)
        _drop_frames(error)
        mirrored = () if self.mirrored is None else (self.mirrored,)
        for future in (*self.futures(), *mirrored):
            with contextlib.suppress(InvalidStateError):  # it has completed
                future.set_exception(error)

    def follow(self, written: Future[Any]) -> None:
        """Complete with the outcome of `written`, and the other futures with those of its attributes of their names."""
        getattr(written, "durable", written).add_done_callback(_copy_to(self.durable))
        if self.mirrored is not None:
            getattr(written, "mirrored", written).add_done_callback(_copy_to(self.mirrored))
        written.add_done_callback(_copy_to(self.written))


def _drop_frames(error: BaseException) -> None:
    """Drop the traceback of `error`: its frames would keep the whole state alive as long as the handle."""
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

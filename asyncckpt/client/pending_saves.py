"""The table of saves that have begun and not ended, on the trainer's side, and the completion of their futures.

A row lives from `begin` to the worker's word that the save has ended. The slot is freed with the row, never before:
a save whose future has run out of time may still be read by the worker.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from asyncckpt.client.save_outcomes import Send
from asyncckpt.client.slot import Slot
from asyncckpt.errors import AsyncCkptError, CommitTimeoutError, WorkerUnavailableError, from_wire
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages, save_phases
from asyncckpt.save_handle import SaveReport

Rest = Callable[[Future[Any], Callable[[AsyncCkptError | None], None]], None]
"""Begins to copy what `save()` has left for later: (the future that then completes, called at the end: with None when
the slot is sealed, else with the error of a save that has been withdrawn)."""


Announcement = Callable[[int, int], messages.Message]
"""Makes the Begin of a save from a request id and the slot's number."""


class Unended(NamedTuple):
    """A save that a worker has not reported as ended: the generation of its slot, and its messages.

    `snapshot`: None while it is being staged. `is_known`: a worker was told of it, or has got its memory.
    """

    save_id: str
    generation: int
    announcement: Announcement | None
    snapshot: StagedSnapshot | None
    is_known: bool


class WriteFuture(Future[SaveReport]):
    """A future of the commit; `durable` is one of this rank's files."""

    def __init__(self) -> None:
        super().__init__()
        self.durable: Future[SaveReport] = Future()

    def fail(self, error: BaseException) -> None:
        """Set `error` on both, as far as they are not done."""
        for future in (self.durable, self):
            if not future.done():
                future.set_exception(error)


class StagedSnapshot:
    """The default stager's result: a sealed slot, or one that is sealed once `rest` was called and has ended.

    `began`: `time.perf_counter()` at the start of `save()`. `extra`: the arguments of `save()` that are the hooks'.
    `details`: of the report on `staged`. `resubmitted`: to how many workers, after the first, it was handed.
    """

    __slots__ = (
        *("began", "details", "extra", "nbytes", "path", "rest", "resubmitted"),
        *("save_id", "seconds", "slot", "step"),
    )

    def __init__(
        self,
        *,
        save_id: SaveId,
        step: int,
        path: str,
        slot: Slot,
        nbytes: int,
        seconds: dict[str, float],
        began: float,
        extra: Mapping[str, Any],
        rest: Rest | None = None,
        details: Mapping[str, Any] | None = None,
    ) -> None:
        self.save_id, self.step, self.path, self.slot = save_id, step, path, slot
        self.nbytes, self.seconds, self.began = nbytes, seconds, began
        self.extra, self.rest, self.details = extra, rest, dict(details or {})
        self.resubmitted = 0

    def report(self, facts: Mapping[str, Any] | None) -> SaveReport:
        """Return what is known of the save, `facts` from the worker added."""
        rest = dict(facts or {})
        seconds = {k.removeprefix("seconds_"): rest.pop(k) for k in list(rest) if k.startswith("seconds_")}
        if self.resubmitted:
            rest["resubmitted"] = self.resubmitted
        return SaveReport(
            save_id=str(self.save_id),
            nbytes=int(rest.pop("nbytes", self.nbytes)),
            seconds={**self.seconds, **seconds, "total": time.perf_counter() - self.began},
            details=rest,
        )


class _Row:
    __slots__ = (
        *("announcement", "deadline", "early_error", "future", "generation", "is_asked", "is_known", "missing"),
        "snapshot",
    )

    def __init__(self, announcement: Announcement | None, generation: int, *, is_known: bool) -> None:
        self.announcement, self.generation, self.is_asked = announcement, generation, False
        self.is_known = is_known
        self.deadline = float("inf")
        self.missing: list[int] = []
        self.snapshot: StagedSnapshot | None = None
        self.future: WriteFuture | None = None
        self.early_error: AsyncCkptError | None = None


class PendingSaves:
    """See the module. Thread-safe; futures complete outside the lock, in the thread that brings the news.

    Args:
        lock: Of the client's tables.
        commit_timeout_s: So long after it was staged, an uncommitted save's futures fail.
        free: Gives a save's slot back to the pool.
        verdict_s: How long the worker's own word on a save that took too long, which names the missing ranks, may take.
        on_durable: Called when this rank's files are, once per save and worker.
        on_committed: Called before the slot is freed and `written` completes.
    """

    def __init__(
        self,
        lock: threading.RLock,
        *,
        commit_timeout_s: float,
        free: Callable[[SaveId], None],
        verdict_s: float = 0.0,
        on_durable: Callable[[StagedSnapshot], None] = lambda snapshot: None,
        on_committed: Callable[[StagedSnapshot], None] = lambda snapshot: None,
    ) -> None:
        self._timeout_s, self._verdict_s, self._free = commit_timeout_s, verdict_s, free
        self._on_durable, self._on_committed = on_durable, on_committed
        self._lock = lock
        self._rows: dict[str, _Row] = {}

    def begin(
        self, save_id: SaveId, announcement: Announcement | None = None, generation: int = 0, *, is_known: bool = True
    ) -> None:
        """Staging begins, into the `generation` of a slot; `is_known`: a worker is told of it now."""
        with self._lock:
            self._rows[str(save_id)] = _Row(announcement, generation, is_known=is_known)

    def withdraw(self, save_id: SaveId) -> None:
        """Staging failed: the save will never be sealed."""
        with self._lock:
            self._rows.pop(str(save_id), None)

    def is_staging(self, name: str) -> bool:
        """Whether the save was begun and not yet handed over."""
        with self._lock:
            row = self._rows.get(name)
            return row is not None and row.future is None

    def early_error(self, save_id: SaveId) -> AsyncCkptError | None:
        """Return why the save has failed while it was being staged, or None."""
        with self._lock:
            row = self._rows.get(str(save_id))
            return row.early_error if row else None

    def staged(self, snapshot: StagedSnapshot, future: WriteFuture, lost: AsyncCkptError | None) -> bool:
        """The slot is sealed; from here the worker's news reach `future`.

        Args:
            snapshot: What was staged.
            future: To complete.
            lost: The worker was lost meanwhile.

        Returns:
            False when the save has failed already; then `future` is done.
        """
        with self._lock:
            row = self._rows.get(str(snapshot.save_id))
            error = lost or (row.early_error if row else None)
            if row is not None and error is None:
                row.snapshot, row.future = snapshot, future
                row.deadline = time.monotonic() + self._timeout_s + self._verdict_s
                return True
            self._rows.pop(str(snapshot.save_id), None)
        self._free(snapshot.save_id)
        future.fail(error or AsyncCkptError(f"save {snapshot.save_id} was never begun"))
        return False

    def news(self, row: Mapping[str, Any]) -> None:
        """Take in one row of the worker's `Saves`."""
        name, phase = str(row["save_id"]), row["phase"]
        if phase == save_phases.COMMITTED:
            self.end(name, None, row.get("report"))
        elif phase in save_phases.ENDED:
            self.end(name, from_wire(row.get("error") or {"text": f"save {name} was {phase} by the worker"}), None)
        else:
            with self._lock:
                found = self._rows.get(name)
            if found is None or found.future is None or found.snapshot is None:
                return
            found.missing = list(row.get("missing") or ())
            if phase == save_phases.DURABLE:
                if not found.future.durable.done():
                    found.future.durable.set_result(found.snapshot.report(row.get("report")))
                if not found.is_asked:
                    found.is_asked = True
                    self._on_durable(found.snapshot)

    def end(self, name: str, error: AsyncCkptError | None, facts: Mapping[str, Any] | None) -> None:
        """The save has ended; unknown names are ignored, since news may come twice."""
        with self._lock:
            row = self._rows.get(name)
            if row is None:
                return
            if row.future is None or row.snapshot is None:  # still staging: told to `staged`
                row.early_error = error
                return
            del self._rows[name]
        if error is not None:
            self._free(row.snapshot.save_id)
            row.future.fail(error)
            return
        self._on_committed(row.snapshot)
        self._free(row.snapshot.save_id)
        report = row.snapshot.report(facts)
        for future in (row.future.durable, row.future):
            if not future.done():
                future.set_result(report)

    def unended(self, save_id: SaveId | None, *, handed_over: bool = False, told: bool = False) -> Unended | None:
        """Return what another worker must know of a save; None: nothing, since it has ended.

        Args:
            save_id: Of the save, or None.
            handed_over: Its memory is being given to that worker, which may end it by what it finds there.
            told: That worker is being told of it.
        """
        with self._lock:
            row = self._rows.get(str(save_id))
            if row is None or row.early_error is not None:
                return None
            if handed_over and row.snapshot is not None:
                row.snapshot.resubmitted += 1
            row.is_asked = row.is_asked and not (told and row.snapshot is not None)
            was_known, row.is_known = row.is_known, row.is_known or handed_over or told
            return Unended(str(save_id), row.generation, row.announcement, row.snapshot, was_known)

    def lose_all(self, error: AsyncCkptError) -> None:
        """The worker is lost: every save that it had fails. The pool has orphaned the slots already."""
        self.lose(self.names(), error)

    def lose(self, names: Sequence[str], error: AsyncCkptError) -> None:
        """As `lose_all`, of these saves."""
        with self._lock:
            rows = {name: row for name in names if (row := self._rows.get(name)) is not None}
            for name, row in rows.items():
                if row.future is None:
                    row.early_error = error
                else:
                    del self._rows[name]
        for row in rows.values():
            if row.future is not None and row.snapshot is not None:
                self._free(row.snapshot.save_id)
                row.future.fail(error)

    def expire(self) -> None:
        """Fail the futures of saves that have run out of time; their rows and slots stay."""
        now = time.monotonic()
        with self._lock:
            late = [
                (name, row.future, row.missing)
                for name, row in self._rows.items()
                if row.future and not row.future.done() and now > row.deadline
            ]
        for name, future, missing in late:
            others = f"; ranks {missing[:20]} had not staged or written it" if missing else ""
            future.fail(
                CommitTimeoutError(
                    f"save {name} was not committed within commit_timeout_s={self._timeout_s:g}{others}; "
                    "the worker goes on with it",
                    missing_ranks=missing,
                    timeout_s=self._timeout_s,
                    save_id=name,
                )
            )

    def names(self) -> list[str]:
        """Return the ids of all rows."""
        with self._lock:
            return list(self._rows)

    def close(self, error: AsyncCkptError) -> None:
        """Fail what is left."""
        with self._lock:
            left = [r.future for r in self._rows.values() if r.future is not None]
            self._rows.clear()
        for future in left:
            future.fail(error)


MAX_OPEN = 64
"""Withdrawals that are kept until the worker has answered. More than saves are in flight at once."""


class Withdrawals:
    """See the module. Thread-safe.

    Args:
        send: Sends a request.
        lock: Of the client's tables.
        alone: There is but one rank: what cannot be sent at once is dropped, since nobody waits.
    """

    def __init__(self, send: Send, lock: threading.RLock, *, alone: bool) -> None:
        self._send, self._alone = send, alone
        self._lock = lock
        self._open: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._told: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """Those that a worker has answered, the latest: it may die before the other ranks hear of them."""

        self._without_run: list[tuple[int, str]] = []

    def add(self, save: str, reason: str, *, skipped: bool = False) -> None:
        """Withdraw a save, by its id; its epoch may be 0, unknown."""
        reason = reason[:200].encode(errors="replace").decode()  # torch's message may hold anything
        with self._lock:
            if not self._alone:
                self._open[save] = reason, skipped
                while len(self._open) > MAX_OPEN:
                    self._open.popitem(last=False)
        self._tell(save, reason, skipped)

    def lost(self, saves: Sequence[str]) -> None:
        """These were with a worker that is lost: a part of them may be with the next one, and wait for ours."""
        for save in saves:
            self.add(save, "the worker that had it was lost")

    def resend(self) -> None:
        """There is another session: say everything again that was not answered."""
        with self._lock:
            still = list(self._open.items())
        for save, (reason, skipped) in still:
            self._tell(save, reason, skipped)

    def again(self) -> None:
        """There is another worker: what the one before has answered may have died with it."""
        with self._lock:
            told, self._told = self._told, OrderedDict()
        for save, (reason, skipped) in told.items():
            self.add(save, reason, skipped=skipped)

    def before_the_run(self, sequence: int, reason: str) -> None:
        """A save was declined before this rank knew its run."""
        with self._lock:
            self._without_run = [*self._without_run, (sequence, reason)][-MAX_OPEN:]

    def run_is_known(self, run_id: str) -> None:
        """Withdraw what was declined before."""
        with self._lock:
            declined, self._without_run = self._without_run, []
        for sequence, reason in declined:
            self.add(str(SaveId(0, sequence, run_id)), reason)

    def _tell(self, save: str, reason: str, skipped: bool) -> None:
        build: Callable[[int], messages.Message] = lambda n: messages.Withdraw(  # noqa: E731
            id=n, save_id=save, reason=reason, skipped=skipped
        )
        asked = self._send(build)
        if asked is not None and not self._alone:
            asked.add_done_callback(lambda done: self._answered(save, done))

    def _answered(self, save: str, done: Future[messages.Message]) -> None:
        if not isinstance(done.exception(), WorkerUnavailableError):
            with self._lock:
                told = self._open.pop(save, None)
                if told is not None:
                    self._told[save] = told
                while len(self._told) > MAX_OPEN:
                    self._told.popitem(last=False)

"""The table of saves that have begun and not ended, on the trainer's side, and the completion of their futures.

`Withdrawals` tells workers of the saves in which this rank does not take part.

A row lives from `begin` until the worker reports that the save has ended. The slot is freed with the row, never before:
the worker may still read the slot of a save whose future has timed out.
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

StartDeferred = Callable[[Future[Any], Callable[[AsyncCkptError | None], None]], None]
"""Starts the deferred part of a copy. Takes the future to complete with it, and a function to call at its end: with
None once the slot is sealed, else with the error of a save that has been withdrawn."""


Announcement = Callable[[int, int], messages.Message]
"""Builds the Begin of a save from a request id and the slot's number."""


class UnfinishedSave(NamedTuple):
    """What the next worker must know of a save that no worker has reported as ended.

    Attributes:
        save_id: ID of the save.
        generation: Generation of its slot.
        announcement: Builds its Begin, if there is one.
        snapshot: The snapshot; None while it is being staged.
        is_known: A worker was told of the save, or has adopted its slot.
    """

    save_id: str
    generation: int
    announcement: Announcement | None
    snapshot: StagedSnapshot | None
    is_known: bool


class WriteFuture(Future[SaveReport]):
    """Completes when the checkpoint is committed; its `durable`, when this rank's files are durable; its `mirrored`,
    when the copy in the mirror is committed. `mirrored` is None without a mirror.
    """

    def __init__(self, *, has_mirror: bool = False) -> None:
        super().__init__()
        self.durable: Future[SaveReport] = Future()
        self.mirrored: Future[SaveReport] | None = Future() if has_mirror else None

    def fail(self, error: BaseException) -> None:
        """Set `error` on all of these futures, unless they are done."""
        for future in (self.durable, self, self.mirrored):
            if future is not None and not future.done():
                future.set_exception(error)


class StagedSnapshot:
    """The default stager's result: a slot that is sealed, or will be at the end of a deferred copy.

    Attributes:
        save_id, step, path: ID, step and directory of the save.
        slot: The slot.
        nbytes: Size of the shard files.
        seconds: Durations of the stages of `save()`.
        began: `time.perf_counter()` at the start of `save()`.
        extra: The arguments of `save()` that are for the commit hooks.
        start_deferred: Starts the deferred copy; None: the slot is sealed.
        details: Details of the report on `staged`.
        resubmitted: To how many workers, after the first, the slot was handed over.
        mirror: Where the checkpoint is copied to; "": nowhere.
        mirrored: Completes when the copy is committed; None without a mirror.
    """

    __slots__ = (
        *("began", "details", "extra", "mirror", "mirrored", "nbytes", "path", "resubmitted", "save_id", "seconds"),
        *("slot", "start_deferred", "step"),
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
        start_deferred: StartDeferred | None = None,
        details: Mapping[str, Any] | None = None,
        mirror: str = "",
    ) -> None:
        self.mirror = mirror
        self.mirrored: Future[SaveReport] | None = None
        self.save_id, self.step, self.path, self.slot = save_id, step, path, slot
        self.nbytes, self.seconds, self.began = nbytes, seconds, began
        self.extra, self.start_deferred, self.details = extra, start_deferred, dict(details or {})
        self.resubmitted = 0

    def report(self, facts: Mapping[str, Any] | None) -> SaveReport:
        """Return the report of the save, with `facts` from the worker."""
        details = dict(facts or {})
        seconds = {k.removeprefix("seconds_"): details.pop(k) for k in list(details) if k.startswith("seconds_")}
        if self.resubmitted:
            details["resubmitted"] = self.resubmitted
        return SaveReport(
            save_id=str(self.save_id),
            nbytes=int(details.pop("nbytes", self.nbytes)),
            seconds={**self.seconds, **seconds, "total": time.perf_counter() - self.began},
            details=details,
        )


class _Row:
    __slots__ = (
        *("announcement", "deadline", "early_error", "future", "generation", "is_durable_reported", "is_known"),
        *("missing", "snapshot"),
    )

    def __init__(self, announcement: Announcement | None, generation: int, *, is_known: bool) -> None:
        self.announcement, self.generation, self.is_durable_reported = announcement, generation, False
        self.is_known = is_known
        self.deadline = float("inf")
        self.missing: list[int] = []
        self.snapshot: StagedSnapshot | None = None
        self.future: WriteFuture | None = None
        self.early_error: AsyncCkptError | None = None


class PendingSaves:
    """The table of pending saves. Thread-safe; futures complete outside the lock, in the thread that calls.

    Args:
        lock: The lock of the client's tables.
        commit_timeout_s: How long after it was staged the futures of an uncommitted save fail.
        free: Gives a save's slot back to the pool.
        worker_report_s: Extra time for the worker to report that timeout itself, since it names the missing ranks.
        on_durable: Called when this rank's files are durable, once per save and worker.
        on_committed: Called before the slot is freed and `written` completes.
    """

    def __init__(
        self,
        lock: threading.RLock,
        *,
        commit_timeout_s: float,
        free: Callable[[SaveId], None],
        worker_report_s: float = 0.0,
        on_durable: Callable[[StagedSnapshot], None] = lambda snapshot: None,
        on_committed: Callable[[StagedSnapshot], None] = lambda snapshot: None,
    ) -> None:
        self._timeout_s, self._worker_report_s, self._free = commit_timeout_s, worker_report_s, free
        self._on_durable, self._on_committed = on_durable, on_committed
        self._lock = lock
        self._rows: dict[str, _Row] = {}

    def begin(
        self, save_id: SaveId, announcement: Announcement | None = None, generation: int = 0, *, is_known: bool = True
    ) -> None:
        """Add a save whose staging begins, into `generation` of a slot; `is_known`: a worker is told of it now."""
        with self._lock:
            self._rows[str(save_id)] = _Row(announcement, generation, is_known=is_known)

    def withdraw(self, save_id: SaveId) -> None:
        """Remove a save whose staging failed: its slot will never be sealed."""
        with self._lock:
            self._rows.pop(str(save_id), None)

    def is_staging(self, name: str) -> bool:
        """Whether the save was begun and `staged` was not called for it."""
        with self._lock:
            row = self._rows.get(name)
            return row is not None and row.future is None

    def early_error(self, save_id: SaveId) -> AsyncCkptError | None:
        """Return why the save has failed while it was being staged, or None."""
        with self._lock:
            row = self._rows.get(str(save_id))
            return row.early_error if row else None

    def staged(self, snapshot: StagedSnapshot, future: WriteFuture, lost: AsyncCkptError | None) -> bool:
        """Note that the slot is sealed: from here on, `future` completes when the save ends.

        Args:
            snapshot: What was staged.
            future: To complete.
            lost: The error, if the worker was lost meanwhile.

        Returns:
            False if the save has failed already; then `future` is done.
        """
        with self._lock:
            row = self._rows.get(str(snapshot.save_id))
            error = lost or (row.early_error if row else None)
            if row is not None and error is None:
                row.snapshot, row.future = snapshot, future
                row.deadline = time.monotonic() + self._timeout_s + self._worker_report_s
                return True
            self._rows.pop(str(snapshot.save_id), None)
        self._free(snapshot.save_id)
        future.fail(error or AsyncCkptError(f"save {snapshot.save_id} was never begun"))
        return False

    def update(self, row: Mapping[str, Any]) -> None:
        """Apply one row of the worker's `Saves`."""
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
                if not found.is_durable_reported:
                    found.is_durable_reported = True
                    self._on_durable(found.snapshot)

    def end(self, name: str, error: AsyncCkptError | None, facts: Mapping[str, Any] | None) -> None:
        """End a save. Unknown names are ignored: the worker may report an end twice."""
        with self._lock:
            row = self._rows.get(name)
            if row is None:
                return
            if row.future is None or row.snapshot is None:  # still being staged: `staged` fails with it
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

    def unfinished(
        self, save_id: SaveId | None, *, handed_over: bool = False, told: bool = False
    ) -> UnfinishedSave | None:
        """Return what the next worker must know of a save; None: nothing, since the save has ended.

        Args:
            save_id: ID of the save; None: no save uses the slot.
            handed_over: The worker is about to get the slot, and may end the save by what it finds there.
            told: The worker is about to be told of the save.
        """
        with self._lock:
            row = self._rows.get(str(save_id))
            if row is None or row.early_error is not None:
                return None
            if handed_over and row.snapshot is not None:
                row.snapshot.resubmitted += 1
            if told and row.snapshot is not None:
                row.is_durable_reported = False
            was_known, row.is_known = row.is_known, row.is_known or handed_over or told
            return UnfinishedSave(str(save_id), row.generation, row.announcement, row.snapshot, was_known)

    def fail_all(self, error: AsyncCkptError) -> None:
        """Fail every save: the worker is lost. The pool has orphaned the slots already."""
        self.fail(self.names(), error)

    def fail(self, names: Sequence[str], error: AsyncCkptError) -> None:
        """As `fail_all`, for these saves."""
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
        """Fail the futures of saves that have timed out; their rows and slots stay."""
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
                    "the worker continues with it",
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
        """Fail the futures of all rows, and remove the rows."""
        with self._lock:
            left = [r.future for r in self._rows.values() if r.future is not None]
            self._rows.clear()
        for future in left:
            future.fail(error)


MAX_WITHDRAWALS = 64
"""Maximum number of withdrawals that are kept, of each kind. More than saves are in flight at once."""


class Withdrawals:
    """Tells workers which saves this rank does not take part in, until one has answered. Thread-safe.

    Args:
        send: Sends a request.
        lock: The lock of the client's tables.
        alone: There is only one rank: what cannot be sent at once is dropped, since no other rank waits.
    """

    def __init__(self, send: Send, lock: threading.RLock, *, alone: bool) -> None:
        self._send, self._alone = send, alone
        self._lock = lock
        self._open: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        self._answered: OrderedDict[str, tuple[str, bool]] = OrderedDict()
        """The latest that a worker has answered: it may die before the other ranks hear of them."""

        self._without_run: list[tuple[int, str]] = []

    def add(self, save: str, reason: str, *, skipped: bool = False) -> None:
        """Withdraw a save by its id, whose epoch may be 0 (unknown)."""
        reason = reason[:200].encode(errors="replace").decode()  # torch's message may not be valid text
        with self._lock:
            if not self._alone:
                self._open[save] = reason, skipped
                while len(self._open) > MAX_WITHDRAWALS:
                    self._open.popitem(last=False)
        self._send_withdraw(save, reason, skipped)

    def add_lost(self, saves: Sequence[str]) -> None:
        """Withdraw saves of a lost worker: the next one may have other ranks' parts, and wait for this rank's."""
        for save in saves:
            self.add(save, "the worker that had it was lost")

    @property
    def has_unanswered(self) -> bool:
        """Whether a withdrawal was not answered: the worker may not know of it yet."""
        with self._lock:
            return bool(self._open)

    def resend(self) -> None:
        """Send everything again that was not answered: there is another session."""
        with self._lock:
            unanswered = list(self._open.items())
        for save, (reason, skipped) in unanswered:
            self._send_withdraw(save, reason, skipped)

    def repeat_answered(self) -> None:
        """Send again what the last worker has answered: it may have died before other ranks heard of it."""
        with self._lock:
            answered, self._answered = self._answered, OrderedDict()
        for save, (reason, skipped) in answered.items():
            self.add(save, reason, skipped=skipped)

    def add_before_run_known(self, sequence: int, reason: str) -> None:
        """A save was declined before this rank knew its run."""
        with self._lock:
            self._without_run = [*self._without_run, (sequence, reason)][-MAX_WITHDRAWALS:]

    def send_for_run(self, run_id: str) -> None:
        """Withdraw what was declined before."""
        with self._lock:
            declined, self._without_run = self._without_run, []
        for sequence, reason in declined:
            self.add(str(SaveId(0, sequence, run_id)), reason)

    def _send_withdraw(self, save: str, reason: str, skipped: bool) -> None:
        build: Callable[[int], messages.Message] = lambda n: messages.Withdraw(  # noqa: E731
            id=n, save_id=save, reason=reason, skipped=skipped
        )
        asked = self._send(build)
        if asked is not None and not self._alone:
            asked.add_done_callback(lambda done: self._on_answer(save, done))

    def _on_answer(self, save: str, done: Future[messages.Message]) -> None:
        if not isinstance(done.exception(), WorkerUnavailableError):
            with self._lock:
                withdrawal = self._open.pop(save, None)
                if withdrawal is not None:
                    self._answered[save] = withdrawal
                while len(self._answered) > MAX_WITHDRAWALS:
                    self._answered.popitem(last=False)

"""The trainer's end: finds or starts the worker, keeps the table of pending saves, and completes their futures.

`WorkerProcess` outlives sessions: when one is lost, pending saves fail, the slots are given up, and the next save opens
another session, starting a worker if none answers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from asyncckpt import launcher
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import (
    AsyncCkptError,
    CommitTimeoutError,
    ConfigError,
    CheckpointerClosedError,
    SaveFailedError,
    WorkerUnavailableError,
    from_wire,
)
from asyncckpt.format.names import SaveId
from asyncckpt.handle import SaveReport
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.parts import CheckpointProcess
from asyncckpt.protocol import lifecycle, messages
from asyncckpt.session import START_AFTER_S, Rows, Session, greeting
from asyncckpt.staging.slot_pool import LentSlot, SlotPool

RESTART_GRACE_S = 2.0
"""After a loss at an endpoint that the user named, its own supervisor may bring the worker back for so long."""

RETRY_AFTER_S = 60.0
RETRY_BUDGET_S = 1.0
"""While no worker could be reached for the last minute, a save tries for a second only: training goes on."""

SUBMIT_TIMEOUT_S = 1e6
"""A doorbell is repeated as long as the session lives; the session's own deadlines end it."""

_log = logging.getLogger("asyncckpt.client")


class WriteFuture(Future[SaveReport]):
    """A future of the commit; `durable` is one of this rank's files."""

    def __init__(self) -> None:
        super().__init__()
        self.durable: Future[SaveReport] = Future()


class StagedSnapshot:
    """The default stager's result: a sealed slot."""

    __slots__ = ("began", "nbytes", "path", "save_id", "seconds", "slot", "step")

    def __init__(
        self, *, save_id: SaveId, step: int, path: str, slot: LentSlot, nbytes: int, seconds: dict[str, float], began: float
    ) -> None:
        self.save_id, self.step, self.path, self.slot = save_id, step, path, slot
        self.nbytes, self.seconds, self.began = nbytes, seconds, began


class _Pending:
    __slots__ = ("deadline", "failed_early", "future", "snapshot")

    def __init__(self, deadline: float) -> None:
        self.deadline = deadline
        self.snapshot: StagedSnapshot | None = None
        self.future: WriteFuture | None = None
        self.failed_early: AsyncCkptError | None = None


class WorkerProcess(CheckpointProcess):
    """The worker, as seen from the trainer.

    Args:
        config: For the timeouts and slot policy.
        rank: Of this process.
        endpoint: `ipc://...`.
        named: The user named the endpoint.
        package: asyncckpt's version.
    """

    def __init__(self, config: CheckpointerConfig, rank: RankInfo, *, endpoint: str, named: bool, package: str) -> None:
        self.config, self.rank, self.endpoint = config, rank, endpoint
        self._named = named
        self._hello = greeting(rank.rank, rank.world_size, package)
        self._session: Session | None = None
        self._opening = threading.Lock()
        self._lock = threading.Lock()
        self._pending: dict[str, _Pending] = {}
        self._epochs: dict[str, int] = {}
        self._had_session = False
        self._failed_at = float("-inf")
        self._connecting: threading.Thread | None = None
        self._closed = False
        self.pool = SlotPool(config, self._allocate, self._release)

    # -- the session

    def connect(self, *, start: bool = True) -> Session:
        """Return the live session, opening one when there is none. Blocks up to `worker_start_timeout_s`.

        Raises:
            WorkerUnavailableError: Nobody answers. CheckpointerClosedError: After `close`.
        """
        with self._opening:
            if self._closed:
                raise CheckpointerClosedError("the checkpointer is closed")
            session = self._session
            if session is not None and session.error is None:
                return session
            if session is not None:
                session.close()
            session = Session(
                self.endpoint,
                hello=self._hello,
                worker_timeout_s=self.config.worker_timeout_s,
                pending=self._pending_ids,
                on_rows=self._on_rows,
                on_lost=self._on_lost,
            )
            grace = RESTART_GRACE_S if self._named and self._had_session else START_AFTER_S
            now = time.monotonic()
            brief = now - self._failed_at < RETRY_AFTER_S
            deadline = now + (min(RETRY_BUDGET_S, self.config.worker_start_timeout_s) if brief else self.config.worker_start_timeout_s)
            try:
                session.open(deadline, self._start_worker if start else None, grace)
            except AsyncCkptError:
                self._failed_at = time.monotonic()
                raise
            self._session, self._had_session, self._failed_at = session, True, float("-inf")
            return session

    def connect_soon(self) -> None:
        """Begin to connect in the background, so that the constructor does not wait for a worker to start."""

        def run() -> None:
            with contextlib.suppress(AsyncCkptError):
                self.connect()

        self._connecting = threading.Thread(target=run, name="asyncckpt-connect", daemon=True)
        self._connecting.start()

    def in_client_thread(self) -> bool:
        """Whether the caller runs in the thread that completes futures."""
        session = self._session
        return session is not None and threading.current_thread() is session.thread

    def flush(self, timeout_s: float) -> None:
        """Wait until the worker has answered every request, at most `timeout_s`."""
        session = self._session
        if session is not None:
            session.flush(timeout_s)

    def _start_worker(self) -> None:
        launcher.start_worker(self.endpoint)

    def _call(self, build: Callable[[int], messages.Message]) -> messages.Message:
        return self.connect().call(build, self.config.worker_timeout_s * 2)

    def epoch_for(self, path: str) -> int:
        """Return the epoch of this run for checkpoints beside `path`; the worker looks once per directory.

        Raises:
            WorkerUnavailableError, SaveFailedError: The worker cannot say.
        """
        parent = os.path.dirname(path)
        if parent not in self._epochs:
            reply = self._call(lambda n: messages.Lineage(id=n, path=path))
            assert isinstance(reply, messages.LineageFound)
            # A run's epoch never falls: its own later saves must stay the newest wherever they go.
            self._epochs[parent] = max([reply.epoch, *self._epochs.values()])
        return max(self._epochs.values())

    def _allocate(self, nbytes: int) -> LentSlot:
        session = self.connect()
        reply = session.call(lambda n: messages.Allocate(id=n, nbytes=nbytes, populate=True), self.config.worker_timeout_s * 2)
        assert isinstance(reply, messages.Granted)
        try:
            memory = SlotMemory.attach(session.worker.pid, reply.fd, reply.nbytes, reply.token)
        except (SlotError, OSError) as error:
            session.request(lambda n: messages.Release(id=n, slot=reply.slot), SUBMIT_TIMEOUT_S)
            raise WorkerUnavailableError(
                f"the worker's slot cannot be opened through /proc/{session.worker.pid}/fd: {error}; worker and trainer "
                "must run as the same user and share a PID namespace",
                endpoint=self.endpoint,
                detail="slot",
            ) from error
        return LentSlot(number=reply.slot, memory=memory)

    def _release(self, number: int) -> None:
        session = self._session
        if session is not None and session.error is None:
            session.request(lambda n: messages.Release(id=n, slot=number), SUBMIT_TIMEOUT_S)

    # -- saves

    def begin(self, save_id: SaveId, slot: LentSlot, *, step: int, path: str, nbytes: int, umask: int) -> None:
        """Announce a save whose staging begins now. Does not wait.

        Raises:
            WorkerUnavailableError: The worker was lost since the slot was acquired.
        """
        session = self._session
        if session is None or session.error is not None or slot.orphaned:
            raise (session.error if session else None) or WorkerUnavailableError("no worker", endpoint=self.endpoint)
        with self._lock:
            self._pending[str(save_id)] = _Pending(time.monotonic() + self.config.commit_timeout_s)
        begun = session.request(
            lambda n: messages.Begin(
                id=n,
                save_id=str(save_id),
                step=step,
                path=path,
                slot=slot.number,
                generation=slot.generation,
                nbytes=nbytes,
                umask=umask,
            ),
            SUBMIT_TIMEOUT_S,
        )
        begun.add_done_callback(lambda done: self._refused(save_id, done))

    def withdraw(self, save_id: SaveId, reason: str) -> None:
        """Take back a save that was begun and will not be sealed; its slot is free at once."""
        with self._lock:
            self._pending.pop(str(save_id), None)
        session = self._session
        if session is not None and session.error is None:
            session.request(
                lambda n: messages.Withdraw(id=n, save_id=str(save_id), reason=reason[:200]), SUBMIT_TIMEOUT_S
            )
        self.pool.free(save_id)

    def write(self, staging_result: Any, path: str, **kw: Any) -> WriteFuture:
        """Ring the doorbell for a sealed slot. Does not wait."""
        if not isinstance(staging_result, StagedSnapshot):
            raise ConfigError(
                f"the worker writes sealed slots, but the stager returned a {type(staging_result).__name__}; an own "
                "checkpoint_stager with other results needs its own checkpoint_process",
                field="checkpoint_process",
            )
        snapshot, future = staging_result, WriteFuture()
        name = str(snapshot.save_id)
        self.pool.staged(snapshot.slot)
        with self._lock:
            pending = self._pending.get(name)
            session = self._session
            lost = session is None or session.error is not None or snapshot.slot.orphaned
            if pending is not None and not lost and pending.failed_early is None:
                pending.snapshot, pending.future = snapshot, future
        if pending is None or lost or pending.failed_early is not None:
            with self._lock:
                self._pending.pop(name, None)
            self.pool.free(snapshot.save_id)
            early = pending.failed_early if pending else None
            _fail(future, early or (session.error if session else None) or WorkerUnavailableError("the worker was lost"))
            return future
        assert session is not None
        rung = session.request(
            lambda n: messages.Submit(
                id=n, save_id=name, slot=snapshot.slot.number, generation=snapshot.slot.generation
            ),
            SUBMIT_TIMEOUT_S,
        )
        rung.add_done_callback(lambda done: self._refused(snapshot.save_id, done))
        return future

    def _refused(self, save_id: SaveId, done: Future[messages.Message]) -> None:
        error = done.exception()
        if error is None or isinstance(error, WorkerUnavailableError):
            return  # a lost session ends every pending save itself
        self._end(str(save_id), error if isinstance(error, AsyncCkptError) else AsyncCkptError(repr(error)))

    def _end(self, name: str, error: AsyncCkptError | None, row: Mapping[str, Any] | None = None) -> None:
        with self._lock:
            pending = self._pending.get(name)
            if pending is None:
                return
            if pending.future is None:  # still staging: remembered until write() asks
                pending.failed_early = error
                return
            del self._pending[name]
            future, snapshot = pending.future, pending.snapshot
        assert snapshot is not None
        self.pool.free(snapshot.save_id)
        if error is not None:
            _fail(future, error)
        else:
            report = _report(snapshot, row or {})
            if not future.durable.done():
                future.durable.set_result(report)
            if not future.done():
                future.set_result(report)

    # -- called in the session's thread

    def _pending_ids(self) -> list[str]:
        self._check_deadlines()
        with self._lock:
            return list(self._pending)

    def _check_deadlines(self) -> None:
        now = time.monotonic()
        with self._lock:
            late = [(n, p) for n, p in self._pending.items() if p.future and not p.future.done() and now > p.deadline]
        for name, pending in late:
            # The entry stays, so that the slot is freed only when the worker says that the save has ended.
            assert pending.future is not None
            _fail(
                pending.future,
                CommitTimeoutError(
                    f"save {name} was not committed within commit_timeout_s={self.config.commit_timeout_s:g}; "
                    "the worker goes on with it",
                    missing_ranks=[],
                    timeout_s=self.config.commit_timeout_s,
                    save_id=name,
                ),
            )

    def _on_rows(self, rows: Rows) -> None:
        for row in rows:
            name, phase = str(row["save_id"]), row["phase"]
            if phase in lifecycle.ENDED:
                error = None if phase == lifecycle.COMMITTED else from_wire(row.get("error") or {"text": f"save {phase}"})
                self._end(name, error, row)
            elif phase == lifecycle.DURABLE:
                with self._lock:
                    pending = self._pending.get(name)
                if pending is not None and pending.future is not None and pending.snapshot is not None:
                    if not pending.future.durable.done():
                        pending.future.durable.set_result(_report(pending.snapshot, row))

    def _on_lost(self, error: WorkerUnavailableError) -> None:
        _log.warning("%s", error)
        with self._lock:
            ended = [(n, p) for n, p in self._pending.items()]
            for name, pending in ended:
                if pending.future is None:
                    pending.failed_early = error
                else:
                    del self._pending[name]
        self.pool.orphan_all()
        for _, pending in ended:
            if pending.future is not None:
                _fail(pending.future, error)

    # -- the end

    def pending_names(self) -> list[str]:
        """Return the save ids that have not ended."""
        with self._lock:
            return list(self._pending)

    def close(self) -> None:
        """Say goodbye, end the session, unmap the slots. Saves that are pending are left to the worker."""
        with self._opening:
            if self._closed:
                return
            self._closed = True
            session, self._session = self._session, None
        if session is not None:
            if session.error is None:
                try:
                    session.call(lambda n: messages.Goodbye(id=n), min(2.0, self.config.worker_timeout_s))
                except AsyncCkptError as error:
                    _log.debug("goodbye was not answered: %s", error)
            session.close()
        if self._connecting is not None:
            self._connecting.join(self.config.worker_start_timeout_s)
        with self._lock:
            left = [p.future for p in self._pending.values() if p.future is not None]
            self._pending.clear()
        for future in left:
            _fail(future, CheckpointerClosedError("the checkpointer was closed; the worker goes on with this save"))
        self.pool.close()

    def close_inherited_fds(self) -> None:
        """In a forked child: drop the child's copies of our fds."""
        self.pool.close_inherited_fds()
        if self._session is not None:
            self._session.close_inherited_fds()


def _fail(future: WriteFuture, error: BaseException) -> None:
    for one in (future.durable, future):
        if not one.done():
            one.set_exception(error)


def _report(snapshot: StagedSnapshot, row: Mapping[str, Any]) -> SaveReport:
    facts = dict(row.get("report") or {})
    seconds = {k.removeprefix("seconds_"): facts.pop(k) for k in list(facts) if k.startswith("seconds_")}
    total = time.perf_counter() - snapshot.began
    return SaveReport(
        save_id=str(snapshot.save_id),
        nbytes=int(facts.pop("nbytes", snapshot.nbytes)),
        seconds={**snapshot.seconds, **seconds, "total": total},
        details=facts,
    )

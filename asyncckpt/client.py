"""The trainer's end: finds or starts the worker, keeps the table of pending saves, and completes their futures.

`WorkerProcess` outlives sessions: when one is lost, pending saves fail, the slots are given up, and the next save opens
another session, starting a worker if none answers.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncckpt import launcher
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, ConfigError, WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.lineage import Lineage
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.parts import CheckpointProcess
from asyncckpt.pending import PendingSaves, StagedSnapshot, WriteFuture
from asyncckpt.protocol import messages
from asyncckpt.session import START_AFTER_S, Session, greeting
from asyncckpt.session_thread import Rows
from asyncckpt.staging.slot_pool import LentSlot, SlotPool

RESTART_GRACE_S = 2.0
"""After a loss at an endpoint that the user named, its own supervisor may bring the worker back for so long."""

RETRY_BUDGET_S = 1.0
"""After a worker could not be reached, or fell silent, a save tries for a second only: training goes on. A worker that
is started meanwhile is found by the next save."""

GOODBYE_TIMEOUT_S = 2.0
SUBMIT_TIMEOUT_S = 1e6
"""A doorbell is repeated as long as the session lives; the session's own deadlines end it."""

_log = logging.getLogger("asyncckpt.client")


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
        self.lineage = Lineage(self._ask_epoch)
        self._had_session = False
        self._unreachable = False
        self._opening_session: Session | None = None
        self._connecting: threading.Thread | None = None
        self._closed = False
        self.pool = SlotPool(config, self._allocate, self._release)
        self._pending = PendingSaves(commit_timeout_s=config.commit_timeout_s, free=self.pool.free)

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
                pending=self._asked_for,
                on_rows=self._on_rows,
                on_lost=self._on_lost,
            )
            grace = RESTART_GRACE_S if self._named and self._had_session else START_AFTER_S
            now = time.monotonic()
            brief = self._unreachable
            budget_s = self.config.worker_start_timeout_s
            deadline = now + (min(RETRY_BUDGET_S, budget_s) if brief else budget_s)
            self._opening_session = session
            try:
                if self._closed:  # set before `close` looked for a session to give up
                    raise CheckpointerClosedError("the checkpointer is closed")
                session.open(deadline, partial(launcher.start_worker, self.endpoint) if start else None, grace)
            except AsyncCkptError:
                self._unreachable = True
                session.close()
                raise
            finally:
                self._opening_session = None
            self._session, self._had_session, self._unreachable = session, True, False
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

    def _call(self, build: Callable[[int], messages.Message]) -> messages.Message:
        return self.connect().call(build, self.config.worker_timeout_s * 2)

    def _ask_epoch(self, path: str) -> int:
        reply = self._call(lambda n: messages.Lineage(id=n, path=path))
        assert isinstance(reply, messages.LineageFound)
        return reply.epoch

    def _allocate(self, nbytes: int) -> LentSlot:
        session = self.connect()
        reply = session.call(
            lambda n: messages.Allocate(id=n, nbytes=nbytes, populate=True), self.config.worker_timeout_s * 2
        )
        assert isinstance(reply, messages.Granted)
        try:
            memory = SlotMemory.attach(session.worker.pid, reply.fd, reply.nbytes, reply.token)
        except (SlotError, OSError) as error:
            session.request(lambda n: messages.Release(id=n, slot=reply.slot), SUBMIT_TIMEOUT_S)
            raise WorkerUnavailableError(
                f"the worker's slot cannot be opened through /proc/{session.worker.pid}/fd: {error}; worker and "
                "trainer must run as the same user and share a PID namespace",
                endpoint=self.endpoint,
                detail="slot",
            ) from error
        return LentSlot(number=reply.slot, memory=memory, session=session.name)

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
        session, lost = self._session, self._lost(slot)
        if lost is not None or session is None:
            slot.orphaned = True  # it may have been lent by a session that was lost before the pool knew of it
            raise lost or WorkerUnavailableError("there is no worker", endpoint=self.endpoint)
        self._pending.begin(save_id)
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
                fsync=self.config.fsync,
            ),
            SUBMIT_TIMEOUT_S,
        )
        begun.add_done_callback(lambda done: self._answered(save_id, done))

    def withdraw(self, save_id: SaveId, reason: str) -> None:
        """Take back a save that will not be sealed; its slot is free at once."""
        session = self._session
        if session is not None and session.error is None:
            reason = reason[:200].encode(errors="replace").decode()  # torch's message may hold anything
            session.request(lambda n: messages.Withdraw(id=n, save_id=str(save_id), reason=reason), SUBMIT_TIMEOUT_S)
        self._pending.withdraw(save_id)

    def write(self, staging_result: Any, path: str, **kw: Any) -> WriteFuture:
        """Ring the doorbell for a sealed slot. Does not wait.

        Raises:
            ConfigError: The stager's result is no sealed slot.
        """
        if not isinstance(staging_result, StagedSnapshot):
            raise ConfigError(
                f"the worker writes sealed slots, but the stager returned a {type(staging_result).__name__}; an own "
                "checkpoint_stager with other results needs its own checkpoint_process",
                field="checkpoint_process",
            )
        snapshot, future, session = staging_result, WriteFuture(), self._session
        if (self._lost(snapshot.slot) or self._pending.early_error(snapshot.save_id)) is not None:
            # While the pool still counts it as being staged, nobody else unmaps it. Sealed, it would be taken up when
            # this process dies, and a save that was reported as failed would be committed.
            snapshot.slot.memory.control.discard()
        self.pool.staged(snapshot.slot)
        if self._pending.staged(snapshot, future, self._lost(snapshot.slot)) and session is not None:
            rung = session.request(
                lambda n: messages.Submit(
                    id=n, save_id=str(snapshot.save_id), slot=snapshot.slot.number, generation=snapshot.slot.generation
                ),
                SUBMIT_TIMEOUT_S,
            )
            rung.add_done_callback(lambda done: self._answered(snapshot.save_id, done))
        return future

    def _lost(self, slot: LentSlot) -> AsyncCkptError | None:
        session = self._session
        if session is not None and session.error is None and session.name == slot.session and not slot.orphaned:
            return None
        return (session.error if session else None) or WorkerUnavailableError(
            f"the worker at {self.endpoint} was lost while the state was being staged", endpoint=self.endpoint
        )

    def _answered(self, save_id: SaveId, done: Future[messages.Message]) -> None:
        error = done.exception()
        if error is None or isinstance(error, WorkerUnavailableError):
            return  # a lost session ends every pending save itself
        self._pending.end(
            str(save_id), error if isinstance(error, AsyncCkptError) else AsyncCkptError(repr(error)), None
        )

    # -- called in the session's thread

    def _asked_for(self) -> list[str]:
        self._pending.expire()
        return self._pending.names()

    def _on_rows(self, rows: Rows) -> None:
        for row in rows:
            self._pending.news(row)

    def _on_lost(self, error: WorkerUnavailableError) -> None:
        _log.warning("%s", error)
        if error.detail == "silent":
            self._unreachable = True  # it may hang for long, and holds the endpoint
        self.pool.orphan_all()
        self._pending.lose_all(error)

    # -- the end

    def close(self, goodbye_timeout_s: float = GOODBYE_TIMEOUT_S) -> None:
        """Say goodbye, end the session, unmap the slots. Saves that are pending are left to the worker.

        Blocks: for the answer to the goodbye, at most `goodbye_timeout_s`; a connection in the making is given up.
        """
        was_closed, self._closed = self._closed, True
        if was_closed:
            return
        opening = self._opening_session
        if opening is not None:
            opening.close()
        with self._opening:
            session, self._session = self._session, None
        if session is not None:
            if session.error is None:
                try:
                    session.call(lambda n: messages.Goodbye(id=n), goodbye_timeout_s)
                except AsyncCkptError as error:
                    _log.debug("goodbye was not answered: %s", error)
            session.close()
        if self._connecting is not None:
            self._connecting.join(goodbye_timeout_s)
        self._pending.close(CheckpointerClosedError("the checkpointer was closed; the worker goes on with this save"))
        self.pool.close()

    def close_inherited_fds(self) -> None:
        """In a forked child: drop the child's copies of our fds."""
        self.pool.close_inherited_fds()
        if self._session is not None:
            self._session.close_inherited_fds()

"""The trainer's end: finds or starts the worker, keeps the table of pending saves, and completes their futures.

`WorkerProcess` outlives sessions: when one is lost, pending saves fail, the slots are given up, and the next save opens
another session, starting a worker if none answers.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncckpt.board import BoardExchange
from asyncckpt.changes import NOT_AGREED, Changes, Run
from asyncckpt.config import CheckpointerConfig
from asyncckpt.connection import CLOSE_TIMEOUT_S, Connection
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, ConfigError, WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.hooks import HookRunner
from asyncckpt.lineage import BRIEF_S, Lineage
from asyncckpt.parts import CheckpointProcess
from asyncckpt.pending import PendingSaves, StagedSnapshot, WriteFuture
from asyncckpt.protocol import messages
from asyncckpt.session import Session, greeting
from asyncckpt.slot_lender import SlotLender
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.slot_pool import SlotPool
from asyncckpt.withdrawals import Withdrawals

MAX_SETTLED = 64
"""Saves of which it is remembered that somebody sees to their end. More than are in flight at once."""

SUBMIT_TIMEOUT_S = 1e6
"""A doorbell is repeated as long as the session lives; the session's own deadlines end it."""

VERDICT_S = 1.0
"""Chosen: the worker looks at the clock several times a second."""

_log = logging.getLogger("asyncckpt.client")


class WorkerProcess(CheckpointProcess):
    """The worker, as seen from the trainer.

    Args:
        config: For the timeouts and slot policy.
        run: Of this process's rank.
        endpoint: `ipc://...`.
        named: The user named the endpoint.
        package: asyncckpt's version.
        hooks: The user's commit hooks.
    """

    def __init__(
        self,
        config: CheckpointerConfig,
        run: Run,
        *,
        endpoint: str,
        named: bool,
        package: str,
        hooks: HookRunner | None = None,
    ) -> None:
        self.config, self.run, self.endpoint, self.hooks = config, run, endpoint, hooks or HookRunner(None)
        self._changes = Changes(run, self._send)
        self._withdrawals = Withdrawals(self._send, alone=run.alone)
        self._connection = Connection(
            endpoint,
            named=named,
            config=config,
            greet=partial(greeting, run.rank.rank, run.rank.world_size, package),
            pending=self._asked_for,
            on_saves=self._on_saves,
            on_lost=self._on_lost,
        )
        self.connect_soon = self._connection.connect_soon
        self.lineage = Lineage(self._ask_epoch)
        lender = SlotLender(self.connect, self._send, endpoint, timeout_s=2 * config.worker_timeout_s)
        self.pool = SlotPool(config, lender.allocate, lender.release)
        self._pending = PendingSaves(
            commit_timeout_s=config.commit_timeout_s,
            free=self.pool.free,
            verdict_s=0.0 if run.alone else VERDICT_S,
            on_durable=self._ask_hook,
            on_committed=lambda snapshot: self.hooks.after(snapshot.path, snapshot.extra),
        )
        self.settled: deque[int] = deque(maxlen=MAX_SETTLED)  # sequences of saves that `decline` need not end

    def connect(self, *, start: bool = True) -> Session:
        """Return the live session, opening one when there is none; see `Connection.connect`."""
        session = self._connection.connect(start=start)
        if self._changes.connected(session.name, session.worker.instance):
            self._withdrawals.resend()
        return session

    def in_client_thread(self) -> bool:
        """Whether the caller runs in the thread that completes futures."""
        session = self._connection.session
        return session is not None and threading.current_thread() is session.thread

    def flush(self, timeout_s: float) -> None:
        """Wait until the worker has answered every request, at most `timeout_s`."""
        session = self._connection.session
        if session is not None:
            session.flush(timeout_s)

    def call(self, build: Callable[[int], messages.Message], timeout_s: float) -> messages.Message:
        """Send a request, connecting where that is needed, and return the worker's reply; as `Session.call`."""
        return self.connect().call(build, timeout_s)

    def _send(self, build: Callable[[int], messages.Message]) -> Future[messages.Message] | None:
        """Send a request that is repeated as long as the session lives; None without a session."""
        session = self._connection.session
        return None if session is None or session.error is not None else session.request(build, SUBMIT_TIMEOUT_S)

    def board(self) -> BoardExchange:
        """Return the exchange of the ranks that have this worker."""
        return BoardExchange(self.run.rank, self.call, timeout_s=self.config.worker_timeout_s)

    def _ask_epoch(self, path: str, run: str, brief: bool) -> int:
        timeout_s = BRIEF_S if brief else self.config.worker_timeout_s
        reply = self.call(lambda n: messages.Lineage(id=n, run=run, path=path), timeout_s)
        assert isinstance(reply, messages.LineageFound)
        return reply.epoch

    # -- saves

    def begin(self, save_id: SaveId, slot: LentSlot, *, step: int, path: str, nbytes: int, umask: int) -> None:
        """Announce a save whose staging begins now. Does not wait.

        Raises:
            WorkerUnavailableError: The worker was lost since the slot was acquired.
        """
        session, lost = self._connection.session, self._lost(slot)
        if lost is not None or session is None:
            slot.orphaned = True  # it may have been lent by a session that was lost before the pool knew of it
            raise lost or WorkerUnavailableError("there is no worker", endpoint=self.endpoint)
        self._withdrawals.run_is_known(save_id.run_id)
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
                overwrite=self.config.overwrite,
                commit_timeout_s=self.config.commit_timeout_s,
            ),
            SUBMIT_TIMEOUT_S,
        )
        begun.add_done_callback(lambda done: self._answered(save_id, done))

    def withdraw(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """Take back a save that will not be sealed; its slot is free at once, and it ends on all ranks."""
        self.settled.append(save_id.sequence)
        self._withdrawals.add(str(save_id), reason, skipped=skipped)
        self._pending.withdraw(save_id)
        self.pool.give_up(save_id)

    def decline(self, save_id: SaveId, reason: str) -> None:
        """`save()` has failed: see to it that nothing of it stays, and that no other rank waits for this one.

        Args:
            save_id: As the checkpointer numbered it; its epoch, and the run of several ranks, need not be known.
            reason: For the other ranks.
        """
        if save_id.sequence in self.settled:
            return None  # withdrawn, or handed over, already
        run = self.run
        if not run.alone:
            save_id = save_id._replace(run_id=run.run_id)
        tail = f"-{save_id.sequence:08d}-{save_id.run_id}"
        for name in self._pending.names():
            if name.endswith(tail) and self._pending.is_staging(name):
                return self.withdraw(SaveId.parse(name), reason)
        if not run.alone and run.knows_run:
            self.withdraw(save_id, reason if run.agreement is not None else NOT_AGREED + reason)
        elif not run.alone:
            self._withdrawals.before_the_run(save_id.sequence, reason)
            run.refuse(save_id.sequence, reason)
        return None

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
        snapshot, future, session = staging_result, WriteFuture(), self._connection.session
        self.settled.append(snapshot.save_id.sequence)
        if (self._lost(snapshot.slot) or self._pending.early_error(snapshot.save_id)) is not None:
            # While the pool still counts it as being staged, nobody else unmaps it. Sealed, it would be taken up when
            # this process dies, and a save that was reported as failed would be committed.
            snapshot.slot.memory.control.discard()
            self._withdrawals.add(str(snapshot.save_id), "the worker refused this rank's part of it, or was lost")
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
        session = self._connection.session
        if session is not None and session.error is None and session.name == slot.session and not slot.orphaned:
            return None
        return (session.error if session else None) or WorkerUnavailableError(
            f"the worker at {self.endpoint} was lost while the state was being staged", endpoint=self.endpoint
        )

    def _answered(self, save_id: SaveId, done: Future[messages.Message]) -> None:
        error, session = done.exception(), self._connection.session
        lost = isinstance(error, WorkerUnavailableError) and (session is None or session.error is not None)
        if error is None or lost:
            return  # a lost session ends every pending save itself; a worker that drains refuses this one only
        if not self.run.alone:
            self._withdrawals.add(str(save_id), f"the worker refused this rank's part: {error}")
        self._pending.end(
            str(save_id), error if isinstance(error, AsyncCkptError) else AsyncCkptError(repr(error)), None
        )

    # -- called in the session's thread

    def _asked_for(self) -> list[str]:
        self._pending.expire()
        return self._pending.names()

    def _on_saves(self, reply: messages.Saves) -> None:
        # The rows last: whoever waits for a save that has failed may begin the next one at once.
        self._changes.seen(reply.changes, reply.leader)
        for row in reply.saves:
            if str(((row.get("error") or {}).get("fields") or {}).get("detail")).startswith(NOT_AGREED):
                self.run.forget(SaveId.parse(row["save_id"]).sequence)
            self._pending.news(row)

    def _ask_hook(self, snapshot: StagedSnapshot) -> None:
        if self.hooks.asks:
            veto = self.hooks.before(snapshot.path, snapshot.extra)
            reason = "" if veto is None else veto[:200].encode(errors="replace").decode()
            self._send(
                lambda n: messages.Consent(id=n, save_id=str(snapshot.save_id), granted=veto is None, reason=reason)
            )

    def _on_lost(self, error: WorkerUnavailableError) -> None:
        _log.warning("%s", error)
        self._withdrawals.lost(self._pending.names())
        self.pool.orphan_all()
        self._pending.lose_all(error)

    # -- the end

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S, *, at_exit: bool = False) -> None:
        """Say goodbye, end the session, unmap the slots. Saves that are pending are left to the worker.

        Blocks: at most `timeout_s`, in all; a connection in the making is given up.

        Args:
            timeout_s: See above.
            at_exit: The interpreter ends: nobody can wait for the futures any more, and their callbacks, which may
                block, are not run.
        """
        if self._connection.close(timeout_s):
            self._end(complete=not at_exit)

    def abandon(self) -> None:
        """As `close`, from a destructor: waits for nothing; the session's thread says goodbye and frees everything."""
        if self._connection.abandon(self._end):
            self._end()

    def _end(self, *, complete: bool = True) -> None:
        self.pool.close()
        if complete:
            text = "the checkpointer was closed; the worker goes on with this save"
            self._pending.close(CheckpointerClosedError(text))

    def close_inherited_fds(self) -> None:
        """In a forked child: drop the child's copies of our fds."""
        self.pool.close_inherited_fds()
        session = self._connection.session
        if session is not None:
            session.close_inherited_fds()

"""The trainer's end: finds or starts the worker, keeps the table of pending saves, and completes their futures.

`WorkerProcess` outlives sessions. When the worker is proved dead, another one is found or started and gets the slots
(`takeover`); when it hangs, or `on_worker_loss="fail"`, pending saves fail, the slots are given up, and the next save
opens another session.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from asyncckpt.board import BoardExchange
from asyncckpt.config import CheckpointerConfig
from asyncckpt.connection import CLOSE_TIMEOUT_S, Connection
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, ReplicaMismatchError, WorkerUnavailableError
from asyncckpt.hooks import HookRunner
from asyncckpt.lineage import BRIEF_S, Lineage
from asyncckpt.outcomes import Run
from asyncckpt.pending import PendingSaves, StagedSnapshot
from asyncckpt.protocol import messages, save_phases
from asyncckpt.session import Session, greeting
from asyncckpt.slot_lender import SlotLender, while_workers_die
from asyncckpt.slow_saves import why_saves_do_not_end
from asyncckpt.staging.slot_pool import SlotPool
from asyncckpt.submitting import SUBMIT_TIMEOUT_S, Submitting
from asyncckpt.takeover import MAX_HANDOVERS, Takeover
from asyncckpt.withdrawals import Withdrawals

MAX_FAILED = 16
"""Saves that ended with an error, of which the next worker is told: other ranks may not have heard of it."""

VERDICT_S = 1.0
"""Chosen: the worker looks at the clock several times a second."""

_log = logging.getLogger("asyncckpt.client")


class WorkerProcess(Submitting):
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
        super().__init__()
        self.config, self.run, self.endpoint, self.hooks = config, run, endpoint, hooks or HookRunner(None)
        self._withdrawals = Withdrawals(self._send, alone=run.alone)
        self._connection = Connection(
            endpoint,
            named=named,
            config=config,
            greet=partial(greeting, run.rank.rank, run.rank.world_size, package),
            pending=self._asked_for,
            on_saves=self._on_saves,
            on_open=self._on_open,
            on_lost=self._on_lost,
            options=run.links.start_options,
        )
        self.connect_soon = self._connection.connect_soon
        self.lineage = Lineage(self._ask_epoch)
        self._attempts = 1 + MAX_HANDOVERS if config.on_worker_loss == "resubmit" else 1
        lender = SlotLender(
            self.connect,
            lambda: self._connection.session,
            self._send,
            endpoint,
            timeout_s=2 * config.worker_timeout_s,
            attempts=self._attempts,
        )
        self.pool = SlotPool(
            config, lender.allocate, lender.give_back, lambda: why_saves_do_not_end(self._connection.session)
        )
        self._pending = PendingSaves(
            commit_timeout_s=config.commit_timeout_s,
            free=self.pool.free,
            verdict_s=0.0 if run.alone else VERDICT_S,
            on_durable=self._ask_hook,
            on_committed=self._committed,
        )
        self._takeover = Takeover(
            self.pool,
            self._pending,
            self._handing,
            endpoint=endpoint,
            timeout_s=config.worker_timeout_s,
            announce=self._say_again,
            on_given_up=self._give_up,
        )
        self._last_instance, self._last_session = "", ""
        self._is_retired = False
        self._failed: deque[str] = deque(maxlen=MAX_FAILED)
        self._consents: dict[str, str | None] = {}

    def connect(self, *, start: bool = True) -> Session:
        """Return the live session, opening one when there is none; see `Connection.connect`."""
        session = self._connection.connect(start=start)
        if session.name != self._last_session:
            self._last_session = session.name
            self._withdrawals.resend()
        return session

    def in_client_thread(self) -> bool:
        """Whether the caller runs in the thread that completes futures."""
        session = self._connection.session
        current = threading.current_thread()
        return self._takeover.in_thread() or (session is not None and current is session.thread)

    def flush(self, timeout_s: float) -> None:
        """Wait until a worker has been told everything, and has answered, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._takeover.join(timeout_s)
        session = self._connection.session
        if session is not None:
            session.flush(max(0.0, deadline - time.monotonic()))

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
        build: Callable[[int], messages.Message] = lambda n: messages.Lineage(id=n, run=run, path=path)  # noqa: E731
        reply = while_workers_die(self.connect, lambda session: session.call(build, timeout_s), self._attempts)
        assert isinstance(reply, messages.LineageFound)
        return reply.epoch

    # -- called in the session's thread

    def _asked_for(self) -> list[str]:
        self._pending.expire()
        return self._pending.names()

    def _on_saves(self, reply: messages.Saves) -> None:
        # The rows last: whoever waits for a save that has failed may begin the next one at once.
        self.run.outcomes.take(reply.run, reply.outcomes)
        for row in reply.saves:
            error = row.get("error") or {}
            if error.get("code") == ReplicaMismatchError.wire_code:
                self.run.differs(str((error.get("fields") or {}).get("fqn")))
            if row["phase"] in (save_phases.FAILED, save_phases.ABANDONED) and row["save_id"] not in self._failed:
                self._failed.append(row["save_id"])
            self._pending.news(row)

    def _ask_hook(self, snapshot: StagedSnapshot) -> None:
        if not self.hooks.asks:
            return
        save = str(snapshot.save_id)
        if save not in self._consents:  # what it said to a worker that has died holds for the next one
            self._consents[save] = self.hooks.before(snapshot.path, snapshot.extra)
        for old in list(self._consents)[:-MAX_FAILED]:
            del self._consents[old]
        veto = self._consents[save]
        reason = "" if veto is None else veto[:200].encode(errors="replace").decode()
        self._send(lambda n: messages.Consent(id=n, save_id=save, granted=veto is None, reason=reason))

    def _committed(self, snapshot: StagedSnapshot) -> None:
        self.pool.committed(snapshot.save_id)
        self.hooks.after(snapshot.path, snapshot.extra)

    def _on_lost(self, session: Session, error: WorkerUnavailableError) -> None:
        _log.warning("%s", str(error))  # a log that keeps the error keeps its traceback, and the state that was saved
        self.run.outcomes.worker_lost()
        handed_on = self._hands_on(error)
        with self._handing:
            self._note_loss(session.name, is_handed_on=handed_on)
        if not handed_on:
            self._withdrawals.lost(self._pending.names())
            self.pool.orphan_all()
            self._pending.lose_all(error)
        elif self._pending.names() or self._keeps() or self.run.links.leads:
            self._takeover.begin(self._connection)

    def _keeps(self) -> bool:
        """Whether the next worker is to have, at once, what it keeps in memory for who comes after this trainer."""
        return self.config.keep_in_memory == "latest" and any(slot.committed for slot in self.pool.held())

    # -- called where a session is opened

    def _on_open(self, session: Session) -> None:
        """A new session: hand over what a dead worker had, and say what the other ranks may not know."""
        # IMPORTANT: first, so that the worker knows who decides on the saves that it is about to find.
        self.run.links.say_again(lambda build: session.request(build, SUBMIT_TIMEOUT_S))
        self._takeover.hand_over(session)
        failed, self._failed = self._failed, deque(maxlen=MAX_FAILED)
        if not self.run.alone and self._last_instance not in ("", session.worker.instance):
            self._withdrawals.again()
            self._withdrawals.lost(list(failed))
        self._last_instance = session.worker.instance

    def _give_up(self, saves: list[str], error: AsyncCkptError) -> None:
        self._withdrawals.lost(saves)
        self._pending.lose(saves, error)

    # -- the end

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S, *, at_exit: bool = False) -> None:
        """Say goodbye, end the session, unmap the slots. Saves that are pending are left to the worker.

        Where another worker is still being found for saves of a dead one, all that happens once it has them.

        Blocks: at most `timeout_s`, in all; a connection in the making is given up.

        Args:
            timeout_s: See above.
            at_exit: The interpreter ends: nobody can wait for the futures any more, and their callbacks, which may
                block, are not run.
        """
        if self._is_left:
            return
        deadline = time.monotonic() + timeout_s
        session = self._connection.session
        if session is not None and session.error is not None:
            session.close(timeout_s / 4)  # it may be about to tell of its loss
        self._takeover.join(timeout_s / 2)
        tells = session is not None and session.error is not None and session.thread.is_alive()
        # IMPORTANT: what is staged, and no worker has yet, would be lost.
        if not at_exit and (tells or self._takeover.is_under_way):
            self._is_left = True
            return self.abandon()
        if at_exit and self._takeover.is_under_way and (names := self._pending.names()):
            _log.error("the interpreter ends before another worker was found: the saves %s are lost", ", ".join(names))
        if self._connection.close(max(0.0, deadline - time.monotonic())):
            self._takeover.join(max(0.0, deadline - time.monotonic()))
            self._end(complete=not at_exit)

    def abandon(self) -> None:
        """As `close`, from a destructor: waits for nothing; the session's thread says goodbye and frees everything."""
        if self._takeover.afterwards(self.abandon):
            return
        if self._connection.abandon(self._session_ended, after_saves=self._is_retired):
            self._end()

    def retire(self) -> None:
        """As `abandon`, once no save is pending any more: until then their futures complete as ever."""
        self._is_retired = True
        self.abandon()

    @property
    def has_ended(self) -> bool:
        """Whether it was closed, or has ended after `abandon` or `retire`."""
        return self._connection.is_closed

    def _session_ended(self) -> None:
        """Abandoned, and its session has said goodbye, or was lost: then another worker gets what it had."""
        if not self._takeover.afterwards(self.abandon):
            self._end()

    def _end(self, *, complete: bool = True) -> None:
        self._connection.shut()
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

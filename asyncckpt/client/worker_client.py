"""The trainer's end: finds or starts the worker, tells it of each save, and completes the futures of pending saves.

`WorkerClient` outlives sessions. When the worker is proved dead, another one is found or started and gets the slots
(`failover`); when it hangs, or `on_worker_loss="fail"`, pending saves fail, the slots are given up, and the next save
opens another session. Between the death of a worker and the takeover by another one there is nobody to tell: what is
told then is remembered in the table of pending saves, and `failover` says it.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.client.connection import CLOSE_TIMEOUT_S, Connection, why_saves_do_not_end
from asyncckpt.client.failover import MAX_HANDOVERS, Takeover
from asyncckpt.client.pending_saves import PendingSaves, StagedSnapshot, Unended, Withdrawals, WriteFuture
from asyncckpt.client.save_outcomes import Run
from asyncckpt.client.session import CLOSED, DIED, Session, greeting
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_lender import SlotLender, while_workers_die
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.client.worker_board import BoardExchange
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CheckpointProcess
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    ConfigError,
    ReplicaMismatchError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import STATE_SEALED, STATE_STREAMED
from asyncckpt.protocol import messages, save_phases
from asyncckpt.protocol.save_phases import NOT_AGREED

BRIEF_S = 1.0
RETRY_AFTER_S = 60.0
"""While the directory cannot be looked at (a wedged disk, say), a save waits for `BRIEF_S` only: training goes on."""


class Lineage:
    """Remembers the epoch per directory, so that only the first save into one looks.

    Args:
        ask: Returns the epoch of a run (its id) for a checkpoint at a path; raises when it cannot tell. Its last
            argument says that it failed a moment ago: then it should wait for `BRIEF_S` only.
    """

    def __init__(self, ask: Callable[[str, str, bool], int]) -> None:
        self._ask = ask
        self._epochs: dict[str, int] = {}
        self._failed_at = float("-inf")

    def epoch_for(self, path: str, run: str) -> int:
        """Return the epoch of `run` for a checkpoint at `path`: above every sibling of another run.

        It depends on the directory alone, not on what was saved before: the ranks of a run must come to the same one
        although a save may have failed on some of them before it got here.

        Raises:
            AsyncCkptError, OSError: What `ask` raises.
        """
        parent = os.path.dirname(path)
        known = self._epochs.get(parent)
        if known is not None:
            return known
        brief = time.monotonic() - self._failed_at < RETRY_AFTER_S
        try:
            found = self._epochs[parent] = self._ask(path, run, brief)
        except Exception:
            self._failed_at = time.monotonic()
            raise
        return found


MAX_SETTLED = 64
"""Saves of which it is remembered that somebody sees to their end. More than are in flight at once."""

MAX_LOSSES = 16
"""Lost sessions of which it is remembered whether their slots may be handed on. More than can be of use at once."""

SUBMIT_TIMEOUT_S = 1e6
"""A doorbell is repeated as long as the session lives; the session's own deadlines end it."""

MAX_FAILED = 16
"""Saves that ended with an error, of which the next worker is told: other ranks may not have heard of it."""

VERDICT_S = 1.0
"""Chosen: the worker looks at the clock several times a second."""

_log = logging.getLogger("asyncckpt.client")


class WorkerClient(CheckpointProcess):
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
        self.settled: deque[int] = deque(maxlen=MAX_SETTLED)  # sequences of saves that `decline` need not end
        # Held by who reads or changes which session has which slot, and what is told of the save in it. Nobody waits
        # with it. Reentrant: a signal handler, or a destructor, may close this in the middle of a save.
        self._lock = threading.RLock()
        self._losses: OrderedDict[str, bool] = OrderedDict()
        self._is_left = False  # closed while another worker was being found: it gets what is staged by then
        self.config, self.run, self.endpoint, self.hooks = config, run, endpoint, hooks or HookRunner(None)
        self._withdrawals = Withdrawals(self._send, self._lock, alone=run.alone)
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
            self._lock,
            commit_timeout_s=config.commit_timeout_s,
            free=self.pool.free,
            verdict_s=0.0 if run.alone else VERDICT_S,
            on_durable=self._ask_hook,
            on_committed=self._committed,
        )
        self._takeover = Takeover(
            self.pool,
            self._pending,
            self._lock,
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

    # ---- called in the session's thread -----------------------------------------------------------------------------

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
            if row["phase"] in save_phases.ENDED and not self.run.alone:
                save_id, committed = SaveId.parse(row["save_id"]), row["phase"] == save_phases.COMMITTED
                self.run.outcomes.ended(save_id.run_id, save_id.sequence, committed=committed)
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
        with self._lock:
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

    # ---- called where a session is opened ---------------------------------------------------------------------------

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

    # ---- what becomes of a slot -------------------------------------------------------------------------------------

    def _hands_on(self, error: AsyncCkptError) -> bool:
        """Whether another worker gets what one has that is lost by `error`.

        IMPORTANT: only when it is proved to be dead. One that hangs may wake up and commit what another one, which had
        been given the same save, takes back.
        """
        return error.facts().get("detail") == DIED and self.config.on_worker_loss == "resubmit"

    def _note_loss(self, session: str, *, is_handed_on: bool) -> None:
        """Remember what becomes of the slots of a lost session. Under the lock."""
        self._losses[session] = is_handed_on
        while len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)

    def _speaker(self, slot: Slot) -> Session | None:
        """Return the session that has the slot; None between two workers: then whoever takes it over is told.

        Raises:
            WorkerUnavailableError: No worker will ever have it.
        """
        session = self._connection.session
        lives = session is not None and session.error is None
        if session is not None and lives and session.name == slot.session and not slot.orphaned:
            return session
        handed_on = self._losses.get(slot.session)
        if handed_on is None and session is not None and session.name == slot.session and session.error is not None:
            # It was lost just now, and its thread is about to note that; or we have closed it.
            handed_on = session.error.facts().get("detail") == CLOSED or self._hands_on(session.error)
        # One that joined the pool after its lender's slots had been handed on is handed on now.
        given_up = handed_on is False or (lives and self._connection.settled and not handed_on)
        if slot.orphaned or given_up or session is None:
            slot.orphaned = True
            raise (session.error if session is not None else None) or WorkerUnavailableError(
                f"the worker at {self.endpoint} was lost while the state was being staged", endpoint=self.endpoint
            )
        self._takeover.begin(self._connection)
        return None

    # ---- what the training thread tells of each save: none of it waits ----------------------------------------------

    def begin(self, save_id: SaveId, slot: Slot, *, step: int | None, path: str, nbytes: int, umask: int) -> None:
        """Announce a save whose staging begins now; without `step` rank 0 will say it. Does not wait.

        Raises:
            WorkerUnavailableError: The worker was lost since the slot was acquired, and nobody takes it over.
        """

        def announcement(number: int, slot_number: int) -> messages.Message:
            return messages.Begin(
                id=number,
                save_id=str(save_id),
                step=step,
                path=path,
                slot=slot_number,
                generation=slot.generation,
                nbytes=nbytes,
                umask=umask,
                fsync=self.config.fsync,
                overwrite=self.config.overwrite,
                commit_timeout_s=self.config.commit_timeout_s,
            )

        with self._lock:
            session = self._speaker(slot)
            self._withdrawals.run_is_known(save_id.run_id)
            self._pending.begin(save_id, announcement, slot.generation, is_known=session is not None)
            if session is not None:
                self._say_begin(session, save_id, announcement, slot)

    def _say_begin(self, session: Session, save_id: SaveId | str, announcement: Any, slot: Slot) -> None:
        number = slot.number
        session.request(lambda n: announcement(n, number), SUBMIT_TIMEOUT_S, partial(self._answered, str(save_id)))

    def _say_sealed(self, session: Session, snapshot: StagedSnapshot) -> None:
        save, slot = str(snapshot.save_id), snapshot.slot
        build = partial(_submit, save, slot.number, slot.generation)
        session.request(build, SUBMIT_TIMEOUT_S, partial(self._answered, save))

    def _say_again(self, session: Session, save: Unended, slot: Slot) -> None:
        """Tell the worker that has taken a slot over of the save in it. Called under the lock."""
        if save.snapshot is not None:
            self._say_sealed(session, save.snapshot)
        elif save.announcement is not None and slot.memory.control.state != STATE_SEALED:
            # What was sealed when the worker before died, that one may have committed: the new one looks by itself.
            self._say_begin(session, save.save_id, save.announcement, slot)
            if slot.is_ring and slot.memory.control.state == STATE_STREAMED:
                # Its trainer waits for cells: the new worker ends the save. One that is sealed between the two looks is
                # found so by this doorbell.
                self._say_streamed(session, save.save_id, slot)

    def early_error(self, save_id: SaveId) -> AsyncCkptError | None:
        """Return why the save has failed while it was being staged, or None."""
        return self._pending.early_error(save_id)

    def is_pending(self, save_id: SaveId) -> bool:
        """Whether the save was begun, and no worker has said that it has ended."""
        return str(save_id) in self._pending.names()

    def stream(self, save_id: SaveId, slot: Slot) -> Callable[[], bool]:
        """Ring the doorbell for a slot that is being filled. Does not wait.

        Of a slot with room for everything, whether anybody hears it makes no difference but to time: what is sealed is
        written from its beginning.

        Returns:
            For a ring: what raises, when it is called, as soon as no worker will write what comes next; it says whether
            the one that had it is dead, and another is being found, which looks what it has left and ends the save.

        Raises:
            WorkerUnavailableError: Of a ring: the worker was lost since the save was announced, and nobody takes it
                over.
        """
        with self._lock:
            try:
                session = self._speaker(slot)
            except WorkerUnavailableError:
                if slot.is_ring:
                    raise
                session = None  # `write` sees to that
            if session is not None:  # else whoever takes it over is told
                self._say_streamed(session, save_id, slot)

        def check() -> bool:
            error = self._pending.early_error(save_id)
            if error is not None:
                raise error
            session = self._connection.session
            if session is not None and session.error is None and session.name == slot.session and not slot.orphaned:
                return False
            if self._is_left:
                text = f"the checkpointer was closed while save {save_id} waited for another worker; save again"
                raise CheckpointerClosedError(text)
            if self._takeover.is_under_way:
                return True
            with self._lock:
                return self._speaker(slot) is None

        return check

    def _say_streamed(self, session: Session, save_id: SaveId | str, slot: Slot) -> None:
        build = partial(_submit, str(save_id), slot.number, slot.generation)
        session.request(build, SUBMIT_TIMEOUT_S, partial(self._answered, str(save_id)) if slot.is_ring else None)

    def withdraw(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """Take back a save that will not be sealed; its slot is free at once, and it ends on all ranks."""
        self.settled.append(save_id.sequence)
        with self._lock:
            self._withdrawals.add(str(save_id), reason, skipped=skipped)
            self._pending.withdraw(save_id)
            self.pool.give_up(save_id)

    def decline(self, save_id: SaveId, path: str, reason: str, *, skipped: bool = False) -> None:
        """`save()` has failed: see to it that nothing of it stays, and that no other rank waits for this one.

        Args:
            save_id: As the checkpointer numbered it; its epoch, and the run of several ranks, need not be known.
            path: Of the checkpoint; "": what was given is none.
            reason: For the other ranks.
            skipped: It was skipped by `on_busy`.
        """
        run = self.run
        if not run.alone:
            save_id = save_id.with_parts(sequence=run.aligned(save_id.sequence), run_id=run.run_id)
        if save_id.sequence in self.settled:
            return None  # withdrawn, or handed over, already
        tail = f"-{save_id.sequence:08d}-{save_id.run_id}"
        for name in self._pending.names():
            if name.endswith(tail) and self._pending.is_staging(name):
                return self.withdraw(SaveId.parse(name), reason, skipped=skipped)
        if not run.alone and run.knows_run:
            reason = NOT_AGREED + reason if run.must_meet else reason
            self.withdraw(save_id, reason, skipped=skipped)
        elif not run.alone:
            self._withdrawals.before_the_run(save_id.sequence, reason)
        if not run.alone:
            run.refuse(save_id.sequence, path, reason)
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
        snapshot, future = staging_result, WriteFuture()
        # IMPORTANT: Ctrl-C before this means that nobody has it, after it that the worker has; not in between, where
        # nobody would take it back and nobody wait for its end.
        with self._lock, signals_deferred():
            self.settled.append(snapshot.save_id.sequence)
            session: Session | None = None
            lost: AsyncCkptError | None = None
            try:
                session = self._speaker(snapshot.slot)
            except WorkerUnavailableError as error:
                lost = error
            if (lost or self._pending.early_error(snapshot.save_id)) is not None:
                # While the pool still counts it as being staged, nobody else unmaps it. Sealed, it would be taken up
                # when this process dies, and a save that was reported as failed would be committed.
                snapshot.slot.memory.control.discard()
                self._withdrawals.add(str(snapshot.save_id), "the worker refused this rank's part of it, or was lost")
            self.pool.staged(snapshot.slot)
            if self._pending.staged(snapshot, future, lost) and session is not None:
                self._say_sealed(session, snapshot)
        return future

    def _answered(self, save: str, done: Future[messages.Message]) -> None:
        error, session = done.exception(), self._connection.session
        lost = isinstance(error, WorkerUnavailableError) and (session is None or session.error is not None)
        if error is None or lost:
            return  # who is told of a lost session sees to its saves; a worker that drains refuses this one only
        if not self.run.alone:
            self._withdrawals.add(save, f"the worker refused this rank's part: {error}")
        self._pending.end(save, error if isinstance(error, AsyncCkptError) else AsyncCkptError(repr(error)), None)

    # ---- the end ----------------------------------------------------------------------------------------------------

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


def _submit(save: str, slot: int, generation: int, number: int) -> messages.Message:
    return messages.Submit(id=number, save_id=save, slot=slot, generation=generation)


POLL_S = 0.05
"""How often the worker is asked. Chosen: saves take longer, and the question costs it next to nothing."""


def await_saves_below(root: str, deadline: float, process: WorkerClient) -> None:
    """Wait until every save to a child of `root` has ended; while no worker can be reached, nobody writes there.

    Args:
        root: Absolute path.
        deadline: `time.monotonic()` after which to go on all the same, with a warning.
        process: The worker.
    """
    try:
        while left := _unfinished(root, process):
            if time.monotonic() >= deadline:
                _log.warning("saves to %s are still unfinished: %s", root, ", ".join(left[:8]))
                return
            time.sleep(POLL_S)
    except WorkerUnavailableError as error:
        _log.warning("saves to %s that may be under way cannot be waited for: %s", root, error)


def _unfinished(root: str, process: WorkerClient) -> list[str]:
    reply = process.call(lambda n: messages.Status(id=n), process.config.worker_timeout_s)
    assert isinstance(reply, messages.StatusReport)
    rows: list[Mapping[str, Any]] = list(reply.report.get("saves") or ())
    return [
        str(row.get("save_id"))
        for row in rows
        if os.path.dirname(str(row.get("path"))) == root and row.get("phase") not in save_phases.ENDED
    ]

"""The trainer's client of the worker: announces each save to it and completes the futures of pending saves.

`WorkerClient` outlives sessions. If the worker is proved dead, another one is found or started and gets the slots
(`failover`). If it hangs, or if `on_worker_loss="fail"`, pending saves fail, the slots are closed, and the next save
opens another session. Between the death of a worker and the failover to another one, requests have no recipient: they
are kept in the table of pending saves, and `failover` sends them.
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
from asyncckpt.client.awaited_mirrors import AwaitedMirrors
from asyncckpt.client.connection import CLOSE_TIMEOUT_S, Connection, why_saves_do_not_end
from asyncckpt.client.epochs import EPOCH_RETRY_TIMEOUT_S, EpochCache
from asyncckpt.client.failover import MAX_HANDOVERS, Failover
from asyncckpt.client.pending_saves import PendingSaves, StagedSnapshot, UnfinishedSave, Withdrawals, WriteFuture
from asyncckpt.client.save_outcomes import Run
from asyncckpt.client.session import CLOSED, DIED, NO_TIMEOUT_S, TIMED_OUT, Session, hello_builder
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_lender import SlotLender, retry_on_worker_death
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.client.worker_board import BoardExchange
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CheckpointProcess
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    ConfigError,
    RanksDisagreeError,
    ReplicaMismatchError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import STATE_SEALED, STATE_STREAMED
from asyncckpt.protocol import messages, save_phases
from asyncckpt.protocol.save_phases import NOT_AGREED

MAX_HANDLED = 64
"""How many saves that `decline` need not end are remembered. More than are in flight at once."""

MAX_LOSSES = 16
"""How many lost sessions are remembered, with whether their slots are handed over. More than can matter at once."""

MAX_FAILED = 16
"""How many failed saves are remembered, to tell the next worker: other ranks may not have heard of the failure."""

WORKER_REPORT_S = 1.0
"""How much later than the worker the trainer times a save out. Chosen: the worker checks deadlines several times a
second."""

_log = logging.getLogger("asyncckpt.client")


class WorkerClient(CheckpointProcess):
    """The worker, as seen from the trainer.

    Args:
        config: For the timeouts and slot policy.
        run: The run of this process's rank.
        endpoint: `ipc://...`.
        named: The user named the endpoint.
        package: asyncckpt's version.
        hooks: The user's commit hooks.

    Attributes:
        handled: Sequences of the latest saves that `decline` need not end: they were withdrawn, or have been sealed.
        epochs: The epochs of directories.
        pool: The slots.
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
        self.handled: deque[int] = deque(maxlen=MAX_HANDLED)
        # Protects which session has which slot, and what was sent about the save in it. Never held while waiting.
        # Reentrant: a signal handler, or a destructor, may close this in the middle of a save.
        self._lock = threading.RLock()
        self._losses: OrderedDict[str, bool] = OrderedDict()
        self._is_closing = False  # closed during a failover: the next worker still gets what is staged
        self.config, self.run, self.endpoint, self.hooks = config, run, endpoint, hooks or HookRunner(None)
        self._withdrawals = Withdrawals(self._send, self._lock, alone=run.alone)
        self._mirrors = AwaitedMirrors(self._send, self._lock)
        self._connection = Connection(
            endpoint,
            named=named,
            config=config,
            hello_for=partial(
                hello_builder, run.rank.rank, run.rank.world_size, package, storage=config.storage_options
            ),
            pending=self._pending_ids,
            on_saves=self._on_saves,
            on_open=self._on_open,
            on_lost=self._on_lost,
            options=run.links.start_options,
        )
        self.connect_soon = self._connection.connect_soon
        self.epochs = EpochCache(self._ask_epoch)
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
            worker_report_s=0.0 if run.alone else WORKER_REPORT_S,
            on_durable=self._run_pre_commit_hook,
            on_committed=self._committed,
        )
        self._failover = Failover(
            self.pool,
            self._pending,
            self._lock,
            endpoint=endpoint,
            timeout_s=config.worker_timeout_s,
            announce=self._announce,
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
        return self._failover.in_thread() or (session is not None and current is session.thread)

    def flush(self, timeout_s: float) -> None:
        """Wait until a worker has answered every request, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        self._failover.join(timeout_s)
        session = self._connection.session
        if session is not None:
            session.flush(max(0.0, deadline - time.monotonic()))

    def call(self, build: Callable[[int], messages.Message], timeout_s: float) -> messages.Message:
        """Send a request, connecting first if necessary, and return the worker's reply; as `Session.call`."""
        return self.connect().call(build, timeout_s)

    def _send(self, build: Callable[[int], messages.Message]) -> Future[messages.Message] | None:
        """Send a request that is repeated as long as the session lives; None without a session."""
        session = self._connection.session
        return None if session is None or session.error is not None else session.request(build, NO_TIMEOUT_S)

    def board(self) -> BoardExchange:
        """Return the exchange of the ranks that share this worker."""
        return BoardExchange(self.run.rank, self.call, timeout_s=self.config.worker_timeout_s)

    def _ask_epoch(self, path: str, run: str, least: int, brief: bool) -> int:
        timeout_s = EPOCH_RETRY_TIMEOUT_S if brief else self.config.worker_timeout_s
        build: Callable[[int], messages.Message] = lambda n: messages.Lineage(  # noqa: E731
            id=n, run=run, path=path, least_epoch=least
        )
        try:
            reply = retry_on_worker_death(self.connect, lambda session: session.call(build, timeout_s), self._attempts)
        except WorkerUnavailableError as error:
            if error.facts().get("detail") != TIMED_OUT:
                raise
            text = f"the checkpoints beside {path} were not listed within {timeout_s:g} s; later saves ask again"
            why = "their storage is slow or does not answer, or the worker hangs"
            facts = error.facts()
            raise WorkerUnavailableError(f"{text}: {why}", endpoint=facts.get("endpoint"), detail=TIMED_OUT) from None
        assert isinstance(reply, messages.LineageFound)
        return reply.epoch

    # ---- called in the session's thread -----------------------------------------------------------------------------

    def _pending_ids(self) -> list[str]:
        self._pending.expire()
        self._mirrors.ask()
        return self._pending.names()

    def _on_saves(self, reply: messages.Saves) -> None:
        # IMPORTANT: outcomes before rows. A row completes futures, and a caller that waits for one may begin the next
        # save at once, which needs the outcomes.
        self.run.outcomes.update(reply.run, reply.outcomes)
        for row in reply.saves:
            error = row.get("error") or {}
            if error.get("code") == ReplicaMismatchError.wire_code:
                self.run.differs(str((error.get("fields") or {}).get("fqn")))
            if error.get("code") == RanksDisagreeError.wire_code:
                self.epochs.forget()
            if row["phase"] in (save_phases.FAILED, save_phases.ABANDONED) and row["save_id"] not in self._failed:
                self._failed.append(row["save_id"])
            if row["phase"] in save_phases.ENDED and not self.run.alone:
                save_id, committed = SaveId.parse(row["save_id"]), row["phase"] == save_phases.COMMITTED
                self.run.outcomes.note_ended(save_id.run_id, save_id.sequence, committed=committed)
            self._pending.update(row)

    def _run_pre_commit_hook(self, snapshot: StagedSnapshot) -> None:
        if not self.hooks.asks:
            return
        save = str(snapshot.save_id)
        if save not in self._consents:  # the hook runs once per save: its answer holds for the next worker too
            self._consents[save] = self.hooks.before(snapshot.path, snapshot.extra)
        for old in list(self._consents)[:-MAX_FAILED]:
            del self._consents[old]
        veto = self._consents[save]
        reason = "" if veto is None else veto[:200].encode(errors="replace").decode()
        self._send(lambda n: messages.Consent(id=n, save_id=save, granted=veto is None, reason=reason))

    def _committed(self, snapshot: StagedSnapshot) -> None:
        self.pool.committed(snapshot.save_id)
        self._mirrors.add(snapshot)
        self.hooks.after(snapshot.path, snapshot.extra)

    def _on_lost(self, session: Session, error: WorkerUnavailableError) -> None:
        try:
            # Not the error: its traceback would keep the state that is being saved alive.
            _log.warning("%s", str(error))
        finally:  # a handler of the log may raise
            self._handle_loss(session, error)

    def _handle_loss(self, session: Session, error: WorkerUnavailableError) -> None:
        self.run.outcomes.note_worker_lost()
        handed_over = self._is_handed_over(error)
        with self._lock:
            self._note_loss(session.name, is_handed_over=handed_over)
        if not handed_over:
            self._withdrawals.add_lost(self._pending.names())
            self.pool.orphan_all()
            self._pending.fail_all(error)
            self._mirrors.fail_all(error)
        elif self._pending.names() or self._retains_snapshot() or self.run.links.is_leader or self._mirrors:
            self._failover.start(self._connection)

    def _retains_snapshot(self) -> bool:
        """Whether a slot holds a committed snapshot that the next worker is to keep for a restarted trainer."""
        return self.config.keep_in_memory == "latest" and any(slot.committed for slot in self.pool.held())

    # ---- called where a session is opened ---------------------------------------------------------------------------

    def _on_open(self, session: Session) -> None:
        """Prepare a new session: hand a dead worker's slots over, and repeat what other ranks may not have heard."""
        # IMPORTANT: link first. The worker must know which worker decides on the saves that it finds in the slots.
        self.run.links.relink(lambda build: session.request(build, NO_TIMEOUT_S))
        self._failover.hand_over(session)
        failed, self._failed = self._failed, deque(maxlen=MAX_FAILED)
        if not self.run.alone and self._last_instance not in ("", session.worker.instance):
            self._withdrawals.repeat_answered()
            self._withdrawals.add_lost(list(failed))
        self._last_instance = session.worker.instance

    def _give_up(self, saves: list[str], error: AsyncCkptError) -> None:
        self._withdrawals.add_lost(saves)
        self._pending.fail(saves, error)
        session = self._connection.session
        if session is None or session.error is not None:
            self._mirrors.fail_all(error)

    # ---- which session has a slot -----------------------------------------------------------------------------------

    def _is_handed_over(self, error: AsyncCkptError) -> bool:
        """Whether another worker gets the slots of one that was lost by `error`.

        IMPORTANT: only if its death is proved. A worker that hangs may wake up and commit a save that another worker,
        which was given the same save, rolls back.
        """
        return error.facts().get("detail") == DIED and self.config.on_worker_loss == "resubmit"

    def _note_loss(self, session: str, *, is_handed_over: bool) -> None:
        """Remember whether the slots of a lost session are handed over. Under the lock."""
        self._losses[session] = is_handed_over
        while len(self._losses) > MAX_LOSSES:
            self._losses.popitem(last=False)

    def _session_of(self, slot: Slot) -> Session | None:
        """Return the session that has the slot; None during a failover, which tells the next worker.

        Raises:
            WorkerUnavailableError: No worker will ever have it.
        """
        session = self._connection.session
        lives = session is not None and session.error is None
        if session is not None and lives and session.name == slot.session and not slot.orphaned:
            return session
        handed_over = self._losses.get(slot.session)
        if handed_over is None and session is not None and session.name == slot.session and session.error is not None:
            # It was lost a moment ago, and its thread has not called `_note_loss` yet; or we have closed it.
            handed_over = session.error.facts().get("detail") == CLOSED or self._is_handed_over(session.error)
        # A slot that joined the pool after the failover of its session's slots is handed over now.
        given_up = handed_over is False or (lives and self._connection.is_ready and not handed_over)
        if slot.orphaned or given_up or session is None:
            slot.orphaned = True
            raise (session.error if session is not None else None) or WorkerUnavailableError(
                f"the worker at {self.endpoint} was lost while the state was being staged", endpoint=self.endpoint
            )
        self._failover.start(self._connection)
        return None

    # ---- calls of the training thread for each save: none of them waits ---------------------------------------------

    def begin(self, save_id: SaveId, slot: Slot, *, step: int | None, path: str, nbytes: int, umask: int) -> None:
        """Announce a save whose staging begins now. Does not wait.

        Args:
            save_id, step, path: ID, step and directory of the save; `step` is None if only rank 0 knows it.
            slot: The slot that it is staged into.
            nbytes: Size of the shard files and the request.
            umask: Umask of the files to create.

        Raises:
            WorkerUnavailableError: The worker was lost since the slot was acquired, and no other one will adopt it.
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
            session = self._session_of(slot)
            self._withdrawals.send_for_run(save_id.run_id)
            self._pending.begin(save_id, announcement, slot.generation, is_known=session is not None)
            if session is not None:
                self._send_begin(session, save_id, announcement, slot)

    def _send_begin(self, session: Session, save_id: SaveId | str, announcement: Any, slot: Slot) -> None:
        number = slot.number
        session.request(lambda n: announcement(n, number), NO_TIMEOUT_S, partial(self._on_answer, str(save_id)))

    def _send_submit(self, session: Session, save_id: SaveId | str, slot: Slot, *, may_fail: bool = True) -> None:
        """Let the worker write a slot. `may_fail`: a refusal fails the save."""
        save = str(save_id)

        def build(n: int) -> messages.Message:
            return messages.Submit(id=n, save_id=save, slot=slot.number, generation=slot.generation)

        session.request(build, NO_TIMEOUT_S, partial(self._on_answer, save) if may_fail else None)

    def _announce(self, session: Session, save: UnfinishedSave, slot: Slot) -> None:
        """Tell the worker that has adopted a slot about the save in it. Called under the lock."""
        if save.snapshot is not None:
            self._send_submit(session, save.save_id, save.snapshot.slot)
        elif save.announcement is not None and slot.memory.control.state != STATE_SEALED:
            # No Begin for a sealed slot: the dead worker may have committed it, and the new one checks that itself.
            self._send_begin(session, save.save_id, save.announcement, slot)
            if slot.is_ring and slot.memory.control.state == STATE_STREAMED:
                # The trainer waits for cells of the ring: the new worker ends the save. If the slot has been sealed
                # since the check above, the worker finds it sealed by this Submit.
                self._send_submit(session, save.save_id, slot)

    def early_error(self, save_id: SaveId) -> AsyncCkptError | None:
        """Return why the save has failed while it was being staged, or None."""
        return self._pending.early_error(save_id)

    def is_pending(self, save_id: SaveId) -> bool:
        """Whether the save was begun, and no worker has said that it has ended."""
        return str(save_id) in self._pending.names()

    def stream(self, save_id: SaveId, slot: Slot) -> Callable[[], bool]:
        """Submit a slot while it is being filled, so that the worker begins to write it. Does not wait.

        For a slot with room for the whole state this only saves time: if no worker gets it, the sealed slot is written
        from its beginning.

        Returns:
            A check for a ring, to be called while waiting for cells. It raises once no worker will write the rest. It
            returns True if the worker is dead and another one is being found; that one ends the save.

        Raises:
            WorkerUnavailableError: The slot is a ring, the worker was lost since the save was announced, and no other
                worker will adopt it.
        """
        with self._lock:
            try:
                session = self._session_of(slot)
            except WorkerUnavailableError:
                if slot.is_ring:
                    raise
                session = None  # `write` fails the save
            if session is not None:  # else the failover tells the next worker
                self._send_submit(session, save_id, slot, may_fail=slot.is_ring)

        def check() -> bool:
            error = self._pending.early_error(save_id)
            if error is not None:
                raise error
            session = self._connection.session
            if session is not None and session.error is None and session.name == slot.session and not slot.orphaned:
                return False
            if self._is_closing:
                text = f"the checkpointer was closed while save {save_id} waited for another worker; save again"
                raise CheckpointerClosedError(text)
            if self._failover.is_under_way:
                return True
            with self._lock:
                return self._session_of(slot) is None

        return check

    def withdraw(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """Withdraw a save that will not be sealed: its slot is free at once, and the save fails on all ranks."""
        self.handled.append(save_id.sequence)
        with self._lock:
            self._withdrawals.add(str(save_id), reason, skipped=skipped)
            self._pending.withdraw(save_id)
            self.pool.give_up(save_id)

    @property
    def awaits_withdrawals(self) -> bool:
        """Whether the connected worker may not know yet that this rank has withdrawn from a save."""
        session = self._connection.session
        return session is not None and session.error is None and self._withdrawals.has_unanswered

    def decline(self, save_id: SaveId, path: str, reason: str, *, skipped: bool = False) -> None:
        """Clean up after a failed `save()`: withdraw it if it was begun, and tell the other ranks not to wait.

        Args:
            save_id: As the checkpointer numbered it; its epoch, and the run of several ranks, need not be known.
            path: Directory of the checkpoint; "": the user's path was invalid.
            reason: For the other ranks.
            skipped: The save was skipped by `on_busy`.
        """
        run = self.run
        if not run.alone:
            save_id = save_id.with_parts(sequence=run.aligned(save_id.sequence), run_id=run.run_id)
        if save_id.sequence in self.handled:
            return None  # withdrawn or sealed already
        tail = f"-{save_id.sequence:08d}-{save_id.run_id}"
        for name in self._pending.names():
            if name.endswith(tail) and self._pending.is_staging(name):
                return self.withdraw(SaveId.parse(name), reason, skipped=skipped)
        if not run.alone and run.knows_run:
            reason = NOT_AGREED + reason if run.must_meet else reason
            self.withdraw(save_id, reason, skipped=skipped)
        elif not run.alone:
            self._withdrawals.add_before_run_known(save_id.sequence, reason)
        if not run.alone:
            run.refuse(save_id.sequence, path, reason)
        return None

    def write(self, staging_result: Any, path: str, **kw: Any) -> WriteFuture:
        """Submit a sealed slot. Does not wait.

        Raises:
            ConfigError: The stager's result is not a sealed slot.
        """
        if not isinstance(staging_result, StagedSnapshot):
            raise ConfigError(
                f"the worker writes sealed slots, but the stager returned a {type(staging_result).__name__}; a custom "
                "checkpoint_stager with other results needs its own checkpoint_process",
                field="checkpoint_process",
            )
        snapshot, future = staging_result, WriteFuture(has_mirror=bool(staging_result.mirror))
        snapshot.mirrored = future.mirrored
        # IMPORTANT: signals are deferred. Before this block `save()` rolls the save back on Ctrl-C, after it the worker
        # has the save. In between, the save would be neither rolled back nor waited for.
        with self._lock, signals_deferred():
            self.handled.append(snapshot.save_id.sequence)
            session: Session | None = None
            lost: AsyncCkptError | None = None
            try:
                session = self._session_of(snapshot.slot)
            except WorkerUnavailableError as error:
                lost = error
            if (lost or self._pending.early_error(snapshot.save_id)) is not None:
                # IMPORTANT: discard the snapshot. If it stayed sealed, a worker would take it up when this process
                # dies, and commit a save that was reported as failed. Do so before `pool.staged`: until then no other
                # thread unmaps the slot.
                snapshot.slot.memory.control.discard()
                self._withdrawals.add(str(snapshot.save_id), "the worker refused this rank's part of it, or was lost")
            self.pool.staged(snapshot.slot)
            if self._pending.staged(snapshot, future, lost) and session is not None:
                self._send_submit(session, snapshot.save_id, snapshot.slot)
        return future

    def _on_answer(self, save: str, done: Future[messages.Message]) -> None:
        error, session = done.exception(), self._connection.session
        lost = isinstance(error, WorkerUnavailableError) and (session is None or session.error is not None)
        if error is None or lost:
            return  # `_on_lost` handles all saves of a lost session; other errors concern this save only
        if not self.run.alone:
            self._withdrawals.add(save, f"the worker refused this rank's part: {error}")
        self._pending.end(save, error if isinstance(error, AsyncCkptError) else AsyncCkptError(repr(error)), None)

    # ---- the end ----------------------------------------------------------------------------------------------------

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S, *, at_exit: bool = False) -> None:
        """Say goodbye, end the session, unmap the slots. The worker finishes pending saves.

        During a failover, all this happens in the background once the next worker has the saves.

        Blocks: at most `timeout_s` in all; a `connect` that is under way is aborted.

        Args:
            timeout_s: In seconds.
            at_exit: The interpreter ends: futures are not completed, since their callbacks may block.
        """
        if self._is_closing:
            return
        deadline = time.monotonic() + timeout_s
        session = self._connection.session
        if session is not None and session.error is not None:
            session.close(timeout_s / 4)  # its thread may be about to call `_on_lost`
        self._failover.join(timeout_s / 2)
        may_call_on_lost = session is not None and session.error is not None and session.thread.is_alive()
        # IMPORTANT: do not unmap the slots yet: snapshots that no worker has would be lost.
        if not at_exit and (may_call_on_lost or self._failover.is_under_way):
            self._is_closing = True
            return self.abandon()
        if at_exit and self._failover.is_under_way and (names := self._pending.names()):
            _log.error("the interpreter ends before another worker was found: saves %s are lost", ", ".join(names))
        if self._connection.close(max(0.0, deadline - time.monotonic())):
            self._failover.join(max(0.0, deadline - time.monotonic()))
            self._end(complete=not at_exit)

    def abandon(self) -> None:
        """As `close`, but without waiting, for destructors: the session's thread says goodbye and frees everything."""
        if self._failover.call_when_done(self.abandon):
            return
        if self._connection.abandon(self._session_ended, after_saves=self._is_retired):
            self._end()

    def retire(self) -> None:
        """As `abandon`, once no save is pending: until then futures complete as usual."""
        self._is_retired = True
        self.abandon()

    @property
    def has_ended(self) -> bool:
        """Whether the client was closed, or has ended after `abandon` or `retire`."""
        return self._connection.is_closed

    def _session_ended(self) -> None:
        """End after `abandon`: its session has said goodbye. If it was lost instead, the failover ends first."""
        if not self._failover.call_when_done(self.abandon):
            self._end()

    def _end(self, *, complete: bool = True) -> None:
        self._connection.shut()
        self.pool.close()
        if complete:
            text = "the checkpointer was closed; the worker continues with this save"
            self._pending.close(CheckpointerClosedError(text))
            text = "the checkpointer was closed; the worker continues with the copy to the mirror"
            self._mirrors.close(CheckpointerClosedError(text))

    def close_inherited_fds(self) -> None:
        """In a forked child: close the child's copies of our fds."""
        self.pool.close_inherited_fds()
        session = self._connection.session
        if session is not None:
            session.close_inherited_fds()


POLL_S = 0.05
"""How often to ask the worker for its saves. Chosen: saves take longer, and a reply costs it next to nothing."""


def await_saves_below(root: str, deadline: float, process: WorkerClient) -> None:
    """Wait until every save to a child of `root` has ended. If no worker can be reached, return with a warning.

    Args:
        root: Absolute path.
        deadline: `time.monotonic()` after which to return anyway, with a warning.
        process: The worker.
    """
    try:
        while left := _unfinished(root, process):
            if time.monotonic() >= deadline:
                _log.warning("saves below %s are still unfinished: %s", root, ", ".join(left[:8]))
                return
            time.sleep(POLL_S)
    except WorkerUnavailableError as error:
        _log.warning("cannot wait for saves below %s that may be under way: %s", root, error)


def _unfinished(root: str, process: WorkerClient) -> list[str]:
    reply = process.call(lambda n: messages.Status(id=n), process.config.worker_timeout_s)
    assert isinstance(reply, messages.StatusReport)
    rows: list[Mapping[str, Any]] = list(reply.report.get("saves") or ())
    return [
        str(row.get("save_id"))
        for row in rows
        if os.path.dirname(str(row.get("path"))) == root and row.get("phase") not in save_phases.ENDED
    ]

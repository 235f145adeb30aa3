"""What the training thread tells the worker of each save: it begins, it is sealed, or it will never be.

None of it waits. Between the death of a worker and the takeover by another one there is nobody to tell: what is told
then is remembered in the table of pending saves, and `takeover` says it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from asyncckpt.config import CheckpointerConfig
from asyncckpt.connection import Connection
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, ConfigError, WorkerUnavailableError
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import STATE_SEALED, STATE_STREAMED
from asyncckpt.outcomes import Run
from asyncckpt.parts import CheckpointProcess
from asyncckpt.pending import PendingSaves, StagedSnapshot, Unended, WriteFuture
from asyncckpt.protocol import messages
from asyncckpt.protocol.save_phases import NOT_AGREED
from asyncckpt.session import Session
from asyncckpt.session_thread import CLOSED, DIED
from asyncckpt.staging.lent_slot import LentSlot
from asyncckpt.staging.slot_pool import SlotPool
from asyncckpt.takeover import Takeover
from asyncckpt.uninterrupted import uninterrupted
from asyncckpt.withdrawals import Withdrawals

MAX_SETTLED = 64
"""Saves of which it is remembered that somebody sees to their end. More than are in flight at once."""

MAX_LOSSES = 16
"""Lost sessions of which it is remembered whether their slots may be handed on. More than can be of use at once."""

SUBMIT_TIMEOUT_S = 1e6
"""A doorbell is repeated as long as the session lives; the session's own deadlines end it."""


class Submitting(CheckpointProcess):
    """The part of `WorkerProcess` that the training thread uses for each save; see the module."""

    config: CheckpointerConfig
    run: Run
    endpoint: str
    pool: SlotPool
    _connection: Connection
    _pending: PendingSaves
    _takeover: Takeover
    _withdrawals: Withdrawals

    def __init__(self) -> None:
        self.settled: deque[int] = deque(maxlen=MAX_SETTLED)  # sequences of saves that `decline` need not end
        # Held while a slot goes from one session to another, and while somebody looks which one it has.
        self._handing = threading.RLock()  # a signal handler may save or close in the middle of a save
        self._losses: OrderedDict[str, bool] = OrderedDict()
        self._is_left = False  # closed while another worker was being found: it gets what is staged by then

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

    def _speaker(self, slot: LentSlot) -> Session | None:
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

    # ---- what is told -----------------------------------------------------------------------------------------------

    def begin(self, save_id: SaveId, slot: LentSlot, *, step: int | None, path: str, nbytes: int, umask: int) -> None:
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

        with self._handing:
            session = self._speaker(slot)
            self._withdrawals.run_is_known(save_id.run_id)
            self._pending.begin(save_id, announcement, slot.generation, is_known=session is not None)
            if session is not None:
                self._say_begin(session, save_id, announcement, slot)

    def _say_begin(self, session: Session, save_id: SaveId | str, announcement: Any, slot: LentSlot) -> None:
        number = slot.number
        begun = session.request(lambda n: announcement(n, number), SUBMIT_TIMEOUT_S)
        begun.add_done_callback(lambda done: self._answered(str(save_id), done))

    def _say_sealed(self, session: Session, snapshot: StagedSnapshot) -> None:
        build = partial(_submit, str(snapshot.save_id), snapshot.slot.number, snapshot.slot.generation)
        rung = session.request(build, SUBMIT_TIMEOUT_S)
        rung.add_done_callback(lambda done: self._answered(str(snapshot.save_id), done))

    def _say_again(self, session: Session, save: Unended, slot: LentSlot) -> None:
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

    def stream(self, save_id: SaveId, slot: LentSlot) -> Callable[[], bool]:
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
        with self._handing:
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
            with self._handing:
                return self._speaker(slot) is None

        return check

    def _say_streamed(self, session: Session, save_id: SaveId | str, slot: LentSlot) -> None:
        rung = session.request(partial(_submit, str(save_id), slot.number, slot.generation), SUBMIT_TIMEOUT_S)
        if slot.is_ring:
            rung.add_done_callback(lambda done: self._answered(str(save_id), done))

    def withdraw(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """Take back a save that will not be sealed; its slot is free at once, and it ends on all ranks."""
        self.settled.append(save_id.sequence)
        with self._handing:
            self._withdrawals.add(str(save_id), reason, skipped=skipped)
            self._pending.withdraw(save_id)
            self.pool.give_up(save_id)

    def decline(self, save_id: SaveId, reason: str, *, skipped: bool = False) -> None:
        """`save()` has failed: see to it that nothing of it stays, and that no other rank waits for this one.

        Args:
            save_id: As the checkpointer numbered it; its epoch, and the run of several ranks, need not be known.
            reason: For the other ranks.
            skipped: It was skipped by `on_busy`.
        """
        if save_id.sequence in self.settled:
            return None  # withdrawn, or handed over, already
        run = self.run
        if not run.alone:
            save_id = save_id.with_parts(run_id=run.run_id)
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
        snapshot, future = staging_result, WriteFuture()
        # IMPORTANT: Ctrl-C before this means that nobody has it, after it that the worker has; not in between, where
        # nobody would take it back and nobody wait for its end.
        with self._handing, uninterrupted():
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


def _submit(save: str, slot: int, generation: int, number: int) -> messages.Message:
    return messages.Submit(id=number, save_id=save, slot=slot, generation=generation)

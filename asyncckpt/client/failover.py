"""Failover after the proved death of a worker: find or start another one, and hand the dead one's slots over to it.

A sealed slot holds all that a worker needs to finish the save, so the same futures complete. There is no failover from
a worker that only hangs: it may wake up, and two workers must never have one save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.client.connection import Connection
from asyncckpt.client.pending_saves import PendingSaves, UnfinishedSave
from asyncckpt.client.session import NO_TIMEOUT_S, TIMED_OUT, Session
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_lender import await_grant
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, WorkerUnavailableError
from asyncckpt.protocol import messages

MAX_HANDOVERS = 3
"""To how many workers in turn a slot is handed over before its save fails: the save may be what kills them. Chosen."""

_log = logging.getLogger("asyncckpt.client")


class Failover:
    """Hands slots over to the next worker; in a background thread, or where a session is opened.

    Args:
        pool: The slots.
        pending: The saves in them.
        lock: The lock of the client's tables, held while a slot passes from one session to another.
        endpoint: For error messages.
        timeout_s: How long a worker may take to adopt one slot.
        announce: Tells a session about the save in a slot that it has adopted. Called under the lock.
        on_given_up: Called with the saves that no worker will get, and why, after their slots were given up.
    """

    def __init__(
        self,
        pool: SlotPool,
        pending: PendingSaves,
        lock: threading.RLock,
        *,
        endpoint: str,
        timeout_s: float,
        announce: Callable[[Session, UnfinishedSave, Slot], None],
        on_given_up: Callable[[list[str], AsyncCkptError], None],
    ) -> None:
        self._pool, self._pending, self._lock = pool, pending, lock
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._announce, self._on_given_up = announce, on_given_up
        self._thread: threading.Thread | None = None
        self._requested = False
        self._on_done: Callable[[], None] | None = None

    # ---- handing slots over -----------------------------------------------------------------------------------------

    def hand_over(self, session: Session) -> None:
        """Hand every held slot over to a new session. Blocks for its answers.

        Raises:
            WorkerUnavailableError: The session was lost meanwhile.
        """
        for slot in self._pool.held():
            if slot.session != session.name:
                self._hand_over(session, slot)

    def _hand_over(self, session: Session, slot: Slot) -> None:
        if slot.handovers >= MAX_HANDOVERS:
            return self._give_up(
                slot,
                WorkerUnavailableError(
                    f"the slot of save {slot.user} was handed over to {slot.handovers + 1} workers in turn, and each "
                    "of them died before it reported the outcome; it is not handed over again. The last of them may "
                    "have committed the save: look at its path",
                    endpoint=self._endpoint,
                    detail=f"handovers={slot.handovers}",
                ),
            )
        slot.handovers += 1
        with self._lock:
            found = self._pending.unfinished(slot.user, handed_over=True)
            last = slot.memory.control.generation
        generation = max(last, found.generation if found is not None else 0)
        if found is not None and not found.is_known:
            generation = found.generation - 1  # begun after the last worker died, which has written nothing of it
        ended = min(last, found.generation - 1) if found is not None else last
        committed = slot.committed_of(ended)
        build: Callable[[int], messages.Message] = lambda n: messages.Adopt(  # noqa: E731
            id=n,
            fd=slot.memory.fd,
            nbytes=slot.memory.nbytes,
            token=slot.memory.token,
            generation=generation,
            ended=ended,
            committed=committed,
        )
        try:
            reach("trainer: handing over")
            asked = session.request(build, NO_TIMEOUT_S)
            if not await_grant(session, asked, self._timeout_s):
                raise WorkerUnavailableError(
                    f"the worker at {self._endpoint} did not adopt the slot of save {slot.user} within "
                    f"{self._timeout_s:g} s",
                    endpoint=self._endpoint,
                    detail=TIMED_OUT,
                )
            reply = asked.result()
        except AsyncCkptError as error:
            if session.error is not None:
                raise
            return self._give_up(slot, error)
        assert isinstance(reply, messages.Granted)
        with self._lock:
            if not self._pool.adopted(slot, reply.slot, session.name):
                session.request(lambda n: messages.Release(id=n, slot=reply.slot), self._timeout_s)
                return None
            found = self._pending.unfinished(slot.user, told=True)
            if found is not None:
                self._announce(session, found, slot)
            else:
                slot.handovers -= 1  # adopted, and no save uses it: it cannot be what kills the worker
        return None

    def _give_up(self, slot: Slot, error: AsyncCkptError) -> None:
        with self._lock:
            found = self._pending.unfinished(slot.user)
            self._pool.orphan(slot)
        _log.warning("the slot of save %s is closed, since no worker takes it: %s", slot.user, str(error))
        if found is not None:
            self._on_given_up([found.save_id], error)

    # ---- in the background ------------------------------------------------------------------------------------------

    def start(self, connection: Connection) -> None:
        """Find or start a worker, in a thread. If no thread can be started, the dead worker's saves fail.

        Does not wait.
        """
        error = self._start_thread(connection)
        if error is not None:
            self._fail_orphans(connection, error)

    def _start_thread(self, connection: Connection) -> AsyncCkptError | None:
        with self._lock:
            self._requested = True
            if self._thread is not None:
                return None
            thread = BackgroundThread(self._run, "asyncckpt-failover", (connection,))
            try:
                thread.start()
            except RuntimeError as error:  # can't start new thread
                self._requested = False
                return WorkerUnavailableError(
                    f"no thread can be started to find another worker: {error}", endpoint=self._endpoint
                )
            self._thread = thread
            return None

    def _run(self, connection: Connection) -> None:
        while True:
            with self._lock:
                requested, self._requested = self._requested, False
                if not requested:
                    self._thread, on_done = None, self._on_done
                    break
            session: Session | None = None
            try:
                reach("trainer: seeking a worker")
                session = connection.connect()
                self.hand_over(session)  # `connect` did so too, but a slot may have joined the pool since
            except CheckpointerClosedError:
                continue
            except Exception as error:
                if session is None or session.error is None:  # else `on_lost` of that session starts the next failover
                    self._fail_orphans(connection, error)
        if on_done is not None:
            on_done()

    def call_when_done(self, call: Callable[[], None]) -> bool:
        """Call `call` in the failover's thread once it has ended; False: none is under way, `call` is dropped."""
        with self._lock:
            if self._thread is not None:
                self._on_done = call
            return self._thread is not None

    def _fail_orphans(self, connection: Connection, error: Exception) -> None:
        """No worker was found: fail the saves whose slots no live session has."""
        if not isinstance(error, AsyncCkptError):
            _log.error("failover from a dead worker failed", exc_info=error)
            error = WorkerUnavailableError(f"failover from a dead worker failed: {error!r}", endpoint=self._endpoint)
        lost = []
        with self._lock:
            session = connection.session
            living = session.name if session is not None and session.error is None else ""
            for slot in self._pool.held():
                if slot.session != living:
                    found = self._pending.unfinished(slot.user)
                    lost += [found.save_id] if found is not None else []
                    self._pool.orphan(slot)
        self._on_given_up(lost, error)

    @property
    def is_under_way(self) -> bool:
        """Whether the failover's thread runs: it looks for a worker, or hands slots over."""
        with self._lock:
            return self._thread is not None

    def in_thread(self) -> bool:
        """Whether the caller runs in the failover's thread, which may complete futures."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> None:
        """Wait until no failover is under way, at most `timeout_s`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # its thread has not started yet
                thread.join(timeout_s)

"""What follows the proved death of a worker: another one is found or started, and gets the memory that it had.

What lies sealed in a slot is all that a worker needs, so that the same futures complete. A worker that only hangs is
none of this: two workers must never have one save.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.client.connection import Connection
from asyncckpt.client.pending_saves import PendingSaves, Unended
from asyncckpt.client.session import Session
from asyncckpt.client.slot import Slot
from asyncckpt.client.slot_lender import LATEST_S, is_granted_in_time
from asyncckpt.client.slot_pool import SlotPool
from asyncckpt.errors import AsyncCkptError, CheckpointerClosedError, WorkerUnavailableError
from asyncckpt.protocol import messages

MAX_HANDOVERS = 3
"""To how many workers in turn a slot is handed before its save fails: the save may be what kills them. Chosen."""

_log = logging.getLogger("asyncckpt.client")


class Takeover:
    """See the module.

    Args:
        pool: Holds the slots.
        pending: Knows the saves in them.
        lock: Of the client's tables: held while a slot goes from one session to another.
        endpoint: For messages.
        timeout_s: For one slot.
        announce: Tells a session of the save in a slot that it has got; called under the lock.
        on_given_up: Called with each save that no worker gets, and why, after its slot was given up.
    """

    def __init__(
        self,
        pool: SlotPool,
        pending: PendingSaves,
        lock: threading.RLock,
        *,
        endpoint: str,
        timeout_s: float,
        announce: Callable[[Session, Unended, Slot], None],
        on_given_up: Callable[[list[str], AsyncCkptError], None],
    ) -> None:
        self._pool, self._pending, self._lock = pool, pending, lock
        self._endpoint, self._timeout_s = endpoint, timeout_s
        self._announce, self._on_given_up = announce, on_given_up
        self._thread: threading.Thread | None = None
        self._wanted = False
        self._after: Callable[[], None] | None = None

    # ---- the memory -------------------------------------------------------------------------------------------------

    def hand_over(self, session: Session) -> None:
        """Give a new session every slot that is held. Blocks for its answers.

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
                    f"the memory of save {slot.user} was handed to {slot.handovers + 1} workers in turn, and each of "
                    "them has died before it told how that ended; it is not handed to another one. The last of them "
                    "may have committed it: look at the path",
                    endpoint=self._endpoint,
                    detail=f"handovers={slot.handovers}",
                ),
            )
        slot.handovers += 1
        with self._lock:
            found = self._pending.unended(slot.user, handed_over=True)
            last = slot.memory.control.generation
        generation = max(last, found.generation if found is not None else 0)
        if found is not None and not found.is_known:
            generation = found.generation - 1  # begun since the worker before is dead, which has written none of it
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
            asked = session.request(build, LATEST_S)
            if not is_granted_in_time(session, asked, self._timeout_s):
                raise WorkerUnavailableError(
                    f"the worker at {self._endpoint} did not take memory over in time",
                    endpoint=self._endpoint,
                    detail="request timeout",
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
            found = self._pending.unended(slot.user, told=True)
            if found is not None:
                self._announce(session, found, slot)
            else:
                slot.handovers -= 1  # taken over alive: what nobody does anything with kills no worker from here on
        return None

    def _give_up(self, slot: Slot, error: AsyncCkptError) -> None:
        with self._lock:
            found = self._pending.unended(slot.user)
            self._pool.orphan(slot)
        _log.warning("the memory of save %s is given up: %s", slot.user, str(error))
        if found is not None:
            self._on_given_up([found.save_id], error)

    # ---- in the background ------------------------------------------------------------------------------------------

    def begin(self, connection: Connection) -> None:
        """Find or start a worker, as one is dead that had saves; they fail without a thread for it. Does not wait."""
        refused = self._start(connection)
        if refused is not None:
            self._nobody(connection, refused)

    def _start(self, connection: Connection) -> AsyncCkptError | None:
        with self._lock:
            self._wanted = True
            if self._thread is not None:
                return None
            thread = BackgroundThread(self._run, "asyncckpt-takeover", (connection,))
            try:
                thread.start()
            except RuntimeError as error:  # can't start new thread
                self._wanted = False
                return WorkerUnavailableError(f"nobody looks for another worker: {error}", endpoint=self._endpoint)
            self._thread = thread
            return None

    def _run(self, connection: Connection) -> None:
        while True:
            with self._lock:
                wanted, self._wanted = self._wanted, False
                if not wanted:
                    self._thread, after = None, self._after
                    break
            session: Session | None = None
            try:
                reach("trainer: seeking a worker")
                session = connection.connect()
                self.hand_over(session)  # also what has joined the pool since that session got the others
            except CheckpointerClosedError:
                continue
            except Exception as error:
                if session is None or session.error is None:  # else its loss, of which somebody is told, sees to that
                    self._nobody(connection, error)
        if after is not None:
            after()

    def afterwards(self, call: Callable[[], None]) -> bool:
        """Let `call` be called once nothing is under way, in the thread of that; False: nothing is."""
        with self._lock:
            if self._thread is not None:
                self._after = call
            return self._thread is not None

    def _nobody(self, connection: Connection, error: Exception) -> None:
        """There is no worker: fail what none has, unless another thread has found one meanwhile."""
        if not isinstance(error, AsyncCkptError):
            _log.error("taking over from a dead worker failed", exc_info=error)
            error = WorkerUnavailableError(f"taking over from a dead worker failed: {error!r}", endpoint=self._endpoint)
        lost = []
        with self._lock:
            session = connection.session
            living = session.name if session is not None and session.error is None else ""
            for slot in self._pool.held():
                if slot.session != living:
                    found = self._pending.unended(slot.user)
                    lost += [found.save_id] if found is not None else []
                    self._pool.orphan(slot)
        self._on_given_up(lost, error)

    @property
    def is_under_way(self) -> bool:
        """Whether a worker is being found just now."""
        with self._lock:
            return self._thread is not None

    def in_thread(self) -> bool:
        """Whether the caller runs in the thread of a takeover, which may complete futures."""
        return threading.current_thread() is self._thread

    def join(self, timeout_s: float) -> None:
        """Wait until nothing is under way, at most `timeout_s`."""
        thread = self._thread
        if thread is not None and thread is not threading.current_thread():
            with contextlib.suppress(RuntimeError):  # it is only being started
                thread.join(timeout_s)

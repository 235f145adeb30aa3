"""Gets slots from the worker and gives them back."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from asyncckpt.client.session import DIED, Session
from asyncckpt.client.slot import Slot
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol import messages
from asyncckpt.protocol.identity import is_gone

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id, to the worker that there is; None when there is none."""


T = TypeVar("T")

DYING_S = 1.0
POLL_S = 0.005
"""A process that is killed lets its memory go between its descriptors and its end: some milliseconds. Chosen."""

LATEST_S = 1e6
"""A slot that nobody waits for any more is given back whenever it comes: nobody else knows of it."""


def while_workers_die(connect: Callable[[], Session], ask: Callable[[Session], T], attempts: int) -> T:
    """Return what `ask` returns, of another worker where one dies over it.

    Raises:
        WorkerUnavailableError: `attempts` workers in turn have died, or there is none, or it hangs.
        AsyncCkptError: What `ask` raises else.
    """
    while True:
        attempts -= 1
        try:
            return ask(connect())
        except WorkerUnavailableError as error:
            if attempts <= 0 or error.facts().get("detail") != DIED:
                raise
            error.__traceback__ = None  # it lives on in its session: not with the state that is being saved


def is_granted_in_time(session: Session, asked: Future[messages.Message], timeout_s: float) -> bool:
    """Wait for the answer of a session that was asked for a slot, or to take one; one that comes later is given back.

    Args:
        session: Was asked.
        asked: By a request that ends no sooner than the session, `LATEST_S`.
        timeout_s: For the answer, which may be an error.
    """
    if wait([asked], timeout_s).done:
        return True

    def give_back(late: Future[messages.Message]) -> None:
        reply = None if late.exception() is not None else late.result()
        if isinstance(reply, messages.Granted):
            session.request(lambda n: messages.Release(id=n, slot=reply.slot), LATEST_S)

    asked.add_done_callback(give_back)
    return False


def _is_dying(worker: messages.Welcome) -> bool:
    """Whether a worker, whose memory cannot be opened, is dead, or is within `DYING_S`.

    A process that is killed has no descriptors any more before it is seen to have ended.
    """
    deadline = time.monotonic() + DYING_S
    while not is_gone(worker.pid, worker.pid_start):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


class SlotLender:
    """See the module.

    Args:
        connect: Returns the live session, opening one when there is none.
        current: Returns the last session.
        send: As `Send` says.
        endpoint: For messages.
        timeout_s: For an allocation.
        attempts: How many workers in turn are asked, while each dies over it.
    """

    def __init__(
        self,
        connect: Callable[[], Session],
        current: Callable[[], Session | None],
        send: Send,
        endpoint: str,
        *,
        timeout_s: float,
        attempts: int,
    ) -> None:
        self._connect, self._current, self._send = connect, current, send
        self._endpoint, self._timeout_s, self._attempts = endpoint, timeout_s, attempts
        self._late: Future[messages.Message] | None = None

    def allocate(self, nbytes: int, within_s: float | None = None) -> Slot | None:
        """Return a slot of `nbytes`, or little more. Blocks until the worker has made it, or found one that it kept.

        Args:
            nbytes: See above.
            within_s: The wait for the answer ends then, with None, and a slot that comes later is given back.

        Raises:
            WorkerUnavailableError: It cannot be reached, or its memory cannot be opened; that it lives is looked at
                for `DYING_S`.
            InsufficientMemoryError: The machine has no room for it.
        """
        return while_workers_die(
            self._connect, lambda session: self._allocate(session, nbytes, within_s), self._attempts
        )

    def _allocate(self, session: Session, nbytes: int, within_s: float | None) -> Slot | None:
        timeout_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        future = self._asked(session, nbytes, time.monotonic() + timeout_s)
        if future is None and within_s is not None:
            return None
        if future is None:
            raise WorkerUnavailableError(
                f"the worker at {self._endpoint} did not answer in time", endpoint=self._endpoint, detail="allocate"
            )
        reply = future.result()
        assert isinstance(reply, messages.Granted)
        try:
            memory = SlotMemory.attach(session.worker.pid, reply.fd, reply.nbytes, reply.token)
        except (SlotError, OSError) as error:
            self.release(reply.slot)
            lacks_descriptors = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
            lives = lacks_descriptors or not _is_dying(session.worker)
            advice = (
                "raise the limit of open files (ulimit -n), or close files"
                if lacks_descriptors
                else "worker and trainer must run as the same user, with the same capabilities, share a PID namespace, "
                "and see each other in /proc"
            )
            raise WorkerUnavailableError(
                f"the worker's slot cannot be opened through /proc/{session.worker.pid}/fd: {error}; {advice}",
                endpoint=self._endpoint,
                detail="slot" if lives else DIED,
            ) from error
        # One that was lent before, and is warm, goes on from the generation that it holds.
        generation = memory.control.generation
        return Slot(number=reply.slot, memory=memory, session=session.name, generation=generation)

    def _asked(self, session: Session, nbytes: int, deadline: float) -> Future[messages.Message] | None:
        """Ask, and return the answer; None: it has not come in time."""
        # One at a time: else a worker that wakes up makes a slot for every save that has asked meanwhile.
        if self._late is not None and not wait([self._late], max(0.0, deadline - time.monotonic())).done:
            return None
        self._late = None
        future = session.request(lambda n: messages.Allocate(id=n, nbytes=nbytes, populate=True), LATEST_S)
        if is_granted_in_time(session, future, max(0.0, deadline - time.monotonic())):
            return future
        self._late = future
        return None

    def release(self, number: int) -> None:
        """Give slot `number` back. Does not wait."""
        self._send(lambda n: messages.Release(id=n, slot=number))

    def give_back(self, slot: Slot) -> None:
        """As `release`; a slot of a session that is over is nobody's, and its number another one's by now."""
        session = self._current()
        if session is not None and session.name == slot.session:
            self.release(slot.number)

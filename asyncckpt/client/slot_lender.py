"""Gets slots from the worker and gives them back."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import TypeVar

from asyncckpt.client.save_outcomes import Send
from asyncckpt.client.session import DIED, NO_TIMEOUT_S, Session
from asyncckpt.client.slot import Slot
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol import messages
from asyncckpt.protocol.identity import has_exited

T = TypeVar("T")

DEATH_WAIT_S = 1.0
POLL_S = 0.005
"""A killed process closes its descriptors, then frees its memory, then counts as ended: some milliseconds. Chosen."""


def retry_on_worker_death(connect: Callable[[], Session], ask: Callable[[Session], T], attempts: int) -> T:
    """Return what `ask` returns for a session; if that worker dies during the call, ask the next worker.

    Raises:
        WorkerUnavailableError: `attempts` workers in turn died, or no worker can be reached, or it hangs.
        AsyncCkptError: Any other error of `ask`.
    """
    while True:
        attempts -= 1
        try:
            return ask(connect())
        except WorkerUnavailableError as error:
            if attempts <= 0 or error.facts().get("detail") != DIED:
                raise
            # The session keeps the error, and its traceback would keep the state that is being saved alive.
            error.__traceback__ = None


def await_grant(session: Session, asked: Future[messages.Message], timeout_s: float) -> bool:
    """Wait for the answer to an Allocate or an Adopt. A slot that is granted later is released at once.

    IMPORTANT: also after an interrupt (KeyboardInterrupt). Else the worker would keep it, of the size of a snapshot,
    for a process that does not know of it.

    Args:
        session: The session that was asked.
        asked: The future of the request, whose timeout must be `NO_TIMEOUT_S`: no other code knows of a late slot.
        timeout_s: How long to wait for the answer, which may be an error.

    Returns:
        Whether `asked` is done.
    """

    def give_back(late: Future[messages.Message]) -> None:
        reply = None if late.exception() is not None else late.result()
        if isinstance(reply, messages.Granted):
            session.request(lambda n: messages.Release(id=n, slot=reply.slot), NO_TIMEOUT_S)

    is_done = False
    try:
        is_done = bool(wait([asked], timeout_s).done)
    finally:
        if not is_done:
            asked.add_done_callback(give_back)
    return is_done


def _is_dying(worker: messages.Welcome) -> bool:
    """Whether a worker whose memory cannot be opened is dead, or dies within `DEATH_WAIT_S`.

    A killed process loses its descriptors a moment before it counts as ended.
    """
    deadline = time.monotonic() + DEATH_WAIT_S
    while not has_exited(worker.pid, worker.pid_start):
        if time.monotonic() >= deadline:
            return False
        time.sleep(POLL_S)
    return True


class SlotLender:
    """Borrows slots from the worker for one checkpointer.

    Args:
        connect: Returns the live session; opens one if there is none.
        current: Returns the latest session, or None.
        send: Sends a request to the worker, if there is one.
        endpoint: For error messages.
        timeout_s: How long an allocation may take.
        attempts: How many workers in turn are asked, if each dies during the request.
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
        """Return a slot of `nbytes`, or a little more. Blocks until the worker has made it, or found one that it kept.

        Args:
            nbytes: The size wanted.
            within_s: Return None after so many seconds, and give back a slot that comes later; None: raise after
                `timeout_s`.

        Raises:
            WorkerUnavailableError: The worker cannot be reached, or its memory cannot be opened although it is still
                alive after `DEATH_WAIT_S`.
            InsufficientMemoryError: The machine has no room for the slot.
        """
        return retry_on_worker_death(
            self._connect, lambda session: self._allocate(session, nbytes, within_s), self._attempts
        )

    def _allocate(self, session: Session, nbytes: int, within_s: float | None) -> Slot | None:
        timeout_s = self._timeout_s if within_s is None else min(within_s, self._timeout_s)
        future = self._asked(session, nbytes, time.monotonic() + timeout_s)
        if future is None and within_s is not None:
            return None
        if future is None:
            raise WorkerUnavailableError(
                f"the worker at {self._endpoint} did not lend a slot of {nbytes} bytes within {timeout_s:g} s",
                endpoint=self._endpoint,
                detail="allocate",
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
        # A slot that was lent before continues from the generation that it holds.
        generation = memory.control.generation
        return Slot(number=reply.slot, memory=memory, session=session.name, generation=generation)

    def _asked(self, session: Session, nbytes: int, deadline: float) -> Future[messages.Message] | None:
        """Ask for a slot and return the answered request; None: no answer by `deadline`."""
        # One request at a time: else a worker that wakes up makes a slot for every save that asked meanwhile.
        if self._late is not None and not wait([self._late], max(0.0, deadline - time.monotonic())).done:
            return None
        future = session.request(lambda n: messages.Allocate(id=n, nbytes=nbytes, populate=True), NO_TIMEOUT_S)
        self._late = future  # before the wait, which an interrupt may end
        if not await_grant(session, future, max(0.0, deadline - time.monotonic())):
            return None
        self._late = None
        return future

    def release(self, number: int) -> None:
        """Give slot `number` back. Does not wait."""
        self._send(lambda n: messages.Release(id=n, slot=number))

    def give_back(self, slot: Slot) -> None:
        """Release a slot if its session still lives; else its number means nothing, or another session's slot."""
        session = self._current()
        if session is not None and session.name == slot.session:
            self.release(slot.number)

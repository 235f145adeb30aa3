"""Gets slots from the worker and gives them back."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol import messages
from asyncckpt.session import Session
from asyncckpt.staging.lent_slot import LentSlot

Send = Callable[[Callable[[int], messages.Message]], "Future[messages.Message] | None"]
"""Sends a request, made from its id, to the worker that there is; None when there is none."""


class SlotLender:
    """See the module.

    Args:
        connect: Returns the live session, opening one when there is none.
        send: As `Send` says.
        endpoint: For messages.
        timeout_s: For an allocation.
    """

    def __init__(self, connect: Callable[[], Session], send: Send, endpoint: str, *, timeout_s: float) -> None:
        self._connect, self._send, self._endpoint, self._timeout_s = connect, send, endpoint, timeout_s

    def allocate(self, nbytes: int) -> LentSlot:
        """Return a slot of `nbytes`, or little more. Blocks until the worker has made it, or found one that it kept.

        Raises:
            WorkerUnavailableError: It cannot be reached, or its memory cannot be opened.
            InsufficientMemoryError: The machine has no room for it.
        """
        session = self._connect()
        reply = session.call(lambda n: messages.Allocate(id=n, nbytes=nbytes, populate=True), self._timeout_s)
        assert isinstance(reply, messages.Granted)
        try:
            memory = SlotMemory.attach(session.worker.pid, reply.fd, reply.nbytes, reply.token)
        except (SlotError, OSError) as error:
            self.release(reply.slot)
            raise WorkerUnavailableError(
                f"the worker's slot cannot be opened through /proc/{session.worker.pid}/fd: {error}; worker and "
                "trainer must run as the same user and share a PID namespace",
                endpoint=self._endpoint,
                detail="slot",
            ) from error
        # One that was lent before, and is warm, goes on from the generation that it holds.
        generation = memory.control.generation
        return LentSlot(number=reply.slot, memory=memory, session=session.name, generation=generation)

    def release(self, number: int) -> None:
        """Give slot `number` back. Does not wait."""
        self._send(lambda n: messages.Release(id=n, slot=number))

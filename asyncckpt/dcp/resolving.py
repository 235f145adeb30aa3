"""A planner's tensors made by the thread that called it, while others write: in the order of the files, one by one.

A planner may not be made for threads; it may even ask other ranks. With one thread, DCP's own writer calls it so.

Ctrl-C may come between any two steps of the thread that serves. So nobody waits for an answer without looking whether
one can still come, and answers go through queues, whose `put` is one step.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import partial
from queue import Empty, SimpleQueue

import torch

from asyncckpt.dcp.written_tensor import Resolve
from asyncckpt.uninterrupted import uninterrupted

LOOK_EVERY_S = 0.05
"""Whether the thread that serves has failed. Chosen: that is rare, and ends the save."""

_Answer = SimpleQueue["torch.Tensor | Exception"]


class _Stopped(Exception):
    """The thread that calls the planner has failed."""


class CallersResolves:
    """See the module. For one `serve`.

    Args:
        resolves: In the order of the files.
        settle: Called with each tensor before another thread gets it, in the thread that has made it.
    """

    def __init__(self, resolves: Sequence[Resolve], settle: Callable[[torch.Tensor], None] = lambda made: None) -> None:
        self._resolves, self._settle = resolves, settle
        self._wishes: SimpleQueue[tuple[int, _Answer] | None] = SimpleQueue()
        self._made: dict[int, torch.Tensor] = {}
        self._next = 0
        self._failure: Exception | None = None
        self._stopped = False

    def resolves(self) -> list[Resolve]:
        """Return what other threads call instead: each asks the thread that serves, and waits for it."""
        return [partial(self._asked, number) for number in range(len(self._resolves))]

    def _asked(self, number: int) -> torch.Tensor:
        answer: _Answer = SimpleQueue()
        self._wishes.put((number, answer))
        while True:
            try:
                found = answer.get(timeout=LOOK_EVERY_S)
            except Empty:
                self.check()
                continue
            if isinstance(found, Exception):
                raise found
            return found

    def check(self) -> None:
        """Raise in a thread that writes, when there is nobody any more to make what it needs."""
        if self._stopped:
            raise _Stopped

    def serve(self, work: Callable[[], None]) -> None:
        """Do `work` in another thread, and make what it asks for.

        Raises:
            Exception: Whatever `work` raises, which gets what the planner raised.

        Blocks: for the work. No thread is left when this returns or raises.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                self._wishes.put(None)

        thread = threading.Thread(target=run, name="asyncckpt-write-all")
        is_over, interrupted = False, None
        try:
            with uninterrupted():
                thread.start()
            while (wish := self._wishes.get()) is not None:
                self._fulfil(*wish)
            is_over = True
        finally:
            # IMPORTANT: no call outside of the inner `try`: a second signal may be handled there, and the thread uses
            # memory and descriptors that others may have next.
            while True:
                try:
                    self._stopped = not is_over  # who waits for an answer, or writes, sees it
                    if thread.ident is not None:
                        with uninterrupted():
                            thread.join()
                    break
                except BaseException as error:
                    interrupted = error
        if interrupted is not None:
            raise interrupted
        if errors:
            raise errors[0]

    def _fulfil(self, number: int, answer: _Answer) -> None:
        """Answer. A planner that has failed is asked no more: every other wish gets the same error."""
        if self._failure is None:
            try:
                answer.put(self._tensor(number))
                return
            except Exception as error:
                self._failure = error
        answer.put(self._failure)

    def _tensor(self, number: int) -> torch.Tensor:
        if number < self._next and number not in self._made:
            return self._resolved(number)  # once more: of what is on no device nothing is kept early
        while self._next <= number:
            self._made[self._next] = self._resolved(self._next)
            self._next += 1
        return self._made.pop(number)

    def _resolved(self, number: int) -> torch.Tensor:
        made = self._resolves[number]()
        self._settle(made)
        return made

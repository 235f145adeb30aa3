"""A planner's tensors made by the thread that called it, while others write: in the order of the files, one by one.

A planner may not be made for threads; it may even ask other ranks. With one thread, DCP's own writer calls it so.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import Empty, SimpleQueue

import torch

from asyncckpt.dcp.written_tensor import Resolve
from asyncckpt.uninterrupted import uninterrupted

_LOOK_EVERY_S = 0.01


class _Stopped(Exception):
    """The thread that calls the planner has failed."""


class CallersResolves:
    """See the module. For one `serve`.

    Args:
        resolves: In the order of the files.
    """

    def __init__(self, resolves: Sequence[Resolve]) -> None:
        self._resolves = resolves
        self._wishes: SimpleQueue[tuple[int, Future[torch.Tensor]] | None] = SimpleQueue()
        self._made: dict[int, torch.Tensor] = {}
        self._next = 0
        self._stopped = False

    def resolves(self) -> list[Resolve]:
        """Return what other threads call instead: each asks the thread that serves, and waits for it."""
        return [partial(self._asked, number) for number in range(len(self._resolves))]

    def _asked(self, number: int) -> torch.Tensor:
        wish: Future[torch.Tensor] = Future()
        self._wishes.put((number, wish))
        return wish.result()

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
        ended: Future[None] = Future()

        def run() -> None:
            try:
                work()
                ended.set_result(None)
            except BaseException as error:
                ended.set_exception(error)
            finally:
                self._wishes.put(None)

        thread = threading.Thread(target=run, name="asyncckpt-write-all")
        try:
            with uninterrupted():
                thread.start()
            while (wish := self._wishes.get()) is not None:
                self._fulfil(*wish)
        except BaseException:
            self._stopped = True
            raise
        finally:
            self._end(thread)
        ended.result()

    def _end(self, thread: threading.Thread) -> None:
        """Wait for the thread, whatever comes meanwhile: it uses memory and descriptors that others may have next."""
        interrupted: BaseException | None = None
        while thread.is_alive():
            try:
                wish = self._wishes.get(timeout=_LOOK_EVERY_S)
                if wish is not None:
                    wish[1].set_exception(_Stopped())
            except Empty:
                pass
            except BaseException as error:
                self._stopped, interrupted = True, error
        if interrupted is not None:
            raise interrupted

    def _fulfil(self, number: int, wish: Future[torch.Tensor]) -> None:
        try:
            if number < self._next and number not in self._made:
                wish.set_result(self._resolves[number]())  # once more: of what is on no device nothing is kept early
                return
            while self._next <= number:
                self._made[self._next] = self._resolves[self._next]()
                self._next += 1
            wish.set_result(self._made.pop(number))
        except Exception as error:
            wish.set_exception(error)
        except BaseException as error:
            wish.set_exception(_Stopped())
            raise error

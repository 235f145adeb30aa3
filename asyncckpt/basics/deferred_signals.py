"""Defers signals (Ctrl-C, a scheduler's, an alarm) while steps run that must not be separated.

One of them is to start a thread. If a signal handler raises in `Thread.start` while that holds the lock of an event,
the new thread never gets the lock, and the interpreter waits for the thread for ever at exit.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor
from typing import Any, TypeVar

_Item = TypeVar("_Item")
_Found = TypeVar("_Found")

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM, signal.SIGUSR1, signal.SIGUSR2)
"""Those whose handlers may raise: Ctrl-C, schedulers (SLURM's too), and time limits by `signal.alarm`."""


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Defer signals that have handlers in Python: they are handled at the end of the block.

    At the end every handler is restored and every signal that came is handled, even if a handler raises; then the first
    error of a handler is raised.

    Handlers run in the main thread only, so in other threads this does nothing. Signals that end the process, or are
    ignored, keep doing so.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []
    before: dict[int, Any] = {}

    def note(number: int, _: Any) -> None:
        if number not in came:
            came.append(number)

    try:
        for one in _SIGNALS:
            handler = signal.getsignal(one)
            if callable(handler):
                before[one] = handler
                signal.signal(one, note)
        yield
    finally:
        first: BaseException | None = None
        while before or came:
            try:
                while before:
                    # IMPORTANT: in reverse order, so that the handler of Ctrl-C, which raises, is restored last.
                    number, handler = next(reversed(before.items()))
                    if signal.getsignal(number) is note:
                        signal.signal(number, handler)
                    del before[number]
                while came:
                    signal.raise_signal(came.pop(0))
            except BaseException as error:
                first = error if first is None else first
        if first is not None:
            raise first


def mapped(pool: Executor, work: Callable[[_Item], _Found], items: Iterable[_Item]) -> Iterator[_Found]:
    """As `pool.map`, with signals deferred while its threads are started."""
    with signals_deferred():
        return pool.map(work, items)


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until all threads have ended; if a signal handler raises meanwhile, raise its error after that."""
    interrupted: BaseException | None = None
    for thread in threads:
        while thread.is_alive():
            try:
                with signals_deferred():
                    thread.join()
            except BaseException as error:
                interrupted = error
    if interrupted is not None:
        raise interrupted

"""Steps between which Ctrl-C, or a scheduler's signal, waits for the last of them.

Starting a thread is one: an exception out of `Thread.start`, raised in the instant in which that holds the lock of an
event, keeps the new thread from ever getting it, and the interpreter waits for that thread at its end.
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

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def signals_deferred() -> Iterator[None]:
    """Keep signals whose handlers are Python's from interrupting the block; they are handled at its end.

    Every handler is given back, and every signal that came is handled, also where the handler of another one raises:
    what the first of them raised is raised at the end.

    Handlers run in the main thread alone, so in others there is nothing to do. What ends the process at once, or is
    ignored, stays so.
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
                    # IMPORTANT: Ctrl-C, whose handler raises, was taken first and is given back last.
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
    """As `pool.map`, whose threads are started `uninterrupted`."""
    with signals_deferred():
        return pool.map(work, items)


def join_all(threads: Iterable[threading.Thread]) -> None:
    """Wait until threads have ended, whatever comes meanwhile: a signal's exception is raised after that."""
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

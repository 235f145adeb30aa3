"""Steps between which Ctrl-C, or a scheduler's signal, waits for the last of them."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from typing import Any

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
    """Keep signals whose handlers are Python's from interrupting the block; they are handled at its end.

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
        for number, handler in before.items():
            signal.signal(number, handler)
        for number in came:
            signal.raise_signal(number)

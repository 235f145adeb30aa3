"""Signals that ask a training to end: a handler that takes a note, and passes the signal on to who was there before."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterable
from types import FrameType
from typing import Any

from asyncckpt.errors import ConfigError, SignalHandlerError
from asyncckpt.managing.dataloader_workers import DeferredDeaths

_UNCATCHABLE = (signal.SIGKILL, signal.SIGSTOP)
_log = logging.getLogger("asyncckpt")


def signals_of(given: int | Iterable[int] | None) -> tuple[signal.Signals, ...]:
    """Return what a user means by a signal, or several.

    Raises:
        ConfigError: No signal, or one that nobody can handle.
    """
    listed = () if given is None else (given,) if isinstance(given, int) else tuple(given)
    try:
        found = tuple(dict.fromkeys(signal.Signals(one) for one in listed))
    except (ValueError, TypeError) as error:
        raise ConfigError(f"preemption_signal={given!r}: {error}", field="preemption_signal") from error
    for one in found:
        if one in _UNCATCHABLE:
            raise ConfigError(f"{one.name} cannot be handled by any process", field="preemption_signal", value=one.name)
    return found


class SignalNote:
    """Notes when the first of some signals came. The handlers are in place from `install` to `restore`.

    The handler that was there before is called as well, unless it is one that ends the process: that is what is put
    off. In a forked child (of a pool, say, that ends its children by SIGTERM) nothing is put off: it does what was
    there before; and so it does where `restore` could not take it away, since another note was made later, or was not
    in the main thread. IMPORTANT: the handler takes no lock and writes no log: it may interrupt whoever holds one.

    Attributes:
        at: `time.monotonic()` when it came; None: it has not.
    """

    def __init__(self) -> None:
        self.at: float | None = None
        self._before: dict[signal.Signals, Any] = {}
        self._pid = os.getpid()
        self._is_over = False
        self._deaths = DeferredDeaths()

    def install(self, signals: Iterable[signal.Signals]) -> None:
        """Handle these signals.

        Raises:
            SignalHandlerError: Not in the main thread, where alone Python sets handlers.
        """
        wanted = list(signals)
        if wanted and threading.current_thread() is not threading.main_thread():
            names = ", ".join(one.name for one in wanted)
            raise SignalHandlerError(
                f"a handler for {names} can be set in the main thread only, and this is "
                f"{threading.current_thread().name!r}; make the manager there, or call its preempt() from a handler "
                "of your own",
                signal=names,
            )
        for one in wanted:
            self._before[one] = signal.getsignal(one)
            signal.signal(one, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        before = self._before.get(signal.Signals(number))
        # A note that was made later and still counts calls this one, too: then nothing ends the process.
        if os.getpid() != self._pid or (self._is_over and self._is_in_place(number)):
            self._leave_to(before, number, frame)
            return
        if self.at is None and not self._is_over:
            self.at = time.monotonic()
            self._deaths.begin()
        if callable(before) and before is not signal.default_int_handler:
            before(number, frame)

    def _is_in_place(self, number: int) -> bool:
        return signal.getsignal(number) == self._handle  # a bound method is another object each time it is asked for

    @staticmethod
    def _leave_to(before: Any, number: int, frame: FrameType | None) -> None:
        if callable(before):
            before(number, frame)
        elif before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Put back what was there before, where this is still what is there. Twice is fine."""
        self._is_over = True
        if threading.current_thread() is threading.main_thread():
            self._deaths.end()
        for one, before in list(self._before.items()):
            if self._is_in_place(one) and before is not None:
                with contextlib.suppress(ValueError):  # not the main thread: it goes on passing them on
                    signal.signal(one, before)
                    del self._before[one]
            else:
                _log.debug("the handler of %s has been replaced since; it stays", one.name)

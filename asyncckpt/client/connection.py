"""Finds or starts the worker, and keeps the session with it; another one when that is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.client import launcher
from asyncckpt.client.session import START_AFTER_S, Session
from asyncckpt.config import CheckpointerConfig
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    ProtocolVersionError,
    WorkerUnavailableError,
)
from asyncckpt.protocol import messages
from asyncckpt.protocol.dealer import NO_DESCRIPTORS

RESTART_GRACE_S = 2.0
"""After a loss at an endpoint that the user named, its own supervisor may bring the worker back for so long."""

RETRY_BUDGET_S = 1.0
"""After a worker could not be reached, or fell silent, a save tries for a second only: training goes on. A worker that
is started meanwhile is found by the next save."""

GOODBYE_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 8.0
"""What `close` may take beyond the waiting for saves. Chosen: normally it takes milliseconds."""

_log = logging.getLogger("asyncckpt.client")


class Connection:
    """See the module.

    Args:
        endpoint: `ipc://...`.
        named: The user named the endpoint.
        config: For the timeouts.
        greet: From the name of the session that is replaced, or "", to what builds a Hello.
        pending, on_saves: As `Session` has them.
        on_open: Called with each new session before anybody else gets it; raises when that is lost again.
        on_lost: Called with each session that is lost, in its thread, and why.
        options: Returns how to start a worker, besides what the config says.

    Attributes:
        session: The last one, or None.
        settled: `on_open` has returned for it.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        named: bool,
        config: CheckpointerConfig,
        greet: Callable[[str], Callable[[int, str], messages.Hello]],
        pending: Callable[[], Sequence[str]],
        on_saves: Callable[[messages.Saves], None],
        on_open: Callable[[Session], None],
        on_lost: Callable[[Session, WorkerUnavailableError], None],
        options: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.endpoint = endpoint
        self.session: Session | None = None
        self.settled = True
        self._on_open, self._options = on_open, options
        self._named, self._config, self._greet = named, config, greet
        self._pending, self._on_saves, self._report_loss = pending, on_saves, on_lost
        self._opening = threading.RLock()  # a signal handler may save or close in the middle of a save
        self._opening_session: Session | None = None
        self._connecting: threading.Thread | None = None
        self._last_name = ""
        self._had_session = self._unreachable = self._closed = False

    def connect(self, *, start: bool = True) -> Session:
        """Return the live session, opening one when there is none.

        Blocks: up to `worker_start_timeout_s`; up to `RETRY_BUDGET_S` while the last attempt has failed.

        Raises:
            WorkerUnavailableError: Nobody answers.
            CheckpointerClosedError: After `close`.
        """
        with self._opening:
            self._check_open()
            session = self.session
            if session is not None and session.error is None and self.settled:
                return session
            budget_s = self._config.worker_start_timeout_s
            deadline = time.monotonic() + (min(RETRY_BUDGET_S, budget_s) if self._unreachable else budget_s)
            while True:
                session = self._open(deadline, start=start)
                try:
                    self._on_open(session)
                except BaseException as error:
                    # Lost again, perhaps by what it was told: that is bounded, and so is the time.
                    lost = isinstance(error, AsyncCkptError) and session.error is not None
                    if lost and not self._closed and time.monotonic() < deadline:
                        # Its session keeps the error: with the traceback it would keep the state that is being saved.
                        error.__traceback__ = None
                        continue
                    session.close()
                    raise
                self.settled = True
                return session

    def _open(self, deadline: float, *, start: bool) -> Session:
        if self.session is not None:
            self.session.close()
        session = Session(
            self.endpoint,
            hello=self._greet(self._last_name),
            worker_timeout_s=self._config.worker_timeout_s,
            pending=self._pending,
            on_saves=self._on_saves,
            on_lost=lambda error: self._on_lost(session, error),
        )
        grace = RESTART_GRACE_S if self._named and self._had_session else START_AFTER_S
        self._opening_session = session
        try:
            self._check_open()  # `close` sets the flag before it looks for a session to give up
            options = (*(("--events",) if self._config.events else ()), *self._options())
            begin = partial(launcher.start_worker, self.endpoint, options=options) if start else None
            session.open(deadline, begin, grace)
        except BaseException as error:
            # One of another version has answered: the next save may find another one in its place, and starts it.
            if isinstance(error, AsyncCkptError) and not isinstance(error, ProtocolVersionError):
                # Where no descriptor was left, that says nothing about the worker.
                self._unreachable = self._unreachable or error.facts().get("detail") != NO_DESCRIPTORS
            session.close()
            raise
        finally:
            self._opening_session = None
        if self._closed:  # meanwhile, and nobody has waited for this
            session.abandon(lambda: None)
            self._check_open()
        self.settled = False
        self.session, self._had_session, self._unreachable = session, True, False
        self._last_name = session.name
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointerClosedError("the checkpointer is closed")

    def connect_soon(self) -> None:
        """Begin to connect in the background, so that the constructor does not wait for a worker to start."""

        def run() -> None:
            with contextlib.suppress(AsyncCkptError):
                self.connect()

        thread = BackgroundThread(run, "asyncckpt-connect")
        with contextlib.suppress(RuntimeError):  # can't start new thread: the first save connects
            thread.start()
            self._connecting = thread

    def _on_lost(self, session: Session, error: WorkerUnavailableError) -> None:
        if error.facts().get("detail") == "silent":
            self._unreachable = True  # it may hang for long, and holds the endpoint
        self._report_loss(session, error)

    def close(self, timeout_s: float) -> bool:
        """Say goodbye and end the session; a connection in the making is given up.

        Blocks: at most `timeout_s`, in all.

        Returns:
            False when it was closed already.
        """
        was_closed, self._closed = self._closed, True
        if was_closed:
            return False
        deadline = time.monotonic() + timeout_s

        def left() -> float:
            return max(0.0, deadline - time.monotonic())

        opening = self._opening_session
        if opening is not None:
            opening.close(left())
        if self._opening.acquire(timeout=left() / 2):  # the rest is for the goodbye of a session that is not settled
            self._opening.release()
        session, self.session = self.session, None
        if session is not None:
            try:
                if session.error is None:
                    session.call(lambda n: messages.Goodbye(id=n), min(GOODBYE_TIMEOUT_S, left()), late_s=0.2)
            except AsyncCkptError as error:
                _log.debug("goodbye was not answered: %s", error)
            finally:  # after an interrupt, or what a signal handler raises, too: else its thread goes on
                session.close(left())
        if self._connecting is not None:
            self._connecting.join(left())
        return True

    def abandon(self, on_end: Callable[[], None], *, after_saves: bool = False) -> bool:
        """Close without waiting: the session's thread says goodbye, and calls `on_end` at its end.

        Args:
            on_end, after_saves: As for `Session.abandon`.

        Returns:
            Whether the caller must do what `on_end` does: there is no living session.
        """
        session = self.session
        return not self._closed and (session is None or not session.abandon(on_end, after_saves=after_saves))

    def shut(self) -> None:
        """Let nobody connect any more; a connection in the making is given up. Does not wait."""
        self._closed = True
        opening = self._opening_session
        if opening is not None:
            opening.close(0.0)

    @property
    def is_closed(self) -> bool:
        """Whether nobody can connect any more."""
        return self._closed


SILENT_S = 1.0
"""The worker's control loop does no file I/O: it answers within milliseconds. Chosen."""

SLOW_STORAGE = "storage is slower than the saves come: save less often, or allow more slots"


def why_saves_do_not_end(session: Session | None) -> str:
    """Return it for people, as the end of a sentence."""
    if session is None or session.error is not None or session.silent_s < SILENT_S:
        return SLOW_STORAGE
    return (
        f"the worker (pid {session.worker.pid}) at {session.endpoint} has not answered for {session.silent_s:.0f} s: "
        "it hangs, or was stopped; its saves go on when it does"
    )

"""Finds or starts the worker and keeps one session with it; opens another session when that one is lost."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.client import launcher
from asyncckpt.client.session import REFUSED, SILENT, START_AFTER_S, Session
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
"""How long to wait, after a loss at an endpoint that the user named, for the user's supervisor to restart the worker
before we start one. Chosen."""

RETRY_BUDGET_S = 1.0
"""How long a save tries to connect after the last attempt failed or the worker stopped answering, so that training is
not held up by every save. A worker that is started meanwhile is found by the next save."""

GOODBYE_TIMEOUT_S = 2.0
CLOSE_TIMEOUT_S = 8.0
"""How long `close` may take after the wait for saves. Chosen: normally it takes milliseconds."""

_log = logging.getLogger("asyncckpt.client")


class Connection:
    """The connection of one checkpointer to its worker, over any number of sessions.

    Args:
        endpoint: `ipc://...`.
        named: The user named the endpoint.
        config: For the timeouts.
        hello_for: Takes the name of the session to replace, or "", and returns a function that builds a Hello.
        pending, on_saves: As for `Session`.
        on_open: Called with each new session before `connect` returns it; raises if that session is lost meanwhile.
        on_lost: Called with each lost session and the reason, in the session's thread.
        options: Returns command-line options for a worker to start, besides those that `config` sets.

    Attributes:
        session: The latest session, or None.
        is_ready: `on_open` has returned for `session`.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        named: bool,
        config: CheckpointerConfig,
        hello_for: Callable[[str], Callable[[int, str], messages.Hello]],
        pending: Callable[[], Sequence[str]],
        on_saves: Callable[[messages.Saves], None],
        on_open: Callable[[Session], None],
        on_lost: Callable[[Session, WorkerUnavailableError], None],
        options: Callable[[], Sequence[str]] = tuple,
    ) -> None:
        self.endpoint = endpoint
        self.session: Session | None = None
        self.is_ready = True
        self._on_open, self._options = on_open, options
        self._named, self._config, self._hello_for = named, config, hello_for
        self._pending, self._on_saves, self._report_loss = pending, on_saves, on_lost
        self._opening = threading.RLock()  # a signal handler may save or close in the middle of a save
        self._opening_session: Session | None = None
        self._connecting: threading.Thread | None = None
        self._last_name = ""
        self._had_session = self._unreachable = self._closed = False

    def connect(self, *, start: bool = True) -> Session:
        """Return the live session; open one if there is none.

        Blocks: up to `worker_start_timeout_s`, or up to `RETRY_BUDGET_S` if the last attempt failed.

        Raises:
            WorkerUnavailableError: No worker answers.
            CheckpointerClosedError: After `close`.
        """
        with self._opening:
            self._check_open()
            session = self.session
            if session is not None and session.error is None and self.is_ready:
                return session
            budget_s = self._config.worker_start_timeout_s
            deadline = time.monotonic() + (min(RETRY_BUDGET_S, budget_s) if self._unreachable else budget_s)
            while True:
                session = self._open(deadline, start=start)
                try:
                    self._on_open(session)
                except BaseException as error:
                    # The worker died again, perhaps because of what `on_open` sent. Retries are bounded: by the
                    # deadline, and by `failover.MAX_HANDOVERS`.
                    lost = isinstance(error, AsyncCkptError) and session.error is not None
                    if lost and not self._closed and time.monotonic() < deadline:
                        # The session keeps the error, and its traceback would keep the state that is being saved alive.
                        error.__traceback__ = None
                        continue
                    session.close()
                    raise
                self.is_ready = True
                return session

    def _open(self, deadline: float, *, start: bool) -> Session:
        if self.session is not None:
            self.session.close()
        session = Session(
            self.endpoint,
            hello=self._hello_for(self._last_name),
            worker_timeout_s=self._config.worker_timeout_s,
            pending=self._pending,
            on_saves=self._on_saves,
            on_lost=lambda error: self._on_lost(session, error),
        )
        grace = RESTART_GRACE_S if self._named and self._had_session else START_AFTER_S
        self._opening_session = session
        try:
            self._check_open()  # `close` sets the flag first, then closes `_opening_session`
            options = (*(("--events",) if self._config.events else ()), *self._options())
            begin = partial(launcher.start_worker, self.endpoint, options=options) if start else None
            session.open(deadline, begin, grace)
        except BaseException as error:
            # A worker of another version has answered, so the endpoint is reachable: the next save gets its full time,
            # since by then another worker may be there, or is to be started.
            if isinstance(error, AsyncCkptError) and not isinstance(error, ProtocolVersionError):
                # If this process has run out of file descriptors, the worker may well be reachable.
                self._unreachable = self._unreachable or error.facts().get("detail") != NO_DESCRIPTORS
            session.close()
            raise
        finally:
            self._opening_session = None
        if self._closed:  # by another thread, which did not wait for the open to end
            session.abandon(lambda: None)
            self._check_open()
        self.is_ready = False
        self.session, self._had_session, self._unreachable = session, True, False
        self._last_name = session.name
        return session

    def _check_open(self) -> None:
        if self._closed:
            raise CheckpointerClosedError("the checkpointer is closed")

    def connect_soon(self) -> None:
        """Connect in a background thread, so that the constructor does not wait for a worker to start."""

        def run() -> None:
            with contextlib.suppress(AsyncCkptError):
                self.connect()

        thread = BackgroundThread(run, "asyncckpt-connect")
        with contextlib.suppress(RuntimeError):  # can't start new thread: the first save connects
            thread.start()
            self._connecting = thread

    def _on_lost(self, session: Session, error: WorkerUnavailableError) -> None:
        if self._closed and error.facts().get("detail") == REFUSED:
            return  # a heartbeat that was sent after the goodbye
        if error.facts().get("detail") == SILENT:
            self._unreachable = True  # it may hang for a long time, and still holds the endpoint
        self._report_loss(session, error)

    def close(self, timeout_s: float) -> bool:
        """Say goodbye and end the session; abort a `connect` that is under way.

        Blocks: at most `timeout_s` in all.

        Returns:
            False if it was closed already.
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
        if self._opening.acquire(timeout=left() / 2):  # keep the other half for the goodbye of a session in `on_open`
            self._opening.release()
        session, self.session = self.session, None
        if session is not None:
            try:
                if session.error is None:
                    session.call(lambda n: messages.Goodbye(id=n), min(GOODBYE_TIMEOUT_S, left()), margin_s=0.2)
            except AsyncCkptError as error:
                _log.debug("goodbye was not answered: %s", error)
            finally:  # also after KeyboardInterrupt, or what a signal handler raises: else the session's thread runs on
                session.close(left())
        if self._connecting is not None:
            self._connecting.join(left())
        return True

    def abandon(self, on_end: Callable[[], None], *, after_saves: bool = False) -> bool:
        """Close without waiting: the session's thread says goodbye, and calls `on_end` when it ends.

        Args:
            on_end, after_saves: As for `Session.abandon`.

        Returns:
            Whether there is no live session to call `on_end`, so that the caller must do what it does.
        """
        session = self.session
        return not self._closed and (session is None or not session.abandon(on_end, after_saves=after_saves))

    def shut(self) -> None:
        """Refuse further `connect` calls and abort one that is under way. Does not wait."""
        self._closed = True
        opening = self._opening_session
        if opening is not None:
            opening.close(0.0)

    @property
    def is_closed(self) -> bool:
        """Whether `connect` is refused for good."""
        return self._closed


SILENT_S = 1.0
"""A worker that has not answered for so long hangs or was stopped: its control loop does no file I/O, so it normally
answers within milliseconds. Chosen."""

SLOW_STORAGE = "storage is slower than the saves come: save less often, or allow more slots"


def why_saves_do_not_end(session: Session | None) -> str:
    """Return the probable reason why saves do not end, as the last clause of an error message."""
    if session is None or session.error is not None or session.silent_s < SILENT_S:
        return SLOW_STORAGE
    return (
        f"the worker (pid {session.worker.pid}) at {session.endpoint} has not answered for {session.silent_s:.0f} s: "
        "it hangs or was stopped; its saves go on when it resumes"
    )

"""One connection to one worker process, from Hello until it ends; it never reconnects.

A thread owns the socket. Other threads hand requests over through a deque and an eventfd, and get a future. libzmq
promises no arrival, so every request is sent again until it is answered; the worker treats repeats as one.
"""

from __future__ import annotations

import concurrent.futures
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.endpoint import check_directory, socket_path
from asyncckpt.protocol.identity import own_start_ticks
from asyncckpt.session_thread import SessionThread

LATE_S = 1.0
"""How late the session's thread may set an error before the caller gives up by itself."""

_log = logging.getLogger("asyncckpt.session")

CLOSE_TIMEOUT_S = 5.0
SAY_AFTER_S = 1.0
START_AGAIN_S = 1.0
"""A worker that is on its way out still holds the endpoint: starting another is tried again after this."""

START_AFTER_S = 0.15
"""How long a running worker has to answer Hello before another is started; a second one exits by itself."""


class Session(SessionThread):
    """See the module. Made by `Session.open`.

    Args:
        endpoint: `ipc://...`.
        hello: Builds the Hello from a request id and a session name.
        worker_timeout_s: Silence after which the worker counts as lost.
        pending: Returns the save ids to ask for in heartbeats. Called in the session's thread.
        on_saves: Receives every `Saves`, in the session's thread.
        on_lost: Called once, in the session's thread, when the worker is lost.
    """

    @property
    def error(self) -> WorkerUnavailableError | None:
        """Why the session ended, or None while it lives. From the worker's death on, also while last words are heard.

        IMPORTANT: a save that begins after a worker's death is not one that it may have written or committed.
        """
        with self._lock:  # the watch is closed under it
            return self._gone() if self._error is None and self._has_died() else self._error

    @property
    def silent_s(self) -> float:
        """How long the worker has owed an answer to a heartbeat."""
        since = self._silent_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def open(self, deadline: float, start: Callable[[], None] | None, start_after_s: float = START_AFTER_S) -> None:
        """Greet the worker. Blocks until it answers.

        Args:
            deadline: `time.monotonic()` at which to give up.
            start: Starts a worker at this endpoint; called when none answers within `start_after_s`, and
                again every `START_AGAIN_S`.
            start_after_s: See `start`.

        Raises:
            WorkerUnavailableError: Nobody answered in time, or no thread can be started.
            ProtocolVersionError: another version answered.
            EndpointError: Somebody else may be listening there.
        """
        try:
            check_directory(self.endpoint)
            self._start()
            if start is None:
                self._await_welcome(min(time.monotonic() + SAY_AFTER_S, deadline))
                if not self._welcome.done():
                    wait_s = deadline - time.monotonic()
                    _log.warning("waiting up to %.0f s for a worker at %s", wait_s, self.endpoint)
            else:
                exists = os.path.exists(socket_path(self.endpoint))
                self._await_welcome(min(time.monotonic() + (start_after_s if exists else 0.0), deadline))
                while not self._welcome.done() and time.monotonic() < deadline:
                    start()
                    self._await_welcome(min(time.monotonic() + START_AGAIN_S, deadline))
            self._await_welcome(deadline)
            if not self._welcome.done():
                started = " although one was started; see the log file beside its socket" if start else ""
                raise WorkerUnavailableError(
                    f"no worker answers at {self.endpoint}{started}. Start one with: asyncckpt-worker --endpoint "
                    f"{self.endpoint}",
                    endpoint=self.endpoint,
                    detail="no answer to hello",
                )
            self._welcome.result(0)
            # IMPORTANT: again, as it may have been made meanwhile: what comes next is the training state.
            check_directory(self.endpoint)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError as error:
            text = f"no thread can speak to the worker at {self.endpoint}: {error}"
            raise WorkerUnavailableError(text, endpoint=self.endpoint, detail="thread") from error

    def _await_welcome(self, until: float) -> None:
        # IMPORTANT: `wait`, here and below: an error of the future may be a TimeoutError itself.
        concurrent.futures.wait([self._welcome], max(0.0, until - time.monotonic()))
        if self._welcome.done():
            self._welcome.result(0)

    def request(self, build: Callable[[int], messages.Message], timeout_s: float) -> Future[messages.Message]:
        """Send a request; it is repeated until it is answered.

        Args:
            build: Makes the message from its id.
            timeout_s: After it, the future fails with WorkerUnavailableError.

        Returns:
            A future of the reply; a `Refused` reply sets the error that it carries.
        """
        future: Future[messages.Message] = Future()
        with self._lock:
            number = next(self._ids)
            error = self._error
            if error is None:
                self._queue.append((number, codec.encode(build(number)), future, time.monotonic() + timeout_s))
        if error is not None:
            future.set_exception(error)
        else:
            self._ring()
        return future

    def call(
        self, build: Callable[[int], messages.Message], timeout_s: float, *, late_s: float = LATE_S
    ) -> messages.Message:
        """Send a request and wait for its reply, at most `timeout_s` + `late_s`.

        Raises:
            WorkerUnavailableError: No answer in time, or the worker is lost.
            AsyncCkptError: What the worker refused with.
        """
        future = self.request(build, timeout_s)
        # The thread sets an error at the deadline itself; the margin only covers a thread that is late.
        if not concurrent.futures.wait([future], timeout_s + late_s).done:
            raise WorkerUnavailableError(
                f"the worker at {self.endpoint} did not answer in time",
                endpoint=self.endpoint,
                detail="request timeout",
            )
        return future.result(0)

    def flush(self, timeout_s: float) -> None:
        """Wait until every request has been answered, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._error is None and (self._queue or self._outstanding) and time.monotonic() < deadline:
            time.sleep(0.005)

    def abandon(self, on_end: Callable[[], None], *, after_saves: bool = False) -> bool:
        """End without waiting: the thread says goodbye once everything is answered, and calls `on_end` at its end.

        Args:
            on_end: See above.
            after_saves: It goes on until no save is pending.

        Returns:
            False when the thread has ended already; `on_end` will not be called.
        """
        with self._lock:
            # IMPORTANT: one that is just telling of its loss has not ended: what follows from that comes first.
            if self._has_ended or not self.thread.is_alive():
                return False
            self._on_end, self._ends_after_saves = on_end, after_saves
        self._ring()
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the thread and close the socket. Outstanding requests fail. Twice is fine; nothing in a forked child.

        Blocks: at most `timeout_s`, for the thread, which may be in a callback of the user's.
        """
        if os.getpid() != self._owner_pid:
            return
        self._stop()
        if self.thread.ident is not None and threading.current_thread() is not self.thread:
            self.thread.join(timeout_s)
        with self._lock:
            if not self.thread.is_alive() and self._wake >= 0:
                os.close(self._wake)
                self._wake = -1

    def close_inherited_fds(self) -> None:
        """In a forked child: drop the child's copies of our own fds. The socket is left alone."""
        if self._wake >= 0:
            os.close(self._wake)
        self._wake = -1
        if self._watch is not None:
            self._watch.close()


def greeting(rank: int, world_size: int, package: str, replaces: str = "") -> Callable[[int, str], messages.Hello]:
    """Return what builds this process's Hello; `replaces`: the name of its session before, which the worker ends.

    Raises:
        WorkerUnavailableError: /proc cannot be read.
    """
    pid = os.getpid()
    started = own_start_ticks()

    def build(number: int, session: str) -> messages.Hello:
        return messages.Hello(
            id=number,
            session=session,
            replaces=replaces,
            package=package,
            pid=pid,
            pid_start=started,
            rank=rank,
            world_size=world_size,
        )

    return build

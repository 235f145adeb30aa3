"""One session with one worker process, from Hello until it ends; it never reconnects.

A thread owns the socket. Other threads put requests into a deque, wake that thread by an eventfd, and get a future.
libzmq does not guarantee delivery, so every request is sent again until it is answered; the worker treats repeats as
one request.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import logging
import os
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future

from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.basics.storage_options import NO_OPTIONS
from asyncckpt.errors import AsyncCkptError, ProtocolError, ProtocolVersionError, WorkerUnavailableError, from_wire
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.dealer import NO_DESCRIPTORS, Dealer
from asyncckpt.protocol.endpoint import check_directory, socket_path
from asyncckpt.protocol.identity import ProcessWatch, own_start_ticks, watch

CALL_MARGIN_S = 1.0
"""How long after its deadline a caller still waits for the session's thread to set the error."""

_log = logging.getLogger("asyncckpt.client.session")

NO_TIMEOUT_S = 1e6
"""Timeout of a request that is repeated as long as the session lives: the session's own deadlines end it."""

CLOSE_TIMEOUT_S = 5.0
LOG_WAIT_AFTER_S = 1.0
START_RETRY_S = 1.0
"""How often to try to start a worker again: one that is shutting down still holds the endpoint."""

START_AFTER_S = 0.15
"""How long a running worker has to answer Hello before another one is started. If two run, the second exits."""

RESEND_S = 1.0
"""A request without an answer is sent again after this. Chosen: far above a round trip, far below any deadline."""

HELLO_RESEND_S = 0.05
POLL_S = 0.2
LAST_REPLIES_S = 0.05
"""How long to read what a dead worker has sent, after the last message."""

STALL_S = 1.0
"""An iteration of the loop takes `POLL_S`. If one took so long, this process was stopped or starved; that says nothing
about the worker."""

DIED = "died"
"""`detail` of the error of a proved loss: the worker's process has ended."""

SILENT = "silent"
"""`detail` of the error of a loss that is not proved: the worker does not answer."""

REFUSED = "refused"
"""`detail` of the error of a session that the worker does not know."""

CLOSED = "closed"
"""`detail` of the error of a session that we have closed."""

TIMED_OUT = "request timeout"
"""`detail` of the error of a request without an answer."""

ABANDON_TIMEOUT_S = 3.0
"""How long an abandoned session waits for answers before it says goodbye."""

GOODBYE_LINGER_S = 0.2


class _SentRequest:
    """A request without an answer: the frames to send again, the deadline, and the future of the reply."""

    __slots__ = ("deadline", "frames", "future", "sent")

    def __init__(self, frames: list[bytes], future: Future[messages.Message], deadline: float) -> None:
        self.frames, self.future, self.deadline = frames, future, deadline
        self.sent = 0.0


OnAnswer = Callable[["Future[messages.Message]"], None]


class Session:
    """One session with one worker. Call `open` before any other method.

    Args:
        endpoint: `ipc://...`.
        hello: Builds the Hello from a request id and a session name.
        worker_timeout_s: Silence after which the worker counts as lost.
        pending: Returns the save ids to ask for in heartbeats. Called in the session's thread.
        on_saves: Receives every `Saves`, in the session's thread.
        on_lost: Called once, in the session's thread, when the worker is lost.
    """

    def __init__(
        self,
        endpoint: str,
        *,
        hello: Callable[[int, str], messages.Hello],
        worker_timeout_s: float,
        pending: Callable[[], Sequence[str]],
        on_saves: Callable[[messages.Saves], None],
        on_lost: Callable[[WorkerUnavailableError], None],
    ) -> None:
        self.endpoint = endpoint
        self.name = secrets.token_hex(8)
        self._hello, self._timeout_s = hello, worker_timeout_s
        self._pending, self._on_saves, self._on_lost = pending, on_saves, on_lost
        self._queue: deque[tuple[int, list[bytes], Future[messages.Message], float]] = deque()
        self._outstanding: dict[int, _SentRequest] = {}
        self._ids = iter(range(1, 1 << 62))
        self._lock = threading.RLock()  # a signal handler may save or close in the middle of a request
        self._on_end: Callable[[], None] | None = None
        self._ends_after_saves = False
        self._abandoned_at: float | None = None
        self._looped_at = time.monotonic()
        self._error: WorkerUnavailableError | None = None
        self._stopping = False
        self._welcome: Future[messages.Welcome] = Future()
        self._watch: ProcessWatch | None = None
        self._heartbeat_s = 1.0
        self._has_ended = False
        self._silent_since: float | None = None
        self._next_heartbeat = 0.0
        try:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        except OSError as caught:
            text = f"the worker at {endpoint} cannot be reached: no file descriptor is free ({caught.strerror})"
            raise WorkerUnavailableError(text, endpoint=endpoint, detail=NO_DESCRIPTORS) from caught
        self._owner_pid = os.getpid()
        self.thread = BackgroundThread(self._run, "asyncckpt-client", give_up=self._stop)

    @property
    def worker(self) -> messages.Welcome:
        """The worker's Welcome; only after `open`."""
        return self._welcome.result(0)

    @property
    def error(self) -> WorkerUnavailableError | None:
        """Why the session ended, or None while it lives. Set from the worker's death on.

        IMPORTANT: also while the dead worker's last replies are still being read. A save that begins after its death
        must not count as one that it may have written or committed.
        """
        with self._lock:  # the watch is closed under it
            return self._death_error() if self._error is None and self._has_died() else self._error

    @property
    def silent_s(self) -> float:
        """Seconds for which the worker has not answered a heartbeat."""
        since = self._silent_since
        return 0.0 if since is None else max(0.0, time.monotonic() - since)

    def open(self, deadline: float, start: Callable[[], None] | None, start_after_s: float = START_AFTER_S) -> None:
        """Open the session: send Hello until the worker answers. Blocks until then.

        Args:
            deadline: `time.monotonic()` at which to give up.
            start: Starts a worker at this endpoint; called if none answers in time, and again every `START_RETRY_S`.
                None: only wait for one.
            start_after_s: How long a running worker may take to answer before `start` is called.

        Raises:
            WorkerUnavailableError: No worker answered in time, or no thread can be started.
            ProtocolVersionError: A worker of another version answered.
            EndpointError: Another user may be listening there.
        """
        try:
            check_directory(self.endpoint)
            self._start()
            if start is None:
                self._await_welcome(min(time.monotonic() + LOG_WAIT_AFTER_S, deadline))
                if not self._welcome.done():
                    wait_s = deadline - time.monotonic()
                    _log.warning("waiting up to %.0f s for a worker at %s", wait_s, self.endpoint)
            else:
                exists = os.path.exists(socket_path(self.endpoint))
                self._await_welcome(min(time.monotonic() + (start_after_s if exists else 0.0), deadline))
                while not self._welcome.done() and time.monotonic() < deadline:
                    start()
                    self._await_welcome(min(time.monotonic() + START_RETRY_S, deadline))
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
            # IMPORTANT: check again. The directory may have been made since the first check, by another user, who
            # would get the training state that is sent next.
            check_directory(self.endpoint)
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        try:
            self.thread.start()
        except RuntimeError as error:
            text = f"no thread can be started for the session with the worker at {self.endpoint}: {error}"
            raise WorkerUnavailableError(text, endpoint=self.endpoint, detail="thread") from error

    def _await_welcome(self, until: float) -> None:
        # IMPORTANT: `wait`, not `result(timeout)`, here and below: the future's own error may be a TimeoutError.
        concurrent.futures.wait([self._welcome], max(0.0, until - time.monotonic()))
        if self._welcome.done():
            self._welcome.result(0)

    def request(
        self, build: Callable[[int], messages.Message], timeout_s: float, on_answer: OnAnswer | None = None
    ) -> Future[messages.Message]:
        """Send a request; it is repeated until it is answered.

        Args:
            build: Makes the message from its id.
            timeout_s: After so long without a reply the future fails with WorkerUnavailableError.
            on_answer: Called with the future when it is done: in the session's thread, so that the caller may hold
                locks; or in this call, if the session has ended.

        Returns:
            A future of the reply; a `Refused` reply sets the error that it carries.
        """
        future: Future[messages.Message] = Future()
        if on_answer is not None:
            future.add_done_callback(on_answer)
        with self._lock:
            number = next(self._ids)
            error = self._error
            if error is None:
                self._queue.append((number, codec.encode(build(number)), future, time.monotonic() + timeout_s))
        if error is not None:
            future.set_exception(error)
        else:
            self._wake_thread()
        return future

    def call(
        self, build: Callable[[int], messages.Message], timeout_s: float, *, margin_s: float = CALL_MARGIN_S
    ) -> messages.Message:
        """Send a request and wait for its reply, at most `timeout_s` + `margin_s`.

        Raises:
            WorkerUnavailableError: No answer in time, or the worker is lost.
            AsyncCkptError: The error with which the worker refused.
        """
        future = self.request(build, timeout_s)
        # The session's thread sets an error at the deadline; the margin is for a thread that is late.
        if not concurrent.futures.wait([future], timeout_s + margin_s).done:
            raise WorkerUnavailableError(
                f"the worker at {self.endpoint} did not answer a request within {timeout_s + margin_s:g} s",
                endpoint=self.endpoint,
                detail=TIMED_OUT,
            )
        return future.result(0)

    def flush(self, timeout_s: float) -> None:
        """Wait until every request has been answered, at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        while self._error is None and (self._queue or self._outstanding) and time.monotonic() < deadline:
            time.sleep(0.005)

    def abandon(self, on_end: Callable[[], None], *, after_saves: bool = False) -> bool:
        """End without waiting: the thread says goodbye once every request is answered, and calls `on_end` at its end.

        Args:
            on_end: Called in the session's thread when it ends.
            after_saves: Keep the session until no save is pending.

        Returns:
            False if the thread has ended already; then `on_end` is not called.
        """
        with self._lock:
            # IMPORTANT: a session whose thread is in `on_lost` has not ended: what `on_lost` starts must come first.
            if self._has_ended or not self.thread.is_alive():
                return False
            self._on_end, self._ends_after_saves = on_end, after_saves
        self._wake_thread()
        return True

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """End the thread and close the socket; requests without an answer fail. Idempotent. No-op in a forked child.

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
        """In a forked child: close the child's copies of our own fds. The socket is left alone."""
        if self._wake >= 0:
            os.close(self._wake)
        self._wake = -1
        if self._watch is not None:
            self._watch.close()

    # ---- the thread -------------------------------------------------------------------------------------------------

    def _stop(self) -> None:
        """Let the thread end after this iteration of its loop. Does not wait."""
        self._stopping = True
        self._wake_thread()

    def _wake_thread(self) -> None:
        with self._lock:
            if self._wake >= 0:
                with contextlib.suppress(BlockingIOError):
                    os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        error = WorkerUnavailableError("the session was closed", endpoint=self.endpoint, detail=CLOSED)
        lost = False
        try:
            with contextlib.closing(Dealer(self.endpoint, self.name)) as dealer:
                if self._loop(dealer):
                    dealer.close(GOODBYE_LINGER_S)
        except WorkerUnavailableError as caught:
            # Whatever failed first: callers decide on failover by whether the worker is dead.
            error, lost = self._death_error() if self._has_died() else caught, True
        except Exception as caught:
            _log.exception("the client thread failed")
            error, lost = WorkerUnavailableError(f"the client thread failed: {caught!r}", endpoint=self.endpoint), True
        finally:
            self._finish(error, lost)

    def _finish(self, error: WorkerUnavailableError, lost: bool) -> None:
        with self._lock:
            self._error = error
            waiting = [item[2] for item in self._queue] + [o.future for o in self._outstanding.values()]
            self._queue.clear()
            if self._watch is not None:
                self._watch.close()
        for future in waiting:
            future.set_exception(error)
        try:
            if not self._welcome.done():
                self._welcome.set_exception(error)
            elif lost:
                self._on_lost(error)
        finally:
            with self._lock:
                self._has_ended, abandoned = True, self._on_end
                # `close` may have waited in vain, and an abandoned session is not closed by its owner.
                if self._wake >= 0:
                    os.close(self._wake)
                    self._wake = -1
            if abandoned is not None:
                abandoned()

    def _loop(self, dealer: Dealer) -> bool:
        """Send and receive until the session ends; returns whether a goodbye was sent."""
        is_open, next_hello = False, 0.0
        while not self._stopping:
            now = time.monotonic()
            self._reset_silence_if_stalled(now)
            self._looped_at = now
            if self._on_end is not None and self._may_end(now):
                dealer.send(codec.encode(messages.Goodbye(id=0)))
                return True
            if not is_open and now >= next_hello:
                dealer.send(codec.encode(self._hello(0, self.name)))
                next_hello = now + HELLO_RESEND_S
            pidfds = [] if self._watch is None or self._watch.fd < 0 else [self._watch.fd]
            ready = dealer.wait([self._wake, *pidfds], POLL_S if is_open else HELLO_RESEND_S)
            if self._wake in ready:
                os.eventfd_read(self._wake)
            while (frames := dealer.receive()) is not None:
                self._receive(frames)
                if is_open and self._queue:  # send a hook's answer before the next hook runs
                    self._send_requests(dealer)
            is_open = is_open or self._welcome.done()
            if self._has_died():
                # The last replies of a worker that was told to end ("committed", say) may still be in the socket.
                while (frames := dealer.receive(LAST_REPLIES_S)) is not None:
                    self._receive(frames)
                raise self._death_error()
            if is_open:
                self._send_heartbeat(dealer)
                self._send_requests(dealer)
        return False

    def _has_died(self) -> bool:
        return self._watch is not None and self._watch.has_ended()

    def _death_error(self) -> WorkerUnavailableError:
        text = f"the worker (pid {self.worker.pid}) at {self.endpoint} is gone: it has died or was told to end"
        return WorkerUnavailableError(text, endpoint=self.endpoint, detail=DIED)

    def _reset_silence_if_stalled(self, now: float) -> None:
        """If this process was stopped or starved, the answer may be in the socket: start the worker's timeout anew."""
        if self._silent_since is not None and now - self._looped_at > STALL_S:
            self._silent_since, self._next_heartbeat = now, now

    def _may_end(self, now: float) -> bool:
        """Whether an abandoned session may end: every request was answered, or `ABANDON_TIMEOUT_S` is over."""
        if self._ends_after_saves and self._pending():
            return False
        self._abandoned_at = now if self._abandoned_at is None else self._abandoned_at
        return not (self._queue or self._outstanding) or now - self._abandoned_at > ABANDON_TIMEOUT_S

    def _send_heartbeat(self, dealer: Dealer) -> None:
        now = time.monotonic()
        self._reset_silence_if_stalled(now)
        if self._silent_since is not None and now - self._silent_since > self._timeout_s:
            raise WorkerUnavailableError(
                f"the worker (pid {self.worker.pid}) at {self.endpoint} has not answered for {self._timeout_s:g} s",
                endpoint=self.endpoint,
                detail=SILENT,
            )
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + self._heartbeat_s
            saves = tuple(self._pending())[: messages.MAX_TABLE]
            dealer.send(codec.encode(messages.Heartbeat(id=0, saves=saves)))
            if self._silent_since is None:
                self._silent_since = now

    def _send_requests(self, dealer: Dealer) -> None:
        now = time.monotonic()
        while self._queue:
            number, frames, future, deadline = self._queue.popleft()
            self._outstanding[number] = _SentRequest(frames, future, deadline)
        for number, item in list(self._outstanding.items()):
            if now >= item.deadline:
                del self._outstanding[number]
                item.future.set_exception(
                    WorkerUnavailableError(
                        f"the worker at {self.endpoint} did not answer a request within its timeout",
                        endpoint=self.endpoint,
                        detail=TIMED_OUT,
                    )
                )
            elif now - item.sent >= RESEND_S:
                item.sent = now
                dealer.send(item.frames)

    def _receive(self, frames: list[bytes]) -> None:
        try:
            reply = codec.decode(frames, messages.REPLIES)
        except ProtocolVersionError as error:
            raise ProtocolVersionError(
                f"{self.endpoint}: {error.message}", endpoint=self.endpoint, **error.facts()
            ) from None
        except ProtocolError as error:
            _log.warning("ignored a message from the worker: %s", error)
            return
        self._silent_since = None
        if isinstance(reply, messages.Welcome):
            self._on_welcome(reply)
        elif isinstance(reply, messages.Saves):
            self._on_saves(reply)
        elif isinstance(reply, messages.Refused) and reply.id == 0:
            self._on_refused(from_wire(reply.error))
        else:
            self._answer(reply)

    def _answer(self, reply: messages.Message) -> None:
        item = self._outstanding.pop(reply.id, None)  # type: ignore[attr-defined]
        if item is None:
            return  # the request was answered before, and this answers a repeat of it
        if isinstance(reply, messages.Refused):
            item.future.set_exception(from_wire(reply.error))
        else:
            item.future.set_result(reply)

    def _on_refused(self, error: AsyncCkptError) -> None:
        """End the session: id 0 says that a Hello or a heartbeat was refused."""
        if isinstance(error, WorkerUnavailableError):
            raise error
        raise WorkerUnavailableError(
            f"the worker at {self.endpoint} refused this session: {error}", endpoint=self.endpoint, detail=REFUSED
        )

    def _on_welcome(self, welcome: messages.Welcome) -> None:
        if self._welcome.done():
            return
        self._heartbeat_s = min(max(welcome.heartbeat_s, 0.05), 60.0)
        found = watch(welcome.pid, welcome.pid_start)
        if found is None:
            return  # the worker died after it had answered; another one may answer the next Hello
        self._welcome.set_result(welcome)
        self._watch = found


def hello_builder(
    rank: int, world_size: int, package: str, replaces: str = "", *, storage: Mapping[str, str] = NO_OPTIONS
) -> Callable[[int, str], messages.Hello]:
    """Return a function that builds this process's Hello from a request id and a session name.

    Args:
        rank, world_size: Rank of this process.
        package: asyncckpt's version.
        replaces: Name of this process's previous session, which the worker ends; "": none.
        storage: Options of object stores for its saves.

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
            storage=dict(storage),
        )

    return build

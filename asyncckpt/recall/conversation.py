"""A short session with a worker that runs already: what it holds in memory, and that it stays there meanwhile.

Nobody is started for it. The worker ends what the session holds when that says goodbye, or when this process dies.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, TypeVar

from asyncckpt.errors import WorkerUnavailableError, from_wire
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import start_ticks

if TYPE_CHECKING:
    import zmq

M = TypeVar("M", bound=messages.Message)
RESEND_S = 0.2
"""A request without an answer is sent again after this. Chosen: a round trip takes less than a millisecond."""

LOOK_EVERY_S = 1.0
"""Whether anybody listens still is looked at so often: each look takes a place in the queue of a worker that hangs."""

GOODBYE_LINGER_MS = 200


def is_served(endpoint: str) -> bool:
    """Whether a process listens at `endpoint`. Takes microseconds, and never waits: it may hang all the same."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
        try:
            probe.connect(socket_path(endpoint))
        except BlockingIOError:  # its queue of connections is full, so it is there
            return True
        except OSError:
            return False
    return True


class Conversation:
    """See the module. A context manager; used from one thread.

    Args:
        endpoint: `ipc://...`.
        package: asyncckpt's version.
        answer_s: How long the worker may take for each answer.

    Attributes:
        worker: Who answers.

    Raises:
        WorkerUnavailableError: Nobody listens there, or nobody answers in time; ProtocolVersionError: another version.
    """

    def __init__(self, endpoint: str, package: str, answer_s: float) -> None:
        self._endpoint, self._answer_s = endpoint, answer_s
        self._check_served()
        import zmq  # only now: a process that loads beside no worker need not have it

        self._zmq = zmq
        self._owner_pid = os.getpid()
        self._ids = iter(range(1, 1 << 62))
        self._context = zmq.Context()
        try:
            self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
        except BaseException:
            self._context.destroy(0)
            raise
        try:
            name, pid = secrets.token_hex(8), os.getpid()
            for option, value in ((zmq.LINGER, 0), (zmq.MAXMSGSIZE, codec.MAX_FRAME_NBYTES), (zmq.RECONNECT_IVL, 20)):
                self._socket.setsockopt(option, value)
            self._socket.connect(endpoint)
            self.worker = self.call(
                lambda n: messages.Hello(
                    id=n,
                    session=name,
                    replaces="",
                    package=package,
                    pid=pid,
                    pid_start=start_ticks(pid) or 0,
                    rank=0,  # a reader is no rank of anything; it joins no run
                    world_size=1,
                ),
                messages.Welcome,
            )
        except BaseException:
            self._leave()  # its answer was too late: the session may be there, and would live as long as this process
            raise

    def call(self, build: Callable[[int], messages.Message], answer: type[M]) -> M:
        """Send a request, again where that is needed, and return its answer.

        Raises:
            WorkerUnavailableError: None came in time, or nobody listens any more.
            AsyncCkptError: What the worker refused with.
        """
        number = next(self._ids)
        frames, deadline = codec.encode(build(number)), time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0:
            if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
                self._check_served()  # a process that is ending still listens for a moment, and then never answers
            self._socket.send_multipart(frames)
            again = time.monotonic() + min(RESEND_S, left)
            while (left := again - time.monotonic()) > 0:
                if not self._socket.poll(max(1, int(left * 1000))):
                    break
                reply = codec.decode(self._socket.recv_multipart(), messages.REPLIES)
                if isinstance(reply, messages.Refused):
                    raise from_wire(reply.error)
                if isinstance(reply, answer) and getattr(reply, "id", 0) == number:
                    return reply
        raise WorkerUnavailableError(
            f"the worker at {self._endpoint} does not answer", endpoint=self._endpoint, detail="no answer"
        )

    def _check_served(self) -> None:
        self._looked_at = time.monotonic()
        if not is_served(self._endpoint):
            text = f"no worker listens at {self._endpoint}"
            raise WorkerUnavailableError(text, endpoint=self._endpoint, detail="no worker")

    def recall(self, path: str, *, hold: bool) -> messages.Recalled:
        """Return where the snapshots at `path` and below it lie; `hold`: they stay there until this ends."""
        return self.call(lambda n: messages.Recall(id=n, path=path, hold=hold), messages.Recalled)

    def close(self) -> None:
        """Say goodbye, and wait for nothing. Twice is fine; nothing in a forked child."""
        if not self._socket.closed and os.getpid() == self._owner_pid:
            self._leave()

    def _leave(self) -> None:
        with contextlib.suppress(self._zmq.Again):
            self._socket.send_multipart(codec.encode(messages.Goodbye(id=next(self._ids))), self._zmq.DONTWAIT)
        self._context.destroy(GOODBYE_LINGER_MS)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

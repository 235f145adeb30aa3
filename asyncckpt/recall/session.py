"""Requests to a running worker, and a short session, during which it keeps snapshots in memory for a reader.

No worker is started. The worker releases the snapshots when the session ends, or when this process dies.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

from asyncckpt.errors import WorkerUnavailableError, from_wire
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.dealer import Dealer
from asyncckpt.protocol.endpoint import check_directory, socket_path
from asyncckpt.protocol.identity import own_start_ticks

M = TypeVar("M", bound=messages.Message)
RESEND_S = 0.2
"""A request without an answer is sent again after this. Chosen: a round trip takes less than a millisecond."""

LOOK_EVERY_S = 1.0
"""Seconds between checks whether the worker still listens. Each check adds a connection to the queue of a worker that
hangs."""

GOODBYE_LINGER_S = 0.2


def is_served(endpoint: str) -> bool:
    """Return whether a process listens at `endpoint`. False also if this process has no file descriptor left.

    Takes microseconds, and never waits. A process that listens may hang all the same.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
            probe.connect(socket_path(endpoint))
    except BlockingIOError:  # its queue of connections is full, so it is there
        return True
    except OSError:
        return False
    return True


class RequestChannel:
    """Sends requests to a running worker, without a session. Used from one thread.

    Args:
        endpoint: Endpoint of the worker, `ipc://...`.
        answer_s: Seconds that the worker may take for each answer.

    Raises:
        WorkerUnavailableError: No process listens there.
        EndpointError: The endpoint's directory is not safe: a process of another user may listen there.
        ConfigError: The endpoint is malformed.
    """

    def __init__(self, endpoint: str, answer_s: float) -> None:
        check_directory(endpoint)
        self._endpoint, self._answer_s = endpoint, answer_s
        self._check_served()
        self._ids = iter(range(1, 1 << 62))
        self._dealer = Dealer(endpoint)

    def call(self, build: Callable[[int], messages.Message], answer: type[M]) -> M:
        """Send a request, repeat it until it is answered, and return the answer.

        Args:
            build: Makes the request with the given number.
            answer: Class of the answer.

        Raises:
            WorkerUnavailableError: No answer came in time, or no process listens any more.
            AsyncCkptError: The worker refused the request; this is its error.

        Blocks: at most `answer_s`.
        """
        number = next(self._ids)
        frames, deadline = codec.encode(build(number)), time.monotonic() + self._answer_s
        while (left := deadline - time.monotonic()) > 0:
            if time.monotonic() - self._looked_at >= LOOK_EVERY_S:
                self._check_served()  # a process that is ending still listens for a moment, and then never answers
            self._dealer.send(frames)
            again = time.monotonic() + min(RESEND_S, left)
            while (left := again - time.monotonic()) > 0:
                received = self._dealer.receive(left)
                if received is None:
                    break
                reply = codec.decode(received, messages.REPLIES)
                if isinstance(reply, messages.Refused):
                    raise from_wire(reply.error)
                if isinstance(reply, answer) and getattr(reply, "id", 0) == number:
                    return reply
        raise WorkerUnavailableError(
            f"the worker at {self._endpoint} did not answer within {self._answer_s:g} s",
            endpoint=self._endpoint,
            detail="no answer",
        )

    def _check_served(self) -> None:
        self._looked_at = time.monotonic()
        if not is_served(self._endpoint):
            text = f"no worker listens at {self._endpoint}"
            raise WorkerUnavailableError(text, endpoint=self._endpoint, detail="no worker")

    def leave(self) -> None:
        """Tell the worker that the session of this channel ends, and close the channel."""
        self._dealer.send(codec.encode(messages.Goodbye(id=next(self._ids))))
        self.close(GOODBYE_LINGER_S)

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._dealer.closed

    def close(self, linger_s: float = 0.0) -> None:
        """Close the channel; wait up to `linger_s` seconds until all messages are sent. Idempotent."""
        self._dealer.close(linger_s)


class RecallSession:
    """A short session of a reader with a running worker. A context manager; used from one thread.

    Args:
        endpoint: Endpoint of the worker, `ipc://...`.
        package: asyncckpt's version.
        answer_s: Seconds that the worker may take for each answer.

    Attributes:
        worker: The worker's answer to `Hello`, with its process ID.

    Raises:
        WorkerUnavailableError: No process listens there, or the worker does not answer in time.
        ProtocolVersionError: The worker speaks another version of the protocol.
        EndpointError, ConfigError: As `RequestChannel`.
    """

    def __init__(self, endpoint: str, package: str, answer_s: float) -> None:
        self._channel = RequestChannel(endpoint, answer_s)
        self._owner_pid = os.getpid()
        name, pid, started = secrets.token_hex(8), os.getpid(), own_start_ticks()
        try:
            self.worker = self._channel.call(
                lambda n: messages.Hello(
                    id=n,
                    session=name,
                    replaces="",
                    package=package,
                    pid=pid,
                    pid_start=started,
                    rank=0,  # without meaning: a reader joins no run
                    world_size=1,
                    storage={},
                ),
                messages.Welcome,
            )
        except BaseException:
            self._channel.leave()  # a late answer would begin a session that lasts as long as this process
            raise

    def recall(self, path: str, *, hold: bool) -> messages.Recalled:
        """Return the places of the snapshots at `path` and below it.

        Args:
            path: Absolute path of a checkpoint, or of a directory of checkpoints.
            hold: Whether the worker keeps the snapshots until this session ends.

        Raises:
            WorkerUnavailableError, AsyncCkptError: As `RequestChannel.call`.

        Blocks: as `RequestChannel.call`.
        """
        return self._channel.call(lambda n: messages.Recall(id=n, path=path, hold=hold), messages.Recalled)

    def close(self) -> None:
        """End the session without waiting. Idempotent; does nothing in a forked child."""
        if not self._channel.closed and os.getpid() == self._owner_pid:
            self._channel.leave()

    def __enter__(self) -> RecallSession:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

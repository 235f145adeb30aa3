"""A short session with a worker that runs already: what it holds in memory, and that it stays there meanwhile.

Nobody is started for it. The worker ends what the session holds when that says goodbye, or when this process dies.
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
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import own_start_ticks

M = TypeVar("M", bound=messages.Message)
RESEND_S = 0.2
"""A request without an answer is sent again after this. Chosen: a round trip takes less than a millisecond."""

LOOK_EVERY_S = 1.0
"""Whether anybody listens still is looked at so often: each look takes a place in the queue of a worker that hangs."""

GOODBYE_LINGER_S = 0.2


def is_served(endpoint: str) -> bool:
    """Whether a process listens at `endpoint`, as far as this one can see, which may have no descriptor left.

    Takes microseconds, and never waits: it may hang all the same.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as probe:
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
        self._owner_pid = os.getpid()
        self._ids = iter(range(1, 1 << 62))
        name, pid, started = secrets.token_hex(8), os.getpid(), own_start_ticks()
        self._dealer = Dealer(endpoint)
        try:
            self.worker = self.call(
                lambda n: messages.Hello(
                    id=n,
                    session=name,
                    replaces="",
                    package=package,
                    pid=pid,
                    pid_start=started,
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
        if not self._dealer.closed and os.getpid() == self._owner_pid:
            self._leave()

    def _leave(self) -> None:
        self._dealer.send(codec.encode(messages.Goodbye(id=next(self._ids))))
        self._dealer.close(GOODBYE_LINGER_S)

    def __enter__(self) -> Conversation:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

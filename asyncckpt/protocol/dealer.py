"""The trainer's end of the wire: one ZeroMQ context with one DEALER socket, made and closed together.

All ZeroMQ calls of a trainer, a reader and the commands are here, and what they raise is `WorkerUnavailableError`.

IMPORTANT: libzmq aborts the process if it gets no file descriptor while it makes a context and its first socket
(`errno_assert` in epoll.cpp and ip.cpp). So it is called only after `RESERVED` descriptors were opened and closed again
to prove that they are free. Descriptors that run out later do no harm: then only reconnecting takes one, and libzmq
retries that by itself.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from asyncckpt.basics.libc import try_descriptors
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import codec

if TYPE_CHECKING:
    import zmq

NEEDED = 9
"""Descriptors that libzmq opens until it is connected: an eventfd each for context, reaper, thread and socket, an epoll
each for reaper and thread, and the connection; two more in builds without getrandom(2) and eventfd(2)."""

RESERVED = NEEDED + 7
"""How many must be free: other threads of the process open files meanwhile. Chosen."""

NO_DESCRIPTORS = "descriptors"
"""Detail of the error where too few are free. It says nothing about the worker, which may be alive."""

HIGH_WATER_MARK = 1000
RECONNECT_MS = 20


def check_descriptors(endpoint: str) -> None:
    """Prove that ZeroMQ will get the descriptors that it needs.

    Raises:
        WorkerUnavailableError: Fewer than `RESERVED` are free.
    """
    free, error = try_descriptors(RESERVED)
    if error is not None:
        raise WorkerUnavailableError(
            f"the worker at {endpoint} cannot be reached: {error.strerror}; this process has {free} free file "
            f"descriptors, and {RESERVED} are needed. Raise the limit (ulimit -n), or close files",
            endpoint=endpoint,
            detail=NO_DESCRIPTORS,
        ) from error


@contextlib.contextmanager
def _translated(endpoint: str) -> Iterator[None]:
    import zmq

    try:
        yield
    except zmq.ZMQError as error:
        text = f"the worker at {endpoint} cannot be reached: ZeroMQ failed: {error}"
        raise WorkerUnavailableError(text, endpoint=endpoint, detail="zmq") from error


class Dealer:
    """A DEALER socket with a context of its own, connected to a worker. Used from one thread.

    Args:
        endpoint: `ipc://...`.
        name: The session's name, to which the worker answers.

    Raises:
        WorkerUnavailableError: ZeroMQ cannot be used now. An endpoint at which nobody listens is no error: libzmq
            connects once somebody does.
    """

    def __init__(self, endpoint: str, name: str = "") -> None:
        check_descriptors(endpoint)
        import zmq  # only now: a process that loads without a worker does not need it

        self._endpoint, self._again = endpoint, zmq.Again
        self._pollin, self._dontwait = int(zmq.POLLIN), int(zmq.DONTWAIT)
        self._poll = zmq.zmq_poll
        options: list[tuple[int, Any]] = [
            (zmq.LINGER, 0),
            (zmq.SNDHWM, HIGH_WATER_MARK),
            (zmq.RCVHWM, HIGH_WATER_MARK),
            (zmq.MAXMSGSIZE, codec.MAX_FRAME_NBYTES),
            (zmq.RECONNECT_IVL, RECONNECT_MS),
            *([(zmq.IDENTITY, name.encode())] if name else []),
        ]
        with _translated(endpoint):
            self._context = zmq.Context(io_threads=1)
            try:
                self._socket: zmq.Socket[bytes] = self._context.socket(zmq.DEALER)
                for option, value in options:
                    self._socket.setsockopt(option, value)
                self._socket.connect(endpoint)
            except BaseException:
                self._context.destroy(0)
                raise

    def send(self, frames: Sequence[bytes]) -> None:
        """Send a message, or drop it if the queue is full: a caller that needs an answer repeats it. Does not wait."""
        with _translated(self._endpoint), contextlib.suppress(self._again):
            self._socket.send_multipart(frames, self._dontwait)

    def receive(self, timeout_s: float = 0.0) -> list[bytes] | None:
        """Return the next message, or None when none has come within `timeout_s`."""
        with _translated(self._endpoint), contextlib.suppress(self._again):
            if self._socket.poll(max(0, int(timeout_s * 1000))):
                return self._socket.recv_multipart(self._dontwait)
        return None

    def wait(self, fds: Sequence[int], timeout_s: float) -> set[int]:
        """Wait until a message has come, or one of `fds` is readable; returns those that are."""
        wanted: list[tuple[Any, int]] = [(self._socket, self._pollin), *((fd, self._pollin) for fd in fds)]
        with _translated(self._endpoint):
            return {one for one, _ in self._poll(wanted, max(0, int(timeout_s * 1000))) if isinstance(one, int)}

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return bool(self._socket.closed)

    def close(self, linger_s: float = 0.0) -> None:
        """Close socket and context; what is on its way gets `linger_s`. Twice is fine."""
        with _translated(self._endpoint):
            self._context.destroy(int(linger_s * 1000))


def curve_keys(whose: str) -> tuple[str, str]:
    """Return a new public and secret key for connections with the worker of `whose`.

    Raises:
        WorkerUnavailableError: ZeroMQ cannot be used now.
    """
    check_descriptors(whose)
    import zmq

    with _translated(whose):
        public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()

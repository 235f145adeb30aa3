"""The client's socket: one ZeroMQ context with one DEALER socket, created and closed together.

All ZeroMQ calls of trainers, readers and commands are here; they raise `WorkerUnavailableError`.

IMPORTANT: libzmq aborts the process if it gets no file descriptor while it creates a context and its first socket
(`errno_assert` in epoll.cpp and ip.cpp). So it is called only after `RESERVED` descriptors were opened and closed, to
check that they are free. Later only a reconnect needs a descriptor, and libzmq retries it.
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
"""Number of descriptors that must be free, since other threads open files meanwhile. Chosen."""

NO_DESCRIPTORS = "descriptors"
"""Detail of the error if too few descriptors are free. The worker may be running."""

HIGH_WATER_MARK = 1000
RECONNECT_MS = 20


def check_descriptors(endpoint: str) -> None:
    """Check that the file descriptors that ZeroMQ needs are free.

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
    """A DEALER socket with its own context, connected to a worker. Used from one thread.

    Args:
        endpoint: `ipc://...`.
        name: Name of the session, the address of answers.

    Raises:
        WorkerUnavailableError: ZeroMQ cannot be used now. An endpoint without a worker is not an error: libzmq
            connects when a worker listens.
    """

    def __init__(self, endpoint: str, name: str = "") -> None:
        check_descriptors(endpoint)
        import zmq  # imported here, as a load without a worker does not need it

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
        """Send a message, or drop it if the queue is full; the caller repeats requests. Does not wait."""
        with _translated(self._endpoint), contextlib.suppress(self._again):
            self._socket.send_multipart(frames, self._dontwait)

    def receive(self, timeout_s: float = 0.0) -> list[bytes] | None:
        """Return the next message, or None if none has arrived within `timeout_s`."""
        with _translated(self._endpoint), contextlib.suppress(self._again):
            if self._socket.poll(max(0, int(timeout_s * 1000))):
                return self._socket.recv_multipart(self._dontwait)
        return None

    def wait(self, fds: Sequence[int], timeout_s: float) -> set[int]:
        """Wait until a message has arrived or one of `fds` is readable; return the readable ones."""
        wanted: list[tuple[Any, int]] = [(self._socket, self._pollin), *((fd, self._pollin) for fd in fds)]
        with _translated(self._endpoint):
            return {one for one, _ in self._poll(wanted, max(0, int(timeout_s * 1000))) if isinstance(one, int)}

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return bool(self._socket.closed)

    def close(self, linger_s: float = 0.0) -> None:
        """Close socket and context; queued messages are sent for at most `linger_s`. Idempotent."""
        with _translated(self._endpoint):
            self._context.destroy(int(linger_s * 1000))


def curve_keys(whose: str) -> tuple[str, str]:
    """Create a public and a secret key for connections between workers. `whose`: endpoint, for errors.

    Raises:
        WorkerUnavailableError: ZeroMQ cannot be used now.
    """
    check_descriptors(whose)
    import zmq

    with _translated(whose):
        public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()

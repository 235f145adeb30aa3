"""Answers `GET /metrics` on a loopback address: a few lines of HTTP/1.0, in a thread of its own.

The page is handed over by the control loop, so that whoever asks, however often or slowly, never waits for it nor it
for them. Each connection has a deadline, and one that says nothing holds up no other.
"""

from __future__ import annotations

import ipaddress
import selectors
import socket
import threading
import time

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt_worker.exposition import CONTENT_TYPE

MAX_REQUEST_NBYTES = 8192
REQUEST_TIMEOUT_S = 1.0
"""For one request and its answer. Chosen: Prometheus itself waits 10 s."""

MAX_VISITS = 32
"""Connections at once; one more, and the oldest is closed. Chosen."""

LOOK_S = 0.1
"""How often deadlines are looked at. Chosen."""

ACCEPT_S = 0.5
"""How often the thread looks whether it is to end."""


def loopback_address(text: str) -> tuple[str, int]:
    """Return host and port of `HOST:PORT`; port 0 takes a free one.

    Raises:
        ConfigError: Malformed, or an address that other machines reach.
    """
    host, colon, port = text.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        if not ipaddress.ip_address("127.0.0.1" if bare == "localhost" else bare).is_loopback:
            raise ConfigError(
                f"metrics is {text!r}: others than this machine would reach it; use 127.0.0.1:PORT or [::1]:PORT, and "
                "a proxy that knows who may ask",
                field="metrics",
                value=text,
            )
        number = int(port) if colon and port.isascii() and port.isdigit() else -1
    except ValueError:
        number = -1
    if not 0 <= number <= 65535:
        raise ConfigError(f"metrics is {text!r}; expected 127.0.0.1:PORT", field="metrics", value=text)
    return ("127.0.0.1" if bare == "localhost" else bare), number


class Scraped:
    """The listening socket and its thread. `close` may be called twice.

    Args:
        address: `HOST:PORT`.

    Raises:
        ConfigError: As `loopback_address`.
        EndpointError: The port is taken.

    Attributes:
        page: The last page.
        port: The port that it listens at.
    """

    def __init__(self, address: str) -> None:
        host, port = loopback_address(address)
        self.page = ""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(4 * MAX_VISITS)
        except OSError as error:
            self._socket.close()
            raise EndpointError(
                f"cannot listen at {address} for metrics: {error.strerror}; choose another port", endpoint=address
            ) from error
        self._socket.setblocking(False)
        self.port = int(self._socket.getsockname()[1])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncckpt-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        visits: dict[socket.socket, _Visit] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(self._socket, selectors.EVENT_READ)

            def leave(connection: socket.socket) -> None:
                del visits[connection]
                selector.unregister(connection)
                connection.close()

            while not self._ends.is_set():
                for key, _ in selector.select(LOOK_S if visits else ACCEPT_S):
                    if key.fileobj is self._socket:
                        self._let_in(selector, visits)
                    elif (visit := visits.get(key.data)) is not None and visit.goes_on(self.page):
                        selector.modify(key.data, visit.awaited, key.data)
                    elif visit is not None:
                        leave(key.data)
                now = time.monotonic()
                oldest = list(visits)[: max(0, len(visits) - MAX_VISITS)]
                for connection in {*oldest, *(one for one, visit in visits.items() if visit.deadline < now)}:
                    leave(connection)
            for connection in list(visits):
                leave(connection)

    def _let_in(self, selector: selectors.BaseSelector, visits: dict[socket.socket, _Visit]) -> None:
        try:
            connection, _ = self._socket.accept()
        except OSError:  # it has left again, or too many files are open
            self._ends.wait(0.01)
            return
        connection.setblocking(False)
        visits[connection] = _Visit(connection)
        selector.register(connection, selectors.EVENT_READ, connection)

    def close(self) -> None:
        """End the thread, free the port. Blocks: until the thread has looked, `ACCEPT_S`."""
        self._ends.set()
        self._thread.join(REQUEST_TIMEOUT_S + 2 * ACCEPT_S)
        self._socket.close()


class _Visit:
    """One connection: reads a request, then sends the answer, as far as it goes without waiting."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._read = b""
        self._left: memoryview | None = None
        self.deadline = time.monotonic() + REQUEST_TIMEOUT_S

    @property
    def awaited(self) -> int:
        """What it waits for, as selectors have it."""
        return selectors.EVENT_READ if self._left is None else selectors.EVENT_WRITE

    def goes_on(self, page: str) -> bool:
        """Do what can be done now; False when nothing is left to do."""
        try:
            if self._left is None:
                piece = self._connection.recv(4096)
                self._read += piece
                if b"\r\n\r\n" not in self._read and b"\n\n" not in self._read:
                    return bool(piece) and len(self._read) <= MAX_REQUEST_NBYTES
                self._left = memoryview(_answer(self._read, page))
            self._left = self._left[self._connection.send(self._left) :]
            if self._left:
                return True
            # What was sent and not read yet would be lost if it were closed with something unread.
            self._connection.shutdown(socket.SHUT_WR)
        except BlockingIOError:
            return True
        except (OSError, ValueError):
            pass
        return False


def _answer(request: bytes, page: str) -> bytes:
    words = request.split(b"\r\n", 1)[0].split()
    target = words[1].split(b"?")[0] if len(words) == 3 else b""
    if len(words) != 3 or words[0] not in (b"GET", b"HEAD"):
        status, body = "405 Method Not Allowed", b"only GET\n"
    elif target != b"/metrics":
        status, body = "404 Not Found", b"see /metrics\n"
    else:
        status, body = "200 OK", page.encode()
    head = (
        f"HTTP/1.0 {status}\r\nContent-Type: {CONTENT_TYPE}\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
    )
    return head.encode() + (b"" if words[:1] == [b"HEAD"] else body)

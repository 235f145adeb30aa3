"""Answers `GET /metrics` on a loopback address: a few lines of HTTP/1.0, in a thread of its own.

The page is handed over by the control loop, so that whoever asks, however often or slowly, never waits for it nor it
for them. One connection at a time, each with a deadline.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
import time

from asyncckpt.errors import ConfigError, EndpointError
from asyncckpt_worker.exposition import CONTENT_TYPE

MAX_REQUEST_NBYTES = 8192
REQUEST_TIMEOUT_S = 1.0
"""For one request and its answer. Chosen: Prometheus itself waits 10 s."""

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
            self._socket.listen(16)
        except OSError as error:
            self._socket.close()
            raise EndpointError(
                f"cannot listen at {address} for metrics: {error.strerror}; choose another port", endpoint=address
            ) from error
        self._socket.settimeout(ACCEPT_S)
        self.port = int(self._socket.getsockname()[1])
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run, name="asyncckpt-metrics", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._ends.is_set():
            try:
                connection, _ = self._socket.accept()
            except OSError:  # nobody has come, or too many files are open; or it was closed
                if self._ends.wait(0.01):
                    return
                continue
            with connection, contextlib.suppress(OSError, ValueError):
                _answer(connection, self.page)

    def close(self) -> None:
        """End the thread, free the port. Blocks: for a request that is being answered, at most its deadline."""
        self._ends.set()
        self._thread.join(REQUEST_TIMEOUT_S + 2 * ACCEPT_S)
        self._socket.close()


def _answer(connection: socket.socket, page: str) -> None:
    deadline = time.monotonic() + REQUEST_TIMEOUT_S
    data = b""
    while b"\r\n\r\n" not in data and b"\n\n" not in data:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        piece = connection.recv(4096)
        data += piece
        if not piece or len(data) > MAX_REQUEST_NBYTES or time.monotonic() > deadline:
            return
    words = data.split(b"\r\n", 1)[0].split()
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
    connection.settimeout(max(0.01, deadline - time.monotonic()))
    connection.sendall(head.encode() + (b"" if words[:1] == [b"HEAD"] else body))
    # What was sent and not read yet would be lost if it were closed with something unread.
    connection.shutdown(socket.SHUT_WR)

"""A proxy on loopback in front of a server of S3 that answers wrongly, on demand."""

from __future__ import annotations

import contextlib
import http.client
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

BUSY, REFUSED, RESET, TRUNCATED, SLOW, LOST = "busy", "refused", "reset", "truncated", "slow", "lost"
"""503 SlowDown; 403; the connection breaks before the request is passed on; half of the body; half a second late; the
request takes effect, and the connection breaks before the answer."""

SLOW_S = 0.5

Fault = Callable[[str, str], str]
"""Takes method and path of a request; returns one of the above, or "" to pass it on."""


class FaultyProxy:
    """Passes requests on, but for what `fault` says.

    Attributes:
        url: Where it listens.
        fault: May be replaced at any time.
        seen: (method, path) of each request.
        nbytes_read: Bytes of the bodies that were passed back.
    """

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda method, path: ""
        self.seen: list[tuple[str, str]] = []
        self.nbytes_read = 0
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler(urlsplit(upstream).netloc))
        self._server.daemon_threads = True
        self._server.block_on_close = False
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(10)

    def _handler(self, upstream: str) -> type[BaseHTTPRequestHandler]:
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # a connection for each request, so that none is left open

            def _pass_on(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                path = unquote(self.path)  # obstore quotes every sign of a name in GCS
                proxy.seen.append((self.command, path))
                fault = proxy.fault(self.command, path)
                if fault == RESET:
                    return self._reset()
                if fault in (BUSY, REFUSED):
                    code, name = (503, "SlowDown") if fault == BUSY else (403, "AccessDenied")
                    return self._answer(code, {}, f"<Error><Code>{name}</Code></Error>".encode())
                if fault == SLOW:
                    time.sleep(SLOW_S)
                connection = http.client.HTTPConnection(upstream, timeout=30)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    data = response.read()
                    proxy.nbytes_read += len(data)
                finally:
                    connection.close()
                if fault == LOST:
                    return self._reset()
                headers = dict(response.getheaders())
                if self.command == "HEAD":
                    return self._answer(
                        response.status, headers, b"", nbytes=int(response.getheader("Content-Length", "0"))
                    )
                if fault == TRUNCATED:
                    return self._answer(response.status, headers, data[: len(data) // 2], nbytes=len(data))
                return self._answer(response.status, headers, data)

            def _reset(self) -> None:
                """Close the connection with RST."""
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                self.close_connection = True
                self.connection.close()

            def _answer(self, code: int, headers: dict[str, str], data: bytes, nbytes: int | None = None) -> None:
                self.send_response(code)
                for name, value in headers.items():
                    if name.lower() not in ("content-length", "transfer-encoding", "connection", "server", "date"):
                        self.send_header(name, value)
                self.send_header("Content-Length", str(len(data) if nbytes is None else nbytes))
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _pass_on

            def handle(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle()

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing."""

        return Handler


@contextlib.contextmanager
def running(upstream: str) -> Iterator[FaultyProxy]:
    """Run a proxy in front of `upstream`, such as `http://127.0.0.1:9000`."""
    proxy = FaultyProxy(upstream)
    proxy.start()
    try:
        yield proxy
    finally:
        proxy.stop()

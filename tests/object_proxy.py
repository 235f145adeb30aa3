"""A proxy on loopback in front of an object store that answers wrongly, on demand."""

from __future__ import annotations

import contextlib
import http.client
import re
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

BUSY, REFUSED, RESET, TRUNCATED, SLOW, LOST = "busy", "refused", "reset", "truncated", "slow", "lost"
SILENT = "silent"
"""503 SlowDown; 403; the connection breaks before the request is passed on; half of the body; `SLOW_S` late; the
request takes effect, and the connection breaks before the answer; no answer for `SILENT_S`, then the connection breaks.
"""

SAYS_MORE, SAYS_LESS, PADDED, CUT = "says more", "says less", "padded", "cut"
"""Lies about a length. The body is right, and its length is said to be more, or less: of a listing, the sizes in it.
The body is longer, or shorter, and its length is said to be what it is.
"""

LIE_NBYTES = 1000

SLOW_S, SILENT_S = 0.2, 3.0

_SIZE = re.compile(rb"<(Size|Content-Length)>(\d+)<")
_LISTING = re.compile(rb"<ListBucketResult|<EnumerationResults")
"""Of S3 and GCS, and of Azure."""

Fault = Callable[[str, str], str]
"""Takes method and path of a request; returns one of the above, or "" to pass it on."""


class FaultyProxy:
    """Passes requests on, but for what `fault` says.

    Attributes:
        url: Where it listens.
        fault: May be replaced at any time.
        seen: (method, path) of each request.
        nbytes_read: Bytes of the bodies that were passed back.
        nbytes_sent: Bytes of the bodies that were passed on.
        refuses_copies: Whether the answer to a request to copy an object is 403.
    """

    def __init__(self, upstream: str) -> None:
        self.fault: Fault = lambda method, path: ""
        self.seen: list[tuple[str, str]] = []
        self.nbytes_read = self.nbytes_sent = 0
        self.refuses_copies = False
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
                is_copy = any(name.lower() == "x-amz-copy-source" for name in self.headers)
                fault = REFUSED if is_copy and proxy.refuses_copies else proxy.fault(self.command, path)
                if fault == RESET:
                    return self._reset()
                if fault in (BUSY, REFUSED):
                    code, name = (503, "SlowDown") if fault == BUSY else (403, "AccessDenied")
                    return self._answer(code, {}, f"<Error><Code>{name}</Code></Error>".encode())
                if fault == SILENT:
                    time.sleep(SILENT_S)
                    return self._reset()
                if fault == SLOW:
                    time.sleep(SLOW_S)
                connection = http.client.HTTPConnection(upstream, timeout=30)
                try:
                    connection.request(self.command, self.path, body, dict(self.headers))
                    response = connection.getresponse()
                    data = response.read()
                    proxy.nbytes_read += len(data)
                    proxy.nbytes_sent += len(body)
                finally:
                    connection.close()
                if fault == LOST:
                    return self._reset()
                headers = dict(response.getheaders())
                lie = {SAYS_MORE: LIE_NBYTES, SAYS_LESS: -min(LIE_NBYTES, len(data) // 2)}.get(fault, 0)
                if self.command == "HEAD":
                    nbytes = int(response.getheader("Content-Length", "0"))
                    lie = -min(LIE_NBYTES, nbytes // 2) if fault == SAYS_LESS else lie
                    return self._answer(response.status, headers, b"", nbytes=nbytes + lie)
                if fault == TRUNCATED:
                    return self._answer(response.status, headers, data[: len(data) // 2], nbytes=len(data))
                if fault == PADDED:
                    data += bytes(LIE_NBYTES)
                elif fault == CUT:
                    data = data[: len(data) // 2]
                elif lie and _LISTING.search(data):
                    data, lie = _SIZE.sub(lambda found: b"<%s>%d<" % (found[1], max(0, int(found[2]) + lie)), data), 0
                return self._answer(response.status, headers, data, nbytes=len(data) + lie)

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


class SilentServer:
    """A server of S3 that takes connections and answers none; at its end it refuses what was asked.

    Attributes:
        url: Where it listens.
        options: obstore's options that lead to it.
        was_asked: Set by the first request.
        asked: First line of each request.
    """

    def __init__(self) -> None:
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        keys = {"access_key_id": "test", "secret_access_key": "test", "region": "us-east-1"}
        self.options = {"endpoint": self.url, **keys}
        self.was_asked, self.asked = threading.Event(), list[str]()
        self._thread = threading.Thread(target=self._run)
        self._ends = threading.Event()

    def _run(self) -> None:
        with selectors.DefaultSelector() as waiting:
            waiting.register(self._listening, selectors.EVENT_READ)
            while not self._ends.is_set():
                for key, _ in waiting.select(0.05):
                    if key.fileobj is self._listening:
                        waiting.register(self._listening.accept()[0], selectors.EVENT_READ)
                    elif line := key.fileobj.recv(1 << 16).partition(b"\r\n")[0].decode():  # type: ignore[union-attr]
                        self.asked.append(line)
                        self.was_asked.set()
                    else:
                        waiting.unregister(key.fileobj)
                        key.fileobj.close()  # type: ignore[union-attr]
            for key in list(waiting.get_map().values()):
                if key.fileobj is not self._listening:
                    with contextlib.suppress(OSError):
                        key.fileobj.sendall(b"HTTP/1.1 403 Forbidden\r\nContent-Length: 0\r\n\r\n")  # type: ignore[union-attr]
                key.fileobj.close()  # type: ignore[union-attr]

    def n_listings(self, directory: str) -> int:
        """Return how often a directory of the bucket was listed, not one in it."""
        return sum(re.search(rf"[?&]prefix={directory}(%2F|/)[& ]", one) is not None for one in self.asked)

    def __enter__(self) -> SilentServer:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ends.set()
        self._thread.join(10)

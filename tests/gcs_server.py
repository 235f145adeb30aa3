"""A server on loopback that speaks as much of Google Cloud Storage's XML API as obstore uses, with objects in memory.

The emulators in package registries speak the JSON API and a part of the XML one: gcp-storage-emulator has no HEAD,
DELETE, listing or upload in parts there, and its PUT answers without an ETag; fake-gcs-server refuses the PUT. What
this one does follows Google's reference of the XML API; generations are compared as `x-goog-if-generation-match` asks
for it.
"""

from __future__ import annotations

import contextlib
import email.utils
import hashlib
import itertools
import re
import threading
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qsl, unquote, urlsplit
from xml.sax.saxutils import escape

TOKEN = "test-token"
"""What a client must send as its bearer token."""

PAGE_NAMES = 50
"""Of one answer to a listing; Google's has 1,000. Fewer, so that tests see pages that follow."""

MIN_PART_NBYTES = 5 << 20
"""Of each part but the last."""


@dataclass
class _Object:
    data: bytes
    generation: int
    changed_s: float = field(default_factory=time.time)

    @property
    def e_tag(self) -> str:
        return f'"{hashlib.md5(self.data).hexdigest()}"'


class _RefusedError(Exception):
    """What the server answers instead."""

    def __init__(self, status: int, code: str) -> None:
        super().__init__(code)
        self.status, self.code = status, code


@dataclass
class _Answer:
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)
    data: bytes = b""


class _Bucket:
    """Objects and incomplete uploads of one bucket."""

    def __init__(self) -> None:
        self._objects: dict[str, _Object] = {}
        self._uploads: dict[str, dict[int, bytes]] = {}
        self._numbers = itertools.count(int(time.time() * 1e6))
        self._lock = threading.Lock()

    def answer(
        self, method: str, key: str, query: Mapping[str, str], headers: Mapping[str, str], body: bytes
    ) -> _Answer:
        with self._lock:
            if not key:
                return self._list(query)
            if "uploads" in query or "uploadId" in query:
                return self._upload(method, key, query, body)
            if method == "PUT":
                return self._put(key, headers, self._copied(headers) if "x-goog-copy-source" in headers else body)
            found = self._objects.get(key)
            if found is None:
                raise _RefusedError(404, "NoSuchKey")
            if method == "DELETE":
                del self._objects[key]
                return _Answer(204)
            return _read(found, headers.get("range", ""))

    def _copied(self, headers: Mapping[str, str]) -> bytes:
        """Return the content of the object in this bucket that a request asks to copy."""
        found = self._objects.get(unquote(headers["x-goog-copy-source"]).lstrip("/").partition("/")[2])
        if found is None:
            raise _RefusedError(404, "NoSuchKey")
        return found.data

    def _put(self, key: str, headers: Mapping[str, str], data: bytes) -> _Answer:
        expected = headers.get("x-goog-if-generation-match")
        standing = self._objects.get(key)
        if expected is not None and int(expected) != (0 if standing is None else standing.generation):
            raise _RefusedError(412, "PreconditionFailed")
        made = self._objects[key] = _Object(data, next(self._numbers))
        return _Answer(headers={"ETag": made.e_tag, "x-goog-generation": str(made.generation)})

    def _upload(self, method: str, key: str, query: Mapping[str, str], body: bytes) -> _Answer:
        if "uploads" in query:
            upload = f"upload-{next(self._numbers)}"
            self._uploads[upload] = {}
            return _xml("InitiateMultipartUploadResult", f"<UploadId>{upload}</UploadId>")
        parts = self._uploads.get(query["uploadId"])
        if parts is None:
            raise _RefusedError(404, "NoSuchUpload")
        if method == "PUT":
            parts[int(query["partNumber"])] = body
            return _Answer(headers={"ETag": f'"{hashlib.md5(body).hexdigest()}"'})
        if method == "POST":
            named = [parts[int(number)] for number in re.findall(r"<PartNumber>(\d+)</PartNumber>", body.decode())]
            if any(len(part) < MIN_PART_NBYTES for part in named[:-1]):
                raise _RefusedError(400, "EntityTooSmall")
            made = self._objects[key] = _Object(b"".join(named), next(self._numbers))
        del self._uploads[query["uploadId"]]
        if method == "DELETE":
            return _Answer(204)
        answer = _xml("CompleteMultipartUploadResult", f"<ETag>{escape(made.e_tag)}</ETag>")
        answer.headers = {"x-goog-generation": str(made.generation)}
        return answer

    def _list(self, query: Mapping[str, str]) -> _Answer:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        shown: dict[str, str] = {}
        for name in sorted(self._objects):
            rest = name[len(prefix) :]
            if not name.startswith(prefix):
                continue
            if delimiter and delimiter in rest:
                common = prefix + rest.partition(delimiter)[0] + delimiter
                shown[common] = f"<CommonPrefixes><Prefix>{escape(common)}</Prefix></CommonPrefixes>"
            else:
                shown[name] = _listed(name, self._objects[name])
        names = [name for name in sorted(shown) if name > after]
        page = names[: min(PAGE_NAMES, int(query.get("max-keys", PAGE_NAMES)))]
        more = f"<NextContinuationToken>{escape(page[-1])}</NextContinuationToken>" if len(page) < len(names) else ""
        return _xml("ListBucketResult", "".join(shown[name] for name in page) + more)


def _listed(name: str, found: _Object) -> str:
    when = time.strftime("%Y-%m-%dT%H:%M:%S.000Z", time.gmtime(found.changed_s))
    return (
        f"<Contents><Key>{escape(name)}</Key><Generation>{found.generation}</Generation><LastModified>{when}"
        f"</LastModified><ETag>{escape(found.e_tag)}</ETag><Size>{len(found.data)}</Size></Contents>"
    )


def _read(found: _Object, wanted: str) -> _Answer:
    headers = {
        "ETag": found.e_tag,
        "Last-Modified": email.utils.formatdate(found.changed_s, usegmt=True),
        "x-goog-generation": str(found.generation),
    }
    if not wanted:
        return _Answer(200, headers, found.data)
    first, _, last = wanted.removeprefix("bytes=").partition("-")
    end = min(int(last) + 1 if last else len(found.data), len(found.data))
    if int(first) >= len(found.data):
        raise _RefusedError(416, "InvalidRange")
    headers["Content-Range"] = f"bytes {first}-{end - 1}/{len(found.data)}"
    return _Answer(206, headers, found.data[int(first) : end])


def _xml(name: str, inner: str) -> _Answer:
    text = f'<?xml version="1.0" encoding="UTF-8"?><{name} xmlns="http://s3.amazonaws.com/doc/2006-03-01/">{inner}'
    return _Answer(headers={}, data=f"{text}</{name}>".encode())


def _handler(buckets: Mapping[str, _Bucket]) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.0"  # a connection for each request, so that none is left open

        def _serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length") or 0))
            try:
                answer = self._answered(body)
            except _RefusedError as refused:
                answer = _xml("Error", f"<Code>{refused.code}</Code>")
                answer.status = refused.status
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(answer.data)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(answer.data)

        def _answered(self, body: bytes) -> _Answer:
            url = urlsplit(self.path)
            bucket, _, key = url.path.lstrip("/").partition("/")
            if self.headers.get("authorization") != f"Bearer {TOKEN}":
                raise _RefusedError(401, "AuthenticationRequired")
            if bucket not in buckets:
                raise _RefusedError(404, "NoSuchBucket")
            query = dict(parse_qsl(url.query, keep_blank_values=True))
            headers = {name.lower(): value for name, value in self.headers.items()}
            return buckets[bucket].answer(self.command, unquote(key), query, headers, body)

        do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = _serve

        def handle(self) -> None:
            with contextlib.suppress(OSError):
                super().handle()

        def log_message(self, format: str, *args: object) -> None:
            """Say nothing."""

    return Handler


@contextlib.contextmanager
def running(bucket: str) -> Iterator[str]:
    """Run a server that holds one empty bucket, and yield its URL."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _handler({bucket: _Bucket()}))
    server.daemon_threads = True
    server.block_on_close = False
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)

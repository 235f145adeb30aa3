"""`ObjectStore`: a `Store` of objects in one bucket, by the library obstore (extra `cloud`).

A name is a whole URL. An object appears whole, or not at all; a conditional put is one request, and a put that was
repeated and meets its own success has succeeded. There are no directories, links, locks or renames.

Requests are repeated by obstore with growing pauses, as long as the store says that it is busy (429, 500, 503) or the
connection breaks, for at most `retries.RETRY_FOR_S`. What it refuses (401, 403, 404) is an error at once.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from datetime import datetime, timedelta
from typing import Any

from asyncckpt.basics.urls import location_of
from asyncckpt.errors import UnsupportedPathError
from asyncckpt.storage.cloud import retries
from asyncckpt.storage.cloud.object_shards import ObjectShardWriter
from asyncckpt.storage.cloud.store_errors import translated, words_of
from asyncckpt.storage.shard_writer import Image, ShardWriter
from asyncckpt.storage.store import OBJECT, PREFIX, Entry, Store, UnknownOutcomeError

REQUEST_TIMEOUT_S = 60.0
"""Of one try of a request: a part of an upload at 0.3 MB/s."""

MAX_RETRIES = 12


class ObjectStore(Store):
    """A `Store` of the objects of one bucket. Errors as of `Store`; those of the store carry its own words.

    `errno` is EACCES where it refuses the credentials, and EREMOTEIO where it did not answer, or not as it should.

    Args:
        root: Scheme and bucket, such as `s3://bucket`.
        options: What obstore takes, by name: `endpoint`, `region`, `access_key_id` and others of the store, and
            `CLIENT_OPTIONS`. What is not in it comes from the environment.
        client: A store of obstore's to be used instead, for tests.

    Raises:
        UnsupportedPathError: obstore is not installed; or an option is unknown, or has a value that it cannot have.
    """

    shards_appear_whole = True

    def __init__(self, root: str, options: Mapping[str, str] | None = None, *, client: Any = None) -> None:
        self.root = root
        self._options = dict(options or {})
        self._store = client or _opened(root, self._options)
        self._pid = os.getpid()

    def __repr__(self) -> str:
        """Return the bucket, without credentials."""
        return f"ObjectStore({self.root!r})"

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """As of `Store`: durable in any case, since the store answers once it has the object."""
        if replace:
            with translated(name):
                self._client.put(self._key(name), bytes(data), use_multipart=False)
        else:
            self._put_new(name, bytes(data))

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """As of `Store`: an upload in parts."""
        return ObjectShardWriter(path, image, offset, nbytes, open_upload=self._open_upload, stat=self.stat)

    def _open_upload(self, name: str, part_nbytes: int, at_a_time: int) -> Any:
        from obstore import open_writer

        return open_writer(self._client, self._key(name), buffer_size=part_nbytes, max_concurrency=at_a_time)

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """As of `Store`, by one request; there is no temporary name."""
        self._put_new(name, data)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """As of `Store`, by one request."""
        e_tag, _, number = version.partition(_BETWEEN)
        parts = {"e_tag": e_tag, "version": number}
        self._put(name, data, {part: value for part, value in parts.items() if value})

    def _put_new(self, name: str, data: bytes) -> None:
        self._put(name, data, "create")

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        """Put under a condition, again and again: the library repeats no request that could take effect twice.

        Here it may: what is under the name says afterwards who has put it there.
        """
        for is_last in retries.tries():
            try:
                with translated(name):
                    self._client.put(self._key(name), data, mode=mode, use_multipart=False)
                return
            except FileExistsError:
                if self._holds(name, data):
                    return
                # A store may also say so while another request for the name is under way, which may come to nothing.
                if is_last or mode != "create" or self._is_there(name):
                    raise
            except FileNotFoundError as error:  # what was to be replaced is gone
                if mode == "create":
                    raise
                raise FileExistsError(errno.EEXIST, "it is gone", name) from error
            except PermissionError:
                raise
            except OSError as error:
                if self._holds(name, data):
                    return
                # IMPORTANT: that it is not there now says nothing: the request may still be on its way.
                if is_last:
                    raise UnknownOutcomeError(error.errno, error.strerror, name) from error

    def _holds(self, name: str, data: bytes) -> bool:
        try:
            return self.read_whole(name, len(data)) == data
        except OSError:
            return False

    def _is_there(self, name: str) -> bool:
        try:
            self.stat(name)
        except FileNotFoundError:
            return False
        return True

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """As of `Store`, by one request; by more if it answers with fewer bytes than it has."""
        data = self._read_range(name, offset, nbytes)
        while len(data) < nbytes and offset + len(data) < self.stat(name).nbytes:
            more = self._read_range(name, offset + len(data), nbytes - len(data))
            if not more:
                raise OSError(errno.EREMOTEIO, f"{len(data)} bytes came, of {nbytes} from {offset} on", name)
            data += more
        return data

    def _read_range(self, name: str, offset: int, nbytes: int) -> bytes:
        if nbytes <= 0:
            return b""
        try:
            with translated(name):
                data = bytes(self._client.get_range(self._key(name), start=offset, length=nbytes))
        except (FileNotFoundError, PermissionError):
            raise
        except OSError:
            if offset < self.stat(name).nbytes:
                raise
            return b""
        if len(data) > nbytes:
            raise OSError(errno.EREMOTEIO, f"{len(data)} bytes came, of {nbytes} from {offset} on", name)
        return data

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """As of `Store`, by one request."""
        with translated(name):
            found = self._client.get(self._key(name))
            nbytes = found.meta["size"]
            if nbytes > max_nbytes:
                raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} are expected", name)
            data = bytes(found.bytes())
        if len(data) != nbytes:
            raise OSError(errno.EREMOTEIO, f"{len(data)} bytes came, of {nbytes}", name)
        return data

    def stat(self, name: str) -> Entry:
        """As of `Store`; nothing of a prefix is known."""
        with translated(name):
            found = self._client.head(self._key(name))
        return _entry(name, found)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """As of `Store`, by one request for 1,000 names."""
        key = self._key(prefix)
        with translated(prefix):
            found = self._client.list_with_delimiter(key or None)
        within = len(key) + 1 if key else 0
        listed = [_entry(one["path"][within:], one) for one in found["objects"] if len(one["path"]) > within]
        listed += [Entry(one.rstrip("/")[within:], PREFIX, 0, 0, "") for one in found["common_prefixes"]]
        if not listed and key:
            if self._is_there(prefix):
                raise NotADirectoryError(errno.ENOTDIR, "it is an object", prefix)
            raise FileNotFoundError(errno.ENOENT, "nothing is there", prefix)
        return iter(listed)

    def listed(self, prefix: str) -> Store:
        """As of `Store`: all objects below `prefix` are listed once, by one request for 1,000 of them."""
        key = self._key(prefix)
        found: dict[str, Entry] = {}
        with translated(prefix):
            for page in self._client.list(key or None, chunk_size=1000):
                for one in page:
                    name = f"{self.root}/{one['path']}"
                    found[name] = _entry(name, one)
        return ListedStore(self, prefix, found)

    def remove(self, name: str) -> None:
        """As of `Store`; whether it was there is not known."""
        for is_last in retries.tries():
            try:
                with translated(name):
                    self._client.delete(self._key(name))
                return
            except FileNotFoundError:  # S3 does not say it; and an earlier try may have removed it
                return
            except PermissionError:
                raise
            except OSError:
                if is_last:
                    raise

    def sync(self, prefix: str) -> None:
        """Do nothing: what the store has confirmed, it keeps."""

    @property
    def _client(self) -> Any:
        """IMPORTANT: connections and threads of obstore do not live on in a forked process."""
        if os.getpid() != self._pid:
            self._store, self._pid = _opened(self.root, self._options), os.getpid()
        return self._store

    def _key(self, name: str) -> str:
        location = location_of(name)
        if location.root != self.root:
            raise OSError(errno.EXDEV, f"it lies in another bucket than {self.root}", name)
        return location.key


class ListedStore(Store):
    """What a listing has found below a prefix, as `names`, `entries` and `stat` tell it; all else is asked for anew.

    For looking through many checkpoints. Not for deciding what to remove.
    """

    def __init__(self, below: Store, prefix: str, found: Mapping[str, Entry]) -> None:
        self._below, self._prefix, self._found = below, prefix, found
        self.shards_appear_whole = below.shards_appear_whole
        self._children: dict[str, dict[str, Entry]] = {}
        for name, entry in found.items():
            parent, _, last = name.rpartition("/")
            self._children.setdefault(parent, {})[last] = _renamed(entry, last)
            while parent != prefix and len(parent) > len(prefix):
                above, _, last = parent.rpartition("/")
                if last in self._children.setdefault(above, {}):
                    break
                self._children[above][last] = Entry(last, PREFIX, 0, 0, "")
                parent = above

    def entries(self, prefix: str) -> Iterator[Entry]:
        """As of `Store`, as it was listed."""
        if not self._covers(prefix):
            return self._below.entries(prefix)
        if prefix not in self._children:
            if prefix in self._found:
                raise NotADirectoryError(errno.ENOTDIR, "it is an object", prefix)
            raise FileNotFoundError(errno.ENOENT, "nothing is there", prefix)
        return iter(list(self._children[prefix].values()))

    def stat(self, name: str) -> Entry:
        """As of `Store`, as it was listed."""
        if not self._covers(name):
            return self._below.stat(name)
        if name not in self._found:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return self._found[name]

    def _covers(self, name: str) -> bool:
        return name == self._prefix or name.startswith(self._prefix + "/")

    def listed(self, prefix: str) -> Store:
        """Return this, if it has what is asked for."""
        return self if self._covers(prefix) else self._below.listed(prefix)

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """As of the store itself."""
        self._below.put(name, data, durable=durable, replace=replace)

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """As of the store itself."""
        return self._below.shard_writer(path, image, offset, nbytes, aligned=aligned, fsync=fsync)

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """As of the store itself."""
        self._below.put_if_absent(name, data, temporary=temporary, durable=durable)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """As of the store itself."""
        self._below.replace_if(name, data, version, temporary=temporary, durable=durable)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """As of the store itself."""
        return self._below.read(name, offset, nbytes)

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """As of the store itself; what was not listed is not asked for."""
        if self._covers(name) and name not in self._found:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return self._below.read_whole(name, max_nbytes)

    def remove(self, name: str) -> None:
        """As of the store itself."""
        self._below.remove(name)

    def sync(self, prefix: str) -> None:
        """As of the store itself."""
        self._below.sync(prefix)


_BETWEEN = "\n"
"""Of the parts of a version: the entity tag, and the number of the version where the store has one."""


def _entry(name: str, found: Mapping[str, Any]) -> Entry:
    changed: datetime = found["last_modified"]
    return Entry(
        name=name,
        kind=OBJECT,
        nbytes=found["size"],
        mtime_ns=int(changed.timestamp() * 1e6) * 1000,
        version=f"{found['e_tag'] or ''}{_BETWEEN}{found['version'] or ''}",
    )


def _renamed(entry: Entry, name: str) -> Entry:
    return Entry(name, entry.kind, entry.nbytes, entry.mtime_ns, entry.version)


def _opened(root: str, options: Mapping[str, str]) -> Any:
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UnsupportedPathError(
            f"{root}: checkpoints in object stores need the library obstore: pip install 'asyncckpt[cloud]'", path=root
        ) from error
    from obstore.exceptions import BaseError

    try:
        return _from_url(from_url, root, options)
    except (BaseError, ValueError, TypeError) as error:
        text = words_of(error)
        for value in sorted(options.values(), key=len, reverse=True):  # obstore repeats what it cannot parse
            text = text.replace(value, "...") if value else text
        raise UnsupportedPathError(f"{root}: the store cannot be opened: {text}", path=root) from None


CLIENT_OPTIONS = (
    "allow_http",
    "allow_invalid_certificates",
    "connect_timeout",
    "http1_only",
    "http2_only",
    "pool_idle_timeout",
    "pool_max_idle_per_host",
    "proxy_ca_certificate",
    "proxy_excludes",
    "proxy_url",
    "randomize_addresses",
    "root_certificate",
    "timeout",
    "user_agent",
)
"""Options of the connections, not of the store: obstore takes them apart."""


def _from_url(from_url: Any, root: str, options: Mapping[str, str]) -> Any:
    client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
    return from_url(
        root,
        config={name: value for name, value in options.items() if name not in client} or None,
        client_options={"timeout": f"{REQUEST_TIMEOUT_S:g}s", "allow_http": _allows_http(options), **client},
        retry_config={
            "max_retries": MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retries.RETRY_FOR_S),
            "backoff": {
                "init_backoff": timedelta(seconds=retries.FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=retries.LAST_PAUSE_S),
            },
        },
    )


def _allows_http(options: Mapping[str, str]) -> bool:
    """Whether an endpoint of plain HTTP was asked for by name, as one on this machine or in a private network is."""
    given = [
        value for name, value in options.items() if name.lower().endswith(("endpoint", "endpoint_url", "base_url"))
    ]
    given += [os.environ.get(name, "") for name in _ENDPOINTS]
    return any(value.startswith("http://") for value in given)


_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")

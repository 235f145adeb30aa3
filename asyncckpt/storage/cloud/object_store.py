"""`ObjectStore`: a `Store` of objects in one bucket, by the library obstore (extra `cloud`).

A name is a whole URL. An object appears complete or not at all. A conditional put is one request; if a retry finds the
object with the same content, the put has succeeded. There are no directories, links, locks or renames.

obstore retries requests with growing pauses if the store is busy (429, 500, 503) or the connection breaks, for
`retries.RETRY_FOR_S`. A refusal (401, 403, 404) is an error at once.
"""

from __future__ import annotations

import errno
import functools
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from datetime import datetime, timedelta
from typing import Any, ClassVar
from urllib.parse import urlsplit

from asyncckpt.basics.urls import location_of
from asyncckpt.errors import ForkedError, UnsupportedPathError
from asyncckpt.storage.cloud import aws, retries
from asyncckpt.storage.cloud.object_shards import ObjectShardWriter
from asyncckpt.storage.cloud.store_errors import as_os_errors, message_of
from asyncckpt.storage.shard_writer import Image, ShardWriter
from asyncckpt.storage.store import (
    OBJECT,
    PREFIX,
    Entry,
    IncompleteUpload,
    Store,
    UnknownOutcomeError,
    UnsupportedByStoreError,
)

REQUEST_TIMEOUT_S = 60.0
"""Timeout of one attempt. A part must upload at 0.1 MB/s or more."""

MAX_COPIED_NBYTES = 1 << 30
"""Longest object that the store is asked to copy. S3 refuses 5 GB, and a copy must end in `REQUEST_TIMEOUT_S`."""

_AWS, _GOOGLE, _AZURE = "s3://", "gs://", "az://"

_RETRIED = re.compile(r"\bafter \d+ retries\b")
"""Matches what obstore says if an earlier attempt has failed too."""

_COPY_REFUSED = re.compile(r"^(?!.*after \d+ retries).*status code: 4\d\d\b|status code: 501\b", re.DOTALL)
"""Matches what obstore says if the store has refused a request at the first attempt, or does not have such requests."""


class ObjectStore(Store):
    """A `Store` of the objects of one bucket. Errors are those of `Store`, with the message of the object store.

    A process that was forked after its parent has used an object store raises `ForkedError` for each request.

    `errno` is EACCES if the store refuses the credentials, and EREMOTEIO if it did not answer, or not as expected.

    Args:
        root: Scheme and bucket, such as `s3://bucket`.
        options: Options of obstore by name: `endpoint`, `region`, `access_key_id` and others of the store, and
            `CLIENT_OPTIONS`; for S3 also `profile`. Others come from the environment.
        client: A store of obstore to use instead, for tests.
        brief: obstore retries for `retries.BRIEF_RETRY_FOR_S` instead.

    Raises:
        UnsupportedPathError: obstore is not installed; or an option is unknown, or has a value that it cannot have.
    """

    shards_appear_whole = True
    requests_at_a_time = 16
    """Chosen: a store answers a request in 10 to 100 ms, and serves thousands per second."""

    _used_in_pid: ClassVar[int] = 0
    """Process in which the first request to any store began; 0: none has."""

    def __init__(
        self, root: str, options: Mapping[str, str] | None = None, *, client: Any = None, brief: bool = False
    ) -> None:
        self.root = root
        self.links_may_end_late = not root.startswith(_AZURE)
        self._options = dict(options or {})
        self._store, self._profile = (client, None) if client is not None else _opened(root, self._options, brief)
        self._secrets = aws.Secrets(self._options, self._profile)

    def __repr__(self) -> str:
        """Return the bucket, without credentials."""
        return f"ObjectStore({self.root!r})"

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Implement `Store.put`. The object is durable in any case, since the store answers once it has it."""
        if replace:
            with self._os_errors(name):
                self._client.put(self._key(name), bytes(data), use_multipart=False)
        else:
            self._put_new(name, bytes(data))

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, block_nbytes: int, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """Implement `Store.shard_writer`: upload in parts."""
        return ObjectShardWriter(
            path,
            image,
            offset,
            nbytes,
            block_nbytes=block_nbytes,
            open_upload=self._open_upload,
            stat=self.stat,
            secrets=self._secrets,
        )

    def link(self, source: str, target: str, version: str) -> None:
        """Implement `Store.link`: the store copies the object by itself, in one request.

        Azure may answer while the copy is pending, in a header that obstore does not show. So it is not asked.
        """
        if self.root.startswith(_AZURE):
            raise UnsupportedByStoreError("copies that are known to be complete", source)
        found = self.stat(source)
        if found.version != version:
            raise OSError(errno.ESTALE, "it has changed since it was written", source)
        if found.nbytes > MAX_COPIED_NBYTES:
            raise OSError(errno.EFBIG, f"{found.nbytes} bytes, at most {MAX_COPIED_NBYTES} are copied", source)
        said = ""  # by the store, if it has not copied
        try:
            with self._os_errors(source):
                try:
                    self._client.copy(self._key(source), self._key(target))
                except Exception as error:
                    said = str(error)
                    raise
            copied = self.stat(target)
        except UnsupportedByStoreError:
            raise
        except OSError as error:
            is_refused = isinstance(error, (FileNotFoundError, FileExistsError, PermissionError))
            if said and (_COPY_REFUSED.search(said) or (is_refused and not _RETRIED.search(said))):
                raise
            # IMPORTANT: the store may still be copying, for this or an earlier attempt, and would replace what is put
            # to this name now.
            raise UnknownOutcomeError(error.errno, error.strerror, target) from error
        if copied.nbytes != found.nbytes:
            self.remove_quietly(target)
            text = f"the copy has {copied.nbytes} bytes, expected {found.nbytes}"
            raise UnknownOutcomeError(errno.EREMOTEIO, text, target)

    def _open_upload(self, name: str, part_nbytes: int, at_a_time: int) -> Any:
        from obstore import open_writer

        return open_writer(self._client, self._key(name), buffer_size=part_nbytes, max_concurrency=at_a_time)

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Implement `Store.put_if_absent` by one conditional request, without the temporary name."""
        self._put_new(name, data)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Implement `Store.replace_if` by one conditional request, without the temporary name."""
        e_tag, _, number = version.partition(_SEPARATOR)
        parts = {"e_tag": e_tag, "version": number}
        self._put(name, data, {part: value for part, value in parts.items() if value})

    def _put_new(self, name: str, data: bytes) -> None:
        self._put(name, data, "create")

    def _put(self, name: str, data: bytes, mode: Any) -> None:
        """Conditional put with retries.

        obstore does not repeat conditional puts, because they might take effect twice. This is safe here: after a
        failure the object is read back, and equal content means that this put succeeded.
        """
        unknown_because: OSError | None = None  # why it is unknown whether an attempt has taken effect
        for is_last in retries.attempts():
            try:
                with self._os_errors(name):
                    self._client.put(self._key(name), data, mode=mode, use_multipart=False)
                return
            except (FileExistsError, PermissionError) as error:
                failed: OSError = error
            except FileNotFoundError as error:
                failed = error if mode == "create" else _not_there(name)
            except OSError as error:
                failed = unknown_because = error
            is_taken = isinstance(failed, FileExistsError)
            if unknown_because is None and not is_taken:
                raise failed
            try:
                holds = self._holds(name, data)  # None: it is not there, or not known
            except OSError as error:
                # IMPORTANT: it may hold this content nevertheless.
                holds, unknown_because = None, unknown_because or error
            if holds:
                return
            if holds is False and is_taken:
                raise failed
            if holds is False and mode == "create":
                raise FileExistsError(errno.EEXIST, "another object has this name", name)
            # IMPORTANT: that it is not there now says nothing: the request may still be on its way. A store may also
            # report a conflict with a concurrent request that later fails; retry while no object exists.
            is_worth_retrying = failed is unknown_because or (is_taken and mode == "create")
            if is_last or not is_worth_retrying:
                raise failed if unknown_because is None else _unknown_outcome(name, failed, unknown_because)

    def _holds(self, name: str, data: bytes) -> bool | None:
        """Return whether an object has this content; None: it does not exist.

        Raises:
            OSError: It cannot be read.
        """
        try:
            return self.read_whole(name, len(data)) == data
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            return False

    def _entry_or_none(self, name: str) -> Entry | None:
        try:
            return self.stat(name)
        except FileNotFoundError:
            return None

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Implement `Store.read` by one request for a range; by more if it is answered with fewer bytes."""
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
            with self._os_errors(name):
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
        """Implement `Store.read_whole` by one request."""
        with self._os_errors(name):
            found = self._client.get(self._key(name))
            nbytes = found.meta["size"]
            if nbytes > max_nbytes:
                raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} are expected", name)
            data = bytes(found.bytes())
        if len(data) != nbytes:
            raise OSError(errno.EREMOTEIO, f"{len(data)} bytes came, of {nbytes}", name)
        return data

    def stat(self, name: str) -> Entry:
        """Implement `Store.stat`; a prefix has no entry."""
        with self._os_errors(name):
            found = self._client.head(self._key(name))
        return _entry(name, found)

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Implement `Store.entries` by one request for 1,000 names. A bucket has entries even if it is empty."""
        key = self._key(prefix)
        with self._os_errors(prefix):
            found = self._client.list_with_delimiter(key or None)
        within = len(key) + 1 if key else 0
        listed = [_entry(one["path"][within:], one) for one in found["objects"] if len(one["path"]) > within]
        listed += [Entry(one.rstrip("/")[within:], PREFIX, 0, 0, "") for one in found["common_prefixes"]]
        if not listed and key:
            raise _nothing_below(prefix, self._entry_or_none(prefix))
        return iter(listed)

    def listed(self, prefix: str) -> Store:
        """Implement `Store.listed`: list all objects below `prefix` once, by one request for 1,000 of them."""
        key = self._key(prefix)
        found: dict[str, Entry] = {}
        with self._os_errors(prefix):
            for page in self._client.list(key or None, chunk_size=1000):
                for one in page:
                    name = f"{self.root}/{one['path']}"
                    found[name] = _entry(name, one)
        return ListedStore(self, prefix, found)

    def remove(self, name: str) -> None:
        """Implement `Store.remove`, but succeed also if the object does not exist."""
        for is_last in retries.attempts():
            try:
                with self._os_errors(name):
                    self._client.delete(self._key(name))
                return
            except FileNotFoundError:  # S3 does not report it; and an earlier attempt may have removed the object
                return
            except PermissionError:
                raise
            except OSError:
                if is_last:
                    raise

    def incomplete_uploads(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[IncompleteUpload]:
        """Implement `Store.incomplete_uploads`, of S3 only. Azure removes its parts after a week."""
        if self.root.startswith(_GOOGLE):
            text = "list of incomplete uploads that can be read here (use a lifecycle rule of the bucket)"
            raise UnsupportedByStoreError(text, prefix)
        return self._uploads.list_below(prefix, is_wanted) if self.root.startswith(_AWS) else iter(())

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """Implement `Store.abort_upload`."""
        self._uploads.abort(upload)

    @functools.cached_property
    def _uploads(self) -> aws.IncompleteUploads:
        return aws.IncompleteUploads(self.root, self._options, self._client, self._profile, self._secrets)

    def sync(self, prefix: str) -> None:
        """Implement `Store.sync`: do nothing, since the store keeps what it has confirmed."""

    @property
    def _client(self) -> Any:
        """The store of obstore.

        IMPORTANT: obstore's threads do not exist in a forked child, so each request would wait there for ever.
        """
        pid = os.getpid()
        ObjectStore._used_in_pid = used_in_pid = ObjectStore._used_in_pid or pid
        if used_in_pid != pid:
            raise ForkedError(
                f"{self.root}: process {used_in_pid} has used an object store, and this is its forked child {pid}, "
                "where requests would never end. Start the child by 'spawn' in place of 'fork' (of a DataLoader: "
                "multiprocessing_context='spawn'), or use object stores only after the fork"
            )
        return self._store

    def _os_errors(self, name: str) -> AbstractContextManager[None]:
        return as_os_errors(name, self._secrets)

    def _key(self, name: str) -> str:
        location = location_of(name)
        if location.root != self.root:
            raise OSError(errno.EXDEV, f"expected an object in {self.root}", name)
        return location.key


class ListedStore(Store):
    """Answers below a prefix from one listing: `names`, `entries`, `stat`, and whether there is an object to read.

    All other calls of `Store` that it defines go to the store; it has no locks and no renames. Use it to search many
    checkpoints, not to decide what to remove.
    """

    def __init__(self, below: Store, prefix: str, found: Mapping[str, Entry]) -> None:
        self._below, self._prefix, self._found = below, prefix, found
        self.shards_appear_whole = below.shards_appear_whole
        self.requests_at_a_time = below.requests_at_a_time
        self._children: dict[str, dict[str, Entry]] = {}
        for name, entry in found.items():
            parent, _, last = name.rpartition("/")
            self._children.setdefault(parent, {}).setdefault(last, _renamed(entry, last))
            while parent != prefix and len(parent) > len(prefix):
                above, _, last = parent.rpartition("/")
                known = self._children.setdefault(above, {})
                if last in known and known[last].kind == PREFIX:
                    break
                # IMPORTANT: replaces an object of this name. Other programs mark directories with empty objects, and
                # one beside a checkpoint would hide it.
                known[last] = Entry(last, PREFIX, 0, 0, "")
                parent = above

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Implement `Store.entries` from the listing."""
        if not self._covers(prefix):
            return self._below.entries(prefix)
        if prefix not in self._children:
            if not location_of(prefix).key:  # an empty bucket
                return iter(())
            raise _nothing_below(prefix, self._found.get(prefix))
        return iter(list(self._children[prefix].values()))

    def stat(self, name: str) -> Entry:
        """Implement `Store.stat` from the listing."""
        if not self._covers(name):
            return self._below.stat(name)
        if name not in self._found:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return self._found[name]

    def _covers(self, name: str) -> bool:
        return name == self._prefix or name.startswith(self._prefix + "/")

    def listed(self, prefix: str) -> Store:
        """Return this store if its listing covers `prefix`."""
        return self if self._covers(prefix) else self._below.listed(prefix)

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Forward to the wrapped store."""
        self._below.put(name, data, durable=durable, replace=replace)

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, block_nbytes: int, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """Forward to the wrapped store."""
        return self._below.shard_writer(
            path, image, offset, nbytes, block_nbytes=block_nbytes, aligned=aligned, fsync=fsync
        )

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Forward to the wrapped store."""
        self._below.put_if_absent(name, data, temporary=temporary, durable=durable)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Forward to the wrapped store."""
        self._below.replace_if(name, data, version, temporary=temporary, durable=durable)

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Forward to the wrapped store."""
        return self._below.read(name, offset, nbytes)

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """Forward to the wrapped store, unless the listing does not have the object."""
        if self._covers(name) and name not in self._found:
            raise FileNotFoundError(errno.ENOENT, "there is no such object", name)
        return self._below.read_whole(name, max_nbytes)

    def link_version(self, name: str) -> str:
        """Forward to the wrapped store."""
        return self._below.link_version(name)

    def link(self, source: str, target: str, version: str) -> None:
        """Forward to the wrapped store."""
        self._below.link(source, target, version)

    def remove(self, name: str) -> None:
        """Forward to the wrapped store."""
        self._below.remove(name)

    def incomplete_uploads(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[IncompleteUpload]:
        """Forward to the wrapped store."""
        return self._below.incomplete_uploads(prefix, is_wanted)

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """Forward to the wrapped store."""
        self._below.abort_upload(upload)

    def sync(self, prefix: str) -> None:
        """Forward to the wrapped store."""
        self._below.sync(prefix)


_SEPARATOR = "\n"
"""Separates the ETag from the version number in `Entry.version`."""


def _entry(name: str, found: Mapping[str, Any]) -> Entry:
    changed: datetime = found["last_modified"]
    return Entry(
        name=name,
        kind=OBJECT,
        nbytes=found["size"],
        mtime_ns=int(changed.timestamp() * 1e6) * 1000,
        version=f"{found['e_tag'] or ''}{_SEPARATOR}{found['version'] or ''}",
    )


def _not_there(name: str) -> FileExistsError:
    return FileExistsError(errno.EEXIST, "expected an object to replace, but it does not exist", name)


def _unknown_outcome(name: str, failed: OSError, unknown: OSError) -> UnknownOutcomeError:
    """Return the error of a put whose last attempt `failed`, and for which it is `unknown` what an attempt has done."""
    text = str(unknown.strerror)
    if failed is not unknown:
        text = f"{failed.strerror}; it is unknown whether an earlier attempt has taken effect: {text}"
    return UnknownOutcomeError(unknown.errno, text, name)


def _nothing_below(prefix: str, found: Entry | None) -> OSError:
    """Return the error of listing a prefix that has nothing below it.

    Args:
        prefix: The prefix.
        found: The object of this name. An empty one is a mark that other programs put for an empty directory.
    """
    if found is None or found.nbytes == 0:
        return FileNotFoundError(errno.ENOENT, "nothing is there", prefix)
    return NotADirectoryError(errno.ENOTDIR, "expected a prefix, found an object", prefix)


def _renamed(entry: Entry, name: str) -> Entry:
    return Entry(name, entry.kind, entry.nbytes, entry.mtime_ns, entry.version)


def _opened(root: str, options: Mapping[str, str], brief: bool) -> tuple[Any, aws.ProfileCredentials | None]:
    """Return obstore's store, and where its credentials come from if that is a profile."""
    try:
        from obstore.store import from_url
    except ImportError as error:
        raise UnsupportedPathError(
            f"{root}: checkpoints in object stores need the library obstore: pip install 'asyncckpt[cloud]'", path=root
        ) from error
    from obstore.exceptions import BaseError

    try:
        _check_endpoints(root, options)
        if not root.startswith(_AWS):
            return _from_url(from_url, root, options, brief), None
        profile = aws.profile_credentials(options)
        others = {name: value for name, value in options.items() if not aws.is_profile(name)}
        provider = {} if profile is None else {"credential_provider": profile}
        return _from_url(from_url, root, others, brief, **provider), profile
    except (BaseError, ValueError, TypeError) as error:
        text = message_of(error, aws.Secrets(options))  # obstore quotes what it cannot parse
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
"""Options of the connections, which obstore takes apart from those of the store."""


def _from_url(from_url: Any, root: str, options: Mapping[str, str], brief: bool, **more: Any) -> Any:
    retry_for_s = retries.BRIEF_RETRY_FOR_S if brief else retries.RETRY_FOR_S
    client = {name: value for name, value in options.items() if name in CLIENT_OPTIONS}
    return from_url(
        root,
        config={name: value for name, value in options.items() if name not in client} or None,
        client_options={"timeout": f"{REQUEST_TIMEOUT_S:g}s", "allow_http": _allows_http(options), **client},
        retry_config={
            "max_retries": retries.MAX_RETRIES,
            "retry_timeout": timedelta(seconds=retry_for_s),
            "backoff": {
                "init_backoff": timedelta(seconds=retries.FIRST_PAUSE_S),
                "max_backoff": timedelta(seconds=min(retries.LAST_PAUSE_S, retry_for_s * retries.PAUSE_SHARE)),
            },
        },
        **more,
    )


def _allows_http(options: Mapping[str, str]) -> bool:
    """Whether an option or variable names an endpoint of plain HTTP, such as one in a private network."""
    given = [*_endpoints_in(options).values(), *(os.environ.get(name, "") for name in _ENDPOINTS)]
    return any(value.startswith("http://") for value in given)


def _check_endpoints(root: str, options: Mapping[str, str]) -> None:
    """Refuse an endpoint that is not a URL: obstore would panic in each request.

    Raises:
        ValueError: One of the options, or of the environment if the options have none, is not. Its value is not shown.
            Or a variable would be used in place of the option.
    """
    before = os.environ.get(_BEFORE_OPTIONS) if root.startswith(_AWS) else None
    if before and any(value.rstrip("/") != before.rstrip("/") for value in _endpoints_in(options).values()):
        raise ValueError(f"{_BEFORE_OPTIONS} is set, and obstore would use it in place of the option: unset it")
    prefix = _PREFIXES[location_of(root).root.partition(":")[0]]
    given = _endpoints_in(options) or {
        name: os.environ[name] for name in _ENDPOINTS if name.startswith(prefix) and name in os.environ
    }
    for name, value in given.items():
        try:
            parts = urlsplit(value)
            is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 0) >= 0
        except ValueError:
            is_url = False
        if not is_url or not value.isprintable() or " " in value:
            raise ValueError(f"{name} is not of the form http://HOST:PORT or https://HOST:PORT")


def _endpoints_in(options: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in options.items() if _ENDPOINT.fullmatch(name)}


_ENDPOINT = re.compile(r"(aws_|azure_(storage_)?|google_)?(endpoint(_url(_s3)?)?|base_url)", re.IGNORECASE)
_ENDPOINTS = ("AWS_ENDPOINT_URL", "AWS_ENDPOINT", "AWS_ENDPOINT_URL_S3", "AZURE_STORAGE_ENDPOINT", "GOOGLE_BASE_URL")
_BEFORE_OPTIONS = "AWS_ENDPOINT_URL_S3"
_PREFIXES = {"s3": "AWS_", "gs": "GOOGLE_", "az": "AZURE_"}
"""Prefix of the variables that obstore reads for a scheme."""

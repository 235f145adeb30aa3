"""`Store`: the interface to a storage, with what commit, catalog, garbage collection and retention need.

A name consists of parts joined by "/". A prefix is the name of what contains other names, without "/" at its end. An
object appears complete or not at all. Only a file that `put` writes can be seen before it is complete; readers open it
only after a commit.

    FileNotFoundError      there is no such object, or nothing below such a prefix
    FileExistsError        a condition is not fulfilled: the name exists, or the object was changed
    UnknownOutcomeError    the store failed, and a conditional put or a link may have taken effect or not
    UnsupportedByStoreError   the store lacks a capability
    OSError                a call failed, by its errno; nothing was changed

All methods may be called from several threads. A method whose docstring begins with "Capability" raises
`UnsupportedByStoreError` in a store that lacks it. Other methods that are not abstract have a default for stores to
which they do not apply.
"""

from __future__ import annotations

import abc
import contextlib
import errno
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from asyncckpt.format.names import SaveId
from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import Image, ShardWriter

OBJECT = "object"
PREFIX = "prefix"
LINK = "link"
OTHER = "other"

_FIRST_FD = 1 << 29
"""First number for opened objects: above all descriptors of the kernel, below those of `recall.memory_overlay`."""

_logger = logging.getLogger("asyncckpt.storage")

T = TypeVar("T")
R = TypeVar("R")


class UnknownOutcomeError(OSError):
    """A conditional put or a link failed, and it is unknown whether it has taken effect, or still will.

    `shows_itself`: it has taken effect if the object is there.
    """

    shows_itself = True


class UnsupportedByStoreError(OSError):
    """The store lacks a capability."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(errno.EOPNOTSUPP, f"this storage has no {what}", name)


@dataclass(frozen=True, slots=True)
class Entry:
    """Properties of a name in a store.

    Attributes:
        name: The name that was passed to `stat`; in a listing, the last part of the name.
        kind: `object` or `prefix`; for files also `link` and `other`, which are never followed, read or removed.
        nbytes: Length of an object in bytes.
        mtime_ns: Time of the last change, in nanoseconds since 1970; 0: unknown.
        version: A string that changes with the object. `replace_if` compares that of `stat`; listings may have another
            form of it.
    """

    name: str
    kind: str
    nbytes: int
    mtime_ns: int
    version: str

    @property
    def is_object(self) -> bool:
        """Whether it can be read and removed."""
        return self.kind == OBJECT

    @property
    def mtime_s(self) -> float:
        """Seconds since 1970."""
        return self.mtime_ns / 1e9


class IncompleteUpload(NamedTuple):
    """An upload in parts that was begun, and neither completed nor aborted.

    Attributes:
        name: Name of the object that it would have made.
        id: ID that the store has given it.
        nbytes: Length of the parts that the store has.
        changed_s: When it was begun, or the last part came, in seconds since 1970.
    """

    name: str
    id: str
    nbytes: int
    changed_s: float


class DirectoryIdentity(NamedTuple):
    """Identity of a directory: inode number, and time of birth in nanoseconds since 1970 (0: unknown). 63 bits each."""

    inode: int = 0
    birth_ns: int = 0


class Store(abc.ABC):
    """A store of objects by name. The module's docstring lists the errors of its methods.

    Attributes:
        shards_appear_whole: Whether a shard has its name only once it is finished. False: it has the name from its
            first byte on, and can be renamed.
        requests_at_a_time: How many calls `for_each` makes concurrently.
        links_may_end_late: Whether `link` may take effect after the death of the process that has called it, and then
            replaces what has the name.
    """

    shards_appear_whole = False
    requests_at_a_time = 1
    links_may_end_late = False

    @abc.abstractmethod
    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Make a new object.

        Args:
            name: Its name, which no other process uses, such as one with a save ID.
            data: Its content.
            durable: Whether the content survives a power cut when this returns. The name does after `sync`.
            replace: Whether to replace an object of this name, in one step. If that fails, it stays unchanged.

        Raises:
            FileExistsError: The name exists, and `replace` is False. The existing object is unchanged.
            OSError: A call failed. An incomplete new object is removed.
        """

    @abc.abstractmethod
    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Make a new object, which appears complete, if the name does not exist.

        Succeeds also if the name exists with the same content, as after an earlier attempt.

        Args:
            name: Its name.
            data: Its content.
            temporary: A name of the same prefix, for stores that write the content first and then rename. An object
                that a dead process left there is replaced.
            durable: Whether the content, and all names that were made under the same prefix before, survive a power cut
                before the object appears. Its own name does after `sync`.

        Raises:
            FileExistsError: The name exists, with other content.
            UnknownOutcomeError: The object may exist or not. Nothing was removed.
            OSError: A call failed; the object does not exist.
        """

    @abc.abstractmethod
    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Replace an object in one step, if it still has the version that `stat` has returned.

        A store of files compares and renames in two steps, so its callers must hold `lock`.

        Args:
            name, data, temporary, durable: As of `put_if_absent`.
            version: The `version` in the result of `stat`.

        Raises:
            FileExistsError: The object was replaced or removed.
            UnknownOutcomeError: The object may have been replaced or not.
            OSError: A call failed; the object was not replaced.
        """

    @abc.abstractmethod
    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of an object from `offset` on, or fewer at its end.

        Raises:
            FileNotFoundError: There is no such object.
            OSError: EINVAL, ELOOP, ENXIO: the name is not that of an object. Or a call failed.
        """

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """Return the content of an object.

        Raises:
            OSError: EFBIG: it is longer than `max_nbytes`. Others: as `read`.
        """
        nbytes = self.stat(name).nbytes
        if nbytes > max_nbytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} are expected", name)
        return self.read(name, 0, nbytes)

    @abc.abstractmethod
    def stat(self, name: str) -> Entry:
        """Return the properties of an object; for files, of whatever has this name.

        Raises:
            FileNotFoundError: There is no such object.
        """

    @abc.abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield the entries directly below a prefix, in any order. Large listings are requested in pages.

        Raises:
            FileNotFoundError: There is no such prefix. With files, a prefix may be an empty directory.
            NotADirectoryError: The prefix is an object.
        """

    def names(self, prefix: str) -> list[str]:
        """Return the names of `entries`, which may be cheaper than the entries.

        Raises:
            OSError: As `entries`.
        """
        return [entry.name for entry in self.entries(prefix)]

    def listed(self, prefix: str) -> Store:
        """Return a store for many calls of `stat`, `names` and `entries` below `prefix`.

        An object store lists the prefix once and answers these calls from the listing. A store of files returns itself.

        Raises:
            OSError: The prefix cannot be listed.
        """
        return self

    @abc.abstractmethod
    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, block_nbytes: int, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """Return a writer for one shard. Nothing is written yet.

        Args:
            path: Name of the shard, which no other process uses.
            image: The image with its bytes.
            offset, nbytes: Offset of the shard in `image`, and its length.
            block_nbytes: Bytes that have one checksum.
            aligned: Whether `image` and `offset` are page-aligned.
            fsync: Whether the shard must survive a power cut once it is finished.
        """

    def link_version(self, name: str) -> str:
        """Return what `link` compares: a string that changes with the object, and with another one in its place.

        Raises:
            FileNotFoundError: There is no such object.
        """
        return self.stat(name).version

    def link(self, source: str, target: str, version: str) -> None:
        """Capability: make an object with the content of another one, without sending its bytes.

        Neither is affected when the other is removed. The name survives a power cut after `sync`.

        Args:
            source: The other object. Its content is durable.
            target: Name of the new object, which no other process uses.
            version: `link_version(source)` when its content was known.

        Raises:
            UnknownOutcomeError: `target` may come to exist, now or later.
            OSError: It has changed, does not exist, or cannot be linked. `target` does not exist, or as before.
        """
        raise UnsupportedByStoreError("links", source)

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object.

        Raises:
            FileNotFoundError: There is no such object. A store that does not know does not raise.
        """

    def remove_quietly(self, name: str) -> None:
        """Remove an object if it exists. A failure is logged, not raised."""
        try:
            self.remove(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("cannot remove %s: %s", name, error)

    @abc.abstractmethod
    def sync(self, prefix: str) -> None:
        """Make new and removed names directly below a prefix survive a power cut.

        Raises:
            OSError: It is unknown which of them do. IMPORTANT: a second call does not tell either.
        """

    def make_prefix(self, prefix: str, *, durable: bool = True) -> list[str]:
        """Make the missing directories of a prefix, and return them. Stores without directories return none.

        Args:
            prefix: The prefix.
            durable: Whether the new directories survive a power cut when this returns.

        Raises:
            OSError: A part of the prefix is not a directory, or a call failed. The directories made by this call are
                removed.
        """
        return []

    def remove_prefix(self, prefix: str) -> None:
        """Remove the empty directory of a prefix. Stores without directories do nothing.

        Raises:
            OSError: It is not empty, or does not exist.
        """
        return

    def lock(self, prefix: str, timeout_s: float) -> AbstractContextManager[None]:
        """Capability: hold the lock of a prefix until the `with` block ends or the process dies.

        It excludes all other processes, on all machines.

        Raises:
            OSError: EWOULDBLOCK: another process has held it for `timeout_s`.

        Blocks: while another process holds it, at most `timeout_s`.
        """
        raise UnsupportedByStoreError("locks", prefix)

    def publishes_by_creation(self, prefix: str, save_id: SaveId) -> bool:
        """Whether `put_if_absent` makes names below `prefix` before they are whole.

        Then who puts holds `lock`, and `checkpoint_dir.remove_torn` says what a dead process left.

        Raises:
            OSError: It cannot be known.
        """
        return False

    def refuse_unable(self, prefix: str, save_id: SaveId, *, fsync: bool, overwrite: bool) -> None:
        """Raise when the store cannot carry a save below `prefix`, which exists.

        Args:
            prefix: Where it goes.
            save_id: The save.
            fsync: Whether it flushes.
            overwrite: Whether it may replace another.

        Raises:
            UnsupportedPathError: It cannot; names what is missing.
            OSError: It cannot be known.
        """
        return

    def move(self, source: str, target: str, *, replace: bool = False) -> None:
        """Capability: rename an object or a prefix in one step.

        Raises:
            FileExistsError: `target` exists, and `replace` is False.
        """
        raise UnsupportedByStoreError("renames", source)

    def identity(self, prefix: str) -> DirectoryIdentity:
        """Capability: return the identity of a directory, by which it is recognised later.

        Raises:
            OSError: It does not exist, or cannot be read.
        """
        raise UnsupportedByStoreError("directories", prefix)

    def incomplete_uploads(self, prefix: str, is_wanted: Callable[[str], bool]) -> Iterator[IncompleteUpload]:
        """Yield the incomplete uploads below a prefix. Stores that keep no parts of uploads have none.

        Args:
            prefix: The prefix.
            is_wanted: Whether an upload with this name is wanted; the store is asked no more about others.

        Raises:
            UnsupportedByStoreError: The store may hold incomplete uploads, but cannot list them.
            OSError: The request failed.
        """
        return iter(())

    def abort_upload(self, upload: IncompleteUpload) -> None:
        """Remove the parts of an incomplete upload. Succeeds also if it has ended meanwhile.

        Raises:
            OSError: They may still be there.
        """
        raise UnsupportedByStoreError("incomplete uploads", upload.name)

    def as_files(self) -> Files:
        """Return the `Files` with which loads read. For an object store they use `read`, `stat` and `names`."""
        return StoreFiles(self)

    def is_own(self, prefix: str) -> bool:
        """Whether this user owns the directory of a prefix. True for stores without owners."""
        return True

    def resolve(self, name: str) -> str:
        """Return a name with all symbolic links resolved. Stores without links return it unchanged."""
        return name


def for_each(store: Store, call: Callable[[T], R], items: Sequence[T]) -> list[R]:
    """Return the results of `call` for `items`, in order. For an object store, several calls run concurrently.

    Raises:
        Exception: The first error, in the order of `items`.
    """
    at_a_time = min(store.requests_at_a_time, len(items))
    if at_a_time < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(at_a_time, "asyncckpt-request") as pool:
        try:
            results = pool.map(call, items)
        except RuntimeError:  # the interpreter exits, or the limit of threads is reached
            results = map(call, items)
        return list(results)


class StoreFiles(Files):
    """The reading methods of `Files` for an object store. Nothing is ever in a page cache.

    Attributes:
        store: The store.
    """

    def __init__(self, store: Store) -> None:
        self.store = store
        self._lock = threading.Lock()
        self._open: dict[int, Entry] = {}
        self._next = _FIRST_FD

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Check that an object exists, and return a number for it in place of a descriptor."""
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            raise UnsupportedByStoreError("such files", path)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        entry = self.store.stat(path)
        with self._lock:
            self._next += 1
            self._open[self._next] = entry
            return self._next

    def close(self, fd: int) -> None:
        """Drop the number."""
        with self._lock:
            del self._open[fd]

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read a range of the object."""
        if flags & os.RWF_NOWAIT:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        wanted = sum(len(buffer) for buffer in buffers)
        data = memoryview(self.store.read(self._open[fd].name, offset, wanted))
        done = 0
        for buffer in buffers:
            piece = data[done : done + len(buffer)]
            memoryview(buffer).cast("B")[: len(piece)] = piece
            done += len(piece)
        return done

    def fstat(self, fd: int) -> os.stat_result:
        """Return the properties of the object when it was opened."""
        return _status(self._open[fd])

    def lstat(self, path: str) -> os.stat_result:
        """Return the properties of an object or prefix."""
        try:
            return _status(self.store.stat(path))
        except FileNotFoundError:
            self.store.names(path)
            return _status(Entry(path, PREFIX, 0, 0, ""))

    def stat(self, path: str) -> os.stat_result:
        """Return the result of `lstat`, since there are no links."""
        return self.lstat(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names below a prefix."""
        return self.store.names(path)

    def unlink(self, path: str) -> None:
        """Remove an object."""
        self.store.remove(path)

    def fsync(self, fd: int) -> None:
        """Do nothing: an object that a store has confirmed is durable."""

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        """Return False."""
        return False

    def advise_random(self, fd: int) -> None:
        """Do nothing."""

    def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
        """Do nothing."""


STAT_BLOCK_NBYTES = 512
"""Unit of `st_blocks` (stat(3type))."""


def _status(entry: Entry) -> os.stat_result:
    mode = stat.S_IFDIR if entry.kind == PREFIX else stat.S_IFREG
    seconds = entry.mtime_ns // 1_000_000_000
    inode = int.from_bytes(hashlib.sha256(entry.version.encode()).digest()[:7], "little")
    fields = (mode | 0o444, inode, 0, 1, 0, 0, entry.nbytes, seconds, seconds, seconds)
    return os.stat_result(fields, {"st_blocks": -(-entry.nbytes // STAT_BLOCK_NBYTES)})


@contextlib.contextmanager
def exclusively(store: Store, prefix: str, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a prefix if the store has locks. On other stores, conditional puts alone decide.

    Returns:
        A context manager, whose value is whether the lock is held.

    Raises:
        OSError: As of `Store.lock`.

    Blocks: as `Store.lock`.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(store.lock(prefix, timeout_s))
            is_locked = True
        except UnsupportedByStoreError:
            is_locked = False
        yield is_locked

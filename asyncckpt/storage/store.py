"""`Store`: what commit, catalog, garbage collection and retention need of storage, and nothing else.

A name is a text of parts joined by "/"; a prefix is the name of what holds others, without a "/" at its end. Objects
appear whole or not at all, but for `put` into files, whose names nobody reads before a commit names them.

    FileNotFoundError      there is no such object, or nothing below such a prefix
    FileExistsError        a condition does not hold: the name is taken, or was changed
    UnknownOutcomeError    the store failed so that a conditional put may have taken effect, or not
    UnsupportedByStoreError   the store lacks a capability
    OSError                a call failed, by its errno; nothing was changed

All methods are safe to call from several threads. What only files have is a capability: the last methods of `Store`,
which stores without it leave as they are.
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
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

from asyncckpt.storage.files import Files
from asyncckpt.storage.shard_writer import Image, ShardWriter

OBJECT = "object"
PREFIX = "prefix"
LINK = "link"
OTHER = "other"

_FIRST_FD = 1 << 29
"""Numbers from here on are no descriptors of the kernel, nor those of what lies in memory (`recall.memory_overlay`)."""

_logger = logging.getLogger("asyncckpt.storage")


class UnknownOutcomeError(OSError):
    """A conditional put failed, and whether it took effect cannot be told."""


class UnsupportedByStoreError(OSError):
    """The store does not have what was asked for."""

    def __init__(self, what: str, name: str) -> None:
        super().__init__(errno.EOPNOTSUPP, f"this storage has no {what}", name)


@dataclass(frozen=True, slots=True)
class Entry:
    """What a store says of one name.

    Attributes:
        name: As it was asked for; of a listing: the last part.
        kind: `object`; `prefix`; of files also `link` and `other`, which are never followed, read or removed.
        nbytes: Length of an object.
        mtime_ns: When it was changed, in nanoseconds since 1970; 0: unknown.
        version: Changes with the object; what `replace_if` compares.
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


class DirectoryIdentity(NamedTuple):
    """Which directory a path means: inode number, and birth in nanoseconds since 1970 (0: unknown). 63 bits each."""

    inode: int = 0
    birth_ns: int = 0


class Store(abc.ABC):
    """A store of objects by name; the errors of its methods are above."""

    @abc.abstractmethod
    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Make a new object.

        Args:
            name: That nobody else gives, such as one with a save id in it.
            data: Its content.
            durable: Whether the content must survive a power cut when this returns; its name does after `sync`.
            replace: Take the place of what has the name, in one step. If that fails, what stood before stands.

        Raises:
            FileExistsError: The name is taken, and `replace` is False; what is there is left alone.
            OSError: It failed, and what was begun is removed.
        """

    @abc.abstractmethod
    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Make a new object that appears whole, if nothing has the name.

        A put that meets its own success, the same content under the name, has succeeded.

        Args:
            name: Of the object.
            data: Its content.
            temporary: Name beside it for stores that must write the content before it appears. What a dead process
                left there is replaced.
            durable: Whether the content, and all names that were given before under the same prefix, must survive a
                power cut before the object appears; its own name does after `sync`.

        Raises:
            FileExistsError: The name is taken.
            UnknownOutcomeError: It may be there, or not. Nothing was removed.
            OSError: It failed, and is not there.
        """

    @abc.abstractmethod
    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Replace an object in one step, if it is still what `stat` has called `version`.

        Files compare and replace in two steps: whoever replaces holds `lock`. Arguments and errors as of
        `put_if_absent`.

        Raises:
            FileExistsError: It is another one now, or gone.
        """

    @abc.abstractmethod
    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Return `nbytes` bytes of an object from `offset` on; fewer where it ends before.

        Raises:
            FileNotFoundError: There is none.
            OSError: EINVAL, ELOOP, ENXIO: what is there is no object.
        """

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """Return all of an object.

        Raises:
            OSError: EFBIG: it is longer than `max_nbytes`. Others as of `read`.
        """
        nbytes = self.stat(name).nbytes
        if nbytes > max_nbytes:
            raise OSError(errno.EFBIG, f"{nbytes} bytes, at most {max_nbytes} are expected", name)
        return self.read(name, 0, nbytes)

    @abc.abstractmethod
    def stat(self, name: str) -> Entry:
        """Return what the store says of an object, or of what a file system has under this name.

        Raises:
            FileNotFoundError: There is none.
        """

    @abc.abstractmethod
    def entries(self, prefix: str) -> Iterator[Entry]:
        """Yield what is right below a prefix, in no order, page by page.

        Raises:
            FileNotFoundError: Nothing is there. Directories of files may be empty.
            NotADirectoryError: The prefix is an object.
        """

    def names(self, prefix: str) -> list[str]:
        """Return the names of `entries`, where it is cheaper to do without the rest.

        Raises:
            OSError: As `entries`.
        """
        return [entry.name for entry in self.entries(prefix)]

    def listed(self, prefix: str) -> Store:
        """Return a store that tells names, entries and lengths below `prefix` as of now, for looking through all of it.

        Where each look is a request, that is one listing; files are looked at themselves.

        Raises:
            OSError: It cannot be listed.
        """
        return self

    @abc.abstractmethod
    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """Return what writes a shard of `nbytes` bytes from `offset` of `image` on. Nothing is begun yet.

        Args:
            path: Name of the shard, that nobody else gives.
            image: Holds its bytes.
            offset, nbytes: Where they lie.
            aligned: Whether `image` and `offset` are page-aligned.
            fsync: Whether it must survive a power cut once it is finished.
        """

    @abc.abstractmethod
    def remove(self, name: str) -> None:
        """Remove an object.

        Raises:
            FileNotFoundError: There is none. Stores that cannot tell say nothing.
        """

    def remove_quietly(self, name: str) -> None:
        """Remove an object that may be gone already; a failure is logged, not raised."""
        try:
            self.remove(name)
        except FileNotFoundError:
            pass
        except OSError as error:
            _logger.warning("cannot remove %s: %s", name, error)

    @abc.abstractmethod
    def sync(self, prefix: str) -> None:
        """Make the names right below a prefix, given and removed, survive a power cut.

        Raises:
            OSError: It is not known which do. IMPORTANT: trying again would not tell either.
        """

    def make_prefix(self, prefix: str, *, durable: bool = True) -> list[str]:
        """Make the directories of a prefix where there are such things, and return those that were missing.

        Raises:
            OSError: Something else is in the way, or a call failed. What was made is gone again.
        """
        return []

    def remove_prefix(self, prefix: str) -> None:
        """Remove the directory of a prefix where there are such things.

        Raises:
            OSError: It is not empty, or not there.
        """
        return

    def lock(self, prefix: str, timeout_s: float) -> AbstractContextManager[None]:
        """Capability: hold the lock of a prefix, alone on all machines, until the block ends or the process dies.

        Raises:
            OSError: EWOULDBLOCK: another one has held it for `timeout_s`.

        Blocks: for another holder, at most `timeout_s`.
        """
        raise UnsupportedByStoreError("locks", prefix)

    def move(self, source: str, target: str, *, replace: bool = False) -> None:
        """Capability: give an object or a prefix another name, in one step.

        Raises:
            FileExistsError: The name is taken, and `replace` is False.
        """
        raise UnsupportedByStoreError("renames", source)

    def identity(self, prefix: str) -> DirectoryIdentity:
        """Capability: say which directory this is, for whoever asks later whether it is still the same.

        Raises:
            OSError: It is not there.
        """
        raise UnsupportedByStoreError("directories", prefix)

    def as_files(self) -> Files:
        """Return the calls by which loads read. Files have all of them; elsewhere `read`, `stat` and `names` do."""
        return StoreFiles(self)

    def is_own(self, prefix: str) -> bool:
        """Whether this user owns what holds a prefix. Stores without owners say yes."""
        return True

    def resolve(self, name: str) -> str:
        """Return a name without links in it. Stores without links return it as it is."""
        return name


class StoreFiles(Files):
    """The reading calls of `Files` over a store of objects. Everything is cold, and nothing is cached or mapped.

    Attributes:
        store: That one.
    """

    def __init__(self, store: Store) -> None:
        self.store = self._store = store
        self._lock = threading.Lock()
        self._open: dict[int, Entry] = {}
        self._next = _FIRST_FD

    def open(self, path: str, flags: int, mode: int = 0) -> int:
        """Look whether an object is there, and return a number for it."""
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_DIRECTORY):
            raise UnsupportedByStoreError("such files", path)
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), path)
        entry = self._store.stat(path)
        with self._lock:
            self._next += 1
            self._open[self._next] = entry
            return self._next

    def close(self, fd: int) -> None:
        """Forget the number."""
        with self._lock:
            del self._open[fd]

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read a range of the object."""
        if flags & os.RWF_NOWAIT:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        wanted = sum(len(buffer) for buffer in buffers)
        data = memoryview(self._store.read(self._open[fd].name, offset, wanted))
        done = 0
        for buffer in buffers:
            piece = data[done : done + len(buffer)]
            memoryview(buffer).cast("B")[: len(piece)] = piece
            done += len(piece)
        return done

    def fstat(self, fd: int) -> os.stat_result:
        """Return what was seen when it was opened."""
        return _status(self._open[fd])

    def lstat(self, path: str) -> os.stat_result:
        """Ask for an object, or for a prefix of some."""
        try:
            return _status(self._store.stat(path))
        except FileNotFoundError:
            self._store.names(path)
            return _status(Entry(path, PREFIX, 0, 0, ""))

    def stat(self, path: str) -> os.stat_result:
        """As `lstat`: there are no links."""
        return self.lstat(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names below a prefix."""
        return self._store.names(path)

    def unlink(self, path: str) -> None:
        """Remove an object."""
        self._store.remove(path)

    def fsync(self, fd: int) -> None:
        """Do nothing: what a store has confirmed, it keeps."""

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        """Say no."""
        return False

    def advise_random(self, fd: int) -> None:
        """Do nothing."""

    def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
        """Do nothing."""


STAT_BLOCK_NBYTES = 512
"""Of `st_blocks` (stat(3type))."""


def _status(entry: Entry) -> os.stat_result:
    mode = stat.S_IFDIR if entry.kind == PREFIX else stat.S_IFREG
    seconds = entry.mtime_ns // 1_000_000_000
    inode = int.from_bytes(hashlib.sha256(entry.version.encode()).digest()[:7], "little")
    fields = (mode | 0o444, inode, 0, 1, 0, 0, entry.nbytes, seconds, seconds, seconds)
    return os.stat_result(fields, {"st_blocks": -(-entry.nbytes // STAT_BLOCK_NBYTES)})


@contextlib.contextmanager
def exclusively(store: Store, prefix: str, timeout_s: float) -> Iterator[bool]:
    """Hold the lock of a prefix where there are locks; elsewhere conditional puts alone decide.

    Returns:
        A context manager that says whether the lock is held.

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

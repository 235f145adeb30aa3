"""`LocalStore`: a `Store` of files, by POSIX calls that all go through `Files`, which fault tests replace.

A prefix is a directory, an object a regular file. Links are seen, and never followed below the prefix that was asked
for. The lock is an flock(2) on a file in the directory, so that a holder's death frees it, on every node. Who holds it
removes the file before it lets go; who then gets a lock on a file without a name takes the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import stat
import struct
import time
from collections.abc import Iterator

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.libc import libc as _libc
from asyncckpt.format.names import LOCK_NAME, replacing_name
from asyncckpt.storage.files import (
    MODE_DIRECTORY,
    MODE_FILE,
    Files,
    apply_mode,
    fsync_directory,
    opened,
    put_new_name,
    read_small_file,
    write_new_file,
)
from asyncckpt.storage.shard_writer import FileShardWriter, Image, ShardWriter
from asyncckpt.storage.store import (
    LINK,
    OBJECT,
    OTHER,
    PREFIX,
    DirectoryIdentity,
    Entry,
    Store,
    StoreFiles,
    UnknownOutcomeError,
)

DEFAULT_UMASK = 0o022

_SURELY_NOT_DONE = frozenset(
    {
        errno.EPERM,
        errno.EOPNOTSUPP,
        errno.ENOSYS,
        errno.EMLINK,
        errno.EACCES,
        errno.EDQUOT,
        errno.EINVAL,
        errno.ENAMETOOLONG,
        errno.ENOENT,
        errno.ENOSPC,
        errno.ENOTDIR,
        errno.EROFS,
    }
)
"""Answers of link(2), rename(2) and renameat2(2) that mean refusal; after any other (EIO, ESTALE, ...) nobody knows."""

_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR})
_POLL_S = 0.02

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_STATX_NBYTES = 256
_MASK_OFFSET, _BIRTH_OFFSET = 0, 80
"""statx(2), `struct statx` of linux/stat.h: `stx_mask`, and `stx_btime`: seconds, nanoseconds."""

_LOW_63_BITS = (1 << 63) - 1
"""What the worker's messages hold of a number. Overlays and network file systems give inodes that use all 64 bits."""

_KINDS = {stat.S_IFREG: OBJECT, stat.S_IFDIR: PREFIX, stat.S_IFLNK: LINK}

_logger = logging.getLogger("asyncckpt.storage")


class LocalStore(Store):
    """A `Store` of files. Errors as of `Store`, with the calls' own errnos; all of them name the path.

    Args:
        files: The seam to the system calls; None: as the kernel has them.
        umask: Of the modes 0666 and 0777 of what is made, whatever this process's umask is.
    """

    def __init__(self, files: Files | None = None, *, umask: int = DEFAULT_UMASK) -> None:
        self.files = files or Files()
        self._mode = MODE_FILE & ~umask
        self._directory_mode = MODE_DIRECTORY & ~umask

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Create the file exclusively, write, flush and close it. It is seen while it is written.

        To replace one, that is done under a temporary name, which is then renamed onto the other.
        """
        if replace:
            self._put_over(name, data, durable=durable)
            return
        try:
            write_new_file(self.files, name, data, mode=self._mode, fsync=durable)
        except FileExistsError:
            raise
        except BaseException:
            self.remove_quietly(name)
            raise

    def _put_over(self, name: str, data: memoryview | bytes, *, durable: bool) -> None:
        temporary = replacing_name(name)
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(temporary)  # of a worker that died here
        self.put(temporary, data, durable=durable)
        try:
            reach("small file: replacing")
            self.files.rename(temporary, name)
            reach("small file: replaced")
        except BaseException:
            with contextlib.suppress(OSError):
                self.files.unlink(temporary)
            raise

    def shard_writer(
        self, path: str, image: Image, offset: int, nbytes: int, *, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """As of `Store`: a file, by O_DIRECT where that is taken."""
        return FileShardWriter(
            path, image, offset, nbytes, aligned=aligned, mode=self._mode, fsync=fsync, files=self.files
        )

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Write the file under its temporary name, flush it and the directory, and link it to its name."""
        self._write_temporary(temporary, data, durable=durable)
        try:
            put_new_name(self.files, temporary, name)
        except OSError as error:
            self._settle(error, name, data, temporary)
        else:
            self.remove_quietly(temporary)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Write the file under its temporary name, flush it and the directory, and rename it onto the other."""
        self._write_temporary(temporary, data, durable=durable)
        try:
            if self._version_of(name) != version:
                raise FileExistsError(errno.EEXIST, "it was replaced meanwhile", name)
            # IMPORTANT: one rename. Without the name for an instant, a crash would leave nothing there at all.
            self.files.rename(temporary, name)
        except OSError as error:
            self._settle(error, name, data, temporary)

    def _write_temporary(self, temporary: str, data: bytes, *, durable: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(temporary)  # of an earlier try that died
        try:
            write_new_file(self.files, temporary, data, mode=self._mode, fsync=durable)
            reach("put: written")
            if durable:
                fsync_directory(self.files, os.path.dirname(temporary))
            reach("put: flushed")
        except BaseException:
            self.remove_quietly(temporary)
            raise

    def _settle(self, error: OSError, name: str, data: bytes, temporary: str) -> None:
        """Return if the put that failed has succeeded all the same; else raise what is known of it."""
        try:
            is_there = read_small_file(self.files, name, len(data)) == data
        except OSError:
            is_there = False
        if is_there:
            self.remove_quietly(temporary)
            return
        if error.errno == errno.EEXIST or error.errno in _SURELY_NOT_DONE:
            self.remove_quietly(temporary)
            raise error
        raise UnknownOutcomeError(error.errno, error.strerror, name) from error

    def _version_of(self, name: str) -> str | None:
        try:
            return self.stat(name).version
        except FileNotFoundError:
            return None

    def read(self, name: str, offset: int, nbytes: int) -> bytes:
        """Open, read and close."""
        with opened(self.files, name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
            if not stat.S_ISREG(self.files.fstat(fd).st_mode):
                raise OSError(errno.EINVAL, "not a regular file", name)
            found = bytearray()
            while len(found) < nbytes:
                buffer = bytearray(nbytes - len(found))
                count = self.files.preadv(fd, [buffer], offset + len(found))
                if count <= 0:
                    break
                found += buffer[:count]
            return bytes(found)

    def read_whole(self, name: str, max_nbytes: int) -> bytes:
        """As of `Store`, by one opening of the file."""
        return read_small_file(self.files, name, max_nbytes)

    def stat(self, name: str) -> Entry:
        """As of `Store`; a link is not followed."""
        return _entry(name, self.files.lstat(name))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """As of `Store`; the prefix itself may be a link. What goes away meanwhile is left out."""
        for name in self.files.listdir(prefix):
            with contextlib.suppress(FileNotFoundError):
                yield _entry(name, self.files.lstat(os.path.join(prefix, name)))

    def names(self, prefix: str) -> list[str]:
        """As of `Store`, without a look at each."""
        return self.files.listdir(prefix)

    def remove(self, name: str) -> None:
        """Unlink."""
        self.files.unlink(name)

    def sync(self, prefix: str) -> None:
        """fsync of the directory."""
        fsync_directory(self.files, prefix)

    def make_prefix(self, prefix: str, *, durable: bool = True) -> list[str]:
        """Make missing directories, outermost first, each with its mode and its name flushed."""
        made: list[str] = []
        try:
            self._make(prefix, made, durable=durable)
        except BaseException:
            with contextlib.suppress(OSError):
                for directory in reversed(made):
                    self.files.rmdir(directory)
            raise
        return made

    def _make(self, prefix: str, made: list[str], *, durable: bool) -> None:
        missing: list[str] = []
        current = prefix
        while not self._is_directory(current):
            missing.append(current)
            current = os.path.dirname(current)
        for directory in reversed(missing):
            with contextlib.suppress(FileExistsError):  # by another rank at the same time
                self.files.mkdir(directory, self._directory_mode)
                made.append(directory)
                with opened(self.files, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                    apply_mode(self.files, fd, self._directory_mode)
            if not self._is_directory(directory):
                raise FileExistsError(errno.EEXIST, "a dangling symbolic link is in the way", directory)
            if durable:
                fsync_directory(self.files, os.path.dirname(directory))

    def _is_directory(self, path: str) -> bool:
        """Whether `path` is a directory; False when it is absent, an error when it is something else."""
        try:
            found = self.files.stat(path)
        except FileNotFoundError:
            if os.path.dirname(path) == path:
                raise
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "a file is where a directory is wanted", path)
        return True

    def remove_prefix(self, prefix: str) -> None:
        """Remove a directory that is empty."""
        self.files.rmdir(prefix)

    def move(self, source: str, target: str, *, replace: bool = False) -> None:
        """Rename. Where a rename cannot be told not to replace, an empty directory of this instant may be."""
        if replace:
            self.files.rename(source, target)
            return
        try:
            self.files.rename_noreplace(source, target)
        except OSError as error:
            if error.errno not in _NO_SUCH_RENAME:
                raise
            with contextlib.suppress(FileNotFoundError):
                self.files.lstat(target)
                raise FileExistsError(errno.EEXIST, "something has the name", target) from error
            self.files.rename(source, target)

    def identity(self, prefix: str) -> DirectoryIdentity:
        """Inode and birth: file systems give an inode's number to the next directory, but not with its birth.

        Device numbers are left out, since some change when a file system is mounted again.
        """
        return DirectoryIdentity(self.files.stat(prefix).st_ino & _LOW_63_BITS, birth_ns(prefix) & _LOW_63_BITS)

    def as_files(self) -> Files:
        """Return the calls themselves."""
        return self.files

    def is_own(self, prefix: str) -> bool:
        """Whether the directory belongs to this process's user."""
        return self.files.lstat(prefix).st_uid == os.geteuid()

    def resolve(self, name: str) -> str:
        """As of `Store`, as far as the file system tells."""
        return os.path.realpath(name)

    @contextlib.contextmanager
    def lock(self, prefix: str, timeout_s: float) -> Iterator[None]:
        """As of `Store`. OSError also where the file system has no locks."""
        name = os.path.join(prefix, LOCK_NAME)
        fd = self._locked(name, time.monotonic() + timeout_s)
        try:
            reach("lock: taken")
            yield
        finally:
            try:
                if self.files.fstat(fd).st_size == 0:  # else it is not ours: we never write into it
                    self.files.unlink(name)
                    reach("lock: removed")
            except OSError as error:
                _logger.warning("cannot remove %s: %s", name, error)
            with contextlib.suppress(OSError):  # nothing was written through it
                self.files.close(fd)

    def _locked(self, name: str, deadline: float) -> int:
        while True:
            fd = self.files.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, self._mode)
            kept = False
            try:
                if not stat.S_ISREG(self.files.fstat(fd).st_mode):
                    raise OSError(errno.EINVAL, "not a regular file", name)
                kept = self._try_lock(fd, name)
            finally:
                if not kept:
                    with contextlib.suppress(OSError):
                        self.files.close(fd)
            if kept:
                return fd
            if time.monotonic() >= deadline:
                raise OSError(errno.EWOULDBLOCK, "another save is replacing this checkpoint", name)
            time.sleep(_POLL_S)

    def _try_lock(self, fd: int, name: str) -> bool:
        """Return whether the lock was taken, on the file that has the name."""
        try:
            self.files.flock(fd)
        except OSError as error:
            if error.errno in _BUSY:
                return False
            raise
        try:
            there = self.files.lstat(name)
        except FileNotFoundError:
            return False
        # IMPORTANT: the holder before us removed the file; whoever made a new one holds another lock.
        return os.path.samestat(there, self.files.fstat(fd))


def _entry(name: str, found: os.stat_result) -> Entry:
    return Entry(
        name=name,
        kind=_KINDS.get(stat.S_IFMT(found.st_mode), OTHER),
        nbytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        # Without the inode: file systems in user space may number the same file anew at each look. Who replaces holds
        # the lock, so that two of one length within one tick of the clock are not mixed up.
        version=f"{found.st_mtime_ns}.{found.st_size}",
    )


def store_over(files: Files, *, umask: int = DEFAULT_UMASK) -> Store:
    """Return the store whose objects `files` reads: files of this machine, or objects; `umask`: as of `LocalStore`."""
    return files.store if isinstance(files, StoreFiles) else LocalStore(files, umask=umask)


def birth_ns(path: str) -> int:
    """Return when a file was made, in nanoseconds since 1970; 0: nobody knows."""
    if not hasattr(_libc, "statx"):  # glibc before 2.28
        return 0
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        return 0
    (mask,) = struct.unpack_from("=I", found, _MASK_OFFSET)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BIRTH_OFFSET)
    return max(0, int(seconds) * 1_000_000_000 + int(nanoseconds)) if mask & _STATX_BTIME else 0

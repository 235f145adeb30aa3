"""`LocalStore`: a `Store` of files. All system calls go through `Files`, which fault tests replace.

A prefix is a directory, an object is a regular file. Symbolic links below a prefix are listed, but not followed.

The lock is an flock(2) on a file in the directory, so it is freed when its holder dies, also on other nodes. The holder
removes the file before it unlocks it. A process that then gets the lock of the removed file opens a new one.
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
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES
from asyncckpt.format.names import LOCK_NAME, SaveId, replacing_name, temporary_manifest_name
from asyncckpt.storage.files import (
    MODE_DIRECTORY,
    MODE_FILE,
    Files,
    apply_mode,
    await_seen,
    fsync_directory,
    fsync_file,
    is_beginning,
    named,
    opened,
    put_new_name,
    read_small_file,
    write_all,
    write_new_file,
)
from asyncckpt.storage.mounts.abilities import BY_CREATION, BY_RENAME, NATIVE, Abilities, refuse_unable
from asyncckpt.storage.mounts.probe import abilities_at, forget
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
"""Errors of link(2), rename(2) and renameat2(2) after which nothing has changed. After any other (EIO, ESTALE, ...) the
outcome is unknown."""

_NO_SUCH_RENAME = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
_BUSY = frozenset({errno.EWOULDBLOCK, errno.EACCES, errno.EINTR})
_POLL_S = 0.02

_AT_FDCWD = -100
_STATX_BTIME = 0x800
_STATX_NBYTES = 256
_MASK_OFFSET, _BIRTH_OFFSET = 0, 80
"""statx(2), `struct statx` of linux/stat.h: `stx_mask`, and `stx_btime`: seconds, nanoseconds."""

_LOW_63_BITS = (1 << 63) - 1
"""Range of integers in the worker's messages. Overlays and network file systems have inode numbers of 64 bits."""

_KINDS = {stat.S_IFREG: OBJECT, stat.S_IFDIR: PREFIX, stat.S_IFLNK: LINK}

_logger = logging.getLogger("asyncckpt.storage")


class _NotCreatedError(OSError):
    """A name that was created exclusively could not be filled, and is free again."""

    def __init__(self, reason: OSError) -> None:
        super().__init__(reason.errno, reason.strerror, reason.filename)
        self.reason = reason


class LocalStore(Store):
    """A `Store` of files. Its errors are those of `Store`, with the errno of the call and the path.

    Args:
        files: The `Files` to use; None: a new `Files`.
        umask: Umask for new files and directories, regardless of this process's umask.
    """

    def __init__(self, files: Files | None = None, *, umask: int = DEFAULT_UMASK) -> None:
        self.files = files or Files()
        self._mode = MODE_FILE & ~umask
        self._directory_mode = MODE_DIRECTORY & ~umask

    def put(self, name: str, data: memoryview | bytes, *, durable: bool = True, replace: bool = False) -> None:
        """Implement `Store.put`: create the file exclusively, write, flush and close it.

        Others can see the file while it is written. With `replace`, it is written under a temporary name and renamed.
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
            self.files.unlink(temporary)  # left by a worker that died here
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
        self, path: str, image: Image, offset: int, nbytes: int, *, block_nbytes: int, aligned: bool, fsync: bool
    ) -> ShardWriter:
        """Implement `Store.shard_writer`: return a `FileShardWriter`, which uses O_DIRECT if possible.

        O_DIRECT needs a mount on which the last page can be truncated.
        """
        truncates = True
        with contextlib.suppress(OSError):  # then it cannot be created either
            truncates = abilities_at(path, self.files).truncates
        return FileShardWriter(
            path,
            image,
            offset,
            nbytes,
            block_nbytes=block_nbytes,
            aligned=aligned,
            truncates=truncates,
            mode=self._mode,
            fsync=fsync,
            files=self.files,
        )

    def link_version(self, name: str) -> str:
        """Implement `Store.link_version`, with inode number and time of birth: a file that was replaced may have the
        same time and length. Where a file has another inode number in each stat, nothing is linked.
        """
        return self._link_version(name, self.files.lstat(name))

    @staticmethod
    def _link_version(name: str, found: os.stat_result) -> str:
        return f"{_entry(name, found).version}.{found.st_ino}.{birth_ns(name)}"

    def link(self, source: str, target: str, version: str) -> None:
        """Implement `Store.link`: make a hard link, if the file has the permission bits that new files get."""
        before = self.files.lstat(source)
        if not stat.S_ISREG(before.st_mode) or self._link_version(source, before) != version:
            raise OSError(errno.ESTALE, "it has changed since it was written", source)
        if stat.S_IMODE(before.st_mode) & 0o777 != self._mode:
            raise OSError(errno.EPERM, "it has other permission bits than new files get", source)
        try:
            self.files.link(source, target)
        except OSError:
            # On network file systems, a link may have been made although the call fails.
            if not self._is_same_file(target, before):
                raise
        if not self._is_same_file(target, before) or self.link_version(target) != version:
            self.remove_quietly(target)
            raise OSError(errno.ESTALE, "it was replaced while it was linked", source)

    def _is_same_file(self, name: str, found: os.stat_result) -> bool:
        try:
            return os.path.samestat(self.files.lstat(name), found)
        except OSError:
            return False

    def put_if_absent(self, name: str, data: bytes, *, temporary: str, durable: bool = True) -> None:
        """Implement `Store.put_if_absent`: write and flush a temporary file, flush the directory, make a link.

        On a mount that cannot do that, the name is created exclusively: see `_create`.
        """
        found = abilities_at(temporary, self.files)
        self._write_temporary(temporary, data, found, durable=durable)
        try:
            if found.publishes_by == BY_CREATION:
                self._create(name, data, durable=durable)
            elif found.publishes_by == BY_RENAME:
                self.files.rename_noreplace(temporary, name)
            else:
                put_new_name(self.files, temporary, name)
        except _NotCreatedError as error:
            self.remove_quietly(temporary)
            raise error.reason from error
        except UnknownOutcomeError:
            raise
        except OSError as error:
            forget(found)  # another file system may have been mounted there since
            self._settle(error, name, data, temporary)
        else:
            self.remove_quietly(temporary)

    def _create(self, name: str, data: bytes, *, durable: bool) -> None:
        """Create a name exclusively, and fill it. Until it is whole, the temporary file says what it is to be.

        Raises:
            FileExistsError: The name is taken.
            _NotCreatedError: It failed, and the name is free again.
            UnknownOutcomeError: It failed, and what was created resists removal.
        """
        fd = -1
        try:
            try:
                fd = self.files.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, self._mode)
                reach("put: created")
                apply_mode(self.files, fd, self._mode)
                write_all(self.files, fd, memoryview(data), 0, name)
                if durable:
                    fsync_file(self.files, fd, name)
            except BaseException:
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        self.files.close(fd)
                raise
            self.files.close(fd)
            reach("put: filled")
            self._check_content(name, data)
            if durable:
                # IMPORTANT: before the temporary file goes, which shows that a part of this one is no manifest.
                fsync_directory(self.files, os.path.dirname(name))
        except FileExistsError:
            raise
        except BaseException as error:
            self._undo_creation(name, data, error)
            raise

    def _undo_creation(self, name: str, data: bytes, error: BaseException) -> None:
        try:
            if not is_beginning(read_small_file(self.files, name, MAX_MANIFEST_NBYTES), data):
                raise FileExistsError(errno.EEXIST, "another machine has created it meanwhile", name) from error
            self.files.unlink(name)
        except FileExistsError:
            raise
        except FileNotFoundError:
            pass
        except OSError as resists:
            unknown = UnknownOutcomeError(resists.errno, f"{error}; it cannot be removed: {resists}", name)
            unknown.shows_itself = False  # what reads as whole here may be known to this machine's cache alone
            raise unknown from error
        if isinstance(error, OSError):
            raise _NotCreatedError(named(error, name, "publishing it")) from error

    def _check_content(self, name: str, data: bytes) -> None:
        """Prove that a file that was closed holds `data`.

        Raises:
            OSError: It does not, or cannot be read.
        """
        if await_seen(lambda: read_small_file(self.files, name, len(data)), lambda found: found == data) != data:
            raise OSError(errno.EIO, "it holds other bytes than were written", name)

    def publishes_by_creation(self, prefix: str, save_id: SaveId) -> bool:
        """Implement `Store`: the mount decides."""
        name = os.path.join(prefix, temporary_manifest_name(save_id))
        return abilities_at(name, self.files).publishes_by == BY_CREATION

    def refuse_unable(self, prefix: str, save_id: SaveId, *, fsync: bool, overwrite: bool) -> None:
        """Implement `Store`: the mount decides."""
        found = abilities_at(os.path.join(prefix, temporary_manifest_name(save_id)), self.files)
        refuse_unable(prefix, found, fsync=fsync, overwrite=overwrite)

    def replace_if(self, name: str, data: bytes, version: str, *, temporary: str, durable: bool = True) -> None:
        """Implement `Store.replace_if`: write and flush a temporary file, flush the directory, rename."""
        self._write_temporary(temporary, data, abilities_at(temporary, self.files), durable=durable)
        try:
            if self._version_of(name) != version:
                raise FileExistsError(errno.EEXIST, "it was replaced meanwhile", name)
            # IMPORTANT: one rename. If the old file were removed first, a crash would leave no file of this name.
            self.files.rename(temporary, name)
        except OSError as error:
            self._settle(error, name, data, temporary)

    def _write_temporary(self, temporary: str, data: bytes, mount: Abilities, *, durable: bool) -> None:
        with contextlib.suppress(FileNotFoundError):
            self.files.unlink(temporary)  # left by an earlier attempt that died
        try:
            write_new_file(self.files, temporary, data, mode=self._mode, fsync=durable)
            reach("put: written")
            if mount is not NATIVE:
                self._check_content(temporary, data)
            if durable:
                fsync_directory(self.files, os.path.dirname(temporary))
            reach("put: flushed")
        except BaseException:
            self.remove_quietly(temporary)
            raise

    def _settle(self, error: OSError, name: str, data: bytes, temporary: str) -> None:
        """Return if the failed call has taken effect all the same; else raise the error that fits.

        Raises:
            UnknownOutcomeError: Whether it has taken effect is unknown.
            OSError: It has not.
        """
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
        """Implement `Store.read`: open, read and close the file."""
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
        """Implement `Store.read_whole`; open the file only once."""
        return read_small_file(self.files, name, max_nbytes)

    def stat(self, name: str) -> Entry:
        """Implement `Store.stat`; do not follow a symbolic link."""
        return _entry(name, self.files.lstat(name))

    def entries(self, prefix: str) -> Iterator[Entry]:
        """Implement `Store.entries`. The prefix may be a symbolic link. Files removed meanwhile are left out."""
        for name in self.files.listdir(prefix):
            with contextlib.suppress(FileNotFoundError):
                yield _entry(name, self.files.lstat(os.path.join(prefix, name)))

    def names(self, prefix: str) -> list[str]:
        """Implement `Store.names`, without a stat of each file."""
        return self.files.listdir(prefix)

    def remove(self, name: str) -> None:
        """Implement `Store.remove`: unlink the file."""
        self.files.unlink(name)

    def sync(self, prefix: str) -> None:
        """Implement `Store.sync`: fsync the directory."""
        fsync_directory(self.files, prefix)

    def make_prefix(self, prefix: str, *, durable: bool = True) -> list[str]:
        """Implement `Store.make_prefix`: make missing directories, outermost first, and flush each name."""
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
            try:
                self.files.mkdir(directory, self._directory_mode)
            except FileExistsError:  # made by another rank at the same time
                if not self._is_directory(directory):
                    raise FileExistsError(errno.EEXIST, "a broken symbolic link has this name", directory) from None
            else:
                made.append(directory)
                with opened(self.files, directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW) as fd:
                    apply_mode(self.files, fd, self._directory_mode)
            if durable:
                fsync_directory(self.files, os.path.dirname(directory))

    def _is_directory(self, path: str) -> bool:
        """Return whether `path` is a directory. False: it does not exist. Raises if it is something else."""
        try:
            found = self.files.stat(path)
        except FileNotFoundError:
            if os.path.dirname(path) == path:
                raise
            return False
        if not stat.S_ISDIR(found.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, "it is a file, not a directory", path)
        return True

    def remove_prefix(self, prefix: str) -> None:
        """Implement `Store.remove_prefix`: remove an empty directory."""
        self.files.rmdir(prefix)

    def move(self, source: str, target: str, *, replace: bool = False) -> None:
        """Implement `Store.move`: rename.

        On a file system that cannot rename without replacing, a directory `target` that is made at the same moment and
        empty may be replaced.
        """
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
                raise FileExistsError(errno.EEXIST, "the name exists", target) from error
            self.files.rename(source, target)

    def identity(self, prefix: str) -> DirectoryIdentity:
        """Return inode number and time of birth. A later directory may get the same number, with another birth.

        The device number is left out, since it may change when the file system is mounted again.
        """
        return DirectoryIdentity(self.files.stat(prefix).st_ino & _LOW_63_BITS, birth_ns(prefix) & _LOW_63_BITS)

    def as_files(self) -> Files:
        """Return the `Files` of this store."""
        return self.files

    def is_own(self, prefix: str) -> bool:
        """Whether the directory belongs to this process's user."""
        return self.files.lstat(prefix).st_uid == os.geteuid()

    def resolve(self, name: str) -> str:
        """Implement `Store.resolve`; parts of the path that do not exist stay as they are."""
        return os.path.realpath(name)

    @contextlib.contextmanager
    def lock(self, prefix: str, timeout_s: float) -> Iterator[None]:
        """Implement `Store.lock`. Raises OSError also if the file system has no locks."""
        name = os.path.join(prefix, LOCK_NAME)
        fd = self._locked(name, time.monotonic() + timeout_s)
        try:
            reach("lock: taken")
            yield
        finally:
            try:
                if self.files.fstat(fd).st_size == 0:  # else it is the file of another program: a lock file is empty
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
        """Take the lock, and return whether that succeeded and the file still has its name."""
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
        # IMPORTANT: the earlier holder may have removed the file. A process that made a new one has another lock.
        return os.path.samestat(there, self.files.fstat(fd))


def _entry(name: str, found: os.stat_result) -> Entry:
    return Entry(
        name=name,
        kind=_KINDS.get(stat.S_IFMT(found.st_mode), OTHER),
        nbytes=found.st_size,
        mtime_ns=found.st_mtime_ns,
        # Without the inode: in file systems in user space, the same file may have another number in each stat. Writers
        # that replace a file hold the lock, so two versions with the same length and time are not confused.
        version=f"{found.st_mtime_ns}.{found.st_size}",
    )


def store_over(files: Files, *, umask: int = DEFAULT_UMASK) -> Store:
    """Return the store that `files` reads from: that of a `StoreFiles`, or a `LocalStore` with this `umask`."""
    return files.store if isinstance(files, StoreFiles) else LocalStore(files, umask=umask)


def birth_ns(path: str) -> int:
    """Return the time of birth of a file in nanoseconds since 1970; 0: it is unknown."""
    if not hasattr(_libc, "statx"):  # glibc before 2.28
        return 0
    found = ctypes.create_string_buffer(_STATX_NBYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), 0, _STATX_BTIME, found):
        return 0
    (mask,) = struct.unpack_from("=I", found, _MASK_OFFSET)
    seconds, nanoseconds = struct.unpack_from("=qI", found, _BIRTH_OFFSET)
    return max(0, int(seconds) * 1_000_000_000 + int(nanoseconds)) if mask & _STATX_BTIME else 0

"""The one seam to the file system: every file call of storage, loading and worker goes through a `Files`.

Its methods are thin: they add O_CLOEXEC, and reach what Python's `os` lacks. Tests put a subclass in its place that
fails, delays or counts calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
from collections.abc import Iterator, Sequence

from asyncckpt.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.libc import libc as _libc
from asyncckpt.storage.bringing import bring
from asyncckpt.storage.gathering import gather_from_file

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NOT_CHANGEABLE = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
MODE_FILE = 0o666
MODE_DIRECTORY = 0o777


class Files:
    """File calls as the kernel has them. Every method raises OSError; all are safe to call from several threads."""

    def open(self, path: str, flags: int, mode: int = MODE_FILE) -> int:
        """Open `path`, close-on-exec, and return the fd."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Close `fd`; on Linux it is gone even when this raises."""
        os.close(fd)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at `offset`; may write less than asked."""
        return os.pwrite(fd, buffer, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` into `buffers`; may read less than asked."""
        return os.preadv(fd, buffers, offset, flags)

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether a range, whole pages but for its end, is in the page cache.

        By mincore(2), because a RWF_NOWAIT read that misses starts read-ahead. The kernel says yes to all ranges of a
        file that the caller could not write.
        """
        address = _libc.mmap(None, nbytes, mmap.PROT_READ, mmap.MAP_SHARED, fd, offset)
        if address is None or address == _MAP_FAILED:
            return False
        pages = ctypes.create_string_buffer(-(-nbytes // mmap.PAGESIZE))
        failed = _libc.mincore(address, nbytes, pages)
        _libc.munmap(address, nbytes)
        return not failed and pages.raw.count(b"\x01") == len(pages)

    def address(self, fd: int) -> int | None:
        """Return where the bytes of an open file lie in this process's memory; None where they do not."""
        return None

    def gather(self, fd: int, target: int, offset: int, nbytes: int, every: int, times: int, apart: int = 0) -> int:
        """Copy cached ranges to address `target`, as `gathering.gather_from_file`; says how many. Raises nothing."""
        return gather_from_file(fd, target, offset, nbytes, every, times, apart)

    def bring(self, fd: int, offset: int, nbytes: int) -> bool:
        """Have a range read into the page cache in large pages, as `bringing.bring`. Raises nothing."""
        return bring(fd, offset, nbytes)

    def advise_random(self, fd: int) -> None:
        """Switch the kernel's read-ahead off for this descriptor."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
        """Have a range read into the page cache, in pieces as large as the device takes them."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def advise_done(self, fd: int, offset: int, nbytes: int) -> None:
        """Say that what lies at `address` of a range is not looked at any more. There is none of a file on disk."""

    def forget(self, fd: int) -> None:
        """Drop what the page cache has of an open file and is not dirty: what is read next comes from storage."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def fsync(self, fd: int) -> None:
        """Flush data and metadata of `fd`. IMPORTANT: after an error the file must be given up, not retried."""
        os.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, nbytes)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Reserve room from 0 to `nbytes`, by the system call: glibc's posix_fallocate writes zeros when it must."""
        while _libc.fallocate(fd, 0, 0, nbytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def set_direct(self, fd: int, direct: bool) -> None:
        """Switch O_DIRECT of an open fd. EINVAL: the file system has none."""
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT if direct else flags & ~os.O_DIRECT)

    def fchmod(self, fd: int, mode: int) -> None:
        """Set the mode of an open file."""
        os.fchmod(fd, mode)

    def mkdir(self, path: str, mode: int = MODE_DIRECTORY) -> None:
        """Make one directory."""
        os.mkdir(path, mode)

    def rmdir(self, path: str) -> None:
        """Remove one directory, if it is empty."""
        os.rmdir(path)

    def link(self, source: str, target: str) -> None:
        """Hard-link; EEXIST when `target` is there."""
        os.link(source, target, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename; EEXIST when `target` is there, EINVAL where the file system cannot promise that."""
        old, new = os.fsencode(source), os.fsencode(target)
        if _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), source, None, target)

    def rename(self, source: str, target: str) -> None:
        """Rename; what is called `target` is replaced in one step."""
        os.rename(source, target)

    def flock(self, fd: int) -> None:
        """Lock `fd` for this holder alone, as long as it is open; EWOULDBLOCK when another holds it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        """Follow links and stat."""
        return os.stat(path)

    def lstat(self, path: str) -> os.stat_result:
        """Stat without following a link at the end."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Stat an open file."""
        return os.fstat(fd)

    def statvfs(self, path: str) -> os.statvfs_result:
        """Return sizes and free room of the file system that holds `path`."""
        return os.statvfs(path)


@contextlib.contextmanager
def opened(files: Files, path: str, flags: int, mode: int = MODE_FILE) -> Iterator[int]:
    """Open for the time of a `with` block. An error at close counts unless the block already raised one.

    Raises:
        OSError: From open or close.
    """
    fd = files.open(path, flags, mode)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    files.close(fd)


def named(error: OSError, path: str, what: str = "") -> OSError:
    """Return `error` with the file, and `what` was being done, in it; its class follows its errno."""
    code = error.errno or errno.EIO
    text = error.strerror or str(error)
    return OSError(code, f"{what}: {text}" if what else text, path)


def apply_mode(files: Files, fd: int, mode: int) -> None:
    """Give an open file the permission bits `mode`, whatever this process's umask left; special bits stay.

    File systems that keep no modes are left alone.

    Raises:
        OSError: From fstat or fchmod.
    """
    found = stat.S_IMODE(files.fstat(fd).st_mode)
    if found & 0o777 == mode:
        return
    try:
        files.fchmod(fd, (found & ~0o777) | mode)
    except OSError as error:
        if error.errno not in _NOT_CHANGEABLE:
            raise


def write_all(files: Files, fd: int, data: memoryview, offset: int, path: str) -> None:
    """Write all of `data` at `offset`, over as many short writes as it takes.

    Raises:
        OSError: Names `path` and the byte range.
    """
    done = 0
    while done < len(data):
        try:
            written = files.pwrite(fd, data[done:], offset + done)
        except OSError as error:
            raise named(error, path, f"writing bytes {offset + done} to {offset + len(data)}") from error
        if written <= 0:
            raise OSError(errno.EIO, f"the file system took none of the bytes from {offset + done}", path)
        done += written


def write_new_file(files: Files, path: str, data: bytes, *, mode: int, fsync: bool) -> None:
    """Create `path`, which must not exist, with `data`; flushed, closed, errors of both counted.

    Raises:
        OSError: Names `path`; the file may be left behind, incomplete.
    """
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode) as fd:
        apply_mode(files, fd, mode)
        write_all(files, fd, memoryview(data), 0, path)
        if fsync:
            fsync_file(files, fd, path)


def fsync_file(files: Files, fd: int, path: str) -> None:
    """Flush `fd`, which wrote `path`.

    Raises:
        OSError: Names `path`. IMPORTANT: the kernel reports a lost page once, so a second fsync would lie.
    """
    try:
        files.fsync(fd)
    except OSError as error:
        raise named(error, path, "fsync") from error


def fsync_directory(files: Files, path: str) -> None:
    """Flush the names in a directory. A file system that has no such thing (EINVAL) is taken at its word.

    Raises:
        OSError: Names `path`.
    """
    with opened(files, path, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            files.fsync(fd)
        except OSError as error:
            if error.errno not in _UNSUPPORTED:
                raise named(error, path, "fsync of the directory") from error


def read_small_file(files: Files, path: str, max_nbytes: int) -> bytes:
    """Return the whole of a regular file.

    Raises:
        OSError: ELOOP for a symbolic link, EFBIG above `max_nbytes`, EINVAL for what is no regular file, and others.
    """
    with opened(files, path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK) as fd:
        found = files.fstat(fd)
        if not stat.S_ISREG(found.st_mode):
            raise OSError(errno.EINVAL, "not a regular file", path)
        if found.st_size > max_nbytes:
            raise OSError(errno.EFBIG, f"{found.st_size} bytes, at most {max_nbytes} are expected", path)
        data = bytearray(found.st_size)
        done = 0
        while done < len(data):
            try:
                count = files.preadv(fd, [memoryview(data)[done:]], done)
            except OSError as error:
                raise named(error, path, f"reading bytes {done} to {len(data)}") from error
            if count <= 0:
                break
            done += count
        return bytes(data[:done])

"""The one seam to the file system: every file call of storage, loading and worker goes through a `Files`.

Its methods are thin: they add O_CLOEXEC, and reach what Python's `os` lacks. Tests put a subclass in its place that
fails, delays or counts calls. At the end: what a file system refuses, as an error that says what to do.
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

from asyncckpt.basics.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.basics.libc import libc as _libc
from asyncckpt.errors import SaveFailedError

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

    def advise_random(self, fd: int) -> None:
        """Switch the kernel's read-ahead off for this descriptor."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def advise_needed(self, fd: int, offset: int, nbytes: int) -> None:
        """Have a range read into the page cache, in pieces as large as the device takes them."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

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


def write_new_file(files: Files, path: str, data: bytes | memoryview, *, mode: int, fsync: bool) -> None:
    """Create `path`, which must not exist, with `data`; flushed, closed, errors of both counted.

    Raises:
        OSError: Names `path`; the file may be left behind, incomplete.
    """
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode) as fd:
        apply_mode(files, fd, mode)
        write_all(files, fd, memoryview(data), 0, path)
        if fsync:
            fsync_file(files, fd, path)


NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Answers of link(2) on file systems that have none, or no more of them for this file."""


def put_new_name(files: Files, temporary: str, final: str) -> None:
    """Give a finished file its final name, if nothing has it; the temporary one may stay beside it.

    Raises:
        FileExistsError: The name is taken.
        OSError: A call failed.
    """
    try:
        files.link(temporary, final)
    except OSError as error:
        if error.errno not in NO_HARD_LINKS:
            raise
        files.rename_noreplace(temporary, final)


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


ADVICE = {
    "ENOSPC": "free space or inodes, or save to another file system",
    "EDQUOT": "the quota is used up: free space, or save to another file system",
    "EACCES": "give this user the right to write there, or save elsewhere",
    "EPERM": "give this user the right to write there, or save elsewhere",
    "EROFS": "the file system is read-only: save elsewhere, or mount it writable",
    "ENOTDIR": "a file is where a directory is wanted: save to another path",
    "EEXIST": "something else is in the way: save to another path",
    "ENAMETOOLONG": "choose a shorter path",
    "ELOOP": "symbolic links lead in a circle: choose another path",
    "EIO": "the storage failed: look at the kernel's log before you trust it again",
    "ESTALE": "the network file system lost the directory: check the mount",
    "EAGAIN": "another save to this path is being published: wait for its end",
    "ENOLCK": "overwriting needs file locks: save to another path, or mount the file system with them",
    "EMFILE": "raise the limit of open files of the process that writes (ulimit -n)",
    "ENFILE": "raise the machine's limit of open files (sysctl fs.file-max)",
    "EFBIG": "files may not get this large there (ulimit -f, or the file system): use more files, or save elsewhere",
}
_NOADVICE = "earlier checkpoints are untouched, and the next save tries anew"


def whose(step: int | None, rank: int | None) -> str:
    """Return how texts say which part of a save; `step` is None where only rank 0 knows it."""
    return f"rank {rank}" if step is None else f"step {step}, rank {rank}"


def save_failure(
    error: OSError, *, save_id: str | None, rank: int | None, step: int | None, path: str
) -> SaveFailedError:
    """Return `error` as the typed error of a save.

    Args:
        error: What the file system said; its filename and text go into the message.
        save_id, rank, step: Of the save; None when it was looking around before one.
        path: The checkpoint's directory.
    """
    code = errno.errorcode.get(error.errno or 0, "EIO")
    detail = str(error) or type(error).__name__
    what = f"save {save_id} ({whose(step, rank)}) to {path}" if save_id else f"looking beside {path}"
    return SaveFailedError(
        f"{what} failed: {detail}; nothing was published; {ADVICE.get(code, _NOADVICE)}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )

"""`Files`: all system calls on files of storage, loading and worker, so that tests can replace them.

A method makes one system call. It adds O_CLOEXEC, or makes a call that Python's `os` lacks. Tests use subclasses that
fail, delay or count calls. `save_failure` turns an error of a call into a `SaveFailedError` that says what to do.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import mmap
import os
import stat
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from asyncckpt.basics.libc import MAP_FAILED as _MAP_FAILED
from asyncckpt.basics.libc import libc as _libc
from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import SaveFailedError

T = TypeVar("T")

_AT_FDCWD = -100
_RENAME_NOREPLACE = 1
_STATFS_NBYTES = 256
"""More than `struct statfs` takes, whose first member is `f_type`."""

_UNSUPPORTED = frozenset({errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL})
_NOT_CHANGEABLE = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS})
MODE_FILE = 0o666
MODE_DIRECTORY = 0o777


class Files:
    """The system calls. Each method may raise OSError, and may be called from several threads."""

    def open(self, path: str, flags: int, mode: int = MODE_FILE) -> int:
        """Open `path` close-on-exec, and return the fd."""
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        """Close `fd`. On Linux it is closed even if this raises."""
        os.close(fd)

    def pwrite(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Write at `offset`; may write less than asked."""
        return os.pwrite(fd, buffer, offset)

    def preadv(self, fd: int, buffers: Sequence[memoryview | bytearray], offset: int, flags: int = 0) -> int:
        """Read at `offset` into `buffers`; may read less than asked."""
        return os.preadv(fd, buffers, offset, flags)

    def resident(self, fd: int, offset: int, nbytes: int) -> bool:
        """Whether a range of bytes, which begins at a page, is in the page cache.

        Uses mincore(2), because a RWF_NOWAIT read that misses starts read-ahead. For a file to which the caller may not
        write, the kernel always answers yes.
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
        """Ask the kernel to read a range into the page cache, in requests as large as the device allows."""
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def fsync(self, fd: int) -> None:
        """Flush data and metadata of `fd`. IMPORTANT: after an error give the file up; do not call it again."""
        os.fsync(fd)

    def ftruncate(self, fd: int, nbytes: int) -> None:
        """Set the length of a file."""
        os.ftruncate(fd, nbytes)

    def fallocate(self, fd: int, nbytes: int) -> None:
        """Reserve disk space from 0 to `nbytes`. Not by glibc's posix_fallocate, which may write zeros."""
        while _libc.fallocate(fd, 0, 0, nbytes):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def set_direct(self, fd: int, direct: bool) -> None:
        """Switch O_DIRECT of an open fd on or off. EINVAL: the file system does not support it."""
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
        """Make a hard link. EEXIST: `target` exists."""
        os.link(source, target, follow_symlinks=False)

    def rename_noreplace(self, source: str, target: str) -> None:
        """Rename unless `target` exists. EEXIST: it does. EINVAL: the file system does not support this."""
        old, new = os.fsencode(source), os.fsencode(target)
        if _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_NOREPLACE):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), source, None, target)

    def rename(self, source: str, target: str) -> None:
        """Rename. A file `target` is replaced in one step."""
        os.rename(source, target)

    def flock(self, fd: int) -> None:
        """Take an exclusive flock on `fd`, held until it is closed. EWOULDBLOCK: another descriptor has it."""
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def unlink(self, path: str) -> None:
        """Remove a file's name."""
        os.unlink(path)

    def listdir(self, path: str) -> list[str]:
        """Return the names in a directory, in no order."""
        return os.listdir(path)

    def stat(self, path: str) -> os.stat_result:
        """Stat; follow symbolic links."""
        return os.stat(path)

    def lstat(self, path: str) -> os.stat_result:
        """Stat; do not follow a symbolic link at the end of the path."""
        return os.lstat(path)

    def fstat(self, fd: int) -> os.stat_result:
        """Stat an open file."""
        return os.fstat(fd)

    def file_system_type(self, path: str) -> int:
        """Return the number of the type of the file system that holds `path`: `f_type` of statfs(2)."""
        found = ctypes.create_string_buffer(_STATFS_NBYTES)
        if _libc.statfs(os.fsencode(path), found):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), path)
        return ctypes.c_long.from_buffer(found).value & 0xFFFFFFFF

    def statvfs(self, path: str) -> os.statvfs_result:
        """Return sizes and free space of the file system that holds `path`."""
        return os.statvfs(path)


@contextlib.contextmanager
def opened(files: Files, path: str, flags: int, mode: int = MODE_FILE) -> Iterator[int]:
    """Open a file in a `with` block, and close it at the end. An error of close is raised unless the block raised one.

    Raises:
        OSError: From open, or from close; the latter names `path`.
    """
    fd = files.open(path, flags, mode)
    try:
        yield fd
    except BaseException:
        with contextlib.suppress(OSError):
            files.close(fd)
        raise
    try:
        files.close(fd)
    except OSError as error:
        raise named(error, path, "close") from error


def named(error: OSError, path: str, what: str = "") -> OSError:
    """Return an error with the errno of `error`, the file's path, and in its text what was being done (`what`)."""
    code = error.errno or errno.EIO
    text = error.strerror or str(error)
    return OSError(code, f"{what}: {text}" if what else text, path)


def apply_mode(files: Files, fd: int, mode: int) -> None:
    """Set the permission bits of an open file to `mode`, regardless of this process's umask. Special bits stay.

    Does nothing on file systems without permission bits.

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
    """Write all of `data` at `offset`, with as many calls as it takes.

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
            raise OSError(errno.EIO, f"the file system took none of the bytes from {offset + done} on", path)
        done += written


def write_new_file(files: Files, path: str, data: bytes | memoryview, *, mode: int, fsync: bool) -> None:
    """Create the file `path`, which must not exist, write `data`, flush it if `fsync`, and close it.

    Raises:
        OSError: Names `path`. The file may exist and be incomplete.
    """
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode) as fd:
        apply_mode(files, fd, mode)
        write_all(files, fd, memoryview(data), 0, path)
        if fsync:
            fsync_file(files, fd, path)


NO_HARD_LINKS = frozenset({errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK})
"""Errors of link(2) on file systems without hard links, or if a file has too many."""


def put_new_name(files: Files, temporary: str, final: str) -> None:
    """Give a complete file its final name, unless that exists. The temporary name may stay.

    Raises:
        FileExistsError: `final` exists.
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
        OSError: Names `path`. IMPORTANT: do not retry. The kernel reports a lost page once, so a second fsync would
            succeed although data are lost.
    """
    try:
        files.fsync(fd)
    except OSError as error:
        raise named(error, path, "fsync") from error


def fsync_directory(files: Files, path: str) -> None:
    """Flush the names in a directory. Does nothing if the file system does not support it (EINVAL and others).

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
    """Return the content of a regular file.

    Raises:
        OSError: ELOOP: a symbolic link. EFBIG: longer than `max_nbytes`. EINVAL: not a regular file. Or a call failed.
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


SEEN_WITHIN_S = 2.0
"""So long a file may show another length or content than it has, after it was closed. Chosen, not measured."""

_SEEN_POLL_S = 0.02


def await_seen(look: Callable[[], T], is_right: Callable[[T], bool]) -> T:
    """Return what `look` sees of a file that was closed, as soon as that is right, or after `SEEN_WITHIN_S`.

    Mounts of object stores may show what was written only when the file is closed, or a while later.

    Raises:
        OSError: From `look`.

    Blocks: at most `SEEN_WITHIN_S`.
    """
    deadline = time.monotonic() + SEEN_WITHIN_S
    while not is_right(found := look()) and time.monotonic() < deadline:
        time.sleep(_SEEN_POLL_S)
    return found


def is_beginning(found: bytes, whole: bytes) -> bool:
    """Whether a file that was to become `whole` holds no more than a part of it, and zeros; or all of it."""
    return len(found) <= len(whole) and whole.startswith(found.rstrip(b"\0"))


ADVICE = {
    "ENOSPC": "free space or inodes, or save to another file system",
    "EDQUOT": "the quota is used up: free space, or save to another file system",
    "EACCES": "give this user the right to write there, or save elsewhere",
    "EPERM": "give this user the right to write there, or save elsewhere",
    "EROFS": "the file system is read-only: save elsewhere, or mount it writable",
    "ENOTDIR": "a part of the path is a file, not a directory: save to another path",
    "EEXIST": "a file of this name exists: save to another path",
    "ENAMETOOLONG": "choose a shorter path",
    "ELOOP": "the path has a cycle of symbolic links: choose another path",
    "EIO": "the storage failed: look at the kernel's log before you use it again",
    "ESTALE": "the network file system lost the directory: check the mount",
    "EAGAIN": "another save to this path is being published: wait for its end",
    "ENOLCK": "overwriting needs file locks: save to another path, or mount the file system with locks",
    "EMFILE": "raise the limit of open files of the process that writes (ulimit -n)",
    "ENFILE": "raise the machine's limit of open files (sysctl fs.file-max)",
    "EFBIG": "files may not get this large there (ulimit -f, or the file system): use more files, or save elsewhere",
}
"""What to do about a failed save, by the name of the errno."""

_LIED = "the store, or a proxy before it, answers with other bytes than were put there: check both"

OBJECT_ADVICE = {"EIO": _LIED, "EFBIG": _LIED}
"""As `ADVICE`, for object stores, where it differs."""

COPY_UNKNOWN = "copy_unknown"
"""Code of a save whose object store may still be copying an object to the name of one of its shards.

IMPORTANT: nothing may be written under the names of such a save any more: the copy would replace it."""


def step_and_rank(step: int | None, rank: int | None) -> str:
    """Return the text for messages that names step and rank; `step`: None if only rank 0 knows it."""
    return f"rank {rank}" if step is None else f"step {step}, rank {rank}"


def copy_unknown(detail: str, *, save_id: str, rank: int, step: int | None, path: str) -> SaveFailedError:
    """Return the error of a save for which a copy in the object store may still be made; code `COPY_UNKNOWN`."""
    return SaveFailedError(
        f"save {save_id} ({step_and_rank(step, rank)}) to {path} failed: {detail}, so that the store may still be "
        "copying to the name of a shard; nothing was published; save again",
        code=COPY_UNKNOWN,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )


def save_failure(
    error: OSError, *, save_id: str | None, rank: int | None, step: int | None, path: str
) -> SaveFailedError:
    """Return the `SaveFailedError` for an error of a file call.

    Args:
        error: The error; its file name and text go into the message.
        save_id, rank, step: ID, rank and step of the save; None: the call was made before a save began.
        path: The checkpoint's directory.
    """
    code, detail, advice = _facts_of(error, path)
    what = f"save {save_id} ({step_and_rank(step, rank)}) to {path}" if save_id else f"the scan beside {path}"
    advice = advice or "earlier checkpoints are unchanged, and the next save tries again"
    return SaveFailedError(
        f"{what} failed: {detail}; nothing was published; {advice}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )


def conversion_failure(error: OSError, path: str) -> SaveFailedError:
    """Return the `SaveFailedError` for an error while a conversion or an export was written to `path`."""
    code, detail, advice = _facts_of(error, path)
    text = f"{path} was not written: {detail}; nothing of it is left" + (f"; {advice}" if advice else "")
    return SaveFailedError(text, code=code, path=path, detail=detail)


def _facts_of(error: OSError, path: str) -> tuple[str, str, str]:
    """Return the name of the errno, the text of the error, and what to do about it: "" if nothing special."""
    code = errno.errorcode.get(error.errno or 0, "EIO")
    advice = {**ADVICE, **OBJECT_ADVICE} if is_object_url(path) else ADVICE
    return code, str(error) or type(error).__name__, advice.get(code, "")

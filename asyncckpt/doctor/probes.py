"""What a file system can do, tried out: writing past the page cache, flushing, the calls by which a save commits."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import secrets
import time
from collections.abc import Callable, Iterator

from asyncckpt.doctor.findings import Finding, fail, ok, reason, warn
from asyncckpt.sizes import human
from asyncckpt.storage.files import Files, opened, write_all

CHUNK_NBYTES = 4 << 20
MAX_WRITE_NBYTES = 64 << 20
MAX_WRITE_S = 0.25
"""The probe of speed ends with whichever comes first. Chosen so that the whole command takes about a second."""

SLOW_FSYNC_S = 0.5
SKEW_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})

_WAYS = ("link", "renameat2")
NAMES = frozenset(
    {"direct", "small", "new", "old", "lock", "case", "clock", *(f"{w}-{n}" for w in _WAYS for n in "abc")}
)
"""All that the probes leave in their corner."""


def probes(corner: str, files: Files) -> Iterator[Finding]:
    """Yield the findings of what is tried in `corner`, an empty directory; its files are left to the caller."""
    yield _direct(corner, files)
    yield _flush(corner, files)
    yield _directory_flush(corner, files)
    yield _commit(corner, files)
    yield _lock(corner, files)
    yield _names(corner, files)
    yield _skew(corner, files)


def _direct(corner: str, files: Files) -> Finding:
    """Write whole pages past the page cache, read them back, and tell the speed."""
    path = os.path.join(corner, "direct")
    try:
        found = files.statvfs(corner)
        most = min(MAX_WRITE_NBYTES, found.f_bavail * found.f_frsize // 4)  # others save there too
        nbytes = max(mmap.PAGESIZE, min(CHUNK_NBYTES, most) // mmap.PAGESIZE * mmap.PAGESIZE)
        view = memoryview(mmap.mmap(-1, nbytes))  # whole pages, as O_DIRECT wants them
        view[:16] = secrets.token_bytes(16)
        view[-16:] = secrets.token_bytes(16)
        with opened(files, path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600) as fd:
            is_direct = _write_first(files, fd, view, path)
            done, seconds = _write_on(files, fd, view, path, most)
            same = _reads_back(files, fd, view)
    except OSError as error:
        return fail("writing", f"a file cannot be written: {reason(error)}", "choose another directory, or make room")
    if not same:
        return fail("writing", "what was read back is not what was written", "do not use this storage")
    speed = done / max(seconds, 1e-9)
    text = f"{human(speed)}/s by {'O_DIRECT' if is_direct else 'the page cache'}, flushed, in a probe of {human(done)}"
    facts = {"direct": is_direct, "bytes_per_s": round(speed), "nbytes": done}
    if not is_direct:
        advice = "nothing need be done; more memory and processor time is taken"
        return warn("writing", f"{text}: the file system has no O_DIRECT", advice, **facts)
    return ok("writing", text, **facts)


def _write_first(files: Files, fd: int, view: memoryview, path: str) -> bool:
    """Write the first chunk, and say whether that went past the page cache."""
    try:
        files.set_direct(fd, True)
        write_all(files, fd, view, 0, path)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
        files.set_direct(fd, False)
        write_all(files, fd, view, 0, path)
        return False
    return True


def _write_on(files: Files, fd: int, view: memoryview, path: str, most: int) -> tuple[int, float]:
    """Write on for a moment, and flush. Returns bytes, the first chunk's among them, and seconds for them."""
    began, done = time.monotonic(), 0
    while done == 0 or (done + len(view) <= most and time.monotonic() - began < MAX_WRITE_S):
        try:
            write_all(files, fd, view, done, path)
        except OSError as error:
            if done == 0 or error.errno not in _FULL:
                raise
            break
        done += len(view)
    files.fsync(fd)
    return done, time.monotonic() - began


def _reads_back(files: Files, fd: int, written: memoryview) -> bool:
    view = memoryview(mmap.mmap(-1, len(written)))
    done = 0
    while done < len(written):
        count = files.preadv(fd, [view[done:]], done)
        if count <= 0:
            return False
        done += count
    return view == written


def _flush(corner: str, files: Files) -> Finding:
    path = os.path.join(corner, "small")
    try:
        with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
            times = []
            for number in range(3):
                write_all(files, fd, memoryview(b"x" * 4096), 4096 * number, path)
                began = time.monotonic()
                files.fsync(fd)
                times.append(time.monotonic() - began)
                if sum(times) > SLOW_FSYNC_S:
                    break
    except OSError as error:
        return fail("fsync", f"a file cannot be flushed: {reason(error)}", "choose another directory, or fsync=False")
    seconds = sorted(times)[len(times) // 2]
    text, facts = f"a small fsync takes {seconds * 1000:.3g} ms", {"seconds": seconds}
    if seconds > SLOW_FSYNC_S:
        return warn("fsync", f"{text}; a save makes several", "look for what else writes there", **facts)
    return ok("fsync", text, **facts)


def _directory_flush(corner: str, files: Files) -> Finding:
    try:
        with opened(files, corner, os.O_RDONLY | os.O_DIRECTORY) as fd:
            files.fsync(fd)
    except OSError as error:
        if error.errno in (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS):
            text = "the file system flushes no directories; it is taken at its word that names are kept"
            return warn("directory fsync", text, "do not count on the newest checkpoint after a power cut")
        return fail("directory fsync", f"a directory cannot be flushed: {reason(error)}", "choose another directory")
    return ok("directory fsync", "names of files are flushed")


def _commit(corner: str, files: Files) -> Finding:
    """Publish as a commit does: by a name that must not be taken."""
    ways = dict(zip(_WAYS, (files.link, files.rename_noreplace), strict=True))
    works = [name for name, way in ways.items() if _refuses_taken(corner, name, way, files)]
    replaces = _works(lambda: files.rename(_made(corner, "new", files), _made(corner, "old", files)))
    facts = {"ways": works, "rename": replaces}
    if not works:
        text = "neither link(2) nor renameat2(2) puts a name that must not be taken: nothing can be committed"
        return fail("commit", text, "choose another directory", **facts)
    if not replaces:
        return warn(
            "commit", "a name cannot be replaced: overwrite=True fails", "save to a new path each time", **facts
        )
    return ok("commit", f"commits by {works[0]}; overwrites by rename", **facts)


def _refuses_taken(corner: str, name: str, way: Callable[[str, str], None], files: Files) -> bool:
    """Whether it gives a free name, and refuses one that is taken."""
    try:
        source, target = _made(corner, f"{name}-a", files), os.path.join(corner, f"{name}-b")
        way(source, target)
        other = _made(corner, f"{name}-c", files)
    except OSError:
        return False
    try:
        way(other, target)
    except FileExistsError:
        return True
    except OSError:
        return False
    return False


def _lock(corner: str, files: Files) -> Finding:
    advice = "save to a new path each time, in layout safetensors; on NFS use version 4, or mount with local_lock=none"
    path = _path_of(corner, "lock", files)
    try:
        with opened(files, path, os.O_RDWR) as one, opened(files, path, os.O_RDWR) as two:
            files.flock(one)
            try:
                files.flock(two)
            except OSError as error:
                if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                    return ok("locks", "files can be locked, for overwrites and layout dcp")
                raise
    except OSError as error:
        return warn("locks", f"files cannot be locked ({reason(error)}): overwrites and layout dcp fail", advice)
    return warn("locks", "two hold one lock: overwrites and layout dcp are not safe", advice)


def _names(corner: str, files: Files) -> Finding:
    _path_of(corner, "case", files)
    if _works(lambda: files.lstat(os.path.join(corner, "CASE"))):
        return ok("names", "small and capital letters are one; no two files of a checkpoint differ by them alone")
    return ok("names", "small and capital letters are told apart")


def _skew(corner: str, files: Files) -> Finding:
    try:
        seconds = files.lstat(_made(corner, "clock", files)).st_mtime - time.time()
    except OSError as error:
        return warn("storage clock", f"cannot be asked: {reason(error)}", "look yourself")
    text = f"the storage's clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    if abs(seconds) > SKEW_S:
        return warn("storage clock", text, "set the clocks: `asyncckpt gc` goes by them", seconds=seconds)
    return ok("storage clock", text, seconds=seconds)


def _made(corner: str, name: str, files: Files) -> str:
    path = os.path.join(corner, name)
    with opened(files, path, os.O_WRONLY | os.O_CREAT, 0o600):
        return path


def _path_of(corner: str, name: str, files: Files) -> str:
    """As `_made`; where it cannot be made, the check that needs it says so."""
    with contextlib.suppress(OSError):
        return _made(corner, name, files)
    return os.path.join(corner, name)


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True

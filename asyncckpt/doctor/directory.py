"""Checks of the directory that checkpoints go to: room, and what its file system can do.

What the file system can do is tried out in a corner: one directory with a name of its own, which is removed again. `gc`
removes that of a doctor that was killed.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import statistics
import time
from collections.abc import Callable, Iterator

import psutil

from asyncckpt.basics.quantities import human
from asyncckpt.doctor.findings import OK, WARN, Check, Finding, fail, findings_of, ok, warn
from asyncckpt.maintenance.gc import PROBE, Temporary
from asyncckpt.storage.files import Files, opened, read_small_file, write_all

CHUNK_NBYTES = 4 << 20
MAX_WRITE_NBYTES = 64 << 20
MAX_WRITE_S = 0.25
"""The probe of speed ends with whichever comes first. Chosen so that the whole command takes about a second."""

SLOW_FSYNC_S = 0.5
SKEW_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "fuse", "afs", "wekafs")
_FILES_PER_RANK, _FILES_MORE = 4, 4
_ELSEWHERE = "choose another directory"

_WAYS = ("link", "renameat2")
_NO_FLUSH = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_LOCK_ADVICE = (
    "save to a new path each time, in layout safetensors; on NFS use version 4, or mount with local_lock=none"
)
NAMES = frozenset(
    {"direct", "small", "new", "old", "lock", "case", "clock", *(f"{w}-{n}" for w in _WAYS for n in "abc")}
)
"""All that the probes leave in their corner."""

CORNER = re.compile(r"\.asyncckpt-doctor-[0-9a-f]{12}")
PROBES = Temporary(
    kind=PROBE,
    who="doctor",
    is_named=lambda name: CORNER.fullmatch(name) is not None,
    may_hold=NAMES.__contains__,
)


def directory_checks(directory: str, state_nbytes: int | None, ranks: int, files: Files) -> Iterator[Finding]:
    """Yield the findings.

    Args:
        directory: Absolute path; it need not be there yet.
        state_nbytes: What is saved at once; None: not known.
        ranks: How many save.
        files: The storage seam.
    """
    place = nearest(directory, files)
    where = directory if place == directory else f"{place} (where {directory} will be made)"
    corner = os.path.join(place, f".asyncckpt-doctor-{secrets.token_hex(6)}")
    checks = (
        Check("file system", lambda: _file_system(place, where), status=WARN),
        Check("free space", lambda: _free_space(place, state_nbytes, files), status=WARN),
        Check("inodes", lambda: _inodes(place, ranks, files), status=WARN),
        Check("permissions", lambda: _permissions(place, where, corner, files), f"{where} cannot be used", _ELSEWHERE),
    )
    try:
        for found in findings_of(checks):
            yield found
        if found.status == OK:
            yield from probes(corner, files)
    finally:
        with contextlib.suppress(OSError):
            for name in files.listdir(corner):
                files.unlink(os.path.join(corner, name))
            files.rmdir(corner)


def nearest(directory: str, files: Files) -> str:
    """Return the path of the directory, or the nearest one above it at which something is, or which cannot be seen."""
    path = directory
    while True:
        try:
            files.lstat(path)
        except FileNotFoundError:
            path = os.path.dirname(path)
            continue
        except OSError:
            pass
        return path


def _file_system(place: str, where: str) -> Finding:
    """Tell kind and options of the file system that holds `place`, by the kernel's table."""
    real = os.path.realpath(place)
    mounts = [one for one in psutil.disk_partitions(all=True) if os.path.commonpath((real, one[1])) == one[1]]
    mounts.sort(key=lambda one: len(one.mountpoint))  # of two at one place the later one hides the earlier
    kind, options = (mounts[-1].fstype, mounts[-1].opts) if mounts else ("unknown", "")
    text = f"{where} is on {kind}"
    if "ro" in options.split(","):
        return fail(f"{text}, mounted read-only", f"remount it, or {_ELSEWHERE}", kind=kind)
    if kind in _IN_MEMORY:
        advice = "keep checkpoints on a disk or a network file system"
        return warn(f"{text}: in memory, and gone with a reboot", advice, kind=kind)
    shared = kind.partition(".")[0] in _SHARED
    text += ", which several nodes may share" if shared else "; several nodes need one that all of them share"
    return ok(text, kind=kind)


def _free_space(place: str, state_nbytes: int | None, files: Files) -> Finding:
    found = files.statvfs(place)
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    facts = {"free_nbytes": free, "state_nbytes": state_nbytes}
    advice = f"free space, keep fewer checkpoints, or {_ELSEWHERE}"
    if state_nbytes is None:
        return ok(f"{human(free)} are free; --state-bytes says whether that is enough", **facts)
    if free < state_nbytes:
        text = f"{human(free)} are free, a checkpoint takes {human(state_nbytes)}: every save fails"
        return fail(text, advice, **facts)
    if free < 2 * state_nbytes:
        text = f"{human(free)} are free: room for one checkpoint of {human(state_nbytes)}, not for the next beside it"
        return warn(text, advice, **facts)
    return ok(f"{human(free)} are free, for {free // state_nbytes} checkpoints", **facts)


def _inodes(place: str, ranks: int, files: Files) -> Finding:
    found, wanted = files.statvfs(place), _FILES_PER_RANK * ranks + _FILES_MORE
    if not found.f_files:
        return ok("the file system counts no inodes", free=None)
    text = f"{found.f_favail} inodes are free, a checkpoint takes up to {wanted}"
    enough = found.f_favail >= wanted
    return ok(text, free=found.f_favail) if enough else fail(text, "remove files", free=found.f_favail)


def _permissions(place: str, where: str, corner: str, files: Files) -> Finding:
    """Make the corner in which things are tried out."""
    try:
        is_directory = stat.S_ISDIR(files.stat(place).st_mode)
    except FileNotFoundError:  # no save makes what such a link leads to
        text = f"{place} is a link to what is not there: every save fails"
        return fail(text, f"remove the link, or {_ELSEWHERE}")
    if not is_directory:
        return fail(f"{place} is a file", _ELSEWHERE)
    files.mkdir(corner, 0o700)
    return ok(f"uid {os.geteuid()} may make directories in {where}")


# ---- what is tried out ----------------------------------------------------------------------------------------------


def probes(corner: str, files: Files) -> Iterator[Finding]:
    """Yield the findings of what is tried in `corner`, an empty directory; its files are left to the caller."""
    no_locks = "overwrites and layout dcp fail: files cannot be locked"
    return findings_of(
        (
            Check(
                "writing", lambda: _writing(corner, files), "a file cannot be written", f"{_ELSEWHERE}, or make room"
            ),
            Check("fsync", lambda: _flush(corner, files), "a file cannot be flushed", f"{_ELSEWHERE}, or fsync=False"),
            Check("directory fsync", lambda: _directory_flush(corner, files), "it cannot be flushed", _ELSEWHERE),
            Check("commit", lambda: _commit(corner, files), "nothing can be committed", _ELSEWHERE),
            Check("locks", lambda: _lock(corner, files), no_locks, _LOCK_ADVICE, WARN),
            Check("names", lambda: _names(corner, files), status=WARN),
            Check("storage clock", lambda: _skew(corner, files), status=WARN),
        )
    )


def _writing(corner: str, files: Files) -> Finding:
    """Write whole pages past the page cache, read them back, and tell the speed."""
    path, found = os.path.join(corner, "direct"), files.statvfs(corner)
    most = min(MAX_WRITE_NBYTES, found.f_bavail * found.f_frsize // 4)  # others save there too
    nbytes = max(mmap.PAGESIZE, min(CHUNK_NBYTES, most) // mmap.PAGESIZE * mmap.PAGESIZE)
    view = memoryview(mmap.mmap(-1, nbytes))  # whole pages, as O_DIRECT wants them
    view[:16] = secrets.token_bytes(16)
    view[-16:] = secrets.token_bytes(16)
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        is_direct = _is_direct(files, fd, view, path)
        if read_small_file(files, path, nbytes) != view:
            return fail("what was read back is not what was written", "do not use this storage")
        done, seconds = _write_on(files, fd, view, path, most)
    speed = done / max(seconds, 1e-9)
    text = f"{human(speed)}/s by {'O_DIRECT' if is_direct else 'the page cache'}, flushed, in a probe of {human(done)}"
    facts = {"direct": is_direct, "bytes_per_s": round(speed), "nbytes": done}
    if is_direct:
        return ok(text, **facts)
    advice = "nothing need be done; more memory and processor time is taken"
    return warn(f"{text}: the file system has no O_DIRECT", advice, **facts)


def _is_direct(files: Files, fd: int, view: memoryview, path: str) -> bool:
    """Write a chunk; whether that can be done past the page cache. Then all others can be written so, too."""
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
    """Write for a moment, over the first chunk and on, and flush. Returns bytes, and seconds for them."""
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


def _flush(corner: str, files: Files) -> Finding:
    path, times = os.path.join(corner, "small"), list[float]()
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        while len(times) < 3 and sum(times) <= SLOW_FSYNC_S:
            write_all(files, fd, memoryview(b"x" * 4096), 4096 * len(times), path)
            began = time.monotonic()
            files.fsync(fd)
            times.append(time.monotonic() - began)
    seconds = statistics.median(times)
    text, facts = f"a small fsync takes {seconds * 1000:.3g} ms", {"seconds": seconds}
    if seconds > SLOW_FSYNC_S:
        return warn(f"{text}; a save makes several", "look for what else writes there", **facts)
    return ok(text, **facts)


def _directory_flush(corner: str, files: Files) -> Finding:
    with opened(files, corner, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            files.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FLUSH:
                raise
            text = "the file system flushes no directories; it is taken at its word that names are kept"
            return warn(text, "do not count on the newest checkpoint after a power cut")
    return ok("names of files are flushed")


def _commit(corner: str, files: Files) -> Finding:
    """Publish as a commit does: by a name that must not be taken."""
    ways = dict(zip(_WAYS, (files.link, files.rename_noreplace), strict=True))
    works = [name for name, way in ways.items() if _refuses_taken(corner, name, way, files)]
    old, new = _made(corner, "old", files), _made(corner, "new", files)
    replaces = _works(lambda: files.rename(new, old))
    facts = {"ways": works, "rename": replaces}
    if not works:
        text = "neither link(2) nor renameat2(2) puts a name that must not be taken: nothing can be committed"
        return fail(text, _ELSEWHERE, **facts)
    if not replaces:
        return warn("a name cannot be replaced: overwrite=True fails", "save to a new path each time", **facts)
    return ok(f"commits by {works[0]}; overwrites by rename", **facts)


def _refuses_taken(corner: str, name: str, way: Callable[[str, str], None], files: Files) -> bool:
    """Whether it gives a free name, and refuses one that is taken."""
    target = os.path.join(corner, f"{name}-b")
    first, second = _made(corner, f"{name}-a", files), _made(corner, f"{name}-c", files)
    try:
        way(first, target)
        way(second, target)
    except OSError as error:
        return isinstance(error, FileExistsError)
    return False


def _lock(corner: str, files: Files) -> Finding:
    path = _made(corner, "lock", files)
    with opened(files, path, os.O_RDWR) as one, opened(files, path, os.O_RDWR) as two:
        files.flock(one)
        try:
            files.flock(two)
        except OSError as error:
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            return ok("files can be locked, for overwrites and layout dcp")
    return warn("two hold one lock: overwrites and layout dcp are not safe", _LOCK_ADVICE)


def _names(corner: str, files: Files) -> Finding:
    _made(corner, "case", files)
    is_one = _works(lambda: files.lstat(os.path.join(corner, "CASE")))
    one = "small and capital letters are one; no two files of a checkpoint differ by them alone"
    return ok(one if is_one else "small and capital letters are told apart")


def _skew(corner: str, files: Files) -> Finding:
    seconds = files.lstat(_made(corner, "clock", files)).st_mtime - time.time()
    text = f"the storage's clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    if abs(seconds) > SKEW_S:
        return warn(text, "set the clocks: `asyncckpt gc` goes by them", seconds=seconds)
    return ok(text, seconds=seconds)


def _made(corner: str, name: str, files: Files) -> str:
    path = os.path.join(corner, name)
    with opened(files, path, os.O_WRONLY | os.O_CREAT, 0o600):
        return path


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True

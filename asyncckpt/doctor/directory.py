"""Checks of the directory for checkpoints: free space, and the features of its file system.

Features are tested in a temporary probe directory, which is removed again. If `doctor` is killed, `gc` removes it.
"""

from __future__ import annotations

import contextlib
import errno
import functools
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
from asyncckpt.maintenance.gc import PROBE, TemporaryKind
from asyncckpt.storage.files import Files, opened, write_all
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.mounts.abilities import BY_CREATION, Abilities
from asyncckpt.storage.mounts.probe import is_native, probe

CHUNK_NBYTES = 4 << 20
MAX_WRITE_NBYTES = 64 << 20
MAX_WRITE_S = 0.25
"""The write probe ends at either limit. Chosen so that the whole command takes about a second."""

SLOW_FSYNC_S = 0.5
SKEW_S = 60.0
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "fuse", "afs", "wekafs")
_FILES_PER_RANK, _OTHER_FILES = 4, 4
_OTHER_DIRECTORY = "choose another directory"

_NO_FLUSH = (errno.EINVAL, errno.EOPNOTSUPP, errno.ENOSYS)
_LOCK_ADVICE = (
    "save to a new path each time, with layout='safetensors'; on NFS use version 4, or mount with local_lock=none"
)
PROBE_FILE_NAME = re.compile(r"direct|small|lock|case|clock|commit\.[0-9a-f]{12}-[12]|probe|part")
"""Names of the files in the probe directory; the last two: of the objects of `bucket`."""

PROBE_DIR_NAME = re.compile(r"\.asyncckpt-doctor-[0-9a-f]{12}")
PROBES = TemporaryKind(
    kind=PROBE,
    who="doctor",
    is_named=lambda name: PROBE_DIR_NAME.fullmatch(name) is not None,
    may_hold=lambda name: PROBE_FILE_NAME.fullmatch(name) is not None,
)


def directory_checks(directory: str, state_nbytes: int | None, ranks: int, files: Files) -> Iterator[Finding]:
    """Yield the findings about a directory.

    Args:
        directory: Absolute path; the directory need not exist.
        state_nbytes: Bytes that all ranks of this machine save together; None: not known.
        ranks: Number of ranks on this machine.
        files: The storage seam.
    """
    parent = nearest_existing(directory, files)
    where = directory if parent == directory else f"{parent} (where {directory} will be created)"
    probe_dir = os.path.join(parent, f".asyncckpt-doctor-{secrets.token_hex(6)}")
    checks = (
        Check("file system", lambda: _file_system(parent, where), status=WARN),
        Check("free space", lambda: _free_space(parent, state_nbytes, files), status=WARN),
        Check("inodes", lambda: _inodes(parent, ranks, files), status=WARN),
        Check(
            "permissions",
            lambda: _permissions(parent, where, probe_dir, files),
            f"{where} cannot be used",
            _OTHER_DIRECTORY,
        ),
    )
    try:
        for found in findings_of(checks):
            yield found
        if found.status == OK:
            yield from probes(probe_dir, files)
    finally:
        with contextlib.suppress(OSError):
            for name in files.listdir(probe_dir):
                files.unlink(os.path.join(probe_dir, name))
            files.rmdir(probe_dir)


def nearest_existing(directory: str, files: Files) -> str:
    """Return `directory`, or its nearest parent that exists or whose existence cannot be determined."""
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


def _file_system(path: str, where: str) -> Finding:
    """Report type and options of the file system of `path`, from the kernel's mount table."""
    real = os.path.realpath(path)
    mounts = [one for one in psutil.disk_partitions(all=True) if os.path.commonpath((real, one[1])) == one[1]]
    mounts.sort(key=lambda one: len(one.mountpoint))  # if two have the same mount point, the last one is visible
    kind, options = (mounts[-1].fstype, mounts[-1].opts) if mounts else ("unknown", "")
    text = f"{where} is on {kind}"
    if "ro" in options.split(","):
        return fail(f"{text}, mounted read-only", f"remount it, or {_OTHER_DIRECTORY}", kind=kind)
    if kind in _IN_MEMORY:
        advice = "keep checkpoints on a disk or a network file system"
        return warn(f"{text}, which is in memory: checkpoints are lost at a reboot", advice, kind=kind)
    shared = kind.partition(".")[0] in _SHARED
    text += ", a shared file system" if shared else "; a run on several nodes needs a file system that they all share"
    return ok(text, kind=kind)


def _free_space(path: str, state_nbytes: int | None, files: Files) -> Finding:
    found = files.statvfs(path)
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    facts = {"free_nbytes": free, "state_nbytes": state_nbytes}
    advice = f"free space, keep fewer checkpoints, or {_OTHER_DIRECTORY}"
    if state_nbytes is None:
        return ok(f"{human(free)} are free; pass --state-bytes to check whether that is enough", **facts)
    if free < state_nbytes:
        text = f"{human(free)} are free, but a checkpoint needs {human(state_nbytes)}: every save will fail"
        return fail(text, advice, **facts)
    if free < 2 * state_nbytes:
        text = f"{human(free)} are free: enough for one checkpoint of {human(state_nbytes)}, not for two"
        return warn(text, advice, **facts)
    return ok(f"{human(free)} are free: enough for {free // state_nbytes} checkpoints", **facts)


def _inodes(path: str, ranks: int, files: Files) -> Finding:
    found, wanted = files.statvfs(path), _FILES_PER_RANK * ranks + _OTHER_FILES
    if not found.f_files:
        return ok("the file system has no limit for the number of files", free=None)
    text = f"{found.f_favail} inodes are free, a checkpoint needs up to {wanted}"
    enough = found.f_favail >= wanted
    if not enough and not found.f_favail and not is_native(path, files):
        return ok("the mount reports no free inodes, as those do that do not count them", free=None)
    return ok(text, free=found.f_favail) if enough else fail(text, "remove files", free=found.f_favail)


def _permissions(parent: str, where: str, probe_dir: str, files: Files) -> Finding:
    """Create the probe directory."""
    try:
        is_directory = stat.S_ISDIR(files.stat(parent).st_mode)
    except FileNotFoundError:  # a dangling link: a save does not create its target
        text = f"{parent} is a link to a path that does not exist: every save will fail"
        return fail(text, f"remove the link, or {_OTHER_DIRECTORY}")
    if not is_directory:
        return fail(f"{parent} is a file", _OTHER_DIRECTORY)
    files.mkdir(probe_dir, 0o700)
    return ok(f"user {os.geteuid()} can create directories in {where}")


# ---- Probes ---------------------------------------------------------------------------------------------------------


def probes(probe_dir: str, files: Files) -> Iterator[Finding]:
    """Yield the findings of the probes in `probe_dir`, an empty directory; the caller removes the files."""
    abilities = functools.cache(lambda: probe(os.path.join(probe_dir, "commit"), files))
    return findings_of(
        (
            Check(
                "writing",
                lambda: _writing(probe_dir, files),
                "a file cannot be written",
                f"{_OTHER_DIRECTORY}, or make room",
            ),
            Check(
                "fsync",
                lambda: _flush(probe_dir, files),
                "a file cannot be flushed",
                f"{_OTHER_DIRECTORY}, or fsync=False",
            ),
            Check(
                "directory fsync",
                lambda: _directory_flush(probe_dir, files),
                "a directory cannot be flushed",
                _OTHER_DIRECTORY,
            ),
            Check("commit", lambda: _commit(abilities()), "no save can be committed", _OTHER_DIRECTORY),
            Check("overwrite", lambda: _replacing(abilities()), status=WARN),
            Check("durability", lambda: _durability(abilities()), status=WARN),
            Check("locks", lambda: _lock(abilities()), status=WARN),
            Check("names", lambda: _names(probe_dir, files), status=WARN),
            Check("storage clock", lambda: _clock_skew(probe_dir, files), status=WARN),
        )
    )


def _writing(probe_dir: str, files: Files) -> Finding:
    """Write with O_DIRECT (past the page cache), read back, and measure the speed."""
    path, found = os.path.join(probe_dir, "direct"), files.statvfs(probe_dir)
    most = min(MAX_WRITE_NBYTES, found.f_bavail * found.f_frsize // 4)  # leave space for saves that run meanwhile
    nbytes = max(mmap.PAGESIZE, min(CHUNK_NBYTES, most) // mmap.PAGESIZE * mmap.PAGESIZE)
    view = memoryview(mmap.mmap(-1, nbytes))  # page-aligned, as O_DIRECT requires
    view[:16] = secrets.token_bytes(16)
    view[-16:] = secrets.token_bytes(16)
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        is_direct = _is_direct(files, fd, view, path)
        done, seconds = _write_on(files, fd, view, path, most)
    if LocalStore(files).read(path, 0, nbytes) != view:  # only now: some mounts show nothing of an open file
        return fail("the data read back are not what was written", "do not save checkpoints to this storage")
    speed = done / max(seconds, 1e-9)
    how = "O_DIRECT" if is_direct else "the page cache"
    text = f"{human(speed)}/s with {how} and fsync, measured by writing {human(done)}"
    facts = {"direct": is_direct, "bytes_per_s": round(speed), "nbytes": done}
    if is_direct:
        return ok(text, **facts)
    advice = "no action is needed; writing takes more memory and CPU time"
    return warn(f"{text}; the file system does not support O_DIRECT", advice, **facts)


def _is_direct(files: Files, fd: int, view: memoryview, path: str) -> bool:
    """Write a chunk, with O_DIRECT if possible; return whether it was."""
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
    """Write chunks until a limit is reached, and flush. Returns (bytes, seconds)."""
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


def _flush(probe_dir: str, files: Files) -> Finding:
    path, times = os.path.join(probe_dir, "small"), list[float]()
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600) as fd:
        while len(times) < 3 and sum(times) <= SLOW_FSYNC_S:
            write_all(files, fd, memoryview(b"x" * 4096), 4096 * len(times), path)
            began = time.monotonic()
            files.fsync(fd)
            times.append(time.monotonic() - began)
    seconds = statistics.median(times)
    text, facts = f"fsync of a small file takes {seconds * 1000:.3g} ms", {"seconds": seconds}
    if seconds > SLOW_FSYNC_S:
        return warn(f"{text}; each save calls it several times", "check what else writes to this storage", **facts)
    return ok(text, **facts)


def _directory_flush(probe_dir: str, files: Files) -> Finding:
    with opened(files, probe_dir, os.O_RDONLY | os.O_DIRECTORY) as fd:
        try:
            files.fsync(fd)
        except OSError as error:
            if error.errno not in _NO_FLUSH:
                raise
            text = "fsync of directories is not supported: after a power failure the newest files may be missing"
            return warn(text, "after a power failure, check the newest checkpoint with asyncckpt verify")
    return ok("fsync of directories is supported")


def _commit(found: Abilities) -> Finding:
    """Say how a manifest is published: under a name that must not exist, with all of its content or without."""
    facts = {"publishes_by": found.publishes_by, "truncates": found.truncates}
    missing = found.missing(fsync=False, overwrite=False)
    if missing:
        return fail(f"no save can be committed: the file system lacks {'; '.join(missing)}", _OTHER_DIRECTORY, **facts)
    if found.publishes_by == BY_CREATION:
        text = (
            "link(2) and renameat2(2) do not work, so a manifest is created exclusively, and then written. Promise P14 "
            "(docs/guarantees.md) is weaker: of saves of two machines to one path both may succeed, and one stands"
        )
        return warn(text, "let no two runs save to one path", **facts)
    return ok(f"checkpoints can be committed atomically, by {found.publishes_by}", **facts)


def _replacing(found: Abilities) -> Finding:
    facts = {"rename": found.replaces}
    if not found.replaces:
        text = "rename(2) cannot replace a file: overwrite=True, layout='dcp' and retention will fail"
        return warn(text, "save to a new path each time, with layout='safetensors'", **facts)
    if found.publishes_by == BY_CREATION:
        text = (
            "rename(2) replaces files, in one step only if the mount does it so. Promise P10 (docs/guarantees.md) is "
            "weaker: a crash of the mount's own process during overwrite=True may leave neither checkpoint"
        )
        return warn(text, "save to a new path each time", **facts)
    return ok("checkpoints can be replaced atomically, by rename", **facts)


def _durability(found: Abilities) -> Finding:
    facts = {"fsync": found.flushes}
    if not found.flushes:
        return fail("fsync does not work: every save will fail", f"{_OTHER_DIRECTORY}, or fsync=False", **facts)
    if found.publishes_by == BY_CREATION:
        text = (
            "fsync is the mount's own. Promises P3 and P4 (docs/guarantees.md) are weaker: a mount that uploads later "
            "(rclone's cache) may lose what it has not uploaded, although `written` was reported"
        )
        return warn(text, "choose the mount's option that uploads at fsync or close", **facts)
    return ok("what fsync has confirmed is taken for durable", **facts)


def _lock(found: Abilities) -> Finding:
    if found.locks:
        return ok("files can be locked, as overwrite=True and layout='dcp' need")
    return warn("files cannot be locked by one holder alone: overwrite=True and layout='dcp' will fail", _LOCK_ADVICE)


def _names(probe_dir: str, files: Files) -> Finding:
    _create(probe_dir, "case", files)
    is_one = _works(lambda: files.lstat(os.path.join(probe_dir, "CASE")))
    same = "file names are case-insensitive, which is fine: no two files of a checkpoint differ only by case"
    return ok(same if is_one else "file names are case-sensitive")


def _clock_skew(probe_dir: str, files: Files) -> Finding:
    seconds = files.lstat(_create(probe_dir, "clock", files)).st_mtime - time.time()
    text = f"the storage's clock is {abs(seconds):.1f} s {'ahead of' if seconds > 0 else 'behind'} this machine's"
    if abs(seconds) > SKEW_S:
        return warn(text, "set the clocks: `asyncckpt gc` compares file times with them", seconds=seconds)
    return ok(text, seconds=seconds)


def _create(probe_dir: str, name: str, files: Files) -> str:
    path = os.path.join(probe_dir, name)
    with opened(files, path, os.O_WRONLY | os.O_CREAT, 0o600):
        return path


def _works(call: Callable[[], object]) -> bool:
    try:
        call()
    except OSError:
        return False
    return True

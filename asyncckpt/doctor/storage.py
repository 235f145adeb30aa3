"""Checks of the directory that checkpoints go to: room, and what its file system can do, tried out in a corner of it.

Everything that is made lies in one directory with a name of its own, and is removed again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator

from asyncckpt.doctor.findings import Finding, fail, ok, reason, warn
from asyncckpt.doctor.leftovers import corner_name
from asyncckpt.doctor.probes import probes
from asyncckpt.sizes import human
from asyncckpt.storage.files import Files

_IN_MEMORY = ("tmpfs", "ramfs", "devtmpfs")
_SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "cifs", "smb3", "ceph", "9p", "fuse", "afs", "wekafs")
_FILES_PER_RANK, _FILES_MORE = 4, 4


def storage_checks(directory: str, state_nbytes: int | None, ranks: int, files: Files) -> Iterator[Finding]:
    """Yield the findings.

    Args:
        directory: Absolute path; it need not be there yet.
        state_nbytes: What is saved at once; None: not known.
        ranks: How many save.
        files: The storage seam.
    """
    place = nearest(directory, files)
    if isinstance(place, Finding):
        yield place
        return
    where = directory if place == directory else f"{place} (where {directory} will be made)"
    kind, options = _mount_of(place)
    yield _file_system(where, kind, options)
    yield from _room(place, state_nbytes, ranks, files)
    corner = os.path.join(place, corner_name())
    try:
        files.mkdir(corner, 0o700)
    except OSError as error:
        text = f"nothing can be made in {where}: {reason(error)} (uid {os.geteuid()})"
        yield fail("permissions", text, "choose a directory that this user may write to")
        return
    try:
        yield ok("permissions", f"uid {os.geteuid()} may make directories in {where}")
        yield from probes(corner, files)
    finally:
        _remove(corner, files)


def nearest(directory: str, files: Files) -> str | Finding:
    """Return the directory, or the nearest one above it that is there."""
    path = directory
    while True:
        try:
            found = files.stat(path)
        except FileNotFoundError:
            if _is_there(path, files):  # no save makes what such a link leads to
                advice = "remove the link, or choose another directory"
                return fail("permissions", f"{path} is a link to what is not there: every save fails", advice)
            path = os.path.dirname(path)
            continue
        except OSError as error:
            return fail("permissions", f"{path} cannot be looked at: {reason(error)}", "choose another directory")
        if stat.S_ISDIR(found.st_mode):
            return path
        return fail("permissions", f"{path} is a file", "choose another directory")


def _is_there(path: str, files: Files) -> bool:
    try:
        files.lstat(path)
    except OSError:
        return False
    return True


def _mount_of(path: str) -> tuple[str, str]:
    """Return kind and options of the file system that holds `path`, by the kernel's table."""
    real, best = os.path.realpath(path), ("", "unknown", "")
    with contextlib.suppress(OSError), open("/proc/self/mounts", errors="replace") as table:
        for line in table:
            fields = line.split()
            at = fields[1].replace("\\040", " ") if len(fields) > 3 else ""
            if at and (real == at or real.startswith(at.rstrip("/") + "/")) and len(at) >= len(best[0]):
                best = (at, fields[2], fields[3])
    return best[1], best[2]


def _file_system(where: str, kind: str, options: str) -> Finding:
    text = f"{where} is on {kind}"
    if "ro" in options.split(","):
        return fail("file system", f"{text}, mounted read-only", "remount it, or choose another directory", kind=kind)
    if kind in _IN_MEMORY:
        advice = "keep checkpoints on a disk or a network file system"
        return warn("file system", f"{text}: in memory, and gone with a reboot", advice, kind=kind)
    shared = kind.partition(".")[0] in _SHARED
    text += ", which several nodes may share" if shared else "; several nodes need one that all of them share"
    return ok("file system", text, kind=kind)


def _room(place: str, state_nbytes: int | None, ranks: int, files: Files) -> Iterator[Finding]:
    try:
        found = files.statvfs(place)
    except OSError as error:
        yield warn("free space", f"cannot be asked for: {reason(error)}", "look yourself")
        return
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    facts = {"free_nbytes": free, "state_nbytes": state_nbytes}
    advice = "free space, keep fewer checkpoints, or choose another directory"
    if state_nbytes is None:
        yield ok("free space", f"{human(free)} are free; --state-bytes says whether that is enough", **facts)
    elif free < state_nbytes:
        text = f"{human(free)} are free, a checkpoint takes {human(state_nbytes)}: every save fails"
        yield fail("free space", text, advice, **facts)
    elif free < 2 * state_nbytes:
        text = f"{human(free)} are free: room for one checkpoint of {human(state_nbytes)}, not for the next beside it"
        yield warn("free space", text, advice, **facts)
    else:
        yield ok("free space", f"{human(free)} are free, for {free // max(1, state_nbytes)} checkpoints", **facts)
    wanted = _FILES_PER_RANK * ranks + _FILES_MORE
    if not found.f_files:
        yield ok("inodes", "the file system counts no inodes", free=None)
    elif found.f_favail < wanted:
        text = f"{found.f_favail} inodes are free, a checkpoint takes up to {wanted}"
        yield fail("inodes", text, "remove files", free=found.f_favail)
    else:
        yield ok("inodes", f"{found.f_favail} inodes are free, a checkpoint takes up to {wanted}", free=found.f_favail)


def _remove(corner: str, files: Files) -> None:
    with contextlib.suppress(OSError):
        for name in files.listdir(corner):
            with contextlib.suppress(OSError):
                files.unlink(os.path.join(corner, name))
        files.rmdir(corner)

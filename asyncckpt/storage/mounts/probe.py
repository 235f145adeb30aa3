"""Probes what a mounted file system can do, once for each mount and process, by two files that are removed again.

File systems of Linux that lie on disks or in memory can do everything, and are not probed.
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
from collections.abc import Callable, Collection
from dataclasses import replace

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.names import owner_of, probe_name, temporary_manifest_name
from asyncckpt.storage.files import Files, await_seen, opened, write_all
from asyncckpt.storage.mounts.abilities import BY_CREATION, BY_LINK, BY_RENAME, NATIVE, Abilities

_NATIVE = frozenset({0xEF53, 0x58465342, 0x9123683E, 0x01021994, 0x858458F6, 0x794C7630, 0x2FC12FC1, 0xF2F52010})
"""statfs(2): ext2 to ext4, XFS, btrfs, tmpfs, ramfs, overlayfs, ZFS, F2FS."""

_MAX_KNOWN = 256

_REFUSALS = frozenset({errno.EPERM, errno.EACCES, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP, errno.ESPIPE})
"""Answers of mounts that lack something. After any other nothing is known, and the probe fails with it."""

_NO_LINKS = _REFUSALS | {errno.EIO, errno.EMLINK}
"""rclone answers EIO to link(2)."""

_NO_LOCKS = _REFUSALS | {errno.ENOLCK}

_HALF_NBYTES, _CUT_NBYTES = 4096, 5000
_PROBED = (bytes(range(1, 256)) * 33)[: 2 * _HALF_NBYTES]
"""What is written: without zeros, which is what bytes read as that were never written."""


_known: dict[int, Abilities] = {}
"""Device number -> what its mount can do. IMPORTANT: no lock is held while probing: another mount may hang."""


def abilities_at(name: str, files: Files) -> Abilities:
    """Return what the mount can do that holds the directory of `name`. It is probed the first time.

    Args:
        name: Path of a file of a save, to which the probe's files then belong too. Its directory exists.
        files: The storage seam.

    Raises:
        OSError: It cannot be known: no room, no permission, or a call failed otherwise.
    """
    directory = os.path.dirname(name)
    if is_native(directory, files):
        return NATIVE
    device = files.stat(directory).st_dev
    found = _known.get(device)
    if found is None:
        found = probe(_stem_of(name), files)
        if not found.missing(fsync=True, overwrite=False):  # the user may mount an unusable one anew
            if len(_known) >= _MAX_KNOWN:
                _known.clear()
            _known[device] = found
    return found


def _stem_of(name: str) -> str:
    """Return the temporary manifest of the save of a file: names of the probe's files begin with it (`probe_name`)."""
    directory, last = os.path.split(name)
    owner = owner_of(last)
    return name if owner is None else os.path.join(directory, temporary_manifest_name(owner))


def forget(found: Abilities) -> None:
    """Discard the result `found`, so that those mounts are probed again."""
    for device, known in list(_known.items()):
        if known is found:
            _known.pop(device, None)


def is_native(directory: str, files: Files) -> bool:
    """Whether a directory lies on a file system of Linux that is known to do everything, and to count its inodes.

    Raises:
        OSError: It cannot be known.
    """
    return files.file_system_type(directory) in _NATIVE


def probe(stem: str, files: Files) -> Abilities:
    """Find out what a mount can do, with two files that are removed again.

    Args:
        stem: Path that their names begin with.
        files: The storage seam.

    Raises:
        OSError: See `abilities_at`.
    """
    token = secrets.token_hex(6)
    paths = probe_name(stem, token, 1), probe_name(stem, token, 2)
    first, second = paths
    try:
        writes, flushes = _writing(first, files)
        content = await_seen(lambda: _content(first, files), _is_probed) if writes else b""
        is_exclusive = _finds_taken(lambda: _make(first, files))
        found = Abilities(
            writes_anywhere=writes,
            keeps_content=_is_probed(content),
            truncates=len(content) == _CUT_NBYTES,
            flushes=flushes,
            publishes_by=_publishing(first, second, files),
            replaces=_replaces(first, second, files),
            locks=_locks(second, files),
        )
        reach("mount: probed")
    finally:
        removes = all([_remove(path, files) for path in paths])
    if found.publishes_by is None and is_exclusive and found.locks:
        found = replace(found, publishes_by=BY_CREATION)
    return replace(found, removes=removes)


def _works(call: Callable[[], object], refusals: Collection[int] = _REFUSALS) -> bool:
    """Whether a call works; raises what is no refusal."""
    try:
        call()
    except OSError as error:
        if error.errno not in refusals:
            raise
        return False
    return True


def _finds_taken(call: Callable[[], object]) -> bool:
    """Whether a call says that a name is taken; raises what is no refusal."""
    try:
        _works(call)
    except FileExistsError:
        return True
    return False


def _make(path: str, files: Files) -> None:
    with opened(files, path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW):
        pass


def _writing(path: str, files: Files) -> tuple[bool, bool]:
    """Write the second page of a new file, then the first one, cut it, flush and close it.

    Returns:
        Whether it took writes in this order, and whether it took fsync.
    """
    fd = files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW)
    is_open = flushes = True
    try:
        writes = all(
            _works(lambda at=at: write_all(files, fd, memoryview(_PROBED)[at : at + _HALF_NBYTES], at, path))  # type: ignore[misc]
            for at in (_HALF_NBYTES, 0)
        )
        if writes:
            _works(lambda: files.ftruncate(fd, _CUT_NBYTES))  # the content says whether it was cut
            flushes = _works(lambda: files.fsync(fd))
        is_open = False
        return _works(lambda: files.close(fd)) and writes, flushes  # some say only here what they do not take
    finally:
        if is_open:
            with contextlib.suppress(OSError):
                files.close(fd)


def _is_probed(content: bytes) -> bool:
    return content in (_PROBED, _PROBED[:_CUT_NBYTES])


def _content(path: str, files: Files) -> bytes:
    """Return the content of a file, whatever size it is said to have."""
    found = bytearray()
    with opened(files, path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
        while len(found) <= len(_PROBED):
            buffer = bytearray(len(_PROBED))
            count = files.preadv(fd, [buffer], len(found))
            if count <= 0:
                break
            found += buffer[:count]
    return bytes(found)


def _publishing(first: str, second: str, files: Files) -> str | None:
    """Return which call gives the file `first` the free name `second`, and refuses to do so again."""
    if _works(lambda: files.link(first, second), _NO_LINKS):
        is_refused = _finds_taken(lambda: files.link(first, second))
        _remove(second, files)
        return BY_LINK if is_refused else None
    if not _works(lambda: files.rename_noreplace(first, second)):
        return None
    _make(first, files)
    return BY_RENAME if _finds_taken(lambda: files.rename_noreplace(first, second)) else None


def _replaces(first: str, second: str, files: Files) -> bool:
    for path in (first, second):
        with contextlib.suppress(FileExistsError):
            _make(path, files)
    return _works(lambda: files.rename(first, second))


def _locks(path: str, files: Files) -> bool:
    """Whether of two descriptors one gets the lock; opened as `LocalStore.lock` opens its file."""
    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    is_taken = False

    def lock_twice() -> None:
        nonlocal is_taken
        with opened(files, path, flags) as one, opened(files, path, flags) as two:
            files.flock(one)
            try:
                files.flock(two)
            except OSError as error:
                is_taken = error.errno in (errno.EWOULDBLOCK, errno.EACCES)

    return _works(lock_twice, _NO_LOCKS) and is_taken


def _remove(path: str, files: Files) -> bool:
    """Remove a file of the probe, and say whether it is gone."""
    try:
        files.unlink(path)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    return True

"""Who else is at a target that is replaced: saves of ours, which commit under a lock, and whoever puts a file there."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Mapping

from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, SaveFailedError
from asyncckpt.format.names import LOCK_NAME, MANIFEST_NAME, SaveId, owner_of
from asyncckpt.storage.files import Files
from asyncckpt.storage.overwrite_lock import LOCK_TIMEOUT_S, overwrite_lock
from asyncckpt.storage.pinned import is_pinned
from asyncckpt.storage.standing import known_standing_at

Look = Mapping[str, tuple[int, int, int]]
"""By name in a directory, or "" for a file: inode, length, time of the last change."""


def refuse_saves(path: str, files: Files) -> None:
    """Raise when a save may be under way at a checkpoint that is to be replaced, or when it is pinned.

    Raises:
        SaveFailedError: EAGAIN: files of a save are there that the standing checkpoint does not make leftovers.
        CheckpointExistsError: It is pinned.
        OSError: It cannot be known.
    """
    if is_pinned(path, files):
        raise CheckpointExistsError(
            f"{path} is pinned; it was left untouched. Choose another path, or take the pin off "
            "(`asyncckpt pin --remove`)",
            path=path,
        )
    if not os.path.isdir(path):
        return
    names = files.listdir(path)
    owners = {owner for owner in map(owner_of, names) if owner is not None}
    standing = known_standing_at(path, files) if MANIFEST_NAME in names else None
    if standing is not None:
        alive = {one for one in owners if one != standing.save_id and not _is_older(one, standing.save_id)}
    elif MANIFEST_NAME in names and len(owners) == 1:  # damaged, or given up: they are its own
        alive = set()
    else:
        alive = owners
    if alive:
        raise under_way(path, max(alive))


def under_way(path: str, save_id: SaveId) -> SaveFailedError:
    """Return the error of who would take the directory away from a save."""
    return SaveFailedError(
        f"{path} holds files of save {save_id}, which may be under way; it was left untouched. Wait for its end; what "
        "a save that has died left there `asyncckpt gc` removes",
        code="EAGAIN",
        path=path,
        detail=f"files of save {save_id} are there",
        save_id=str(save_id),
    )


def _is_older(one: SaveId, than: SaveId) -> bool:
    """Whether a save can never replace that one: saves of two runs of one epoch have no order."""
    return one.epoch < than.epoch or (one[::2] == than[::2] and one.sequence < than.sequence)


@contextlib.contextmanager
def held(path: str, files: Files, umask: int) -> Iterator[None]:
    """Keep saves from committing at `path`, if it is a directory in which they may: by the lock that they take.

    IMPORTANT: the lock is taken, and given back, in the directory itself, wherever it is renamed to meanwhile: by the
    path, the one that has come there would lose its lock.

    Raises:
        CheckpointExistsError: Another directory came to be there meanwhile.
        OSError: EAGAIN: somebody has held it for too long. Others: there is no locking there.

    Blocks: for another holder, at most `LOCK_TIMEOUT_S`.
    """
    if not (os.path.isdir(path) and any(owner_of(n) or n in (MANIFEST_NAME, LOCK_NAME) for n in files.listdir(path))):
        yield
        return
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with contextlib.ExitStack() as stack:
            lock = overwrite_lock(f"/proc/self/fd/{fd}", files=files, umask=umask, timeout_s=LOCK_TIMEOUT_S)
            try:
                stack.enter_context(lock)
            except OSError as error:
                name = os.path.join(path, LOCK_NAME)
                raise OSError(error.errno, error.strerror, name) from error
            if not os.path.samestat(os.fstat(fd), files.lstat(path)):
                raise CheckpointExistsError(f"{path} was replaced meanwhile; it was left untouched", path=path)
            yield
    finally:
        os.close(fd)


def look_at(path: str, files: Files) -> Look:
    """Return what is at a path, so that it can be seen whether anything came to it.

    Raises:
        OSError: It cannot be known.
    """
    found = files.lstat(path)
    if not stat.S_ISDIR(found.st_mode):
        return {"": _stamp(found)}
    stamps = {}
    for name in files.listdir(path):
        if name != LOCK_NAME:
            with contextlib.suppress(FileNotFoundError):
                stamps[name] = _stamp(files.lstat(os.path.join(path, name)))
    return stamps


def refuse_arrivals(path: str, before: Look, now: Look) -> None:
    """Raise when something came, or was written to, between two looks.

    Raises:
        SaveFailedError: EAGAIN: a file of a save of ours.
        CheckpointExistsError: Something else.
    """
    for name in sorted(now):
        if before.get(name) != now[name]:
            owner = owner_of(name)
            raise under_way(path, owner) if owner is not None else _came(path, name)


def _came(path: str, name: str) -> AsyncCkptError:
    what = f"{name!r} in it" if name else "it"
    return CheckpointExistsError(f"{path}: {what} was written meanwhile; it was left untouched", path=path)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns

"""A target under a temporary name beside its place, and its way into place: all of it at once, or nothing.

IMPORTANT: everything is flushed before the rename, and the directory after it: a power cut leaves the old or the new.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import logging
import os
import secrets
import stat
from collections.abc import Collection, Iterator

from asyncckpt.conversion.companions import carry_over
from asyncckpt.conversion.renaming_by_steps import NOT_SO, put_where_nothing_is, remove, replace_by_steps
from asyncckpt.conversion.replaceable import Standing, companions_at, standing_at
from asyncckpt.conversion.under_way import Look, held, look_at, refuse_arrivals, refuse_saves
from asyncckpt.errors import CheckpointExistsError, CheckpointNotFoundError, SaveFailedError
from asyncckpt.format.names import converting_name, kept_name
from asyncckpt.libc import libc as _libc
from asyncckpt.storage.files import Files, fsync_directory
from asyncckpt.uninterrupted import uninterrupted

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_MARGIN_NBYTES = 1 << 20
_logger = logging.getLogger("asyncckpt.conversion")


def check_place(path: str, files: Files, *, overwrite: bool, is_hub: bool = False) -> Standing:
    """Return what stands at the target, which may all be replaced, or carried over.

    Args:
        path: The target.
        files: The storage seam.
        overwrite: Whether it may be replaced.
        is_hub: Whether a Hugging Face directory replaces it.

    Raises:
        CheckpointExistsError: Something does, and `overwrite` is False; or it is no checkpoint, or holds more than one,
            or is pinned.
        SaveFailedError: EAGAIN: a save of ours may be under way there.
        CheckpointNotFoundError: The target's directory is not there.
        OSError: It cannot be known.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise CheckpointNotFoundError(f"{parent}, where {path} would be, is no directory", path=parent)
    standing = standing_at(path, files, overwrite=overwrite, is_hub=is_hub)
    if standing is Standing.CHECKPOINT:
        refuse_saves(path, files)
    return standing


def check_room(path: str, nbytes: int, files: Files) -> None:
    """Refuse a target that does not fit.

    Raises:
        SaveFailedError: The file system has less free than `nbytes`.
        OSError: It cannot be known.
    """
    found = files.statvfs(os.path.dirname(path))
    free = found.f_bavail * found.f_frsize
    if nbytes + _MARGIN_NBYTES > free:
        raise SaveFailedError(
            f"{path} would take {nbytes} bytes, {free} are free there; nothing was written",
            code="ENOSPC",
            path=path,
            detail=f"{nbytes} bytes are wanted, {free} are free",
        )


class Beside(str):
    """The temporary path of a target.

    Attributes:
        stays: What stood at the target is there, and could be put nowhere else: it is not removed.
    """

    stays = False


@contextlib.contextmanager
def beside(path: str) -> Iterator[Beside]:
    """Give a temporary path in the target's directory; what is there at the end is removed, unless it `stays`."""
    directory, name = os.path.split(path)
    temporary = Beside(os.path.join(directory, converting_name(name, secrets.token_hex(6))))
    try:
        yield temporary
    finally:
        if not temporary.stays:
            with uninterrupted():  # a second Ctrl-C, while a large one is removed
                remove(temporary)


def put_into_place(
    temporary: Beside, path: str, files: Files, umask: int, *, standing: Standing, is_hub: bool = False
) -> tuple[str, ...]:
    """Rename a finished target.

    Args:
        temporary: It is complete and flushed.
        path: Where it goes.
        files: The storage seam.
        umask: Of the mode of a lock's file, which goes again.
        standing: What stood there, and goes; nothing else may stand there now.
        is_hub: The target is a Hugging Face directory. What lies beside the weights that go comes along.

    Returns:
        What came along, unless the target has a file of that name.

    Raises:
        CheckpointExistsError: Something else came to stand there meanwhile.
        SaveFailedError: EAGAIN: a save of ours may be under way there.
        OSError: The rename, or making it durable, failed; what stood there is there, where names can be exchanged.

    Blocks: for a save of ours that commits there, at most `overwrite_lock.LOCK_TIMEOUT_S`.
    """
    if standing is Standing.CHECKPOINT:
        with held(path, files, umask):
            return tuple(_replace(temporary, path, files, is_hub))
    with uninterrupted(), contextlib.ExitStack() as stack:
        if standing is Standing.EMPTY_DIRECTORY:
            stack.enter_context(_without_the_empty(path, files))
        put_where_nothing_is(temporary, path, files)
        try:
            fsync_directory(files, os.path.dirname(path))
        except OSError:
            # Nobody knows whether it would outlive a power cut: back to what was there.
            with contextlib.suppress(OSError):
                os.rename(path, temporary)
            raise
    return ()


def _replace(temporary: Beside, path: str, files: Files, is_hub: bool) -> list[str]:
    """Look once more at what stands there, and put the target in its place; return what came along."""
    # IMPORTANT: ahead of the checks, so that each file is one that they have seen, or one that came after this look.
    before = look_at(path, files)
    standing_at(path, files, overwrite=True, is_hub=is_hub)  # again: what has come into it meanwhile would be lost
    refuse_saves(path, files)
    carried = carry_over(path, temporary, companions_at(path, files), files) if is_hub else []
    if carried:
        fsync_directory(files, temporary)
    own = set(look_at(temporary, files))
    with uninterrupted():
        if exchange(temporary, path):
            _settle(temporary, path, before, own, files)
        else:
            replace_by_steps(temporary, path, before, files)
    return carried


def _settle(temporary: Beside, path: str, before: Look, own: Collection[str], files: Files) -> None:
    """Make an exchange durable, or undo it."""
    try:
        # IMPORTANT: whoever came between the look and the exchange is found before anything is removed.
        refuse_arrivals(path, before, look_at(temporary, files))
        fsync_directory(files, os.path.dirname(path))
    except BaseException:
        # Else nobody knows whether it would outlive a power cut: back to what was there, before that is removed.
        try:
            is_back = exchange(temporary, path)
        except OSError:
            is_back = False
        if is_back:
            _give_back(temporary, path, own, files)
        else:
            _keep(temporary, path)
        raise


def _keep(temporary: Beside, path: str) -> None:
    """Save from its removal what stood there and cannot be put back."""
    kept, temporary.stays = kept_name(temporary), True
    try:
        os.rename(temporary, kept)
        _logger.warning("what stood at %s is at %s now, and could not be put back", path, kept)
    except OSError as error:
        _logger.warning(
            "what stood at %s is at %s now, and could not be put back: %s. Move it away: `asyncckpt gc` takes it for "
            "what a conversion has left",
            *(path, temporary, error),
        )


def _give_back(temporary: str, path: str, own: Collection[str], files: Files) -> None:
    """Move to the directory that is back in its place what came, for that instant, into the one that is not."""
    for name in set(look_at(temporary, files)) - set(own):
        try:
            files.rename_noreplace(os.path.join(temporary, name), os.path.join(path, name))
        except OSError as error:
            _logger.warning("%s came to %s while it was replaced, and is lost: %s", name, path, error)


@contextlib.contextmanager
def _without_the_empty(path: str, files: Files) -> Iterator[None]:
    """Remove an empty directory, which is there again if nothing takes its place."""
    mode = None
    try:
        mode = stat.S_IMODE(files.stat(path).st_mode)
        files.rmdir(path)
    except FileNotFoundError:
        mode = None
    except OSError as error:
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
            raise CheckpointExistsError(
                f"{path} was empty, and something came into it meanwhile; it was left untouched", path=path
            ) from error
        raise
    try:
        yield
    except BaseException:
        if mode is not None:
            with contextlib.suppress(OSError):  # FileExistsError: something else came there meanwhile
                os.mkdir(path)
                os.chmod(path, mode)
        raise


def exchange(temporary: str, path: str) -> bool:
    """Swap both names in one step; what stood at `path` is at `temporary` then. False where it cannot be done.

    Raises:
        OSError: The file system refused for another reason.
    """
    old, new = os.fsencode(temporary), os.fsencode(path)
    if not _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in NOT_SO:
        return False
    raise OSError(code, os.strerror(code), temporary, None, path)

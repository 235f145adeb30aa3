"""Where a target may go, and the rename that puts it in place: all of it at once, or nothing.

IMPORTANT: everything is flushed before the rename, and the directory after it: a power cut leaves the old or the new.

What stands there is replaced only if nothing is lost that only lies beside it. Others may be at work there: saves of
ours, which commit under a lock, and whoever puts a file into the directory.
"""

from __future__ import annotations

import contextlib
import ctypes
import enum
import errno
import logging
import os
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.libc import libc as _libc
from asyncckpt.errors import (
    CheckpointExistsError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.format.names import (
    DCP_METADATA_NAME,
    LOCK_NAME,
    MANIFEST_NAME,
    SaveId,
    converting_name,
    is_converting,
    is_kept,
    kept_name,
    owner_of,
)
from asyncckpt.interop.checkpoint_files import belongs, copy_file, is_carried_over, may_belong, model_files
from asyncckpt.interop.sources.detect import OURS, kind_at
from asyncckpt.interop.sources.torch_file import is_torch_file
from asyncckpt.maintenance.gc import CONVERSION, TemporaryKind
from asyncckpt.storage.checkpoint_dir import is_pinned, manifest_or_error
from asyncckpt.storage.commit import LOCK_TIMEOUT_S
from asyncckpt.storage.contents import Contents
from asyncckpt.storage.files import MODE_FILE, Files, fsync_directory, put_new_name, save_failure
from asyncckpt.storage.local import LocalStore

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Answers of renameat2(2) where names can only be renamed, such as on NFS."""

_MARGIN_NBYTES = 1 << 20
_logger = logging.getLogger("asyncckpt.interop")


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
        stays: What is there stood at the target, and could not be put back: it is not removed.
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
            with signals_deferred():  # a second Ctrl-C, while a large one is removed
                remove(temporary)


def remove(path: str) -> None:
    """Remove a file, or a directory and all that is in it. Raises nothing: what stays is logged."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        _logger.warning("%s could not be removed: %s", path, error)


def check_exchange(path: str, files: Files) -> None:
    """Refuse to replace a directory, or by one, where the file system cannot exchange two names.

    Raises:
        CheckpointExistsError: It cannot.
        SaveFailedError: It cannot be tried.
    """
    with beside(path) as one, beside(path) as other:
        try:
            files.mkdir(one)
            files.mkdir(other)
            is_possible = exchange(one, other)
        except OSError as error:
            raise save_failure(error, save_id=None, rank=None, step=None, path=path) from error
    if not is_possible:
        raise _cannot_replace(path)


def _cannot_replace(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} exists, and this file system cannot exchange two names (renameat2), so it cannot be replaced in one "
        "step; it was left untouched. Remove it first, or choose another path",
        path=path,
    )


def publish(
    temporary: Beside,
    path: str,
    files: Files,
    *,
    replace: bool = False,
    verify: Callable[[str], None] = lambda old: None,
) -> None:
    """Rename a finished file or directory to its place. Signals wait until this is done.

    Args:
        temporary: It is complete and flushed. Afterwards nothing is there, or what stood at `path`: for the caller to
            remove.
        path: Where it goes. An empty directory there makes way for a directory.
        files: The storage seam.
        replace: Replaces what else stands there. False: nothing may.
        verify: Called with the path of what is being replaced while that can be put back; if it raises, it is.

    Raises:
        CheckpointExistsError: Something is there, and `replace` is False, or names cannot be exchanged there.
        OSError: The rename, or making it durable, failed; what stood there is there.
    """
    with signals_deferred():
        if replace and os.path.lexists(path):
            _replace(temporary, path, files, verify)
            return
        put_new(temporary, path, files)
        try:
            fsync_directory(files, os.path.dirname(path))
        except OSError:
            # Nobody knows whether it would outlive a power cut: back to what was there.
            with contextlib.suppress(OSError):
                os.rename(path, temporary)
            raise


def put_new(temporary: str, path: str, files: Files) -> None:
    """Rename to a name that nobody has; a directory may take that of an empty one.

    Raises:
        CheckpointExistsError: Somebody has it.
        OSError: A call failed.
    """
    try:
        if os.path.isdir(temporary):
            files.rename(temporary, path)  # replaces nothing but an empty directory
            return
        try:
            put_new_name(files, temporary, path)
        except OSError as error:
            if error.errno not in _NO_FLAGS:
                raise
            # Neither links nor flags: the name is taken by an empty file of our own first.
            files.close(files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE_FILE))
            files.rename(temporary, path)
        with contextlib.suppress(FileNotFoundError):
            files.unlink(temporary)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise CheckpointExistsError(f"{path} came to exist meanwhile; it was left untouched", path=path) from error
        raise


def _replace(temporary: Beside, path: str, files: Files, verify: Callable[[str], None]) -> None:
    own = set(files.listdir(temporary)) if os.path.isdir(temporary) else set()
    if not exchange(temporary, path):
        if os.path.isdir(temporary) != os.path.isdir(path) or (os.path.isdir(path) and files.listdir(path)):
            raise _cannot_replace(path)
        verify(path)
        files.rename(temporary, path)  # a file by a file, or an empty directory by a directory
        fsync_directory(files, os.path.dirname(path))
        return
    try:
        # IMPORTANT: what came there just before the exchange is found before anything is removed.
        verify(temporary)
        fsync_directory(files, os.path.dirname(path))
    except BaseException:
        # Else nobody knows whether it would outlive a power cut: back to what was there, before that is removed.
        try:
            is_back = exchange(temporary, path)
        except OSError:
            is_back = False
        if not is_back:
            _keep(temporary, path)
        elif os.path.isdir(temporary):
            _give_back(temporary, path, own, files)
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
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), temporary, None, path)


def _keep(temporary: Beside, path: str) -> None:
    """Save from its removal what stood at the target and cannot be put back."""
    at, why, temporary.stays = kept_name(temporary), "", True
    try:
        os.rename(temporary, at)
    except OSError as error:
        at, why = temporary, f": {error}. Move it away: `asyncckpt gc` takes it for what a conversion has left"
    _logger.warning("what stood at %s is at %s now, and could not be put back%s", path, at, why)


def _give_back(temporary: str, path: str, own: set[str], files: Files) -> None:
    """Move to the directory that is back in its place what came, for that instant, into the one that is not."""
    for name in set(files.listdir(temporary)) - own:
        try:
            files.rename_noreplace(os.path.join(temporary, name), os.path.join(path, name))
        except OSError as error:
            _logger.warning("%s came to %s while it was replaced, and is lost: %s", name, path, error)


def put_into_directory(temporary: Beside, path: str, files: Files) -> None:
    """Move a finished target's files into a directory that exists; the manifest or DCP's metadata comes last.

    On an error the files that were moved are moved back.

    Raises:
        CheckpointExistsError: A file of the same name was made there meanwhile.
        OSError: A call failed.
    """
    last = (DCP_METADATA_NAME, MANIFEST_NAME)
    moved: list[str] = []
    with signals_deferred():
        try:
            for name in sorted(files.listdir(temporary), key=lambda name: (name in last, name)):
                if name in last:
                    fsync_directory(files, path)
                put_new(os.path.join(temporary, name), os.path.join(path, name), files)
                moved.append(name)
            fsync_directory(files, path)
        except BaseException:
            for name in reversed(moved):
                with contextlib.suppress(OSError):
                    os.rename(os.path.join(path, name), os.path.join(temporary, name))
            raise


def _keeps(path: str) -> str:
    if is_kept(os.path.basename(path)):
        return "a conversion that failed could not put it back to where it was: it may be the only copy"
    return ""


CONVERSIONS = TemporaryKind(
    kind=CONVERSION,
    who="conversion",
    is_named=lambda name: is_converting(name) or is_kept(name),
    may_hold=may_belong,
    keeps=_keeps,
)
"""What conversions that were killed leave behind, for `asyncckpt gc`."""


_Look = Mapping[str, tuple[int, int, int]]
"""By name in a directory, or "" for a file: inode, length, time of the last change."""

_OF_HUB = (".safetensors", ".index.json")
"""Endings of the files that a Hugging Face directory is read from: a new file of these would change its model."""


class Standing(enum.Enum):
    """What stands at a target."""

    NOTHING = enum.auto()
    EMPTY_DIRECTORY = enum.auto()
    CHECKPOINT = enum.auto()


def is_inside(path: str, directory: str) -> bool:
    """Whether a path, which need not exist, lies inside a directory after symbolic links are resolved."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return inner != outer and os.path.commonpath([inner, outer]) == outer


def check_apart(path: str, source: str, to: str) -> None:
    """Refuse targets of kinds that can neither lie in the source nor around it.

    Raises:
        ConfigError: The target is the source, a directory in it, or a file or a Hugging Face directory around it.
    """
    if (
        os.path.realpath(path) == os.path.realpath(source)
        or (is_inside(path, source) and to not in ("torch", "safetensors"))
        or (is_inside(source, path) and to not in (OURS, "dcp"))
    ):
        raise ConfigError(
            f"{path} and the source {source} are the same or inside each other: a file may lie in the source's "
            "directory, and a directory of kind dcp or asyncckpt around the source",
            field="dst",
        )


def check_inside(path: str, source: str, contents: Contents) -> None:
    """Refuse a target in the source's directory whose name would make it a part of the source.

    Raises:
        ConfigError: By its name it is, or would be, a part of the source.
    """
    if not is_inside(path, source):
        return
    kind = contents.source.kind if contents.source is not None else OURS
    first = os.path.relpath(os.path.realpath(path), os.path.realpath(source)).split(os.sep)[0]
    read = contents.source.stamps if contents.source is not None else ()
    is_read = os.path.realpath(path) in {os.path.realpath(os.path.join(source, name)) for name in read}
    if is_read or (first.endswith(_OF_HUB) if kind == "hf" else belongs(first, kind)):
        raise ConfigError(
            f"{path} lies in the source {source}, and by its name it would be a part of it; choose another name",
            field="dst",
        )


def check_around(path: str, files: Files) -> None:
    """Refuse a target around the source that holds a checkpoint, or files of one.

    Raises:
        CheckpointExistsError: It holds one.
        OSError: It cannot be listed.
    """
    found = [name for name in sorted(files.listdir(path)) if belongs(name, "dcp")]
    if found or kind_at(path, files) != OURS:
        what = repr(found[0]) if found else "safetensors files"
        raise CheckpointExistsError(
            f"{path}, in which the source lies, holds a checkpoint already, or a part of one: {what}; it was left "
            "untouched. Choose another path",
            path=path,
        )


def check_place(path: str, to: str, files: Files, *, overwrite: bool) -> Standing:
    """Return what stands at the target, all of which may be replaced, or carried over.

    Args:
        path: The target.
        to: Its kind.
        files: The storage seam.
        overwrite: Whether a checkpoint may be replaced; an empty directory always may.

    Raises:
        CheckpointExistsError: Something does, and `overwrite` is False; or it is no checkpoint, or holds something
            else as well, which is named; or is pinned; or nothing can be replaced on this file system.
        SaveFailedError: EAGAIN: a save of ours may be under way there.
        CheckpointNotFoundError: The target's directory is not there.
        OSError: It cannot be known.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise CheckpointNotFoundError(f"{parent}, where {path} would be, is no directory", path=parent)
    try:
        found = files.lstat(path)
    except FileNotFoundError:
        return Standing.NOTHING
    is_directory, to_directory = stat.S_ISDIR(found.st_mode), to not in ("torch", "safetensors")
    is_empty = is_directory and not files.listdir(path)
    if not is_empty and not overwrite:
        raise CheckpointExistsError(
            f"{path} exists; it was left untouched. Choose another path, or replace it by overwrite=True (--overwrite)",
            path=path,
        )
    if not is_empty:
        _check_replaceable(path, to, files)
    if (is_directory or to_directory) and not (is_empty and to_directory):
        check_exchange(path, files)
    return Standing.EMPTY_DIRECTORY if is_empty else Standing.CHECKPOINT


def _check_replaceable(path: str, to: str, files: Files) -> None:
    """Raise unless nothing but a checkpoint is at `path`, which nobody pins or saves to."""
    mode = files.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise CheckpointExistsError(
            f"{path} is a symbolic link; it was left untouched. Name what it leads to: {os.path.realpath(path)}",
            path=path,
        )
    try:
        kind = kind_at(path, files)
    except (CheckpointNotFoundError, CheckpointNotCommittedError, UnsupportedFormatError):
        raise _no_checkpoint(path) from None
    if stat.S_ISDIR(mode):
        _check_directory(path, kind, to, files)
    elif kind == "hf" or (kind == "torch" and not is_torch_file(path, files)):  # an index alone is no checkpoint
        raise _no_checkpoint(path)
    _refuse_pinned_or_saving(path, files)


def _check_directory(path: str, kind: str, to: str, files: Files) -> None:
    names = files.listdir(path)
    if kind == OURS and not (MANIFEST_NAME in names and any(map(owner_of, names))):
        raise _no_checkpoint(path)
    weights = model_files(path, names, files) if kind == "hf" else frozenset()
    for name in sorted(names):
        goes = name in weights if kind == "hf" and owner_of(name) is None else belongs(name, kind)
        comes_along = kind == to == "hf" and is_carried_over(path, name)
        if os.path.isdir(os.path.join(path, name)) or not (goes or comes_along or name == LOCK_NAME):
            raise CheckpointExistsError(
                f"{path} holds {name!r}, which is no part of the checkpoint that is read there and would be lost; it "
                "was left untouched. Move it away, or choose another path",
                path=path,
            )


def _no_checkpoint(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is no checkpoint of a kind that asyncckpt knows; it was left untouched", path=path
    )


def _refuse_pinned_or_saving(path: str, files: Files) -> None:
    """Raise if the checkpoint at `path` is pinned, or if files show that a save may be under way there."""
    if is_pinned(path, LocalStore(files)):
        raise CheckpointExistsError(
            f"{path} is pinned; it was left untouched. Choose another path, or remove the pin "
            "(`asyncckpt pin --remove`)",
            path=path,
        )
    if not os.path.isdir(path):
        return
    names = files.listdir(path)
    alive = {owner for owner in map(owner_of, names) if owner is not None}
    if MANIFEST_NAME in names:
        standing = manifest_or_error(path, LocalStore(files))
        if standing is not None:
            own = standing.save_id
            alive = {one for one in alive if one != own and not _is_older(one, own)}
        elif len(alive) == 1:  # damaged, or given up: they are its own
            return
    if alive:
        raise _under_way(path, max(alive))


def _under_way(path: str, save_id: SaveId) -> SaveFailedError:
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
    return one.epoch < than.epoch or (one.run_id == than.run_id and one.sequence < than.sequence)


def put_into_place(
    temporary: Beside, path: str, standing: Standing, to: str, files: Files, umask: int
) -> tuple[str, ...]:
    """Put a finished target in the place of what stood there.

    Args:
        temporary: It is complete and flushed. At the end what stood there is there, to be removed.
        path: Where it goes.
        standing: As `check_place` has found it; nothing else may stand there now.
        to: Its kind. Where a Hugging Face directory replaces one, what lies beside the weights that go comes along.
        files: The storage seam.
        umask: Of the mode of a lock's file, which goes again.

    Returns:
        What came along, unless the target has a file of that name.

    Raises:
        CheckpointExistsError: Something else came to stand there meanwhile.
        SaveFailedError: EAGAIN: a save of ours may be under way there.
        OSError: The rename, or making it durable, failed; what stood there is there.

    Blocks: for a save of ours that commits there, at most `commit.LOCK_TIMEOUT_S`.
    """
    if standing is Standing.NOTHING:
        publish(temporary, path, files)
        return ()
    with _locked(path, files, umask):
        # IMPORTANT: ahead of the checks: each file is one that they have seen, or one that came after this look.
        before: _Look = {}
        carried: list[str] = []
        if standing is Standing.CHECKPOINT:
            before = _look_at(path, files)
            _check_replaceable(path, to, files)  # again: what has come into it meanwhile would be lost
            carried = _carry_over(path, temporary, files) if to == "hf" else []
        publish(
            temporary,
            path,
            files,
            replace=True,
            verify=lambda old: _refuse_arrivals(path, before, _look_at(old, files)),
        )
        return tuple(carried)


def _carry_over(path: str, temporary: str, files: Files) -> list[str]:
    """Copy what lies beside the weights of a Hugging Face directory into the one that replaces it, if it lacks it."""
    if not os.path.isdir(path) or kind_at(path, files) != "hf":
        return []
    there = set(files.listdir(temporary))
    names = sorted(name for name in files.listdir(path) if name not in there and is_carried_over(path, name))
    for name in names:
        copy_file(os.path.join(path, name), os.path.join(temporary, name))
    if names:
        fsync_directory(files, temporary)
    return names


@contextlib.contextmanager
def _locked(path: str, files: Files, umask: int) -> Iterator[None]:
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
            lock = LocalStore(files, umask=umask).lock(f"/proc/self/fd/{fd}", LOCK_TIMEOUT_S)
            try:
                stack.enter_context(lock)
            except OSError as error:
                raise OSError(error.errno, error.strerror, os.path.join(path, LOCK_NAME)) from error
            if not os.path.samestat(os.fstat(fd), files.lstat(path)):
                raise CheckpointExistsError(f"{path} was replaced meanwhile; it was left untouched", path=path)
            yield
    finally:
        os.close(fd)


def _look_at(path: str, files: Files) -> _Look:
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


def _refuse_arrivals(path: str, before: _Look, now: _Look) -> None:
    """Raise when something came, or was written to, between two looks."""
    for name in sorted(now):
        if before.get(name) != now[name]:
            owner = owner_of(name)
            if owner is not None:
                raise _under_way(path, owner)
            what = f"{name!r} in it" if name else "it"
            raise CheckpointExistsError(f"{path}: {what} was written meanwhile; it was left untouched", path=path)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns

"""Checks that a target may be written to a path, and renames it there: readers see a complete target or none.

IMPORTANT: everything is flushed before the rename, and the directory after it: a power cut leaves the old target or the
new one.

A directory is replaced only if no other files in it would be lost. Other processes may write there at the same time:
asyncckpt saves, which commit under a lock, and any program that adds a file.
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
from asyncckpt.interop.sources.detect import kind_at
from asyncckpt.interop.sources.rank_files import RANK_FILES
from asyncckpt.interop.sources.torch_file import is_torch_file
from asyncckpt.maintenance.gc import CONVERSION, TemporaryKind
from asyncckpt.storage.checkpoint_dir import is_pinned, manifest_or_error
from asyncckpt.storage.commit import LOCK_TIMEOUT_S
from asyncckpt.storage.contents import NATIVE, Contents
from asyncckpt.storage.files import MODE_FILE, Files, conversion_failure, fsync_directory, put_new_name
from asyncckpt.storage.local import LocalStore

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2
_NO_FLAGS = frozenset({errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP})
"""Errors of renameat2(2) on file systems that do not support its flags, such as NFS."""

_MARGIN_NBYTES = 1 << 20
_logger = logging.getLogger("asyncckpt.interop")


def check_free_space(path: str, nbytes: int, files: Files) -> None:
    """Check that the file system has room for a target of `nbytes`.

    Raises:
        SaveFailedError: Less is free.
        OSError: The free space cannot be determined.
    """
    found = files.statvfs(os.path.dirname(path))
    free = found.f_bavail * found.f_frsize
    if nbytes + _MARGIN_NBYTES > free:
        raise SaveFailedError(
            f"{path} would take {nbytes} bytes, but its file system has {free} free; nothing was written. Free space, "
            "or choose another path",
            code="ENOSPC",
            path=path,
            detail=f"{nbytes} bytes are needed, {free} are free",
        )


class TemporaryPath(str):
    """The temporary path of a target.

    Attributes:
        is_kept: Whether what is there is not removed: it was at the target's path and could not be moved back.
    """

    is_kept = False


@contextlib.contextmanager
def temporary_path(path: str) -> Iterator[TemporaryPath]:
    """Give a temporary path in the directory of `path`. What is there at the end is removed, unless `is_kept`."""
    directory, name = os.path.split(path)
    temporary = TemporaryPath(os.path.join(directory, converting_name(name, secrets.token_hex(6))))
    try:
        yield temporary
    finally:
        if not temporary.is_kept:
            with signals_deferred():  # so that a second Ctrl-C does not interrupt the removal
                remove(temporary)


def remove(path: str) -> None:
    """Remove a file, or a directory with its content. Never raises: a failure is logged."""
    try:
        if os.path.isdir(path) and not os.path.islink(path):
            shutil.rmtree(path)
        elif os.path.lexists(path):
            os.unlink(path)
    except OSError as error:
        _logger.warning("%s could not be removed: %s", path, error)


def check_exchange(path: str, files: Files) -> None:
    """Check that the file system can exchange two names, as it must where a directory is replaced or replaces a file.

    Raises:
        CheckpointExistsError: It cannot.
        SaveFailedError: The attempt failed for another reason.
    """
    with temporary_path(path) as one, temporary_path(path) as other:
        try:
            files.mkdir(one)
            files.mkdir(other)
            is_possible = exchange(one, other)
        except OSError as error:
            raise conversion_failure(error, path) from error
    if not is_possible:
        raise _cannot_replace(path)


def _cannot_replace(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} exists, and this file system cannot exchange two names (renameat2), so it cannot be replaced in one "
        "step; it was left unchanged. Remove it first, or choose another path",
        path=path,
    )


def publish(
    temporary: TemporaryPath,
    path: str,
    files: Files,
    *,
    replace: bool = False,
    verify: Callable[[str], None] = lambda old: None,
) -> None:
    """Rename a finished file or directory to `path`. Signals are handled after that.

    Args:
        temporary: The finished target; complete and flushed. Afterwards there is nothing, or what was at `path`, which
            the caller has to remove.
        path: The new path. An empty directory there is replaced by a directory in any case.
        files: The storage seam.
        replace: Replace what is at `path`. False: there must be nothing.
        verify: Called with the current path of what is being replaced, before that is final. If it raises, what was
            replaced is moved back.

    Raises:
        CheckpointExistsError: There is something at `path`, and `replace` is False, or the file system cannot exchange
            names.
        OSError: The rename or the flush of the directory failed; what was at `path` is there again.
    """
    with signals_deferred():
        if replace and os.path.lexists(path):
            _replace(temporary, path, files, verify)
            return
        put_new(temporary, path, files)
        try:
            fsync_directory(files, os.path.dirname(path))
        except OSError:
            # The rename might be lost in a power cut: undo it.
            with contextlib.suppress(OSError):
                os.rename(path, temporary)
            raise


def put_new(temporary: str, path: str, files: Files) -> None:
    """Rename `temporary` to `path`, where nothing may be; a directory may replace an empty directory.

    Raises:
        CheckpointExistsError: There is something at `path`.
        OSError: A system call failed.
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
            # The file system has neither links nor flags of renameat2: create an empty file, then replace that.
            files.close(files.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, MODE_FILE))
            files.rename(temporary, path)
        with contextlib.suppress(FileNotFoundError):
            files.unlink(temporary)
    except OSError as error:
        if error.errno in (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR):
            raise CheckpointExistsError(f"{path} came to exist meanwhile; it was left unchanged", path=path) from error
        raise


def _replace(temporary: TemporaryPath, path: str, files: Files, verify: Callable[[str], None]) -> None:
    own = set(files.listdir(temporary)) if os.path.isdir(temporary) else set()
    if not exchange(temporary, path):
        if os.path.isdir(temporary) != os.path.isdir(path) or (os.path.isdir(path) and files.listdir(path)):
            raise _cannot_replace(path)
        verify(path)
        files.rename(temporary, path)  # a file by a file, or an empty directory by a directory
        fsync_directory(files, os.path.dirname(path))
        return
    try:
        # IMPORTANT: files that were added just before the exchange are detected before anything is removed.
        verify(temporary)
        fsync_directory(files, os.path.dirname(path))
    except BaseException:
        # Undo the exchange: it might be lost in a power cut, after what was replaced has been removed.
        try:
            is_back = exchange(temporary, path)
        except OSError:
            is_back = False
        if not is_back:
            _keep_replaced(temporary, path)
        elif os.path.isdir(temporary):
            _move_back_arrivals(temporary, path, own, files)
        raise


def exchange(temporary: str, path: str) -> bool:
    """Exchange both names in one step.

    Returns:
        False if the file system does not support this; nothing was changed then.

    Raises:
        OSError: The call failed for another reason.
    """
    old, new = os.fsencode(temporary), os.fsencode(path)
    if not _libc.renameat2(_AT_FDCWD, old, _AT_FDCWD, new, _RENAME_EXCHANGE):
        return True
    code = ctypes.get_errno()
    if code in _NO_FLAGS:
        return False
    raise OSError(code, os.strerror(code), temporary, None, path)


def _keep_replaced(temporary: TemporaryPath, path: str) -> None:
    """Keep what was at `path` and cannot be moved back: it is not removed with the temporary path."""
    at, why, temporary.is_kept = kept_name(temporary), "", True
    try:
        os.rename(temporary, at)
    except OSError as error:
        at, why = temporary, f": {error}. Move it away: `asyncckpt gc` would remove it as a leftover of a conversion"
    _logger.warning("what was at %s is at %s now, and could not be moved back%s", path, at, why)


def _move_back_arrivals(temporary: str, path: str, own: set[str], files: Files) -> None:
    """After an undone exchange, move files that were added to the new directory meanwhile into the old one."""
    for name in set(files.listdir(temporary)) - own:
        try:
            files.rename_noreplace(os.path.join(temporary, name), os.path.join(path, name))
        except OSError as error:
            _logger.warning("%s was added to %s while that was being replaced, and is lost: %s", name, path, error)


def put_into_directory(temporary: TemporaryPath, path: str, files: Files) -> None:
    """Move the files of a finished target into an existing directory; the manifest or DCP's metadata is moved last.

    After an error the files that were moved are moved back.

    Raises:
        CheckpointExistsError: A file of the same name was created there meanwhile.
        OSError: A system call failed.
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
"""Leftovers of conversions that were killed, for `asyncckpt gc`."""


_Stamps = Mapping[str, tuple[int, int, int]]
"""Inode, length in bytes and modification time in ns of each file: by name in a directory, or under "" for one file."""

_OF_HUB = (".safetensors", ".index.json")
"""Endings of the files of the model in a Hugging Face directory: adding such a file would change the model."""


class TargetState(enum.Enum):
    """What is at the path of a target before the conversion."""

    NOTHING = enum.auto()
    EMPTY_DIRECTORY = enum.auto()
    CHECKPOINT = enum.auto()


def is_inside(path: str, directory: str) -> bool:
    """Whether a path, which need not exist, is inside a directory after symbolic links are resolved."""
    inner, outer = os.path.realpath(path), os.path.realpath(directory)
    return inner != outer and os.path.commonpath([inner, outer]) == outer


def check_not_nested(path: str, source: str, to: str) -> None:
    """Check that neither of target and source contains the other, except where that is allowed.

    Raises:
        ConfigError: The target is the source, a directory in it, or a Hugging Face directory that contains it.
    """
    if (
        os.path.realpath(path) == os.path.realpath(source)
        or (is_inside(path, source) and to not in ("torch", "safetensors"))
        or (is_inside(source, path) and to not in (NATIVE, "dcp"))
    ):
        raise ConfigError(
            f"{path} and the source {source} are the same, or one is inside the other: only a file may be inside the "
            "source's directory, and only a directory of kind dcp or asyncckpt may contain the source. Choose another "
            "path",
            field="dst",
        )


def check_inside(path: str, source: str, contents: Contents) -> None:
    """Check that a target inside the source's directory has no name that would make it a part of the source.

    Raises:
        ConfigError: It has such a name.
    """
    if not is_inside(path, source):
        return
    first = os.path.relpath(os.path.realpath(path), os.path.realpath(source)).split(os.sep)[0]
    read = contents.source.stamps if contents.source is not None else ()
    is_read = os.path.realpath(path) in {os.path.realpath(os.path.join(source, name)) for name in read}
    if is_read or (first.endswith(_OF_HUB) if contents.kind == "hf" else belongs(first, contents.kind)):
        raise ConfigError(
            f"{path} is inside the source {source}, and its name would make it a part of that; choose another name",
            field="dst",
        )


def check_around(path: str, files: Files) -> None:
    """Check that a target that contains the source holds no checkpoint, and no files of one.

    Raises:
        CheckpointExistsError: It does.
        OSError: It cannot be listed.
    """
    found = [name for name in sorted(files.listdir(path)) if belongs(name, "dcp")]
    if found or kind_at(path, files) != NATIVE:
        what = repr(found[0]) if found else "safetensors files"
        raise CheckpointExistsError(
            f"{path}, which contains the source, already holds a checkpoint or a part of one: {what}; it was left "
            "unchanged. Choose another path",
            path=path,
        )


def check_place(path: str, to: str, files: Files, *, overwrite: bool) -> TargetState:
    """Check that the target may be written to `path`, and return what is there.

    Args:
        path: The target.
        to: Its kind.
        files: The storage seam.
        overwrite: Whether a checkpoint may be replaced; an empty directory always may.

    Raises:
        CheckpointExistsError: There is something at `path` and `overwrite` is False; or it is no checkpoint, or holds
            a file that is not part of one, which is named; or it is pinned; or the file system cannot replace it.
        SaveFailedError: EAGAIN: an asyncckpt save may be running there.
        CheckpointNotFoundError: The parent directory does not exist.
        OSError: A system call failed.
    """
    parent = os.path.dirname(path)
    if not os.path.isdir(parent):
        raise CheckpointNotFoundError(f"{parent}, the parent directory of {path}, does not exist", path=parent)
    try:
        found = files.lstat(path)
    except FileNotFoundError:
        return TargetState.NOTHING
    is_directory, to_directory = stat.S_ISDIR(found.st_mode), to not in ("torch", "safetensors")
    is_empty = is_directory and not files.listdir(path)
    if not is_empty and not overwrite:
        raise CheckpointExistsError(
            f"{path} exists; it was left unchanged. Choose another path, or replace it: overwrite=True (--overwrite)",
            path=path,
        )
    if not is_empty:
        _check_replaceable(path, to, files)
    if (is_directory or to_directory) and not (is_empty and to_directory):
        check_exchange(path, files)
    return TargetState.EMPTY_DIRECTORY if is_empty else TargetState.CHECKPOINT


def _check_replaceable(path: str, to: str, files: Files) -> None:
    """Raise unless there is only a checkpoint at `path`, that is not pinned and to which no save is running."""
    mode = files.lstat(path).st_mode
    if stat.S_ISLNK(mode):
        raise CheckpointExistsError(
            f"{path} is a symbolic link; it was left unchanged. Give the path it points to: {os.path.realpath(path)}",
            path=path,
        )
    try:
        kind = kind_at(path, files)
    except (CheckpointNotFoundError, CheckpointNotCommittedError, UnsupportedFormatError):
        raise _no_checkpoint(path) from None
    if kind == RANK_FILES:
        raise _no_checkpoint(path)
    if stat.S_ISDIR(mode):
        _check_directory(path, kind, to, files)
    elif kind == "hf" or (kind == "torch" and not is_torch_file(path, files)):  # an index alone is no checkpoint
        raise _no_checkpoint(path)
    _refuse_pinned_or_saving(path, files)


def _check_directory(path: str, kind: str, to: str, files: Files) -> None:
    names = files.listdir(path)
    if kind == NATIVE and not (MANIFEST_NAME in names and any(map(owner_of, names))):
        raise _no_checkpoint(path)
    weights = model_files(path, names, files) if kind == "hf" else frozenset()
    for name in sorted(names):
        goes = name in weights if kind == "hf" and owner_of(name) is None else belongs(name, kind)
        comes_along = kind == to == "hf" and is_carried_over(path, name)
        if os.path.isdir(os.path.join(path, name)) or not (goes or comes_along or name == LOCK_NAME):
            raise CheckpointExistsError(
                f"{path} holds {name!r}, which is not part of the checkpoint there and would be lost; {path} was left "
                "unchanged. Move the file away, or choose another path",
                path=path,
            )


def _no_checkpoint(path: str) -> CheckpointExistsError:
    return CheckpointExistsError(
        f"{path} is no checkpoint of a kind that asyncckpt knows; it was left unchanged. Choose another path", path=path
    )


def _refuse_pinned_or_saving(path: str, files: Files) -> None:
    """Raise if the checkpoint at `path` is pinned, or if files show that a save may be running there."""
    if is_pinned(path, LocalStore(files)):
        raise CheckpointExistsError(
            f"{path} is pinned; it was left unchanged. Choose another path, or remove the pin "
            "(`asyncckpt pin --remove`)",
            path=path,
        )
    if not os.path.isdir(path):
        return
    names = files.listdir(path)
    alive = {owner for owner in map(owner_of, names) if owner is not None}
    if MANIFEST_NAME in names:
        existing = manifest_or_error(path, LocalStore(files))
        if existing is not None:
            own = existing.save_id
            alive = {one for one in alive if one != own and not _is_older(one, own)}
        elif len(alive) == 1:  # the manifest is damaged, or a tombstone: the files belong to that save
            return
    if alive:
        raise _under_way(path, max(alive))


def _under_way(path: str, save_id: SaveId) -> SaveFailedError:
    return SaveFailedError(
        f"{path} holds files of save {save_id}, which may be running; it was left unchanged. Wait until it has ended; "
        "if it was killed, remove its files with `asyncckpt gc`",
        code="EAGAIN",
        path=path,
        detail=f"files of save {save_id} are there",
        save_id=str(save_id),
    )


def _is_older(one: SaveId, than: SaveId) -> bool:
    """Whether save `one` can never replace save `than`; saves of two runs of one epoch have no order."""
    return one.epoch < than.epoch or (one.run_id == than.run_id and one.sequence < than.sequence)


def put_into_place(
    temporary: TemporaryPath, path: str, existing: TargetState, to: str, files: Files, umask: int
) -> tuple[str, ...]:
    """Rename a finished target to `path`, and replace what is there.

    Args:
        temporary: The finished target; complete and flushed. Afterwards there is nothing, or what was at `path`, which
            the caller has to remove.
        path: The new path.
        existing: What `check_place` has found at `path`; it must still be there.
        to: Kind of the target. If a Hugging Face directory replaces another, companion files that the new one lacks
            are copied into it.
        files: The storage seam.
        umask: For the mode of a lock file, which is removed again.

    Returns:
        Names of the companion files that were copied.

    Raises:
        CheckpointExistsError: What is at `path` has changed since `check_place`.
        SaveFailedError: EAGAIN: an asyncckpt save may be running there.
        OSError: The rename or the flush of the directory failed; what was at `path` is there again.

    Blocks: while an asyncckpt save commits there, at most `commit.LOCK_TIMEOUT_S`.
    """
    if existing is TargetState.NOTHING:
        publish(temporary, path, files)
        return ()
    with _locked(path, files, umask):
        # IMPORTANT: taken before the checks. A file that the checks do not see is then detected as a change.
        before: _Stamps = {}
        carried: list[str] = []
        if existing is TargetState.CHECKPOINT:
            before = _stamps_at(path, files)
            _check_replaceable(path, to, files)  # again: files that were added meanwhile would be lost
            carried = _carry_over(path, temporary, files) if to == "hf" else []
        publish(
            temporary,
            path,
            files,
            replace=True,
            verify=lambda old: _refuse_changes(path, before, _stamps_at(old, files)),
        )
        return tuple(carried)


def _carry_over(path: str, temporary: str, files: Files) -> list[str]:
    """Copy the companion files of a Hugging Face directory that its replacement lacks into that; return their names."""
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
    """Hold the lock under which saves commit at `path`, if that is a directory with files of saves.

    IMPORTANT: the lock is taken and released through a descriptor of the directory, which may be renamed meanwhile.
    Through the path, the release would remove the lock file of the new directory.

    Raises:
        CheckpointExistsError: There is another directory at `path` now.
        OSError: EAGAIN: another process held the lock for too long. Any other: the lock cannot be taken.

    Blocks: while another process holds the lock, at most `LOCK_TIMEOUT_S`.
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
                raise CheckpointExistsError(f"{path} was replaced meanwhile; it was left unchanged", path=path)
            yield
    finally:
        os.close(fd)


def _stamps_at(path: str, files: Files) -> _Stamps:
    """Return the stamps of the file or of all files of the directory at `path`, to detect changes later.

    Raises:
        OSError: A system call failed.
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


def _refuse_changes(path: str, before: _Stamps, now: _Stamps) -> None:
    """Raise if a file was added or changed between `before` and `now`."""
    for name in sorted(now):
        if before.get(name) != now[name]:
            owner = owner_of(name)
            if owner is not None:
                raise _under_way(path, owner)
            what = f"{name!r} in it" if name else "it"
            raise CheckpointExistsError(f"{path}: {what} was written meanwhile; it was left unchanged", path=path)


def _stamp(found: os.stat_result) -> tuple[int, int, int]:
    return found.st_ino, found.st_size, found.st_mtime_ns

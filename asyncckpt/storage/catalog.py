"""What checkpoints are there: reading manifests, and looking through directories for them."""

from __future__ import annotations

import errno
import os
import stat
from dataclasses import dataclass

from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from asyncckpt.format.names import MANIFEST_NAME, owner_of
from asyncckpt.format.steps import newest, next_epoch
from asyncckpt.storage.files import Files, read_small_file

COMMITTED = "committed"
INCOMPLETE = "incomplete"
CORRUPT = "corrupt"
UNSUPPORTED = "unsupported"
UNREADABLE = "unreadable"
_STATES: dict[type[Exception], str] = {CorruptCheckpointError: CORRUPT, UnsupportedFormatError: UNSUPPORTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One checkpoint, or what is left of one.

    Attributes:
        path: Its directory.
        state: `committed`: a valid manifest stands. `incomplete`: files of ours without one. `corrupt`: a damaged
            manifest. `unsupported`: of a newer version. `unreadable`: the file system refused.
        manifest: Of a committed one.
        error: Why it is none.
    """

    path: str
    state: str
    manifest: Manifest | None = None
    error: Exception | None = None


def read_manifest(path: str, files: Files) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        CheckpointNotFoundError: No directory is there, or one that holds other things and nothing of ours.
        CheckpointNotCommittedError: The directory is there, empty or with files of ours, but without a manifest.
        CorruptCheckpointError: The manifest is damaged or no regular file.
        UnsupportedFormatError: Written by a newer version.
        OSError: It cannot be read (permissions, I/O).
    """
    try:
        data = read_small_file(files, os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _absent(path, files) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ENXIO):
            raise
        raise CorruptCheckpointError(
            f"{path}: manifest.json is no manifest: {error.strerror}", path=path, file=MANIFEST_NAME, detail=str(error)
        ) from error
    return decode_manifest(data, path)


def _absent(path: str, files: Files) -> AsyncCkptError:
    try:
        names = files.listdir(path)
    except NotADirectoryError:
        return CheckpointNotFoundError(f"{path} is a file; a checkpoint is a directory", path=path)
    except FileNotFoundError:
        return CheckpointNotFoundError(f"there is no checkpoint at {path}: no such directory", path=path)
    if not names or any(owner_of(name) for name in names):
        return CheckpointNotCommittedError(
            f"{path} holds a checkpoint that was begun and never committed (no {MANIFEST_NAME}); load an earlier one",
            path=path,
        )
    inside = newest((f.path, f.manifest) for f in scan(path, files) if f.manifest is not None)
    hint = f"; the newest checkpoint inside it is {inside[0]}" if inside else ""
    return CheckpointNotFoundError(f"there is no checkpoint at {path}: nothing of ours is in it{hint}", path=path)


def look(path: str, files: Files) -> Found | None:
    """Say what the directory at `path` is; None when nothing of a checkpoint is in it."""
    try:
        names = files.listdir(path)
        if MANIFEST_NAME in names:
            return Found(path=path, state=COMMITTED, manifest=read_manifest(path, files))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptCheckpointError, UnsupportedFormatError, OSError) as error:
        return Found(path=path, state=_STATES.get(type(error), UNREADABLE), error=error)
    if not any(owner_of(name) for name in names):
        return None
    incomplete = CheckpointNotCommittedError(f"{path} was begun and never committed", path=path)
    return Found(path=path, state=INCOMPLETE, error=incomplete)


def scan(root: str, files: Files, *, recursive: bool = False) -> list[Found]:
    """Look for checkpoints in `root` itself and one level below it, or at any depth.

    Links are not followed; nothing inside a checkpoint is looked at.

    Returns:
        What was found, ordered by path. Empty when `root` has none.

    Raises:
        OSError: `root` cannot be listed.
    """
    names = files.listdir(root)
    here = look(root, files)
    if here is not None:
        return [here]
    found: list[Found] = []
    for name in sorted(names):
        child = os.path.join(root, name)
        try:
            if not stat.S_ISDIR(files.lstat(child).st_mode):
                continue
            seen = look(child, files)
            if seen is not None:
                found.append(seen)
            elif recursive:
                found += scan(child, files, recursive=True)
        except FileNotFoundError:  # removed meanwhile
            continue
    return found


def next_epoch_beside(path: str, files: Files) -> int:
    """Return the epoch of a run whose first checkpoint goes to `path`: above every sibling's.

    Raises:
        OSError: The parent cannot be listed, for another reason than that it does not exist.
    """
    try:
        found = scan_children(os.path.dirname(path), files)
    except (FileNotFoundError, NotADirectoryError):
        found = []
    return next_epoch((f.path, f.manifest) for f in found if f.manifest is not None)


def scan_children(root: str, files: Files) -> list[Found]:
    """As `scan`, but the children of `root` are looked at even when `root` is a checkpoint itself."""
    children = (os.path.join(root, name) for name in sorted(files.listdir(root)))
    return [found for child in children if (found := look(child, files)) is not None]

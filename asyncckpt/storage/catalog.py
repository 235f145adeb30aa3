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
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, MAX_EPOCH, is_converting, is_quarantined, owner_of
from asyncckpt.format.steps import newest
from asyncckpt.storage.dcp_commit import is_finished, is_replaced
from asyncckpt.storage.files import Files, named, read_small_file
from asyncckpt.storage.standing import tombstone_at

COMMITTED = "committed"
INCOMPLETE = "incomplete"
CORRUPT = "corrupt"
UNSUPPORTED = "unsupported"
UNREADABLE = "unreadable"
ABANDONED = "abandoned"
QUARANTINED = "quarantined"
_STATES: dict[type[Exception], str] = {CorruptCheckpointError: CORRUPT, UnsupportedFormatError: UNSUPPORTED}


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """One checkpoint, or what is left of one.

    Attributes:
        path: Its directory.
        state: `committed`: a valid manifest stands. `incomplete`: files of ours without one. `corrupt`: a damaged
            manifest. `unsupported`: of a newer version. `unreadable`: the file system refused. `abandoned`: a tombstone
            stands. `quarantined`: put aside as broken, whatever it is.
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
    manifest = decode_manifest(data, path)
    if not is_finished(path, manifest, files):
        raise CheckpointNotCommittedError(
            f"{path} holds a checkpoint that was begun and never committed (no {DCP_METADATA_NAME}); load an earlier "
            "one",
            path=path,
        )
    return manifest


def read_newest_manifest(path: str, files: Files) -> Manifest:
    """Return the manifest of the checkpoint at `path`, unless a stock one was saved to the same path after it.

    Raises:
        CorruptCheckpointError: It was; or as `read_manifest`.
        AsyncCkptError: As `read_manifest`.
        OSError: It cannot be read.
    """
    manifest = read_manifest(path, files)
    if is_replaced(path, manifest, files):
        detail = f"{DCP_METADATA_NAME} is of torch.distributed.checkpoint, and newer than {MANIFEST_NAME}"
        older = "" if manifest.dcp is not None else f"; the older one is read once {DCP_METADATA_NAME} is"
        raise CorruptCheckpointError(
            f"{path}: {detail}: two checkpoints were saved to one path, and which is meant cannot be known. Stock "
            f"dcp.load reads the newer one, and so does asyncckpt once {MANIFEST_NAME} and the "
            f"files that carry {manifest.save_id} in their names are moved away{older}",
            path=path,
            file=DCP_METADATA_NAME,
            detail=detail,
        )
    return manifest


def _absent(path: str, files: Files) -> AsyncCkptError:
    try:
        names = files.listdir(path)
    except NotADirectoryError:
        return CheckpointNotFoundError(f"{path} is a file; a checkpoint is a directory", path=path)
    except FileNotFoundError:
        return CheckpointNotFoundError(f"there is no checkpoint at {path}: no such directory", path=path)
    if not names:
        return CheckpointNotCommittedError(
            f"{path} is an empty directory: nothing was saved there, or a save was begun and never committed", path=path
        )
    if any(owner_of(name) for name in names):
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
            return Found(path=path, state=COMMITTED, manifest=read_newest_manifest(path, files))
    except CheckpointNotCommittedError as error:
        state = ABANDONED if tombstone_at(path, files) is not None else INCOMPLETE
        return Found(path=path, state=state, error=error)
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
    if here is not None and (here.state != CORRUPT or any(map(owner_of, names))):
        return [here]
    # What is called manifest.json there is somebody else's, or all that is left of a checkpoint.
    found: list[Found] = []
    for name in sorted(names):
        if is_converting(name):  # another name, or nothing, is there in a moment
            continue
        child = os.path.join(root, name)
        try:
            if not stat.S_ISDIR(files.lstat(child).st_mode):
                continue
            seen = look(child, files)
            if seen is not None and is_quarantined(name):
                found.append(Found(path=child, state=QUARANTINED, error=seen.error))
            elif seen is not None:
                found.append(seen)
            elif recursive:
                found += scan(child, files, recursive=True)
        except FileNotFoundError:  # removed meanwhile
            continue
    return found or ([here] if here is not None else [])


def next_epoch_beside(path: str, files: Files) -> int:
    """Return the epoch of a run whose first checkpoint goes to `path`: above all that was ever begun beside it.

    Committed or not: a save that was begun and never committed may be finished later, by a worker that lives on, and
    two runs of one epoch have no order. Manifests that are damaged or too new count by the names of their files.

    Raises:
        SaveFailedError: Code `epoch`: there is none left.
        OSError: The parent, or a directory or manifest in it, cannot be read; names it. What another user keeps closed
            to this one is passed over: it can be no checkpoint that this user loads.
    """
    parent = os.path.dirname(path)
    try:
        children = sorted(files.listdir(parent))
    except (FileNotFoundError, NotADirectoryError):
        children = []
    largest = max((_largest_epoch(os.path.join(parent, name), files) for name in children), default=0)
    return check_epoch(largest + 1, path)


def check_epoch(epoch: int, path: str) -> int:
    """Return `epoch` if a save id can hold it.

    Raises:
        SaveFailedError: Code `epoch`.
    """
    if epoch <= MAX_EPOCH:
        return epoch
    detail = f"a checkpoint beside it is of epoch {epoch - 1}, the last that there is"
    raise SaveFailedError(
        f"cannot save to {path}: {detail}; save below another directory", code="epoch", path=path, detail=detail
    )


def _largest_epoch(directory: str, files: Files) -> int:
    """Return the largest epoch that a checkpoint's directory names; 0 when it names none."""
    try:
        names = files.listdir(directory)
        epochs = [owner.epoch for name in names if (owner := owner_of(name)) is not None]
        if MANIFEST_NAME in names:
            epochs.append(read_manifest(directory, files).save_id.epoch)
    except CheckpointNotCommittedError:
        tombstone = tombstone_at(directory, files)
        epochs += [] if tombstone is None else [tombstone.save_id.epoch]
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a file
        return 0
    except (CorruptCheckpointError, UnsupportedFormatError):
        pass
    except PermissionError as error:
        if files.lstat(directory).st_uid == os.geteuid():
            raise named(error, directory, "looking for the epochs of earlier runs") from error
        return 0
    except OSError as error:
        raise named(error, directory, "looking for the epochs of earlier runs") from error
    return max(epochs, default=0)

"""What checkpoints are there: reading manifests, looking through directories for them, and which may be loaded."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import dataclass

from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import MAX_MANIFEST_NBYTES, Manifest, decode_manifest, newest
from asyncckpt.format.names import (
    DCP_METADATA_NAME,
    MANIFEST_NAME,
    MAX_EPOCH,
    SaveId,
    is_converting,
    is_quarantined,
    owner_of,
)
from asyncckpt.storage.checkpoint_dir import dcp_metadata_owner, is_finished, tombstone_at
from asyncckpt.storage.files import named
from asyncckpt.storage.locate import store_at
from asyncckpt.storage.store import LINK, PREFIX, Store

COMMITTED = "committed"
INCOMPLETE = "incomplete"
CORRUPT = "corrupt"
UNSUPPORTED = "unsupported"
UNREADABLE = "unreadable"
ABANDONED = "abandoned"
QUARANTINED = "quarantined"
_STATES: dict[type[Exception], str] = {CorruptCheckpointError: CORRUPT, UnsupportedFormatError: UNSUPPORTED}

_LOST = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""What a file system answers that has lost the bytes, or finds that they are not what it wrote."""

_logger = logging.getLogger("asyncckpt")

_log = logging.getLogger("asyncckpt")


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


def read_manifest(path: str, store: Store) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Raises:
        CheckpointNotFoundError: No directory is there, or one that holds other things and nothing of ours.
        CheckpointNotCommittedError: The directory is there, empty or with files of ours, but without a manifest.
        CorruptCheckpointError: The manifest is damaged or no regular file.
        UnsupportedFormatError: Written by a newer version.
        OSError: It cannot be read (permissions, I/O).
    """
    try:
        data = store.read_whole(os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _absent(path, store) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ENXIO):
            raise
        raise CorruptCheckpointError(
            f"{path}: manifest.json is no manifest: {error.strerror}", path=path, file=MANIFEST_NAME, detail=str(error)
        ) from error
    manifest = decode_manifest(data, path)
    if manifest.dcp is not None and not is_finished(path, manifest, store):
        raise CheckpointNotCommittedError(
            f"{path} holds a checkpoint that was begun and never committed (no {DCP_METADATA_NAME}); load an earlier "
            "one",
            path=path,
        )
    return manifest


def read_newest_manifest(path: str, store: Store) -> Manifest:
    """Return the manifest of the checkpoint at `path`, unless a stock one was saved to the same path after it.

    Raises:
        CorruptCheckpointError: It was; or as `read_manifest`.
        AsyncCkptError: As `read_manifest`.
        OSError: It cannot be read.
    """
    manifest = read_manifest(path, store)
    if _is_replaced(path, manifest, store):
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


def _is_replaced(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether somebody else's `.metadata` came to stand beside a manifest after it: by a stock `dcp.save` to its path.

    An older one was there before, and what is ours was saved beside it. Layout "dcp" is never saved beside one.

    Raises:
        OSError: It cannot be known.
    """
    try:
        theirs = store.stat(os.path.join(path, DCP_METADATA_NAME))
        if not theirs.is_object or dcp_metadata_owner(path, store) is not None:
            return False
        ours = store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return False
    return manifest.dcp is not None or theirs.mtime_ns > ours.mtime_ns


def _absent(path: str, store: Store) -> AsyncCkptError:
    try:
        names = store.names(path)
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
    inside = newest((f.path, f.manifest) for f in scan(path, store) if f.manifest is not None)
    hint = f"; the newest checkpoint inside it is {inside[0]}" if inside else ""
    return CheckpointNotFoundError(f"there is no checkpoint at {path}: nothing of ours is in it{hint}", path=path)


def look(path: str, store: Store) -> Found | None:
    """Say what the directory at `path` is; None when nothing of a checkpoint is in it."""
    try:
        names = store.names(path)
        if MANIFEST_NAME in names:
            return Found(path=path, state=COMMITTED, manifest=read_newest_manifest(path, store))
    except CheckpointNotCommittedError as error:
        state = ABANDONED if tombstone_at(path, store) is not None else INCOMPLETE
        return Found(path=path, state=state, error=error)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptCheckpointError, UnsupportedFormatError, OSError) as error:
        return Found(path=path, state=_STATES.get(type(error), UNREADABLE), error=error)
    if not any(owner_of(name) for name in names):
        return None
    incomplete = CheckpointNotCommittedError(f"{path} was begun and never committed", path=path)
    return Found(path=path, state=INCOMPLETE, error=incomplete)


def scan(root: str, store: Store, *, recursive: bool = False, links: bool = False) -> list[Found]:
    """Look for checkpoints in `root` itself and one level below it, or at any depth.

    Nothing inside a checkpoint is looked at.

    Args:
        root: A directory.
        store: Where it lies.
        recursive: At any depth.
        links: Symbolic links in `root` to checkpoints elsewhere count, as for whoever reads; one to a checkpoint that
            is in `root` itself does not. A link that leads nowhere is `unreadable`. False: for whoever removes.

    Returns:
        What was found, ordered by path. Empty when `root` has none.

    Raises:
        OSError: `root` cannot be listed.
    """
    store = store.listed(root)
    names = store.names(root)
    here = look(root, store)
    if here is not None and (here.state != CORRUPT or any(map(owner_of, names))):
        return [here]
    # What is called manifest.json there is somebody else's, or all that is left of a checkpoint.
    found: list[Found] = []
    linked: list[Found] = []
    for entry in sorted(store.entries(root), key=lambda one: one.name):
        if is_converting(entry.name):  # another name, or nothing, is there in a moment
            continue
        child = os.path.join(root, entry.name)
        try:
            if links and entry.kind == LINK and not is_quarantined(entry.name):
                linked += _behind_link(child, store)
            if entry.kind != PREFIX:
                continue
            seen = look(child, store)
            if seen is not None and is_quarantined(entry.name):
                found.append(Found(path=child, state=QUARANTINED, error=seen.error))
            elif seen is not None:
                found.append(seen)
            elif recursive:
                found += scan(child, store, recursive=True)
        except FileNotFoundError:  # removed meanwhile
            continue
    own = {one.manifest.save_id for one in found if one.manifest is not None}
    found += [one for one in linked if one.manifest is None or one.manifest.save_id not in own]
    found.sort(key=lambda one: one.path)
    return found or ([here] if here is not None else [])


def _behind_link(path: str, store: Store) -> list[Found]:
    """Return what the symbolic link at `path` leads to, if that is a checkpoint or cannot be known."""
    try:
        store.names(path)
    except FileNotFoundError:
        error = CheckpointNotFoundError(f"{path} is a broken symbolic link; is a disk not mounted?", path=path)
        return [Found(path=path, state=UNREADABLE, error=error)]
    except NotADirectoryError:
        return []
    except OSError as error:
        return [Found(path=path, state=UNREADABLE, error=error)]
    seen = look(path, store)
    return [] if seen is None else [seen]


def next_epoch_beside(path: str, store: Store) -> int:
    """Return the epoch of a run whose first checkpoint goes to `path`: above all that was ever begun beside it.

    Committed or not: a save that was begun and never committed may be finished later, by a worker that lives on, and
    two runs of one epoch have no order. Manifests that are damaged or too new count by the names of their files.

    Raises:
        SaveFailedError: Code `epoch`: there is none left.
        OSError: The parent, or a directory or manifest in it, cannot be read; names it. What another user keeps closed
            to this one is passed over: it can be no checkpoint that this user loads.
    """
    parent = os.path.dirname(path)
    store = store.listed(parent)
    try:
        children = sorted(store.names(parent))
    except (FileNotFoundError, NotADirectoryError):
        children = []
    largest = max((_largest_epoch(os.path.join(parent, name), store) for name in children), default=0)
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


def _largest_epoch(directory: str, store: Store) -> int:
    """Return the largest epoch that a checkpoint's directory names; 0 when it names none."""
    try:
        names = store.names(directory)
        epochs = [owner.epoch for name in names if (owner := owner_of(name)) is not None]
        if MANIFEST_NAME in names:
            epochs.append(read_manifest(directory, store).save_id.epoch)
    except CheckpointNotCommittedError:
        tombstone = tombstone_at(directory, store)
        epochs += [] if tombstone is None else [tombstone.save_id.epoch]
    except (FileNotFoundError, NotADirectoryError):  # removed meanwhile, or a file
        return 0
    except (CorruptCheckpointError, UnsupportedFormatError):
        pass
    except PermissionError as error:
        if store.is_own(directory):
            raise named(error, directory, "looking for the epochs of earlier runs") from error
        return 0
    except OSError as error:
        if error.errno == errno.ELOOP:  # links that lead in a circle
            return 0
        raise named(error, directory, "looking for the epochs of earlier runs") from error
    return max(epochs, default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint to be tried.

    Attributes:
        path: Its directory.
        save_id: Of its manifest; by the names of its files where that is damaged; None: not even those can be read,
            or it is not on disk.
        step: Of its manifest; None where that cannot be read.
    """

    path: str
    save_id: SaveId | None
    step: int | None = None


def candidates_in(root: str, store: Store) -> list[Candidate]:
    """Return what may be loaded of `root`, the newest by lineage first.

    Also those whose manifest is damaged: they were committed once, and whoever goes on from an older one must be told.
    Not those that were never committed, and not those that were put aside as broken. Links to checkpoints elsewhere
    count, as somebody has made who has moved them to another disk; what cannot be looked at is named in a warning.

    Args:
        root: Absolute path of a directory whose children are checkpoints, or of a checkpoint.
        store: Where it lies.

    Raises:
        OSError: `root` cannot be listed.
    """
    store = store.listed(root)
    found = [candidate for one in scan(root, store, links=True) if (candidate := _candidate(one, store)) is not None]
    return sorted(found, key=_order, reverse=True)


def _order(candidate: Candidate) -> tuple[bool, str]:
    """One that may be the newest goes first: else it would be passed over in silence."""
    return candidate.save_id is None, candidate.save_id or ""


def _candidate(found: Found, store: Store) -> Candidate | None:
    if found.manifest is not None:
        return Candidate(path=found.path, save_id=found.manifest.save_id, step=found.manifest.step)
    if found.state in (INCOMPLETE, ABANDONED, QUARANTINED):
        return None
    try:
        owners = [owner for name in store.names(found.path) if (owner := owner_of(name)) is not None]
    except OSError as error:
        if is_broken(error):
            return Candidate(path=found.path, save_id=None)
        _logger.warning("%s is passed over, it is %s: %s", found.path, found.state, found.error)
        return None  # closed to this user, who can load nothing there
    if not owners:  # what is called manifest.json is somebody else's
        _logger.warning("%s is passed over, no file of a checkpoint is in it: %s", found.path, found.error)
        return None
    return Candidate(path=found.path, save_id=max(owners))  # loading it says what is wrong


def is_broken(error: BaseException) -> bool:
    """Whether `error` says that a checkpoint is not what was written, and not that the caller made a mistake."""
    if isinstance(error, (CorruptCheckpointError, CheckpointNotCommittedError, CheckpointNotFoundError)):
        return True
    return isinstance(error, OSError) and error.errno in _LOST


def latest_checkpoint(root: str | os.PathLike[str]) -> str | None:
    """Return the path of the newest committed checkpoint in `root`, or None.

    Newest by lineage (the run's epoch, then the save's number), not by step: after a rollback the new branch wins.
    Only the manifests are read, so that it may be one whose data is damaged or gone: `load` finds that out, and
    `restore_latest` goes on to the one before. Whose manifest is damaged or cannot be read is passed over with a
    warning.

    Args:
        root: The directory whose children are checkpoints, or a checkpoint itself.

    Raises:
        UnsupportedPathError: A URL or no path.
        OSError: The directory cannot be listed, for another reason than that it does not exist.
    """
    path = checkpoint_path(root)
    try:
        found = scan(path, store_at(path), links=True)
    except FileNotFoundError:
        return None
    for one in found:
        if one.state not in (COMMITTED, INCOMPLETE, ABANDONED, QUARANTINED):
            _log.warning("%s is passed over, it is %s: %s", one.path, one.state, one.error)
    best = newest((f.path, f.manifest) for f in found if f.manifest is not None)
    return best[0] if best else None

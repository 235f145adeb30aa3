"""The catalog: reads manifests, finds the checkpoints in a directory, and lists those that can be loaded."""

from __future__ import annotations

import contextvars
import errno
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.basics.process_lifecycle import BackgroundThread
from asyncckpt.basics.seen_saves import note_seen
from asyncckpt.basics.urls import parent_of
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    CorruptCheckpointError,
    SaveFailedError,
    UnsupportedFormatError,
)
from asyncckpt.format.manifest import (
    MAX_MANIFEST_NBYTES,
    SHORTEST_MANIFEST_NBYTES,
    Manifest,
    decode_manifest,
    is_sealed,
    newest,
)
from asyncckpt.format.names import (
    DCP_METADATA_NAME,
    MANIFEST_NAME,
    MAX_EPOCH,
    SaveId,
    is_converting,
    is_quarantined,
    owner_of,
)
from asyncckpt.storage.checkpoint_dir import dcp_metadata_owner, is_finished, read_record, tombstone_if_readable
from asyncckpt.storage.files import named
from asyncckpt.storage.locate import store_at, with_storage_options
from asyncckpt.storage.store import LINK, PREFIX, Store, for_each

COMMITTED = "committed"
INCOMPLETE = "incomplete"
CORRUPT = "corrupt"
UNSUPPORTED = "unsupported"
UNREADABLE = "unreadable"
ABANDONED = "abandoned"
QUARANTINED = "quarantined"
_STATES: dict[type[Exception], str] = {CorruptCheckpointError: CORRUPT, UnsupportedFormatError: UNSUPPORTED}

_LOST = frozenset({errno.EIO, errno.EBADMSG, errno.EUCLEAN})
"""Errors of a file system that has lost data, or has found that they are damaged."""


CLOCK_EPOCHS_SINCE = 1_735_689_600.0
"""2025-01-01, in seconds since 1970."""

CLOCK_EPOCH_S = 600.0
"""Seconds in which `epoch_by_clock` becomes one larger. Chosen: restarts are rarely closer together, so that counting
on from it does not overtake the clock; and `MAX_CLOCK_EPOCH` is reached in 2042."""

OLD_TOMBSTONE_S = 3600.0
"""In an object store, where each removed checkpoint leaves a tombstone, older ones are not read for an epoch: the clock
gives a larger one than their saves had. Chosen: much longer than `CLOCK_EPOCH_S`."""

NS_PER_S = 1e9

MAX_CLOCK_EPOCH = 900_000
"""The largest epoch that the clock may give, which leaves 99,999 for counting if it is wrong."""

MIRROR_LOOK_S = 120.0
"""How long the listing of a mirror may take where the root has checkpoints. Chosen: an object store that does not
answer fails by itself after one to two minutes.
"""

_Listing = TypeVar("_Listing")

_log = logging.getLogger("asyncckpt")


@dataclass(frozen=True, kw_only=True, slots=True)
class Found:
    """A directory with a checkpoint, or with files of one.

    Attributes:
        path: The directory.
        state: `committed`: it has a valid manifest. `incomplete`: it has files of a save, but no manifest. `corrupt`:
            the manifest is damaged. `unsupported`: the manifest is of a newer version. `unreadable`: a call failed.
            `abandoned`: it has a tombstone. `quarantined`: it was renamed because the checkpoint was damaged.
        manifest: The manifest of a committed checkpoint.
        error: Why it is not committed.
        is_bare: Of an object store: it has a tombstone, which stays, and nothing else.
    """

    path: str
    state: str
    manifest: Manifest | None = None
    error: Exception | None = None
    is_bare: bool = False


def read_manifest(path: str, store: Store) -> Manifest:
    """Return the manifest of the checkpoint at `path`.

    Args:
        path: The checkpoint's directory.
        store: Store that holds it.

    Raises:
        CheckpointNotFoundError: There is no such directory, or it has other files, and none of a checkpoint.
        CheckpointNotCommittedError: The directory is empty, or has files of a save, but no manifest.
        CorruptCheckpointError: The manifest is damaged, or not a regular file.
        UnsupportedFormatError: A newer version wrote it.
        OSError: It cannot be read (permissions, I/O).
    """
    try:
        data = store.read_whole(os.path.join(path, MANIFEST_NAME), MAX_MANIFEST_NBYTES)
        if not is_sealed(data):
            data = read_record(path, store)  # it may be torn, which is no damage
    except (FileNotFoundError, NotADirectoryError) as error:
        raise _absent(path, store) from error
    except OSError as error:
        if error.errno not in (errno.ELOOP, errno.EINVAL, errno.EFBIG, errno.EISDIR, errno.ENXIO):
            raise
        raise CorruptCheckpointError(
            f"{path}: manifest.json is not a regular file of a manifest's size: {error.strerror}",
            path=path,
            file=MANIFEST_NAME,
            detail=str(error),
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
    """Return the manifest of the checkpoint at `path`; refuse it if a stock `dcp.save` has written there later.

    Raises:
        CorruptCheckpointError: A stock `dcp.save` has written to `path` later; or as `read_manifest`.
        AsyncCkptError: As `read_manifest`.
        OSError: It cannot be read.
    """
    manifest = read_manifest(path, store)
    if _is_replaced(path, manifest, store):
        detail = f"torch.distributed.checkpoint wrote {DCP_METADATA_NAME} after {MANIFEST_NAME} was written"
        older = "" if manifest.dcp is not None else f"; to load the older one, move {DCP_METADATA_NAME} away"
        raise CorruptCheckpointError(
            f"{path}: {detail}: two checkpoints were saved to this path, and it is unknown which one you want. To load "
            f"the newer one, move {MANIFEST_NAME} and the files with {manifest.save_id} in their names away, or use "
            f"stock dcp.load{older}",
            path=path,
            file=DCP_METADATA_NAME,
            detail=detail,
        )
    return manifest


def _is_replaced(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether a stock `dcp.save` has written a `.metadata` to the directory after its manifest was written.

    A checkpoint of layout "safetensors" may be saved to a directory that has such a `.metadata`; one of layout "dcp"
    may not, so then the `.metadata` is always the newer one.

    Raises:
        OSError: A call failed, so it is unknown.
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
            f"{path} is an empty directory: no save was begun there, or one was begun and never committed", path=path
        )
    if any(owner_of(name) for name in names):
        return CheckpointNotCommittedError(
            f"{path} holds a checkpoint that was begun and never committed (no {MANIFEST_NAME}); load an earlier one",
            path=path,
        )
    inside = newest((f.path, f.manifest) for f in scan(path, store) if f.manifest is not None)
    hint = f"; the newest checkpoint inside it is {inside[0]}" if inside else ""
    return CheckpointNotFoundError(f"there is no checkpoint at {path}: it has no file of one{hint}", path=path)


def found_at(path: str, store: Store) -> Found | None:
    """Return the state of the directory at `path`; None if it has no file of a checkpoint, or does not exist."""
    try:
        names = store.names(path)
        if _is_bare_tombstone(path, names, store):
            error = CheckpointNotCommittedError(f"{path} holds no checkpoint any more, but a tombstone", path=path)
            return Found(path=path, state=ABANDONED, error=error, is_bare=True)
        if MANIFEST_NAME in names:
            return Found(path=path, state=COMMITTED, manifest=read_newest_manifest(path, store))
    except CheckpointNotCommittedError as error:
        state = ABANDONED if tombstone_if_readable(path, store) is not None else INCOMPLETE
        return Found(path=path, state=state, error=error)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (CorruptCheckpointError, UnsupportedFormatError, OSError) as error:
        return Found(path=path, state=_STATES.get(type(error), UNREADABLE), error=error)
    if not any(owner_of(name) for name in names):
        return None
    incomplete = CheckpointNotCommittedError(f"{path} was begun and never committed", path=path)
    return Found(path=path, state=INCOMPLETE, error=incomplete)


def _is_bare_tombstone(path: str, names: list[str], store: Store) -> bool:
    """Whether a directory of an object store has a tombstone and nothing else, by its listing alone.

    Retention leaves one for each checkpoint that it has removed there, so there may be thousands. In a file system they
    are read: there they are few, and a short file may be torn. A short manifest.json of another program counts too.

    Raises:
        OSError: The record was removed since, or its properties cannot be read.
    """
    if names != [MANIFEST_NAME] or not store.shards_appear_whole:
        return False
    return store.stat(os.path.join(path, MANIFEST_NAME)).nbytes < SHORTEST_MANIFEST_NBYTES


def scan(root: str, store: Store, *, recursive: bool = False, links: bool = False) -> list[Found]:
    """Find checkpoints in `root` itself and one level below it, or at any depth.

    Does not look inside a checkpoint.

    Args:
        root: A directory.
        store: Store that holds it.
        recursive: Whether to look at any depth.
        links: Whether to include symbolic links in `root` that lead to checkpoints elsewhere, for callers that choose
            or list what can be loaded. A link to a checkpoint in `root` itself is left out; a broken link is
            `unreadable`. Callers that remove checkpoints, or add up their sizes, pass False.

    Returns:
        The checkpoints, ordered by path. Empty if there are none.

    Raises:
        OSError: `root` cannot be listed.
    """
    store = store.listed(root)
    names = store.names(root)
    here = found_at(root, store)
    if here is not None and (here.state != CORRUPT or any(map(owner_of, names))):
        return [here]
    # `root` has a manifest.json of another program, or only a damaged manifest: look at its children as well.
    found: list[Found] = []
    linked: list[Found] = []
    entries = [entry for entry in store.entries(root) if not is_converting(entry.name)]  # those are about to be renamed
    paths = [os.path.join(root, entry.name) for entry in entries if entry.kind == PREFIX]
    states = dict(zip(paths, for_each(store, lambda path: found_at(path, store), paths), strict=True))
    for entry in sorted(entries, key=lambda one: one.name):
        child = os.path.join(root, entry.name)
        try:
            if links and entry.kind == LINK and not is_quarantined(entry.name):
                linked += _behind_link(child, store)
            if entry.kind != PREFIX:
                continue
            seen = states[child]
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
    """Return the checkpoint to which the symbolic link at `path` leads; also if that cannot be read."""
    try:
        store.names(path)
    except FileNotFoundError:
        error = CheckpointNotFoundError(f"{path} is a broken symbolic link; is a disk not mounted?", path=path)
        return [Found(path=path, state=UNREADABLE, error=error)]
    except NotADirectoryError:
        return []
    except OSError as error:
        return [Found(path=path, state=UNREADABLE, error=error)]
    seen = found_at(path, store)
    return [] if seen is None else [seen]


def next_epoch_beside(path: str, store: Store) -> int:
    """Return the epoch of a run whose first checkpoint goes to `path`.

    It is larger than all in the parent directory, and at least `epoch_by_clock`: the parent may be on a new disk, and
    earlier runs on others or in a mirror. Saves that were not committed count too, because another worker may still
    finish them, and two runs of the same epoch have no order. If a manifest is damaged or of a newer version, the file
    names in its directory count.

    Args:
        path: Path of the checkpoint.
        store: Store that holds it.

    Raises:
        SaveFailedError: Code `epoch`: the largest epoch is already used.
        OSError: The parent, or a directory or manifest in it, cannot be read; the message names it. Directories of
            other users that this user may not read are skipped, since this user cannot load their checkpoints.
    """
    parent = parent_of(path)
    store = store.listed(parent)
    try:
        children = sorted(store.names(parent))
    except (FileNotFoundError, NotADirectoryError):
        children = []
    largest = max(for_each(store, lambda name: _largest_epoch(os.path.join(parent, name), store), children), default=0)
    return check_epoch(max(largest + 1, epoch_by_clock(time.time())), path)


def epoch_by_clock(now: float) -> int:
    """Return the epoch of a run that begins at `now`, if no checkpoint of another run is known.

    It is larger than those of runs that began `CLOCK_EPOCH_S` earlier, whose checkpoints may be on other disks, or in a
    mirror that hangs.

    Args:
        now: Seconds since 1970.
    """
    return min(max(1, int((now - CLOCK_EPOCHS_SINCE) // CLOCK_EPOCH_S)), MAX_CLOCK_EPOCH)


def check_epoch(epoch: int, path: str) -> int:
    """Return `epoch` if a save ID can have it.

    Args:
        epoch: Epoch for a new run.
        path: Path of its first checkpoint, for the message.

    Raises:
        SaveFailedError: Code `epoch`: it is larger than `MAX_EPOCH`.
    """
    if epoch <= MAX_EPOCH:
        return epoch
    detail = f"a checkpoint in the same directory has epoch {epoch - 1}, the largest possible one"
    raise SaveFailedError(
        f"cannot save to {path}: {detail}; save below another directory", code="epoch", path=path, detail=detail
    )


def _largest_epoch(directory: str, store: Store) -> int:
    """Return the largest epoch in the manifest, tombstone and file names of a directory; 0 if there is none."""
    try:
        names = store.names(directory)
        if _is_bare_tombstone(directory, names, store):
            written_ns = store.stat(os.path.join(directory, MANIFEST_NAME)).mtime_ns  # 0: unknown
            is_old = written_ns > 0 and time.time() - written_ns / NS_PER_S > OLD_TOMBSTONE_S
            tombstone = None if is_old else tombstone_if_readable(directory, store)
            return 0 if tombstone is None else tombstone.save_id.epoch
        epochs = [owner.epoch for name in names if (owner := owner_of(name)) is not None]
        if MANIFEST_NAME in names:
            epochs.append(read_manifest(directory, store).save_id.epoch)
    except CheckpointNotCommittedError:
        tombstone = tombstone_if_readable(directory, store)
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
        if error.errno == errno.ELOOP:  # a cycle of symbolic links
            return 0
        raise named(error, directory, "looking for the epochs of earlier runs") from error
    return max(epochs, default=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A checkpoint that `restore_latest` may load.

    Attributes:
        path: Its directory.
        save_id: ID in its manifest; if that is damaged, the largest in its file names; None: its directory cannot be
            read, or the checkpoint is only in memory.
        step: Step in its manifest; None: it cannot be read.
    """

    path: str
    save_id: SaveId | None
    step: int | None = None


def candidates_in(root: str, store: Store) -> list[Candidate]:
    """Return the checkpoints in `root` that `restore_latest` may load, the newest by lineage first.

    Checkpoints with a damaged manifest are included: they were committed, so the user must be told if an older one is
    loaded instead. Those that were never committed, and quarantined ones, are left out. Symbolic links to checkpoints
    elsewhere are included, for users who move checkpoints to another disk. Directories that cannot be read are logged.

    Args:
        root: Absolute path of a directory whose children are checkpoints, or of a checkpoint.
        store: Store that holds it.

    Raises:
        OSError: `root` cannot be listed.
    """
    store = store.listed(root)
    return candidates_of(scan(root, store, links=True), store)


def candidates_of(found: Iterable[Found], store: Store) -> list[Candidate]:
    """Return what `candidates_in` does, from what `scan` has found."""
    candidates = [candidate for one in found if (candidate := _candidate(one, store)) is not None]
    return sorted(candidates, key=newest_first, reverse=True)


def newest_first(candidate: Candidate) -> tuple[bool, str]:
    """Sort key, largest for the newest. A checkpoint without an ID may be it, so that it is not skipped silently."""
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
        _log.warning("%s is skipped, it is %s: %s", found.path, found.state, found.error)
        return None  # this user may not read it, so cannot load it
    if not owners:  # its manifest.json is of another program
        _log.warning("%s is skipped, it has no file of a checkpoint: %s", found.path, found.error)
        return None
    return Candidate(path=found.path, save_id=max(owners))  # loading it reports what is wrong


def is_broken(error: BaseException) -> bool:
    """Whether `error` means that a checkpoint is damaged or missing, rather than a mistake of the caller."""
    if isinstance(error, (CorruptCheckpointError, CheckpointNotCommittedError, CheckpointNotFoundError)):
        return True
    return isinstance(error, OSError) and error.errno in _LOST


def latest_checkpoint(
    root: str | os.PathLike[str],
    *,
    mirror: str | os.PathLike[str] | None = None,
    storage_options: Mapping[str, str] | None = None,
) -> str | None:
    """Return the path of the newest committed checkpoint in `root`, or None if there is none.

    The newest is that with the largest epoch, then the largest sequence number of the save, not the largest step:
    after a rollback it is one of the new branch. Only manifests are read, so the data may be damaged or missing; `load`
    then raises, and `restore_latest` tries the checkpoint before. Checkpoints whose manifest is damaged or cannot be
    read are skipped with a warning. Not a collective: each rank that calls it lists `root`.

    Args:
        root: A directory whose children are checkpoints, or a checkpoint itself.
        mirror: Directory or URL that holds their copies. The newest of both places is returned; where both have it,
            that in `root`.
        storage_options: Options of the object store that a URL leads to, by obstore's names; their values are never
            shown. None: those of the environment.

    Raises:
        UnsupportedPathError: `root` or `mirror` is not a path, or a URL whose store cannot be used (as `files_at`).
        ConfigError: The store does not take the options.
        OSError: The directory exists and cannot be listed. If the mirror cannot be, or does not answer for two minutes,
            that is only logged, unless `root` has no checkpoint.
    """
    with with_storage_options(storage_options):
        found = _committed_in(checkpoint_path(root))
        if mirror is not None:
            place = checkpoint_path(mirror)
            find = partial(_committed_in, place)
            found += look_at_mirror(find, [], root=checkpoint_path(root), mirror=place, has_local=bool(found))
    places = {checkpoint_path(root), *(parent_of(path) for path, _ in found)}
    note_seen(places, (manifest.save_id for _, manifest in found))
    best = newest(found)  # the first one of two with one ID
    return best[0] if best else None


def look_at_mirror(
    look: Callable[[], _Listing], nothing: _Listing, *, root: str, mirror: str, has_local: bool
) -> _Listing:
    """Return what `look` finds in a mirror; `nothing` if it cannot be listed and the root has checkpoints.

    Args:
        look: Lists the mirror.
        nothing: What is returned, after a warning, where it cannot be listed.
        root, mirror: For the warning.
        has_local: Whether the root has checkpoints.

    Raises:
        OSError, AsyncCkptError: The mirror cannot be listed, and the root has no checkpoints.

    Blocks: up to `MIRROR_LOOK_S`; without a deadline if the root has no checkpoints.
    """
    if not has_local:
        return look()
    found: Future[_Listing] = Future()
    context = contextvars.copy_context()  # it has the storage options of this call

    def run() -> None:
        try:
            found.set_result(context.run(look))
        except BaseException as error:
            found.set_exception(error)

    # IMPORTANT: in a thread: a mount that hangs cannot be interrupted.
    try:
        BackgroundThread(run, "asyncckpt-mirror").start()
    except RuntimeError:  # the limit of threads is reached
        run()
    try:
        if not wait([found], MIRROR_LOOK_S).done:
            raise TimeoutError(errno.ETIMEDOUT, f"it has not answered for {MIRROR_LOOK_S:g} s")
        return found.result()
    except (OSError, AsyncCkptError) as error:
        _log.warning("the mirror %s cannot be listed, so only %s is looked at: %s", mirror, root, error)
        return nothing


def _committed_in(path: str) -> list[tuple[str, Manifest]]:
    try:
        found = scan(path, store_at(path), links=True)
    except FileNotFoundError:
        return []
    for one in found:
        if one.state not in (COMMITTED, INCOMPLETE, ABANDONED, QUARANTINED):
            _log.warning("%s is skipped, it is %s: %s", one.path, one.state, one.error)
    return [(one.path, one.manifest) for one in found if one.manifest is not None]

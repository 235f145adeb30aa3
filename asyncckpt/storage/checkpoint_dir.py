"""A checkpoint's directory: reads its manifest or tombstone, refuses saves to it, recognises it after a rename."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Iterator, Sequence

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.urls import is_object_url, parent_of
from asyncckpt.errors import AsyncCkptError, CheckpointExistsError, UnsupportedFormatError
from asyncckpt.format.dcp import OWNER_WITHIN_NBYTES, owner_of_metadata
from asyncckpt.format.manifest import (
    MAX_MANIFEST_NBYTES,
    Manifest,
    Tombstone,
    decode_manifest,
    decode_tombstone,
    is_sealed,
)
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME, SaveId, is_temporary_record, owner_of
from asyncckpt.storage.files import is_beginning
from asyncckpt.storage.store import DirectoryIdentity, Store

_NO_MANIFEST = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EACCES,
        errno.EPERM,
        errno.ELOOP,
        errno.EISDIR,
        errno.EINVAL,
        errno.EFBIG,
        errno.ENXIO,
    }
)
"""Errors of reading `manifest.json` that mean that there is no manifest which this user can load."""

TORN_WAIT_S = 2.0
"""So long a torn manifest is watched before it is removed: filling one takes one write. Chosen, not measured."""

_LOOKS = 3

PINS_NAME = ".pins"
"""Name of the directory of pins, in the directory that holds the checkpoints."""

NO_IDENTITY = DirectoryIdentity()
"""Returned by `identity_of` if neither directory can be read."""


def prepare_directory(
    path: str, *, save_id: SaveId, store: Store, fsync: bool, overwrite: bool = False, resumed: bool = False
) -> list[str]:
    """Make the checkpoint's directory and its missing parents.

    Args:
        path: Absolute path of the checkpoint.
        save_id: ID of the save that will be written there.
        store: Store that holds the path.
        fsync: Whether to flush the name of each directory.
        overwrite: Whether the save may replace an older checkpoint.
        resumed: Whether the directory may have the save's own manifest, because a process that wrote the save died.

    Returns:
        The directories that this call has made, outermost first. If the save fails, pass them to `remove_made`.

    Raises:
        CheckpointExistsError: The directory has a manifest that the save may not replace, or holds another checkpoint,
            or lies inside one.
        UnsupportedPathError: The mount lacks something that the save needs.
        OSError: A part of the path is not a directory, or a call failed. The directories made by this call are removed.
    """
    refuse_inside(path, save_id, store)
    made: list[str] = []
    try:
        made = store.make_prefix(path, durable=fsync)
        if not made:
            refuse_around(path, save_id, store)
        existing = refuse_existing(path, save_id, store, overwrite=overwrite)
        if isinstance(existing, Manifest) and existing.save_id == save_id and not resumed:
            raise exists_error(path, save_id, existing, overwrite=overwrite)
        store.refuse_unable(path, save_id, fsync=fsync, overwrite=overwrite)
        reach("directory: made")
    except BaseException:
        remove_made(made, store)
        raise
    return made


def check_target_directory(path: str, *, save_id: SaveId, store: Store, overwrite: bool) -> None:
    """Make the checks of `prepare_directory`, but no directory, as another process does that.

    Args:
        path, save_id, store, overwrite: As of `prepare_directory`.

    Raises:
        CheckpointExistsError: As `prepare_directory`.
        OSError: A directory cannot be read.
    """
    refuse_inside(path, save_id, store)
    refuse_around(path, save_id, store)
    refuse_existing(path, save_id, store, overwrite=overwrite)


def remove_made(made: Sequence[str], store: Store) -> None:
    """Remove the directories that `prepare_directory` has made. One that is not empty, and those above it, stay."""
    with contextlib.suppress(OSError):
        for directory in reversed(made):
            reach("failed: removing directory")
            store.remove_prefix(directory)


def read_record(path: str, store: Store) -> bytes:
    """Return the bytes of `manifest.json` of the directory at `path`: a manifest or a tombstone.

    A torn one counts as absent. On a mount without links, the name is created exclusively and then filled, and a writer
    may die in between. Such a file never committed anything, and its whole content has the temporary name beside it.
    Any other incomplete file was damaged, and is returned.

    Raises:
        FileNotFoundError: There is none, or a torn one.
        OSError: As `Store.read_whole`.
    """
    name = os.path.join(path, MANIFEST_NAME)
    found = store.read_whole(name, MAX_MANIFEST_NBYTES)
    for _ in range(_LOOKS):
        if is_sealed(found):
            break
        if any(is_beginning(found, whole) for whole in _temporary_records(path, store)):
            raise FileNotFoundError(errno.ENOENT, "it was never complete: its writer died", name)
        before, found = found, store.read_whole(name, MAX_MANIFEST_NBYTES)
        if found == before:
            break
        # Its writer lives, and may have completed it between the two.
    return found


def _temporary_records(path: str, store: Store) -> Iterator[bytes]:
    for name in store.names(path):
        if is_temporary_record(name):
            with contextlib.suppress(OSError):  # gone, or given its own name
                data = store.read_whole(os.path.join(path, name), MAX_MANIFEST_NBYTES)
                if is_sealed(data):
                    yield data


def is_torn(path: str, store: Store) -> bool:
    """Whether `manifest.json` of the directory at `path` is torn; see `read_record`.

    Raises:
        OSError: It cannot be known.
    """
    try:
        store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return False
    try:
        read_record(path, store)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
    return False


def remove_torn(path: str, store: Store) -> None:
    """Remove a torn manifest or tombstone, if nobody writes it on.

    IMPORTANT: under the lock, which a living writer on this machine would hold. Those of other machines are seen to
    write, since the lock of a mount may not reach them.

    Raises:
        OSError: EAGAIN: it is being written. Others: it cannot be known, or not be removed.

    Blocks: `TORN_WAIT_S` where one is there.
    """
    if not is_torn(path, store):
        return
    name = os.path.join(path, MANIFEST_NAME)
    before = store.read_whole(name, MAX_MANIFEST_NBYTES)
    time.sleep(TORN_WAIT_S)
    if not is_torn(path, store):
        return
    if store.read_whole(name, MAX_MANIFEST_NBYTES) != before:
        raise OSError(errno.EAGAIN, "another machine is publishing a save here", name)
    reach("torn: removing")
    store.remove(name)


def tombstone_if_readable(path: str, store: Store) -> Tombstone | None:
    """Return the tombstone of the directory at `path`, or None if there is none that can be read."""
    try:
        return tombstone_or_error(path, store)
    except OSError:
        return None


def tombstone_or_error(path: str, store: Store) -> Tombstone | None:
    """Return the tombstone of the directory at `path`. Unlike `tombstone_if_readable`, it raises if reading fails.

    Returns:
        The tombstone; None: there is none, or `manifest.json` is another document.

    Raises:
        OSError: A call failed, so it is unknown whether there is a tombstone.
    """
    try:
        return decode_tombstone(read_record(path, store), path)
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
        return None


def manifest_if_readable(path: str, store: Store) -> Manifest | None:
    """Return the manifest of the directory at `path`, or None if there is none that can be read."""
    try:
        return manifest_or_error(path, store)
    except OSError:
        return None


def manifest_or_error(path: str, store: Store) -> Manifest | None:
    """Return the manifest of the directory at `path`. Unlike `manifest_if_readable`, it raises if reading fails.

    Returns:
        The manifest; None: there is no `manifest.json`, or this version cannot decode it as a manifest.

    Raises:
        OSError: A call failed, so it is unknown whether there is a manifest.
    """
    try:
        data = read_record(path, store)
    except FileNotFoundError:
        return None
    try:
        return decode_manifest(data, path)
    except AsyncCkptError:
        return None


def is_finished(path: str, manifest: Manifest, store: Store) -> bool:
    """Whether a manifest of the directory at `path` commits a checkpoint: in layout "dcp" it needs a `.metadata`.

    Raises:
        OSError: A call failed, so it is unknown whether there is a `.metadata`.
    """
    return manifest.dcp is None or has_dcp_metadata(path, store)


def has_dcp_metadata(path: str, store: Store) -> bool:
    """Whether the directory at `path` has a `.metadata`, from asyncckpt or another program.

    Raises:
        OSError: A call failed, so it is unknown.
    """
    try:
        return store.stat(os.path.join(path, DCP_METADATA_NAME)).is_object
    except FileNotFoundError:
        return False


def dcp_metadata_owner(path: str, store: Store) -> SaveId | None:
    """Return the ID of the save that wrote the `.metadata` in the directory at `path`.

    Returns:
        The ID; None: another program wrote it.

    Raises:
        FileNotFoundError: There is no `.metadata`.
        OSError: It cannot be read.
    """
    return owner_of_metadata(store.read(os.path.join(path, DCP_METADATA_NAME), 0, OWNER_WITHIN_NBYTES))


def refuse_foreign_metadata(path: str, save_id: SaveId, store: Store) -> None:
    """Refuse a directory whose `.metadata` another program wrote: it is a checkpoint that must not be replaced.

    Raises:
        CheckpointExistsError: Another program wrote it.
        OSError: A call failed, so it is unknown.
    """
    try:
        owner = dcp_metadata_owner(path, store)
    except FileNotFoundError:
        return
    if owner is None:
        raise CheckpointExistsError(
            f"{path} already holds a checkpoint of torch.distributed.checkpoint (asyncckpt did not write its "
            f"{DCP_METADATA_NAME}); it was left untouched: save to another path",
            path=path,
            save_id=str(save_id),
            existing_save_id=None,
        )


def version_at(path: str, store: Store) -> str | None:
    """Return the store's version of `manifest.json` in the directory at `path`, for `Store.replace_if`.

    Call it before reading the file: then `replace_if` can only replace the content that was read.

    Returns:
        The version; None: there is no such file.

    Raises:
        OSError: A call failed.
    """
    try:
        return store.stat(os.path.join(path, MANIFEST_NAME)).version
    except FileNotFoundError:
        return None


def refuse_existing(path: str, save_id: SaveId, store: Store, *, overwrite: bool) -> Manifest | Tombstone | None:
    """Refuse a directory with a manifest or tombstone that the save may not replace.

    Two kinds may be replaced even without `overwrite`: an older manifest of layout "dcp" without `.metadata`, which
    commits nothing, and the tombstone of an earlier save. The tombstone of this save or a later one means that this
    save was given up.

    Args:
        path: The checkpoint's directory.
        save_id: ID of the save that will be written there.
        store: Store that holds it.
        overwrite: Whether the save may replace an older checkpoint. One whose manifest cannot be read may be newer, or
            not of asyncckpt. Of two runs of the same epoch neither is older, whatever the numbers of their saves.

    Returns:
        The save's own manifest, or the manifest or tombstone that it may replace; None: there is neither.

    Raises:
        CheckpointExistsError: The save may not replace it. Also if it is older and pinned.
        OSError: A call failed, so it is unknown what the directory has.
    """
    try:
        data = read_record(path, store)
    except FileNotFoundError:
        return None
    except OSError as error:
        if error.errno not in _NO_MANIFEST:
            raise
        data = b""  # neither a manifest nor a tombstone
    try:
        existing = decode_manifest(data, path)
    except AsyncCkptError:
        existing = None
    if existing is not None and existing.save_id == save_id:
        return existing
    is_older = existing is not None and existing.save_id < save_id
    if existing is not None and is_older and not is_finished(path, existing, store):
        return existing
    if existing is not None and is_older and overwrite and not _have_no_order(existing.save_id, save_id):
        if is_pinned(path, store):
            raise pinned_error(path, save_id, existing)
        return existing
    try:
        store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        return None
    tombstone = decode_tombstone(data, path) if existing is None else None
    if tombstone is not None and tombstone.save_id < save_id:
        return tombstone
    if tombstone is not None:
        raise CheckpointExistsError(
            f"{path}: save {save_id} was given up by a clean-up (tombstone of {tombstone.save_id}), since its "
            "files had not changed for a long time. Save again",
            path=path,
            save_id=str(save_id),
            existing_save_id=str(tombstone.save_id),
        )
    raise exists_error(path, save_id, existing, overwrite=overwrite)


def _have_no_order(one: SaveId, other: SaveId) -> bool:
    """Whether two saves are of different runs with the same epoch, so that they have no order.

    This happens if a worker chooses an epoch and is stopped before it writes the first file, and a restarted run
    begins at another worker meanwhile.
    """
    return one.epoch == other.epoch and one.run_id != other.run_id


def exists_error(path: str, save_id: SaveId, existing: Manifest | None, *, overwrite: bool) -> CheckpointExistsError:
    """Return the error of a save to a directory whose manifest it may not replace.

    Args:
        path: The directory.
        save_id: ID of the save.
        existing: The manifest; None: it cannot be read.
        overwrite: Whether the save may replace older checkpoints.
    """
    what = f"save {existing.save_id}, step {existing.step}" if existing else "its manifest cannot be read"
    kind, advice = "a committed", "save to another path"
    advice += "" if is_object_url(path) else ", or by a checkpointer made with overwrite=True"
    if existing is not None and overwrite and _have_no_order(existing.save_id, save_id):
        kind, advice = "another run's", "it began when this run did, so neither is older: save to another path"
    elif overwrite:
        kind, advice = ("a newer" if existing else "a"), "overwrite=True replaces older ones only: save to another path"
    return CheckpointExistsError(
        f"{path} already holds {kind} checkpoint ({what}); it was left untouched: {advice}",
        path=path,
        save_id=str(save_id),
        existing_save_id=str(existing.save_id) if existing else None,
    )


def pinned_error(path: str, save_id: SaveId, existing: Manifest) -> CheckpointExistsError:
    """Return the error of a save that would replace the pinned checkpoint with the manifest `existing`."""
    return CheckpointExistsError(
        f"{path} holds a pinned checkpoint (save {existing.save_id}, step {existing.step}); it was left untouched: "
        "save to another path, or remove the pin (`asyncckpt pin --remove`)",
        path=path,
        save_id=str(save_id),
        existing_save_id=str(existing.save_id),
    )


@contextlib.contextmanager
def refuse_other_commits(path: str, save_id: SaveId, store: Store, *, overwrite: bool) -> Iterator[None]:
    """Raise the right error if another save commits to `path` while the `with` block runs.

    That save removes the files of this one, so calls in the block fail with ENOENT.

    Args:
        path, save_id, store, overwrite: As of `refuse_existing`.

    Raises:
        CheckpointExistsError: Another save has committed, and this one may not replace its manifest.
    """
    try:
        yield
    except FileNotFoundError:
        refuse_existing(path, save_id, store, overwrite=overwrite)
        raise


def refuse_inside(path: str, save_id: SaveId, store: Store) -> None:
    """Refuse a path inside a committed checkpoint: a search for checkpoints does not look inside one.

    A `manifest.json` of another program is ignored.

    Raises:
        CheckpointExistsError: A directory above `path` is a checkpoint; the message names it.
        OSError: A call failed, so it is unknown.
    """
    outer = parent_of(path)
    while (above := parent_of(outer)) != outer:
        try:
            data = read_record(outer, store)
            existing: str | None = str(decode_manifest(data, outer).save_id)
        except UnsupportedFormatError:
            existing = None
        except (OSError, AsyncCkptError) as error:
            if isinstance(error, OSError) and error.errno not in _NO_MANIFEST:
                raise
            outer = above
            continue
        raise CheckpointExistsError(
            f"cannot save to {path}: it lies inside the committed checkpoint {outer} "
            f"({f'save {existing}' if existing else 'of a newer version'}), and would not be found there; save beside "
            "that one",
            path=path,
            save_id=str(save_id),
            existing_save_id=existing,
        )


def refuse_around(path: str, save_id: SaveId, store: Store) -> None:
    """Refuse a directory that holds a committed checkpoint: with a manifest above it, it would not be found any more.

    Raises:
        CheckpointExistsError: A directory in `path` is a checkpoint; the message names it.
        OSError: `path` cannot be listed.
    """
    try:
        names = store.names(path)
    except FileNotFoundError:
        return
    for name in names:
        existing = None if owner_of(name) is not None else manifest_if_readable(os.path.join(path, name), store)
        if existing is not None:
            inner = os.path.join(path, name)
            raise CheckpointExistsError(
                f"cannot save to {path}: the committed checkpoint {inner} (save {existing.save_id}) lies in it, and "
                f"would not be found any more; save beside that one, to {os.path.join(path, 'NAME')}",
                path=path,
                save_id=str(save_id),
                existing_save_id=str(existing.save_id),
            )


def pin_of(path: str) -> str:
    """Return the path of the pin of the checkpoint at `path`."""
    return os.path.join(parent_of(path), PINS_NAME, os.path.basename(path))


def is_pinned(path: str, store: Store) -> bool:
    """Whether the checkpoint at `path` is pinned.

    Raises:
        OSError: A call failed, so it is unknown.
    """
    try:
        store.stat(pin_of(path))
    except FileNotFoundError:
        return False
    return True


def identity_of(path: str, store: Store) -> DirectoryIdentity:
    """Return the identity of the directory at `path`; if there is none, that of its parent; else `NO_IDENTITY`."""
    for directory in (path, os.path.dirname(path)):
        found = _identity_at(directory, store)
        if found != NO_IDENTITY:
            return found
    return NO_IDENTITY


def has_identity(path: str, identity: DirectoryIdentity, store: Store) -> bool:
    """Whether `path` or its parent still is the directory that `identity_of` returned; True for `NO_IDENTITY`."""
    return identity == NO_IDENTITY or any(
        _is_same(identity, _identity_at(directory, store)) for directory in (path, os.path.dirname(path))
    )


def _is_same(one: DirectoryIdentity, other: DirectoryIdentity) -> bool:
    return one.inode == other.inode and (one.birth_ns == other.birth_ns or not (one.birth_ns and other.birth_ns))


def _identity_at(directory: str, store: Store) -> DirectoryIdentity:
    try:
        return store.identity(directory)
    except OSError:
        return NO_IDENTITY

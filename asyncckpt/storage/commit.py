"""The commit: publishes the manifest after all other files, then removes files of earlier saves. Steps: COMMIT.md.

IMPORTANT: the manifest is published after all files that it names are durable, since readers may load as soon as it
exists. It is created only if there is none, or replaces an older one in one step.

Layout "dcp" has a second commit record: the `.metadata` that stock readers read. It names files of one save that are
all durable, and gets its name by a rename, so a stock reader finds a complete checkpoint. A manifest of this layout
counts only if there is also a `.metadata` of asyncckpt. So for both kinds of readers a save is committed by the last of
the two records, and the checkpoint that it replaces is complete until then.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
from collections.abc import Callable, Sequence
from datetime import datetime, timezone

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CommitUnknownError
from asyncckpt.format.checksums import file_checksum
from asyncckpt.format.dcp import MetadataTemplates
from asyncckpt.format.index import decode_index
from asyncckpt.format.manifest import DcpRecord, Manifest, RankRecord, Tombstone, encode_manifest
from asyncckpt.format.names import (
    DCP_METADATA_NAME,
    MANIFEST_NAME,
    SaveId,
    owner_of,
    temporary_dcp_metadata_name,
    temporary_manifest_name,
)
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import (
    dcp_metadata_owner,
    exists_error,
    has_dcp_metadata,
    is_finished,
    manifest_if_readable,
    refuse_existing,
    refuse_foreign_metadata,
    refuse_other_commits,
    remove_torn,
    version_at,
)
from asyncckpt.storage.files import await_seen
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.store import Store, UnknownOutcomeError, exclusively, for_each

LOCK_TIMEOUT_S = 30.0
"""Timeout of the directory's lock. A holder needs it only while it flushes a few directories. Chosen, not measured."""

_logger = logging.getLogger("asyncckpt.storage")
_templates = MetadataTemplates()


def build_manifest(
    requests: Sequence[SaveRequest], results: Sequence[RankResult], *, package: str, dcp_metadata: bytes | None
) -> Manifest:
    """Return the manifest of a save whose ranks are all written.

    Args:
        requests: Save requests of the ranks that this worker serves, in order. The first is that of rank 0, which has
            step and metadata.
        results: Result of each rank, in order.
        package: asyncckpt's version.
        dcp_metadata: In layout "dcp" the content of `.metadata`.

    Returns:
        The manifest. Its timings are in seconds; each is the largest of all ranks.
    """
    first = requests[0]
    assert first.step is not None, "the request of rank 0 has no step"
    return Manifest(
        save_id=SaveId.parse(first.save_id),
        step=first.step,
        world_size=first.world_size,
        created=datetime.now(timezone.utc).isoformat(timespec="milliseconds"),
        fsync=all(request.fsync for request in requests),
        writer=f"asyncckpt {package}",
        ranks=tuple(result.record for result in results),
        metadata=json.loads(first.metadata),
        timings={name: round(max(r.seconds.get(name, 0.0) for r in results), 6) for name in results[0].seconds},
        dcp=None if dcp_metadata is None else DcpRecord(nbytes=len(dcp_metadata), checksum=file_checksum(dcp_metadata)),
        mirror=first.mirror or None,
    )


def commit_save(requests: Sequence[SaveRequest], results: Sequence[RankResult], *, store: Store, package: str) -> None:
    """Commit a save whose ranks are all written and durable.

    Args:
        requests, results, package: As of `build_manifest`.
        store: Store that holds the checkpoint.

    Raises:
        CorruptCheckpointError: In layout "dcp", the structure of a rank does not decode.
        CheckpointExistsError, CommitUnknownError, OSError: As `publish`.

    Blocks: as `publish`.
    """
    first, parts = requests[0], [result.dcp for result in results if result.dcp is not None]
    is_dcp = len(parts) == len(results)
    dcp_metadata = _templates.metadata_of(SaveId.parse(first.save_id), parts) if is_dcp else None
    manifest = build_manifest(requests, results, package=package, dcp_metadata=dcp_metadata)
    publish(first.path, manifest, store=store, overwrite=first.overwrite, dcp_metadata=dcp_metadata)


def check_rank_files(path: str, manifest: Manifest, *, store: Store) -> None:
    """Check that each file of a checkpoint is a regular file of the recorded length, and each index unchanged.

    Args:
        path: The checkpoint's directory.
        manifest: Its manifest.
        store: Store that holds it.

    Raises:
        OSError: A file is missing or differs; names it.
        CorruptCheckpointError, UnsupportedFormatError: An index does not decode.
    """
    store = store.listed(path)

    def check(record: RankRecord) -> None:
        index_path = os.path.join(path, record.index_name)
        data = await_seen(
            functools.partial(store.read_whole, index_path, record.index_nbytes),
            lambda found: len(found) == record.index_nbytes,
        )
        if len(data) != record.index_nbytes or file_checksum(data) != record.index_checksum:
            raise OSError(errno.EIO, "the index differs from what was written", index_path)
        index = decode_index(data)
        sizes = {shard.name: shard.nbytes for shard in index.shards} | {index.objects.name: index.objects.nbytes}
        if index.items is not None:
            sizes[index.items.name] = index.items.nbytes
        for name, nbytes in sizes.items():
            file = os.path.join(path, name)
            found = await_seen(
                functools.partial(store.stat, file),
                lambda entry, nbytes=nbytes: entry.nbytes == nbytes or not entry.is_object,  # type: ignore[misc]
            )
            if not found.is_object or found.nbytes != nbytes:
                raise OSError(errno.EIO, f"{found.nbytes} bytes long, {nbytes} were written", file)

    for_each(store, check, manifest.ranks)


def publish(
    path: str,
    manifest: Manifest,
    *,
    store: Store,
    overwrite: bool = False,
    dcp_metadata: bytes | None = None,
    token: str = "",
) -> None:
    """Commit: publish `manifest` if the directory has none. Idempotent for the same save.

    With `overwrite`, the manifest replaces an older one in one step, while the directory's lock is held. Layout "dcp"
    takes the lock as well, because it publishes two files. An older manifest of layout "dcp" without `.metadata` is
    replaced even without `overwrite`.

    Args:
        path: The checkpoint's directory. All files that the manifest names must be durable.
        manifest: The manifest; `manifest.fsync` says whether to flush.
        store: Store that holds the directory.
        overwrite: Whether to replace an older manifest. `remove_leftovers` then removes the old checkpoint's files.
        dcp_metadata: In layout "dcp" the content of `.metadata`, to which `manifest.dcp` belongs.
        token: As of `temporary_manifest_name`.

    Raises:
        CheckpointExistsError: The directory has the manifest of another save (with `overwrite`: one that is not older),
            or a `.metadata` of another program. It was left unchanged.
        CommitUnknownError: Publishing failed, so that the manifest may or may not be there. Nothing was deleted.
        OSError: A call failed before publishing; nothing was published.

    Blocks: for the writes; while another process holds the lock, at most `LOCK_TIMEOUT_S`.
    """
    reach("commit: begun")
    existing = refuse_existing(path, manifest.save_id, store, overwrite=overwrite)
    replaces = existing is not None and existing.save_id != manifest.save_id
    is_created = store.publishes_by_creation(path, manifest.save_id)
    with contextlib.ExitStack() as stack:
        is_locked = False
        if dcp_metadata is not None:  # two files can be published as one only under a lock
            stack.enter_context(store.lock(path, LOCK_TIMEOUT_S))
            is_locked = True
        elif overwrite or replaces or is_created:
            is_locked = stack.enter_context(exclusively(store, path, LOCK_TIMEOUT_S))
        if is_locked:
            remove_torn(path, store)
            refuse_existing(path, manifest.save_id, store, overwrite=overwrite)  # published while the lock was awaited
        may_replace = overwrite or replaces or dcp_metadata is not None
        _publish(
            path,
            manifest,
            store,
            dcp_metadata,
            overwrite=overwrite,
            may_replace=may_replace,
            is_created=is_created,
            token=token,
        )


def _publish(
    path: str,
    manifest: Manifest,
    store: Store,
    dcp_metadata: bytes | None,
    *,
    overwrite: bool,
    may_replace: bool,
    is_created: bool,
    token: str,
) -> None:
    temporary: str | None = None  # path of the file that becomes `.metadata`
    version: str | None = None  # the store's version of the manifest to replace
    existing: Manifest | Tombstone | None = None
    try:
        with refuse_other_commits(path, manifest.save_id, store, overwrite=overwrite):
            check_rank_files(path, manifest, store=store)
        reach("commit: files checked")
        if dcp_metadata is not None:
            temporary = _write_dcp_metadata(path, manifest, dcp_metadata, store)
            reach("commit: metadata written")
        if manifest.fsync:
            store.sync(os.path.dirname(path))
        reach("commit: parent flushed")
        if may_replace:
            version = version_at(path, store)
            existing = refuse_existing(path, manifest.save_id, store, overwrite=overwrite)
    except BaseException:
        if temporary is not None:
            store.remove_quietly(temporary)
        raise
    if temporary is None:
        _put(path, manifest, store, version if existing is not None else None, token)
    else:
        _put_both(path, temporary, manifest, existing, store, version, token)
    if is_created:
        _check_after_creation(path, manifest, store)
    try:
        reach("commit: put")
        # IMPORTANT: until the directory is flushed, a power cut may remove the manifest again.
        if manifest.fsync:
            store.sync(path)
        reach("commit: durable")
    except OSError as error:
        raise _unknown(path, manifest.save_id, error) from error


def _check_after_creation(path: str, manifest: Manifest, store: Store) -> None:
    """Look at the files once more: the lock may not reach another machine, which may have published, and removed them.

    Raises:
        CommitUnknownError: They are gone, or changed. The manifest stays: who loads it must be told.
    """
    try:
        check_rank_files(path, manifest, store=store)
    except OSError as error:
        text = f"another machine has saved to this path at the same time, and its checkpoint may be damaged ({error})"
        raise _unknown(path, manifest.save_id, OSError(errno.EIO, text, path)) from error


def _put_both(
    path: str,
    temporary: str,
    manifest: Manifest,
    existing: Manifest | Tombstone | None,
    store: Store,
    version: str | None,
    token: str,
) -> None:
    """Publish manifest and `.metadata`, in the order in which a checkpoint that they replace is complete until then."""
    metadata_first = False
    try:
        if isinstance(existing, Manifest) and existing.save_id != manifest.save_id:
            # The rename of the manifest ends a complete checkpoint without `.metadata`: it must commit the new one.
            metadata_first = is_finished(path, existing, store) and not has_dcp_metadata(path, store)
        if metadata_first:
            _put_dcp_metadata(path, temporary, manifest, store)
        _put(path, manifest, store, version if existing is not None else None, token)
    except CommitUnknownError:
        raise
    except BaseException:
        if metadata_first:
            _remove_dcp_metadata_quietly(path, store, doomed=manifest.save_id, is_locked=True)
        store.remove_quietly(temporary)
        raise
    if not metadata_first:
        try:
            if manifest.fsync:  # IMPORTANT: else only `.metadata` might be there after a power cut
                store.sync(path)
            _put_dcp_metadata(path, temporary, manifest, store)
        except OSError as error:
            raise _unknown(path, manifest.save_id, error) from error


def _write_dcp_metadata(path: str, manifest: Manifest, data: bytes, store: Store) -> str:
    """Write `.metadata` under its temporary name; flush it if `manifest.fsync` says so. Return the path.

    Raises:
        CheckpointExistsError: The directory has a `.metadata` of another program.
        OSError: It cannot be written.
    """
    refuse_foreign_metadata(path, manifest.save_id, store)
    temporary = os.path.join(path, temporary_dcp_metadata_name(manifest.save_id))
    with contextlib.suppress(FileNotFoundError):
        store.remove(temporary)  # of an earlier attempt at this save
    store.put(temporary, data, durable=manifest.fsync)
    return temporary


def _put_dcp_metadata(path: str, temporary: str, manifest: Manifest, store: Store) -> None:
    """Rename the temporary file to `.metadata`; flush the directory if `manifest.fsync` says so.

    Raises:
        OSError: A call failed.
    """
    store.move(temporary, os.path.join(path, DCP_METADATA_NAME), replace=True)
    reach("commit: metadata put")
    if manifest.fsync:
        store.sync(path)


def _put(path: str, manifest: Manifest, store: Store, version: str | None, token: str) -> None:
    """Publish the manifest if there is none; with `version`, replace the file with that version.

    If the save's own manifest is already there, this succeeds.
    """
    final = os.path.join(path, MANIFEST_NAME)
    temporary = os.path.join(path, temporary_manifest_name(manifest.save_id, token))
    data = encode_manifest(manifest)
    try:
        if version is None:
            store.put_if_absent(final, data, temporary=temporary, durable=manifest.fsync)
        else:
            store.replace_if(final, data, version, temporary=temporary, durable=manifest.fsync)
    except UnknownOutcomeError as error:
        existing = manifest_if_readable(path, store) if error.shows_itself else None
        if existing is None or existing.save_id != manifest.save_id:
            raise _unknown(path, manifest.save_id, error) from error
    except OSError as error:
        existing = manifest_if_readable(path, store)
        if existing is not None and existing.save_id == manifest.save_id:
            return
        # If another save has committed meanwhile, that is the better message.
        refuse_existing(path, manifest.save_id, store, overwrite=version is not None)
        if error.errno == errno.EEXIST:
            raise exists_error(path, manifest.save_id, existing, overwrite=False) from error
        raise


def _unknown(path: str, save_id: SaveId, error: OSError) -> CommitUnknownError:
    return CommitUnknownError(
        f"{path}: publishing the manifest of save {save_id} failed ({error}); whether the checkpoint is committed is "
        "unknown until the storage answers again. Nothing was deleted; check with `asyncckpt ls`",
        code=errno.errorcode.get(error.errno or 0, "EIO"),
        path=path,
        detail=str(error),
        save_id=str(save_id),
    )


def remove_leftovers(path: str, keep: SaveId, *, store: Store) -> list[str]:
    """Remove the files of earlier saves from the directory of a committed checkpoint.

    IMPORTANT: remove them only once the manifest of `keep` is there: from then on no earlier save can be committed to
    this directory. A later save, which overwrites, still can, so its files stay.

    Args:
        path: The checkpoint's directory.
        keep: ID of the save that is committed there.
        store: Store that holds it.

    Returns:
        The names of the removed files. Other files, links and directories stay. If the manifest of `keep` is not
        there, nothing is removed.
    """
    existing = manifest_if_readable(path, store)
    if existing is None or existing.save_id != keep:
        return []
    if existing.dcp is None and not _remove_dcp_metadata_quietly(path, store, before=keep):
        return []
    return _remove(path, store, lambda owner: owner < keep)


def remove_files_of(path: str, save_id: SaveId, *, store: Store) -> list[str]:
    """Remove the files of a save that was given up. Removes nothing if it is, or may be, committed.

    Args:
        path: The checkpoint's directory.
        save_id: ID of the save.
        store: Store that holds it.

    Returns:
        The names of the removed files.
    """
    try:
        store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        pass
    except OSError:
        return []
    else:
        existing = manifest_if_readable(path, store)
        if existing is None or existing.save_id == save_id:
            return []
    if not _remove_dcp_metadata_quietly(path, store, doomed=save_id):
        return []
    return _remove(path, store, lambda owner: owner == save_id)


def remove_dcp_metadata(
    path: str, doomed: SaveId | None, before: SaveId | None, store: Store, *, is_locked: bool = False
) -> None:
    """Remove the `.metadata` of a save whose files are about to be removed.

    IMPORTANT: call it before the files are removed: a stock reader loads the files that `.metadata` names.

    Args:
        path: The checkpoint's directory.
        doomed: Remove it if this save wrote it.
        before: Remove it also if an earlier save than this wrote it.
        store: Store that holds the directory.
        is_locked: Whether the caller holds the directory's lock; else this function takes it.

    Raises:
        OSError: It cannot be removed, or another process holds the lock for too long.

    Blocks: for the lock, at most `LOCK_TIMEOUT_S`.
    """

    def is_doomed(owner: SaveId | None) -> bool:
        if owner is None:
            return False
        return owner == doomed or (before is not None and owner < before)

    with contextlib.suppress(FileNotFoundError):
        if not is_doomed(dcp_metadata_owner(path, store)):
            return
        with contextlib.nullcontext() if is_locked else store.lock(path, LOCK_TIMEOUT_S):
            if is_doomed(dcp_metadata_owner(path, store)):
                store.remove(os.path.join(path, DCP_METADATA_NAME))


def _remove_dcp_metadata_quietly(
    path: str, store: Store, *, doomed: SaveId | None = None, before: SaveId | None = None, is_locked: bool = False
) -> bool:
    """Do what `remove_dcp_metadata` does; log an error. Returns whether no `.metadata` of these saves is left."""
    try:
        remove_dcp_metadata(path, doomed, before, store, is_locked=is_locked)
    except OSError as error:
        _logger.warning("cannot clean up %s: %s", path, error)
        return False
    return True


def _remove(path: str, store: Store, doomed: Callable[[SaveId], bool]) -> list[str]:
    """Remove the files of the saves for which `doomed` is true. If one cannot be removed, the others still are."""
    removed: list[str] = []
    refused: OSError | None = None
    try:
        names = store.names(path)
    except OSError as error:
        names, refused = [], error
    for name in names:
        owner = owner_of(name)
        if owner is None or not doomed(owner):
            continue
        try:
            if store.stat(os.path.join(path, name)).is_object:
                reach("leftovers: removing")
                store.remove(os.path.join(path, name))
                removed.append(name)
        except FileNotFoundError:
            continue  # removed by its writer, or by the worker of another node that gives up the same save
        except OSError as error:
            refused = error
    if refused is not None:
        _logger.warning("cannot clean up %s: %s", path, refused)
    return removed

"""The commit: a checkpoint's manifest, last of all its files; other attempts' leftovers after it. Steps: COMMIT.md.

IMPORTANT: the manifest is put if absent, or in the place of an older one, after everything that it names is durable.
Whoever sees it may load.

Layout "dcp" has a second commit record: the `.metadata` that stock readers look for. It names files of one save that
are all durable, and a rename gives it its name, so a stock reader finds a whole checkpoint. A manifest of this layout
counts once any `.metadata` of ours stands beside it. So for both kinds of readers a save comes into being with the
last of the two records, and what it replaces stays whole until then.
"""

from __future__ import annotations

import contextlib
import errno
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
from asyncckpt.format.manifest import DcpRecord, Manifest, Tombstone, encode_manifest
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
    exists,
    has_dcp_metadata,
    is_finished,
    overtaken,
    refuse_foreign_metadata,
    refuse_standing,
    standing_at,
    version_at,
)
from asyncckpt.storage.rank_writer import RankResult
from asyncckpt.storage.store import Store, UnknownOutcomeError, exclusively

LOCK_TIMEOUT_S = 30.0
"""Nobody holds the lock longer than it takes to flush a few directories. Chosen, not measured."""

_logger = logging.getLogger("asyncckpt.storage")
_templates = MetadataTemplates()


def build_manifest(
    requests: Sequence[SaveRequest], results: Sequence[RankResult], *, package: str, dcp_metadata: bytes | None
) -> Manifest:
    """Return the manifest of a checkpoint whose ranks are all written.

    Args:
        requests: Those of the ranks that are known here, in order: the first is rank 0's, which says step and metadata.
        results: Of every rank, in order.
        package: asyncckpt's version.
        dcp_metadata: In layout "dcp" the content of `.metadata`.

    Returns:
        The manifest; its timings are those of the slowest rank, in seconds.
    """
    first = requests[0]
    assert first.step is not None, "a rank 0 that seals without one contradicts itself"
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
    )


def commit_save(requests: Sequence[SaveRequest], results: Sequence[RankResult], *, store: Store, package: str) -> None:
    """Commit a save whose ranks are all written and durable; arguments as `build_manifest`, `store`: where it lies.

    Raises:
        CorruptCheckpointError: In layout "dcp", a rank's structure does not decode.
        CheckpointExistsError, CommitUnknownError, OSError: As `publish`.

    Blocks: as `publish`.
    """
    first, parts = requests[0], [result.dcp for result in results if result.dcp is not None]
    is_dcp = len(parts) == len(results)
    dcp_metadata = _templates.metadata_of(SaveId.parse(first.save_id), parts) if is_dcp else None
    manifest = build_manifest(requests, results, package=package, dcp_metadata=dcp_metadata)
    publish(first.path, manifest, store=store, overwrite=first.overwrite, dcp_metadata=dcp_metadata)


def check_rank_files(path: str, manifest: Manifest, *, store: Store) -> None:
    """Look at every file that `manifest` names: it is there, regular, and as long as its record says.

    Raises:
        OSError: It is not.
    """
    store = store.listed(path)
    for record in manifest.ranks:
        index_path = os.path.join(path, record.index_name)
        data = store.read_whole(index_path, record.index_nbytes)
        if len(data) != record.index_nbytes or file_checksum(data) != record.index_checksum:
            raise OSError(errno.EIO, "the index differs from what was written", index_path)
        index = decode_index(data)
        sizes = {shard.name: shard.nbytes for shard in index.shards} | {index.objects.name: index.objects.nbytes}
        if index.items is not None:
            sizes[index.items.name] = index.items.nbytes
        for name, nbytes in sizes.items():
            found = store.stat(os.path.join(path, name))
            if not found.is_object or found.nbytes != nbytes:
                text = f"{found.nbytes} bytes long, {nbytes} were written"
                raise OSError(errno.EIO, text, os.path.join(path, name))


def publish(
    path: str, manifest: Manifest, *, store: Store, overwrite: bool = False, dcp_metadata: bytes | None = None
) -> None:
    """Commit: put `manifest` if no manifest is there. Doing it again for the same save succeeds.

    With `overwrite`, it takes the place of an older one, in one step, under a lock that all who overwrite take. So does
    layout "dcp", which puts two files; what died between them is replaced even without `overwrite`.

    Args:
        path: The checkpoint's directory. Every file that the manifest names must be durable.
        manifest: The commit record; `manifest.fsync` says whether to flush.
        store: Where it lies.
        overwrite: Whether to replace an older manifest. The old checkpoint's files are then leftovers.
        dcp_metadata: In layout "dcp" the content of `.metadata`, as `manifest.dcp` says.

    Raises:
        CheckpointExistsError: Another save's manifest is there, with `overwrite` a newer one; or a `.metadata` that is
            not ours. It was left untouched.
        CommitUnknownError: The put failed so that the manifest may or may not be there. Nothing was deleted.
        OSError: Failed before the put; nothing was published.

    Blocks: with `overwrite`, also for another one that publishes at `path`, at most `LOCK_TIMEOUT_S`.
    """
    reach("commit: begun")
    standing = refuse_standing(path, manifest.save_id, store, overwrite=overwrite)
    replaces = standing is not None and standing.save_id != manifest.save_id
    with contextlib.ExitStack() as stack:
        if dcp_metadata is not None:  # two objects appear as one only under a lock
            stack.enter_context(store.lock(path, LOCK_TIMEOUT_S))
        elif overwrite or replaces:
            stack.enter_context(exclusively(store, path, LOCK_TIMEOUT_S))
        may_replace = overwrite or replaces or dcp_metadata is not None
        _publish(path, manifest, store, dcp_metadata, overwrite=overwrite, may_replace=may_replace)


def _publish(
    path: str, manifest: Manifest, store: Store, dcp_metadata: bytes | None, *, overwrite: bool, may_replace: bool
) -> None:
    beside: str | None = None  # what is to become `.metadata`
    version: str | None = None  # of what is to be replaced
    standing: Manifest | Tombstone | None = None
    try:
        with overtaken(path, manifest.save_id, store, overwrite=overwrite):
            check_rank_files(path, manifest, store=store)
        reach("commit: files checked")
        if dcp_metadata is not None:
            beside = _write_dcp_metadata(path, manifest, dcp_metadata, store)
            reach("commit: metadata written")
        if manifest.fsync:
            store.sync(os.path.dirname(path))
        reach("commit: parent flushed")
        if may_replace:
            version = version_at(path, store)
            standing = refuse_standing(path, manifest.save_id, store, overwrite=overwrite)
    except BaseException:
        if beside is not None:
            store.remove_quietly(beside)
        raise
    if beside is None:
        _put(path, manifest, store, version if standing is not None else None)
    else:
        _put_both(path, beside, manifest, standing, store, version)
    try:
        reach("commit: put")
        # IMPORTANT: until the directory is flushed, a power cut may take the manifest away again.
        if manifest.fsync:
            store.sync(path)
        reach("commit: durable")
    except OSError as error:
        raise _unknown(path, manifest.save_id, error) from error


def _put_both(
    path: str,
    beside: str,
    manifest: Manifest,
    standing: Manifest | Tombstone | None,
    store: Store,
    version: str | None,
) -> None:
    """Put manifest and `.metadata`, in the order in which a checkpoint that is replaced stays whole until the last."""
    is_first = False
    try:
        if isinstance(standing, Manifest) and standing.save_id != manifest.save_id:
            # A whole checkpoint without `.metadata` is replaced by the rename of the manifest, which then has to count.
            is_first = is_finished(path, standing, store) and not has_dcp_metadata(path, store)
        if is_first:
            _put_dcp_metadata(path, beside, manifest, store)
        _put(path, manifest, store, version if standing is not None else None)
    except CommitUnknownError:
        raise
    except BaseException:
        if is_first:
            _is_gone(path, store, doomed=manifest.save_id, is_locked=True)
        store.remove_quietly(beside)
        raise
    if not is_first:
        try:
            if manifest.fsync:  # IMPORTANT: else a power cut might keep `.metadata` alone
                store.sync(path)
            _put_dcp_metadata(path, beside, manifest, store)
        except OSError as error:
            raise _unknown(path, manifest.save_id, error) from error


def _write_dcp_metadata(path: str, manifest: Manifest, data: bytes, store: Store) -> str:
    """Write `.metadata` under its temporary name, flushed as `manifest.fsync` says, and return that.

    Raises:
        CheckpointExistsError: A `.metadata` of somebody else stands there.
        OSError: It cannot be written.
    """
    refuse_foreign_metadata(path, manifest.save_id, store)
    temporary = os.path.join(path, temporary_dcp_metadata_name(manifest.save_id))
    with contextlib.suppress(FileNotFoundError):
        store.remove(temporary)  # of an earlier try of this very save
    store.put(temporary, data, durable=manifest.fsync)
    return temporary


def _put_dcp_metadata(path: str, temporary: str, manifest: Manifest, store: Store) -> None:
    """Give `.metadata` its name, flushed as `manifest.fsync` says.

    Raises:
        OSError: A call failed.
    """
    store.move(temporary, os.path.join(path, DCP_METADATA_NAME), replace=True)
    reach("commit: metadata put")
    if manifest.fsync:
        store.sync(path)


def _put(path: str, manifest: Manifest, store: Store, version: str | None) -> None:
    """Put the manifest, if nothing has its name, or what `version` is of; that of this very save is a success."""
    final = os.path.join(path, MANIFEST_NAME)
    temporary = os.path.join(path, temporary_manifest_name(manifest.save_id))
    data = encode_manifest(manifest)
    try:
        if version is None:
            store.put_if_absent(final, data, temporary=temporary, durable=manifest.fsync)
        else:
            store.replace_if(final, data, version, temporary=temporary, durable=manifest.fsync)
    except UnknownOutcomeError as error:
        standing = standing_at(path, store)
        if standing is None or standing.save_id != manifest.save_id:
            raise _unknown(path, manifest.save_id, error) from error
    except OSError as error:
        standing = standing_at(path, store)
        if standing is not None and standing.save_id == manifest.save_id:
            return
        # Who came first, if anybody, says more.
        refuse_standing(path, manifest.save_id, store, overwrite=version is not None)
        if error.errno == errno.EEXIST:
            raise exists(path, manifest.save_id, standing, overwrite=False) from error
        raise


def _unknown(path: str, save_id: SaveId, error: OSError) -> CommitUnknownError:
    return CommitUnknownError(
        f"{path}: putting the manifest of save {save_id} failed ({error}); whether the checkpoint is committed is not "
        "known until the storage answers again. Nothing was deleted; look with `asyncckpt ls`",
        code=errno.errorcode.get(error.errno or 0, "EIO"),
        path=path,
        detail=str(error),
        save_id=str(save_id),
    )


def remove_leftovers(path: str, keep: SaveId, *, store: Store) -> list[str]:
    """Remove the files of earlier attempts, and of a checkpoint that was replaced, from a committed one.

    IMPORTANT: only once a manifest of `keep` stands, because from then on no earlier attempt can commit here; a later
    one, which overwrites, still can.

    Args:
        path: The checkpoint's directory.
        keep: The save that is committed there.
        store: Where it lies.

    Returns:
        The names that were removed. Files that are not ours by name, links and directories stay; so does everything
        when the manifest of `keep` is not there.
    """
    standing = standing_at(path, store)
    if standing is None or standing.save_id != keep:
        return []
    if standing.dcp is None and not _is_gone(path, store, before=keep):
        return []
    return _remove(path, store, lambda owner: owner < keep)


def remove_files_of(path: str, save_id: SaveId, *, store: Store) -> list[str]:
    """Remove the files of one save that was not committed and never will be; a committed one is left alone.

    Returns:
        The names that were removed.
    """
    try:
        store.stat(os.path.join(path, MANIFEST_NAME))
    except FileNotFoundError:
        pass
    except OSError:
        return []
    else:
        standing = standing_at(path, store)
        if standing is None or standing.save_id == save_id:
            return []
    if not _is_gone(path, store, doomed=save_id):
        return []
    return _remove(path, store, lambda owner: owner == save_id)


def remove_dcp_metadata(
    path: str, doomed: SaveId | None, before: SaveId | None, store: Store, *, is_locked: bool = False
) -> None:
    """Remove a `.metadata` of ours whose files are about to go.

    IMPORTANT: before them. A stock reader takes whatever `.metadata` names for complete.

    Args:
        path: The checkpoint's directory.
        doomed: The save that wrote it; or
        before: one that is earlier than this, by (epoch, sequence).
        store: Where it lies.
        is_locked: The caller holds the lock of `path`.

    Raises:
        OSError: It cannot be removed.
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


def _is_gone(
    path: str, store: Store, *, doomed: SaveId | None = None, before: SaveId | None = None, is_locked: bool = False
) -> bool:
    """Remove a `.metadata` of these saves, and say whether none is left."""
    try:
        remove_dcp_metadata(path, doomed, before, store, is_locked=is_locked)
    except OSError as error:
        _logger.warning("cannot clean up %s: %s", path, error)
        return False
    return True


def _remove(path: str, store: Store, doomed: Callable[[SaveId], bool]) -> list[str]:
    """Remove what is there of these saves. A file that resists stays, and keeps none of the others."""
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
            continue  # its own writer was first, or another node's worker that removes the files of the same save
        except OSError as error:
            refused = error
    if refused is not None:
        _logger.warning("cannot clean up %s: %s", path, refused)
    return removed

"""Recovery: continues a save whose worker died. Complete files of the dead worker are kept, others are written again.

An index is written after all shards of its rank were flushed without an error. So if it exists, and is equal to the
index that the image gives, the shards are durable. The small files are always written again: their own fsync may have
failed, and a second fsync would not report that. Each replaces the old file in one step, because another process may be
committing them.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from concurrent.futures import Executor

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.checksums import DIGEST_NBYTES, block_digest, block_digests
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.layout import SAVE_ID_NBYTES, SAVE_ID_OFFSET, save_id_bytes
from asyncckpt.format.names import SaveId, temporary_dcp_metadata_name, temporary_manifest_name
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import is_finished, manifest_or_error
from asyncckpt.storage.files import Files, fsync_file, opened, read_small_file
from asyncckpt.storage.rank_writer import EXTENT_NBYTES, RankResult, RankWriter
from asyncckpt.storage.shard_writer import ShardWriter
from asyncckpt.storage.store import Store

_logger = logging.getLogger("asyncckpt.storage")


def is_committed(path: str, save_id: SaveId, *, store: Store) -> bool:
    """Return whether a save was committed by a worker that then died. If so, flush the directory, and clean up.

    Args:
        path: The checkpoint's directory.
        save_id: ID of the save.
        store: Store that holds the directory.

    Raises:
        OSError: It cannot be known: the manifest cannot be read, or flushing failed, so that it may not survive a power
            cut.
    """
    existing = manifest_or_error(path, store)
    if existing is None or existing.save_id != save_id or not is_finished(path, existing, store):
        return False
    reach("resumed: committed")
    if existing.fsync:
        # IMPORTANT: the worker that published the manifest may have died before it flushed the directory.
        store.sync(path)
    for name in (temporary_manifest_name(save_id), temporary_dcp_metadata_name(save_id)):
        with contextlib.suppress(OSError):
            store.remove(os.path.join(path, name))
    return True


def resume_rank_files(writer: RankWriter, pool: Executor) -> tuple[RankResult, bool]:
    """Write the files of one rank as `writer.write` does, but keep shards that a dead process has completed.

    Args:
        writer: Writer of the rank.
        pool: As of `RankWriter.write`.

    Returns:
        The result, and whether existing shards were kept.

    Raises:
        SaveFailedError: Code `COPY_UNKNOWN`: the shards are not complete, and the store may still be copying to their
            names. The files stay; the caller removes them.
        OSError: The existing files cannot be read. They stay, because the worker of another node may be committing
            them.
        Exception: As `writer.write`.

    Blocks: for the writes.
    """
    if _find_shards(writer):
        return _keep(writer), True
    if writer.may_be_copied_to:
        # IMPORTANT: a copy that the dead process has asked for would replace what is written to its name, even after
        # the commit.
        raise writer.copy_unknown("the worker that was writing it has died, and may have asked the store for copies")
    _remove(writer.small.paths + [s.path for s in writer.shards], writer.files)
    return writer.write(pool), False


def keep_ring_files(writer: RankWriter) -> RankResult | None:
    """Keep the files of one rank that a dead process has written from a ring, whose bytes are no longer in memory.

    The shards are complete if the index, apart from their checksums, is the one that the request gives.

    Returns:
        The result; None: the shards are not complete, so the save was not committed.

    Raises:
        OSError: The existing files cannot be read, and stay, because the worker of another node may be committing them;
            or they cannot be flushed.
        Exception: As the writer's `check`.

    Blocks: for the flush.
    """
    return _keep(writer) if _find_shards_by_index(writer) else None


def _keep(writer: RankWriter) -> RankResult:
    request = writer.request
    reach("resumed: whole")
    _logger.info(
        "save to %s: the shard files of rank %d are complete, and are kept",
        request.path,
        request.rank,
        extra={"save_id": request.save_id},
    )
    writer.keep_shards(lambda shard: _flush(shard, request, writer.files))
    return writer.finish(request)


def _find_shards_by_index(writer: RankWriter) -> bool:
    """Do what `_find_shards` does, but take the checksums from the index instead of the image."""
    found = _index_of_whole_shards(writer)
    if found is None:
        return False
    try:
        stated = [shard.digests for shard in decode_index(found).shards]
    except (CorruptCheckpointError, UnsupportedFormatError):
        return False
    if [len(digests) for digests in stated] != [len(shard.digests) for shard in writer.shards]:
        return False
    for shard, digests in zip(writer.shards, stated, strict=True):
        shard.digests[:] = digests
    return writer.index() == found


def _find_shards(writer: RankWriter) -> bool:
    """Return whether the shards exist and are durable, by their index; then fill in their digests.

    Raises:
        OSError: A file cannot be read, so it is unknown.
    """
    found = _index_of_whole_shards(writer)
    if found is None:
        return False
    origins = _origins_in(found, len(writer.shards))
    for shard, (offset, nbytes), origin in zip(writer.shards, writer.request.parts, origins, strict=True):
        shard.origin = origin
        shard.digests[:] = _digests(writer, offset, nbytes, origin)
    if writer.index() == found:
        return True
    for shard in writer.shards:
        shard.origin = None
    return False


def _index_of_whole_shards(writer: RankWriter) -> bytes | None:
    """Return the index that a dead process has written; None: there is none, or a shard does not have its length."""
    files = writer.files
    try:
        found = read_small_file(files, writer.small.paths[0], MAX_INDEX_NBYTES)
        for shard in writer.shards:
            status = files.lstat(shard.path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != shard.nbytes:
                return None
    except FileNotFoundError:
        return None
    return found


def _origins_in(index: bytes, n_shards: int) -> list[SaveId | None]:
    """Return for each shard the save whose ID is in the file if it is linked, as an index of a dead process says.

    What it says is not believed: the caller compares the whole index with the one that the image gives.
    """
    try:
        origins = [shard.origin for shard in decode_index(index).shards]
    except (CorruptCheckpointError, UnsupportedFormatError):
        origins = []
    return origins if len(origins) == n_shards else [None] * n_shards


def _digests(writer: RankWriter, offset: int, nbytes: int, origin: SaveId | None) -> bytes:
    """Return the checksums of the blocks of a shard; of a linked one, with the save ID that is in its file."""
    found = bytearray()
    for start in range(0, nbytes, EXTENT_NBYTES):
        writer.check()
        with writer.image[offset + start : offset + min(start + EXTENT_NBYTES, nbytes)] as view:
            found += block_digests(view, writer.block_nbytes)
    if origin is not None:
        with writer.image[offset : offset + min(writer.block_nbytes, nbytes)] as view:
            first = bytearray(view)
        first[SAVE_ID_OFFSET : SAVE_ID_OFFSET + SAVE_ID_NBYTES] = save_id_bytes(origin)
        found[:DIGEST_NBYTES] = block_digest(first)
    writer.check()
    return bytes(found)


def _flush(shard: ShardWriter, request: SaveRequest, files: Files) -> None:
    if request.fsync:
        with opened(files, shard.path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            fsync_file(files, fd, shard.path)
    reach("resumed: shard kept")


def _remove(paths: list[str], files: Files) -> None:
    """Remove files that a dead process left. Raises OSError if one cannot be removed: it must be written again."""
    for path in paths:
        reach("resumed: removing")
        try:
            files.unlink(path)
        except FileNotFoundError:
            continue

"""A save that another worker had begun to write, and died: what of it stands counts, the rest is written anew.

An index is written when all shards of its rank have been flushed without an error. So where it stands, and is byte for
byte the one that the image leads to, the shards are durable. The small files are written anew all the same: whether
*their* fsync has failed, nobody has told, and a second fsync would not repeat it. Each takes the old one's place in one
step, since somebody may be committing them just now.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from concurrent.futures import Executor

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import CorruptCheckpointError, UnsupportedFormatError
from asyncckpt.format.checksums import BLOCK_NBYTES, block_digest
from asyncckpt.format.index import MAX_INDEX_NBYTES, decode_index
from asyncckpt.format.names import SaveId, temporary_dcp_metadata_name, temporary_manifest_name
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import is_finished, standing_at
from asyncckpt.storage.files import Files, fsync_file, opened, read_small_file
from asyncckpt.storage.rank_writer import EXTENT_NBYTES, RankResult, RankWriter
from asyncckpt.storage.shard_writer import ShardWriter
from asyncckpt.storage.store import Store

_logger = logging.getLogger("asyncckpt.storage")


def is_committed(path: str, save_id: SaveId, *, store: Store) -> bool:
    """Whether the save was committed, by whoever died afterwards; then that is flushed, and what it left is removed.

    Raises:
        OSError: It has, and whether that survives a power cut cannot be known.
    """
    standing = standing_at(path, store)
    if standing is None or standing.save_id != save_id or not is_finished(path, standing, store):
        return False
    reach("resumed: committed")
    if standing.fsync:
        # IMPORTANT: who put the manifest may have died before the directory was flushed.
        store.sync(path)
    for name in (temporary_manifest_name(save_id), temporary_dcp_metadata_name(save_id)):
        with contextlib.suppress(OSError):
            store.remove(os.path.join(path, name))
    return True


def resume_rank_files(writer: RankWriter, pool: Executor) -> tuple[RankResult, bool]:
    """As `writer.write`, where another process may have written some of them, or all, and is dead.

    Returns:
        The result, and whether the shards that stood there were kept.

    Raises:
        OSError: Whether they stand cannot be found out, and they stay: another node's worker may be committing them.
        Exception: As `writer.write`.

    Blocks: for the writes.
    """
    if _finds_shards(writer):
        return _keep(writer), True
    _remove(writer.small.paths + [s.path for s in writer.shards], writer.files)
    return writer.write(pool), False


def keep_ring_files(writer: RankWriter) -> RankResult | None:
    """Keep one rank's files that a dead process has written from a ring, whose bytes are in memory no more.

    Whether the shards are whole says the index alone: it must be, but for their checksums, what the request leads to.

    Returns:
        The result; None where they are not whole: then nobody can have committed them.

    Raises:
        OSError: Whether they are cannot be found out, and they stay: another node's worker may be committing them. Or
            they cannot be made durable.
        Exception: Whatever the writer's `check` raises.

    Blocks: for the flush.
    """
    return _keep(writer) if _finds_stated_shards(writer) else None


def _keep(writer: RankWriter) -> RankResult:
    request = writer.request
    reach("resumed: whole")
    _logger.info("files of rank %d stand already, and are kept", request.rank, extra={"save_id": request.save_id})
    writer.keep_shards(lambda shard: _flush(shard, request, writer.files))
    return writer.finish(request)


def _finds_stated_shards(writer: RankWriter) -> bool:
    """As `_finds_shards`, but that the checksums are taken from the index."""
    files = writer.files
    try:
        found = read_small_file(files, writer.small.paths[0], MAX_INDEX_NBYTES)
        stated = [shard.digests for shard in decode_index(found).shards]
        for shard in writer.shards:
            status = files.lstat(shard.path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != shard.nbytes:
                return False
    except (FileNotFoundError, CorruptCheckpointError, UnsupportedFormatError):
        return False
    if [len(digests) for digests in stated] != [len(shard.digests) for shard in writer.shards]:
        return False
    for shard, digests in zip(writer.shards, stated, strict=True):
        shard.digests[:] = digests
    return writer.index() == found


def _finds_shards(writer: RankWriter) -> bool:
    """Whether the shards stand and are durable; their digests are then filled in.

    Raises:
        OSError: That cannot be found out.
    """
    files = writer.files
    try:
        found = read_small_file(files, writer.small.paths[0], MAX_INDEX_NBYTES)
        for shard in writer.shards:
            status = files.lstat(shard.path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != shard.nbytes:
                return False
    except FileNotFoundError:
        return False
    for shard, (offset, nbytes) in zip(writer.shards, writer.request.parts, strict=True):
        shard.digests[:] = _digests(writer, offset, nbytes)
    return writer.index() == found


def _digests(writer: RankWriter, offset: int, nbytes: int) -> bytes:
    found = bytearray()
    for start in range(0, nbytes, EXTENT_NBYTES):
        writer.check()
        with writer.image[offset + start : offset + min(start + EXTENT_NBYTES, nbytes)] as view:
            for at in range(0, len(view), BLOCK_NBYTES):
                with view[at : at + BLOCK_NBYTES] as block:
                    found += block_digest(block)
    writer.check()
    return bytes(found)


def _flush(shard: ShardWriter, request: SaveRequest, files: Files) -> None:
    if request.fsync:
        with opened(files, shard.path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            fsync_file(files, fd, shard.path)
    reach("resumed: shard kept")


def _remove(paths: list[str], files: Files) -> None:
    """Remove what a dead process left under these names; a name of the save's own that resists fails it."""
    for path in paths:
        reach("resumed: removing")
        try:
            files.unlink(path)
        except FileNotFoundError:
            continue

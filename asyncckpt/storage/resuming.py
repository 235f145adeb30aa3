"""A save that another worker had begun to write, and died: what of it stands counts, the rest is written anew.

An index is written when all shards of its rank have been flushed without an error. So where it stands, and is byte for
byte the one that the image leads to, the shards are durable. The small files are written anew all the same: whether
*their* fsync has failed, nobody has told, and a second fsync would not repeat it.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
from collections.abc import Callable
from concurrent.futures import Executor

from asyncckpt.format.checksum import BLOCK_NBYTES, block_digest
from asyncckpt.format.index import MAX_INDEX_NBYTES
from asyncckpt.format.names import (
    DCP,
    SaveId,
    index_name,
    items_name,
    objects_name,
    shard_name,
    temporary_dcp_metadata_name,
    temporary_manifest_name,
)
from asyncckpt.storage.dcp_commit import is_finished
from asyncckpt.storage.files import Files, fsync_directory, fsync_file, opened, read_small_file
from asyncckpt.storage.image import Image
from asyncckpt.storage.rank_files import EXTENT_NBYTES, RankWriter
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.shard_writer import ShardWriter
from asyncckpt.storage.standing import standing_at

_logger = logging.getLogger("asyncckpt.storage")


def is_committed(path: str, save_id: SaveId, *, files: Files) -> bool:
    """Whether the save was committed, by whoever died afterwards; then that is flushed, and what it left is removed.

    Raises:
        OSError: It has, and whether that survives a power cut cannot be known.
    """
    standing = standing_at(path, files)
    if standing is None or standing.save_id != save_id or not is_finished(path, standing, files):
        return False
    if standing.fsync:
        # IMPORTANT: who put the manifest may have died before the directory was flushed.
        fsync_directory(files, path)
    for name in (temporary_manifest_name(save_id), temporary_dcp_metadata_name(save_id)):
        with contextlib.suppress(OSError):
            files.unlink(os.path.join(path, name))
    return True


def resume_rank_files(
    job: RankJob, image: Image, *, files: Files, pool: Executor, check: Callable[[], None]
) -> tuple[RankResult, bool]:
    """As `write_rank_files`, where another process may have written some of them, or all, and is dead.

    Returns:
        The result, and whether the shards that stood there were kept.

    Raises:
        Exception: As `write_rank_files`.

    Blocks: for the writes.
    """
    writer = RankWriter(job, image, files, check)
    kept = _finds_shards(writer)
    small = [index_name(job.save_id, job.rank), objects_name(job.save_id, job.rank)]
    small += [items_name(job.save_id, job.rank)] if job.layout == DCP else []
    doomed = [os.path.join(job.path, name) for name in small]  # the index first: it says that the others are whole
    _remove(doomed + ([] if kept else [s.path for s in writer.shards]), files)
    if not kept:
        writer.write_shards(pool)
        return writer.finish(job), False
    _logger.info("files of rank %d stand already, and are kept", job.rank, extra={"save_id": str(job.save_id)})
    writer.keep_shards(lambda shard: _flush(shard, job, files))
    return writer.finish(job), True


def remove_rank_files(job: RankJob, *, files: Files) -> None:
    """Remove what a dead process has left of one rank's files, the index first, where they cannot be written again.

    Raises:
        OSError: One resists.
    """
    names = [index_name(job.save_id, job.rank), objects_name(job.save_id, job.rank)]
    names += [items_name(job.save_id, job.rank)] if job.layout == DCP else []
    names += [shard_name(job.save_id, job.rank, part, job.layout) for part in range(len(job.parts))]
    _remove([os.path.join(job.path, name) for name in names], files)


def _finds_shards(writer: RankWriter) -> bool:
    """Whether the shards stand and are durable; their digests are then filled in."""
    job, files = writer.job, writer.files
    try:
        found = read_small_file(files, os.path.join(job.path, index_name(job.save_id, job.rank)), MAX_INDEX_NBYTES)
        for shard in writer.shards:
            status = files.lstat(shard.path)
            if not stat.S_ISREG(status.st_mode) or status.st_size != shard.nbytes:
                return False
    except OSError:  # most often: it is not there
        return False
    for shard, (offset, nbytes) in zip(writer.shards, job.parts, strict=True):
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


def _flush(shard: ShardWriter, job: RankJob, files: Files) -> None:
    if job.fsync:
        with opened(files, shard.path, os.O_RDONLY | os.O_NOFOLLOW) as fd:
            fsync_file(files, fd, shard.path)


def _remove(paths: list[str], files: Files) -> None:
    """Remove what a dead process left under these names; a name of the save's own that resists fails it."""
    for path in paths:
        try:
            files.unlink(path)
        except FileNotFoundError:
            continue

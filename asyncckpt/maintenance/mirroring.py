"""The copy of a committed checkpoint to its *mirror*: a second directory or an object store, named in the manifest.

The copy has the same files under the same names, and its manifest is put last: until then nothing is committed there.
A copy that was cut off goes on where it stopped: a file that has its name in the mirror is complete and is not sent
again. Each shard is compared with the checksums of its index while it is copied, so that a damaged local file is never
committed in the mirror. `convert` copies to object stores in the same way.

When the copy is committed, a *mirror record* (format/SPEC.md section 1) is written beside the local manifest. A
checkpoint whose manifest names a mirror, and which has no record, is still to be copied.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CommitUnknownError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    UnsupportedPathError,
)
from asyncckpt.format.checksums import BLOCK_NBYTES, file_checksum
from asyncckpt.format.index import ShardRecord, decode_index
from asyncckpt.format.manifest import Manifest, RankRecord
from asyncckpt.format.names import (
    DCP_METADATA_NAME,
    SaveId,
    copied_shard_name,
    is_temporary,
    mirror_record_name,
    owner_of,
)
from asyncckpt.storage.catalog import read_manifest, scan
from asyncckpt.storage.checkpoint_dir import exists_error, is_finished, manifest_or_error, prepare_directory
from asyncckpt.storage.commit import check_rank_files, publish, remove_leftovers
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import DEFAULT_UMASK
from asyncckpt.storage.store import Store

EXTENT_NBYTES = 4 * BLOCK_NBYTES
"""What is read and written at a time: 1 MiB. Chosen: each copy has a buffer of that size, also while it waits."""

ABANDONED_AFTER_S = 600.0
"""A temporary file in the mirror that has not changed for so long is of a process that died. Chosen."""

_MODE_BITS = 0o777

_logger = logging.getLogger("asyncckpt.storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class MirrorReport:
    """What a copy has done.

    Attributes:
        nbytes: Bytes of the checkpoint's files.
        copied_nbytes: Bytes that this call has sent; less than `nbytes` where an earlier one was cut off.
        seconds: How long this call took.
    """

    nbytes: int
    copied_nbytes: int
    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Unmirrored:
    """A committed checkpoint that is still to be copied.

    Attributes:
        save_id, step, nbytes: Of its manifest.
        path: Its directory.
        mirror: Path or URL that it is to be copied to.
    """

    save_id: SaveId
    step: int
    nbytes: int
    path: str
    mirror: str


def is_mirrored(path: str, save_id: SaveId, store: Store) -> bool:
    """Return whether the mirror record of a checkpoint is there: its copy is committed.

    Args:
        path: The checkpoint's directory.
        save_id: Of its manifest.
        store: Where it lies.

    Raises:
        OSError: It cannot be known.
    """
    try:
        return store.stat(os.path.join(path, mirror_record_name(save_id))).is_object
    except FileNotFoundError:
        return False


def unmirrored_in(root: str, store: Store) -> list[Unmirrored]:
    """Return the committed checkpoints in `root` that are still to be copied to their mirrors, the oldest first.

    Args:
        root: A directory of checkpoints.
        store: Where it lies.

    Raises:
        OSError: `root` cannot be listed, or a record cannot be looked for.
    """
    found = []
    for one in scan(root, store):
        manifest = one.manifest
        if manifest is None or manifest.mirror in (None, one.path) or is_mirrored(one.path, manifest.save_id, store):
            continue
        found.append(
            Unmirrored(
                save_id=manifest.save_id,
                step=manifest.step,
                nbytes=manifest.nbytes,
                path=one.path,
                mirror=str(manifest.mirror),
            )
        )
    return sorted(found, key=lambda one: one.save_id)


def umask_of(path: str, files: Files) -> int:
    """Return the umask that gives the mirror the permissions of a local checkpoint.

    Args:
        path: Directory of the checkpoint.
        files: The calls that read it.

    Raises:
        OSError: It cannot be looked at.
    """
    return DEFAULT_UMASK if is_object_url(path) else ~files.stat(path).st_mode & _MODE_BITS


def copy_to_mirror(
    path: str,
    save_id: SaveId,
    mirror: str,
    *,
    source: Store,
    target: Store,
    pace: Callable[[int], None] = lambda nbytes: None,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> MirrorReport:
    """Copy a committed checkpoint to its mirror, commit it there, and write the mirror record. May be repeated.

    One whose manifest names no mirror is copied without a record.

    An older checkpoint in the mirror is replaced if it was copied to the same place from an earlier save.

    Args:
        path: The checkpoint's directory.
        save_id: Of the save that must be committed there.
        mirror: Path or URL of the copy.
        source, target: The stores that hold `path` and `mirror`.
        pace: Called before so many bytes are read and sent; may wait.
        progress: Called when so many bytes more of the checkpoint are in the mirror, sent now or before.

    Raises:
        CheckpointNotCommittedError: The local checkpoint was removed, or replaced by another save.
        CorruptCheckpointError: A local file is damaged. Nothing is committed in the mirror.
        CheckpointExistsError: Another checkpoint stands in the mirror that is not an earlier copy.
        CommitUnknownError: Putting the manifest failed; whether the copy is committed is not known. Try again.
        AsyncCkptError, OSError: A store failed. Nothing is committed in the mirror, and what is copied stays.

    Blocks: for the copy.
    """
    began = time.monotonic()
    reach("mirror: begun")
    try:
        manifest = _committed_at(path, save_id, source)
    except CheckpointNotCommittedError:
        if (found := mirrored_manifest(mirror, save_id, target)) is None:
            raise
        return MirrorReport(nbytes=found.nbytes, copied_nbytes=0, seconds=time.monotonic() - began)
    _refuse_same_directory(path, mirror, source, target)
    copy = _Copy(path, mirror, manifest, source, target, pace, progress)
    existing = manifest_or_error(mirror, target)
    if existing is None or existing.save_id != save_id or not _is_whole(mirror, existing, target):
        is_older_copy = existing is not None and existing.mirror == mirror and existing.save_id < save_id
        if existing is not None and existing.save_id != save_id and not is_older_copy:
            raise exists_error(mirror, save_id, existing, overwrite=False)
        prepare_directory(
            mirror, save_id=save_id, store=target, fsync=manifest.fsync, overwrite=is_older_copy, resumed=True
        )
        try:
            dcp_metadata = copy.files()
        except FileNotFoundError as error:
            # IMPORTANT: first. A checkpoint that is being removed has lost its manifest before its files.
            _committed_at(path, save_id, source)
            if error.filename is None or os.path.dirname(error.filename) != path:
                raise
            raise copy.damaged(os.path.basename(error.filename), "it is missing") from error
        reach("mirror: files copied")
        publish(mirror, manifest, store=target, overwrite=is_older_copy, dcp_metadata=dcp_metadata, token=copy.token)
        reach("mirror: committed")
        if mirrored_manifest(mirror, save_id, target) is None:
            detail = "it was put, and cannot be read back"
            raise CommitUnknownError(
                f"{mirror}: the manifest of save {save_id}: {detail}; check with `asyncckpt ls`",
                code="EIO",
                path=mirror,
                detail=detail,
                save_id=str(save_id),
            )
    copy.remove_temporary()
    remove_leftovers(mirror, save_id, store=target)
    seconds = time.monotonic() - began
    if manifest.mirror is not None:
        # In the mirror too: somebody may see it under another path than the manifest names.
        _record(mirror, save_id, mirror, target, durable=manifest.fsync)
        _record(path, save_id, mirror, source, durable=manifest.fsync)
    return MirrorReport(nbytes=manifest.nbytes, copied_nbytes=copy.sent_nbytes, seconds=seconds)


def mirrored_manifest(mirror: str, save_id: SaveId, store: Store) -> Manifest | None:
    """Return the manifest of a copy; None: that of `save_id` is not committed in the mirror.

    Args:
        mirror: Path or URL of the copy.
        save_id: Of the save that it must be of.
        store: Store that holds the mirror.

    Raises:
        OSError: It cannot be known.
    """
    found = manifest_or_error(mirror, store)
    is_copy = found is not None and found.save_id == save_id and is_finished(mirror, found, store)
    return found if is_copy else None


def _is_whole(mirror: str, manifest: Manifest, store: Store) -> bool:
    """Whether all files of a copy are there whose manifest is. Those that are not are copied again.

    Raises:
        OSError: It cannot be known.
    """
    if not is_finished(mirror, manifest, store):
        return False
    try:
        check_rank_files(mirror, manifest, store=store)
    except (OSError, CorruptCheckpointError) as error:  # a store that fails says so again when it is copied to
        _logger.warning("the copy in the mirror %s is not whole, and is completed: %s", mirror, error)
        return False
    return True


def _refuse_same_directory(path: str, mirror: str, source: Store, target: Store) -> None:
    """Raise if the mirror is the checkpoint's own directory, by a link.

    Raises:
        UnsupportedPathError: It is.
    """
    try:
        is_same = source.identity(path) == target.identity(mirror)
    except OSError:  # there is no mirror yet, or a store without directories
        return
    if is_same:
        raise UnsupportedPathError(f"the mirror {mirror} is the directory of the checkpoint {path} itself", path=mirror)


def _committed_at(path: str, save_id: SaveId, store: Store) -> Manifest:
    """Return the manifest at `path`.

    Raises:
        CheckpointNotCommittedError: It is not that of `save_id`, or gone.
        AsyncCkptError, OSError: As `read_manifest`.
    """
    try:
        manifest = read_manifest(path, store)
    except FileNotFoundError as error:
        raise CheckpointNotCommittedError(
            f"{path} was removed before it was copied to its mirror", path=path
        ) from error
    if manifest.save_id != save_id:
        raise CheckpointNotCommittedError(
            f"{path} was replaced by save {manifest.save_id} before save {save_id} was copied to its mirror", path=path
        )
    return manifest


def _record(path: str, save_id: SaveId, mirror: str, store: Store, *, durable: bool) -> None:
    data = json.dumps({"mirror": mirror, "save_id": str(save_id), "mirrored_at": round(time.time(), 3)}, indent=1)
    store.put(os.path.join(path, mirror_record_name(save_id)), (data + "\n").encode(), durable=durable, replace=True)


class _Copy:
    """The files of one copy.

    Attributes:
        token: In the temporary names of files that another process may copy at the same time.
        sent_nbytes: Bytes that were sent.
    """

    def __init__(
        self,
        path: str,
        mirror: str,
        manifest: Manifest,
        source: Store,
        target: Store,
        pace: Callable[[int], None],
        progress: Callable[[int], None],
    ) -> None:
        self._path, self._mirror, self._manifest = path, mirror, manifest
        self._source, self._target, self._pace, self._progress = source, target, pace, progress
        self._files = source.as_files()
        self._held: dict[str, int] = {}
        self.token = secrets.token_hex(6)
        self.sent_nbytes = 0

    def files(self) -> bytes | None:
        """Copy all files but the commit record; return what `.metadata` holds in layout "dcp"."""
        with contextlib.suppress(FileNotFoundError):
            listed = [one for one in self._target.entries(self._mirror) if one.is_object]
            self._held = {one.name: one.nbytes for one in listed}
            for one in listed:
                if self._is_temporary(one.name) and 0 < one.mtime_s < time.time() - ABANDONED_AFTER_S:
                    self._target.remove_quietly(os.path.join(self._mirror, one.name))
        for record in self._manifest.ranks:
            self._rank(record)
        dcp = self._manifest.dcp
        if dcp is None:
            return None
        return self._read(DCP_METADATA_NAME, dcp.nbytes, dcp.checksum)

    def _is_temporary(self, name: str) -> bool:
        return is_temporary(name) and owner_of(name) == self._manifest.save_id

    def remove_temporary(self) -> None:
        """Remove what killed copies of this checkpoint have left in the mirror. Only once it is committed there."""
        with contextlib.suppress(FileNotFoundError):
            for name in filter(self._is_temporary, self._target.names(self._mirror)):
                self._target.remove_quietly(os.path.join(self._mirror, name))

    def _rank(self, record: RankRecord) -> None:
        data = self._read(record.index_name, record.index_nbytes, record.index_checksum)
        index = decode_index(data)
        if BLOCK_NBYTES % index.block_nbytes:
            raise UnsupportedFormatError(
                f"{self._path} cannot be copied to its mirror: its checksums are of blocks of {index.block_nbytes} "
                f"bytes, expected a divisor of {BLOCK_NBYTES}; copy it with the version that has written it",
                path=self._path,
            )
        for shard in index.shards:
            self._shard(shard, index.block_nbytes)
        small = [index.objects, *([] if index.items is None else [index.items])]
        for one in small:
            self._put(one.name, self._read(one.name, one.nbytes, one.checksum))
        self._put(record.index_name, data)

    def _read(self, name: str, nbytes: int, checksum: str) -> bytes:
        where = os.path.join(self._path, name)
        try:
            data = self._source.read_whole(where, nbytes)
        except OSError as error:
            if error.errno != errno.EFBIG:
                raise
            raise self.damaged(name, f"it is longer than {nbytes} bytes") from error
        if len(data) != nbytes or file_checksum(data) != checksum:
            raise self.damaged(name, "its checksum differs from what was written")
        return data

    def _put(self, name: str, data: bytes) -> None:
        where = os.path.join(self._mirror, name)
        if self._held.get(name) == len(data) and self._target.read_whole(where, len(data)) == data:
            self._progress(len(data))
            return
        self._pace(len(data))
        self._target.put(where, data, durable=self._manifest.fsync, replace=True)
        self._sent(len(data))
        self._file_copied()

    @staticmethod
    def _file_copied() -> None:
        reach("mirror: file copied")

    def _sent(self, nbytes: int) -> None:
        self.sent_nbytes += nbytes
        self._progress(nbytes)

    def _shard(self, shard: ShardRecord, block_nbytes: int) -> None:
        if self._held.get(shard.name) == shard.nbytes:  # it has its name: it is complete
            self._progress(shard.nbytes)
            return
        final = os.path.join(self._mirror, shard.name)
        name = final if self._target.shards_appear_whole else copied_shard_name(final, self.token)
        with self._image(shard) as image:
            writer = self._target.shard_writer(
                name, image, 0, shard.nbytes, block_nbytes=block_nbytes, aligned=False, fsync=True
            )
            try:
                for start in range(0, shard.nbytes, EXTENT_NBYTES):
                    end = min(start + EXTENT_NBYTES, shard.nbytes)
                    self._pace(end - start)
                    writer.write_extent(start, end)
                    self._sent(end - start)
                if bytes(writer.digests) != shard.digests:
                    raise self.damaged(shard.name, "a block differs from its checksum")
                writer.finish()
            except BaseException:
                writer.abandon()
                # IMPORTANT: never what has its final name, as in an object store: another worker that copies the same
                # checkpoint may have put it there, and committed.
                if writer.created and name != final:
                    self._target.remove_quietly(name)
                raise
        reach("mirror: shard written")
        if name != final:
            # IMPORTANT: only a file that was flushed gets its name. What has a name is not copied again.
            self._target.move(name, final, replace=True)
        self._file_copied()

    @contextlib.contextmanager
    def _image(self, shard: ShardRecord) -> Iterator[_StoredShard]:
        where = os.path.join(self._path, shard.name)
        fd = self._files.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        try:
            if self._files.fstat(fd).st_size != shard.nbytes:
                raise self.damaged(shard.name, f"it does not have its {shard.nbytes} bytes")
            yield _StoredShard(self._files, fd, shard.nbytes)
        finally:
            self._files.close(fd)

    def damaged(self, name: str, detail: str) -> CorruptCheckpointError:
        """Return the error of a local file that is not what was written."""
        text = f"{self._path} cannot be copied to its mirror {self._mirror}: {name} is damaged: {detail}"
        return CorruptCheckpointError(text, path=self._path, file=name, detail=detail)


class _StoredShard:
    """A shard file as an image: each piece is read when it is asked for."""

    is_page_aligned = False

    def __init__(self, files: Files, fd: int, nbytes: int) -> None:
        self._files, self._fd, self._nbytes = files, fd, nbytes

    def __len__(self) -> int:
        return self._nbytes

    def __getitem__(self, piece: slice) -> memoryview:
        start, end, _ = piece.indices(self._nbytes)
        buffer = bytearray(end - start)
        view, done = memoryview(buffer), 0
        while done < len(buffer):
            count = self._files.preadv(self._fd, [view[done:]], start + done)
            if count <= 0:
                break  # what is missing is zeros, which its checksums tell
            done += count
        return view

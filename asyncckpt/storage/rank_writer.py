"""One rank's files of one save: shards, objects and index, written from memory by several threads.

Each shard file is created exclusively, its disk space is reserved, several threads write it in extents, and it is
truncated to its exact length, fsynced through the descriptor that wrote it, and closed. If one of these fails, the
rank's save fails.

IMPORTANT: existing small files are replaced in one step. With several ranks, the worker of another node may have been
told that they are durable, and may be committing them.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from dataclasses import dataclass

from asyncckpt.basics.failpoints import reach
from asyncckpt.errors import SaveFailedError
from asyncckpt.format.checksums import BLOCK_NBYTES, block_nbytes_at, file_checksum
from asyncckpt.format.coverage import Tally
from asyncckpt.format.dcp import encode_items
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import (
    DCP,
    SaveId,
    index_name,
    items_name,
    objects_name,
    shard_name,
)
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.checkpoint_dir import refuse_existing, refuse_foreign_metadata, refuse_other_commits
from asyncckpt.storage.files import Files, copy_unknown
from asyncckpt.storage.local import store_over
from asyncckpt.storage.reuse.shard_history import ShardHistory, WrittenShard
from asyncckpt.storage.reuse.unchanged import UnchangedShards
from asyncckpt.storage.shard_writer import Image, ShardWriter, is_page_aligned, shards_print
from asyncckpt.storage.store import Store, UnknownOutcomeError

EXTENT_NBYTES = 16 << 20
"""Most bytes of one write, whole blocks. 4 to 64 MiB reach the same speed on the machines measured so far."""

MIN_EXTENT_NBYTES = 4 * BLOCK_NBYTES
"""Least bytes of one write. Extents of files smaller than `EXTENT_NBYTES` per thread are smaller, so that all threads
have some. Chosen, not measured."""

DEFAULT_THREADS = 4
"""Number of writing threads. Four keep the disk busy while one computes checksums: 5 to 10 % faster than two, with 1.4
GB on two cores."""

_logger = logging.getLogger("asyncckpt.storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What was written for one rank.

    Attributes:
        record: The rank's entry in the manifest.
        nbytes: Bytes of its files.
        seconds: Seconds by phase: `write` (shards, fsync included), `fsync` (fsync of shards, summed over the files),
            `index` (all other files).
        direct: Whether all shards were written with O_DIRECT.
        reused_nbytes: Bytes of the shards that are linked to files of earlier saves. `nbytes` includes them.
        dcp: In layout "dcp" the rank's structure and the table of its items, for `format.dcp.metadata_of`.
        shards_print: Fingerprint of the shards (`shard_writer.shards_print`).
        rest_print: Fingerprint of all else that the rank saves, added by the worker.
        tally: Tally of the structure, with the seed of the run (`seed_of`), for the check of coverage; None: not made.
    """

    record: RankRecord
    nbytes: int
    seconds: dict[str, float]
    direct: bool
    reused_nbytes: int = 0
    dcp: tuple[bytes, bytes] | None = None
    shards_print: bytes = b""
    rest_print: bytes = b""
    tally: Tally | None = None


class SmallFiles:
    """Writes objects, index and items file of one rank, or replaces existing ones.

    Args:
        request: Save request of the rank.
        save_id: ID of its save.
        store: Store that holds the checkpoint.

    Attributes:
        index_name, objects_name, items_name: Names of these files; there is an items file in layout "dcp" only.
        paths: Their paths. The first is the index, which exists only if the shards are complete.
        created: Paths of the files to remove if the save fails.
        replaces: Whether `write` replaces existing files; set by `replace_existing`.
    """

    def __init__(self, request: SaveRequest, save_id: SaveId, store: Store) -> None:
        self._request, self._store = request, store
        self.index_name = index_name(save_id, request.rank)
        self.objects_name = objects_name(save_id, request.rank)
        self.items_name = items_name(save_id, request.rank)
        names = [self.index_name, self.objects_name] + ([self.items_name] if request.layout == DCP else [])
        self.paths = [os.path.join(request.path, name) for name in names]
        self.created: list[str] = []
        self.replaces = False

    def replace_existing(self) -> None:
        """Make `write` replace existing files. They stay if the save fails, unless only this worker can commit them."""
        self.replaces = True
        if self._request.world_size == 1:
            self.created = list(self.paths)

    def write(self, name: str, data: bytes) -> None:
        """Write the file `name`; flush it if the request says so.

        Raises:
            OSError: A call failed. A file that existed before is unchanged.
        """
        path = os.path.join(self._request.path, name)
        self._store.put(path, data, durable=self._request.fsync, replace=self.replaces)
        if not self.replaces:
            self.created.append(path)


class RankWriter:
    """Writes all files of one rank and makes them durable: by `write`, or by `write_shards` and then `finish`.

    If one of these raises, the files that it created are removed.

    Args:
        request: What to write. Its directory must exist.
        image: The bytes of the shard files (format "B"): a whole slot, private memory, or a `MadeImage`. O_DIRECT needs
            page-aligned memory.
        files: The `Files` to write with.
        check: Called before and after each extent, and before the end; raises if the image may not be used any more.
        threads: Number of writing threads.
        progress: Called from several threads with the number of bytes of each extent that was written.
        history: What this process has written. If the request says so, shards that are unchanged are linked to it, and
            what is written is added. None: everything is written, and nothing remembered.
    """

    def __init__(
        self,
        request: SaveRequest,
        image: Image,
        files: Files,
        *,
        check: Callable[[], None] = lambda: None,
        threads: int = DEFAULT_THREADS,
        progress: Callable[[int], None] = lambda nbytes: None,
        history: ShardHistory | None = None,
    ) -> None:
        self.request, self.image, self.files, self.check = request, image, files, check
        self.save_id = SaveId.parse(request.save_id)
        self._history = history if request.reuse else None
        self._store = store_over(files, umask=request.umask)
        self._write_s = 0.0
        nbytes, aligned = sum(part.nbytes for part in request.parts), is_page_aligned(image)
        self.block_nbytes = block_nbytes_at(request.path, request.mirror, nbytes, reuse=bool(request.reuse))
        self.shards = [
            self._store.shard_writer(
                os.path.join(request.path, shard_name(self.save_id, request.rank, part, request.layout)),
                image,
                offset,
                nbytes,
                block_nbytes=self.block_nbytes,
                aligned=aligned and offset % PAGE_NBYTES == 0,
                fsync=request.fsync,
            )
            for part, (offset, nbytes) in enumerate(request.parts)
        ]
        for shard in self.shards if self._history is not None else ():
            shard.keep_prints()
        self.dcp: tuple[bytes, bytes] | None = None
        self._items = b""
        self.small = SmallFiles(request, self.save_id, self._store)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads, self._progress = threads, progress
        self._remaining: dict[int, int] = {}
        self._todo = self._plan()

    def _plan(self) -> list[tuple[int, int, int]]:
        """Return (shard number, start, end) of each extent in reverse order, because threads pop from the end."""
        todo = []
        for number, shard in enumerate(self.shards):
            share = round_up(-(-shard.extent_nbytes_total // self._threads), BLOCK_NBYTES)
            step = max(MIN_EXTENT_NBYTES, min(EXTENT_NBYTES, share))
            starts = range(0, shard.extent_nbytes_total, step)
            self._remaining[number] = len(starts)
            todo += [(number, start, min(start + step, shard.extent_nbytes_total)) for start in starts]
        return todo[::-1]

    def write(self, pool: Executor) -> RankResult:
        """Write all files of the rank.

        Args:
            pool: Runs up to `threads - 1` writing threads. The calling thread writes as well, so a busy pool only makes
                this slower.

        Returns:
            The result. All files are complete, and durable if `request.fsync`.

        Raises:
            CheckpointExistsError: Another save, which may not be replaced, was committed meanwhile; or, in layout
                "dcp", the directory has a `.metadata` of another program.
            UnsupportedPathError: The mount lacks what the layout needs.
            UnsupportedLeafError: The layout cannot store a leaf.
            SaveFailedError: Code `COPY_UNKNOWN`: the store may still be copying to the name of a shard.
            OSError: A file call failed, or the image does not have the save ID.
            Exception: As `check`.

        Blocks: for the writes. When it returns or raises, no thread uses the image any more.
        """
        self.write_shards(pool)
        return self.finish(self.request)

    def write_shards(self, pool: Executor) -> None:
        """Write only the shard files, for callers that know structure and objects later.

        Args, Raises and Blocks: as `write`.
        """
        started = time.perf_counter()
        with self._removed_on_failure():
            if self.request.layout == DCP:
                self._store.refuse_unable(self.request.path, self.save_id, fsync=self.request.fsync, overwrite=True)
                refuse_foreign_metadata(self.request.path, self.save_id, self._store)
            self._write_shards(pool)
        self._write_s = time.perf_counter() - started

    def finish(self, request: SaveRequest) -> RankResult:
        """Write objects, index and items file after `write_shards`.

        Args:
            request: The request; its parts are those of the request with which this writer was made.

        Returns, Raises and Blocks: as `write`.
        """
        started = time.perf_counter()
        self.request = request
        with self._removed_on_failure():
            record = self._write_small_files()
        seconds = {
            "write": self._write_s,
            "fsync": sum(s.fsync_s for s in self.shards),
            "index": time.perf_counter() - started,
        }
        direct = all(s.direct for s in self.shards if s.origin is None)
        if self._history is not None:
            self._remember(self._history)
        return RankResult(
            record=record,
            nbytes=record.nbytes,
            seconds=seconds,
            direct=direct,
            reused_nbytes=sum(s.nbytes for s in self.shards if s.origin is not None),
            dcp=self.dcp,
            shards_print=shards_print(self.shards),
        )

    def _remember(self, history: ShardHistory) -> None:
        """Add the shards to `history`. IMPORTANT: only once they are complete, and flushed if the request says so."""
        written = []
        for shard in self.shards:
            if shard.prints is None:
                return
            try:
                version = self._store.link_version(shard.path)
            except OSError:
                continue
            origin, durable = shard.origin or self.save_id, self.request.fsync
            digests, prints = bytes(shard.digests), bytes(shard.prints)
            written.append(
                WrittenShard(
                    shard.path,
                    shard.nbytes,
                    origin,
                    durable,
                    version,
                    digests,
                    prints,
                    shard.n_links,
                )
            )
        history.add(self.request.path, self.request.rank, written)

    @contextlib.contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        path, save_id, store, overwrite = self.request.path, self.save_id, self._store, self.request.overwrite
        try:
            refuse_existing(path, save_id, store, overwrite=overwrite)
            with refuse_other_commits(path, save_id, store, overwrite=overwrite):
                yield
        except BaseException:
            self.remove_created()
            raise

    def _write_shards(self, pool: Executor) -> None:
        for number in range(len(self.shards)):
            self._check_image(number)
        if self._history is not None:
            self._link_unchanged(self._history, pool)
        futures: list[Future[None]] = []
        try:
            for _ in range(min(self._threads, len(self._todo)) - 1):
                futures.append(pool.submit(self._run))
            self._run()
        finally:
            self._end(futures)
        if self._error is not None:
            raise self._error
        if any(self._remaining.values()):
            raise AssertionError("some extents were not written, and no error was raised")

    def _link_unchanged(self, history: ShardHistory, pool: Executor) -> None:
        """Link the shards that are unchanged, and take them from what is to be written."""
        written, durable = history.shards(self.request.path, self.request.rank), self.request.fsync
        try:
            unchanged = UnchangedShards(self.shards, written, self._store, durable=durable, check=self.check)
            linked = unchanged.link(pool, self._threads)
        except UnknownOutcomeError as error:
            # It may be the same with the next save: that one writes everything.
            history.forget(self.request.path, self.request.rank)
            raise self.copy_unknown(f"the store did not confirm the copy of an unchanged shard: {error}") from error
        self._todo = [extent for extent in self._todo if extent[0] not in linked]
        self._remaining.update(dict.fromkeys(linked, 0))

    def copy_unknown(self, detail: str) -> SaveFailedError:
        """Return the error of a save under whose names nothing may be written any more (`files.COPY_UNKNOWN`)."""
        request = self.request
        return copy_unknown(detail, save_id=request.save_id, rank=request.rank, step=request.step, path=request.path)

    @property
    def may_be_copied_to(self) -> bool:
        """Whether a dead process may have left a copy that the store still makes, to the name of a shard."""
        return bool(self.request.reuse) and self._store.links_may_end_late

    def _end(self, futures: list[Future[None]]) -> None:
        """Stop all writes, wait for the other threads, and close open files."""
        # IMPORTANT: when this returns, no thread may use the image or a descriptor, whatever happened.
        self._stop(None)
        for future in futures:
            if not future.cancel():
                future.result()
        for shard in self.shards:
            shard.abandon()

    def _check_image(self, number: int) -> None:
        offset, nbytes = self.request.parts[number]
        start = offset + SAVE_ID_OFFSET
        found = bytes(self.image[start : start + SAVE_ID_NBYTES])
        if found != save_id_bytes(self.save_id) or offset + nbytes > len(self.image):
            path = self.shards[number].path
            raise OSError(errno.EINVAL, f"the image of this shard does not have save id {self.save_id}", path)

    def _run(self) -> None:
        """Body of each thread: write extents until none is left or one has failed. Errors are stored, not raised."""
        while True:
            with self._lock:
                if not self._todo:
                    return
                number, start, end = self._todo.pop()
            try:
                self.check()
                self.shards[number].write_extent(start, end)
                self.check()
                self._progress(end - start)
                with self._lock:
                    self._remaining[number] -= 1
                    last = self._remaining[number] == 0
                if last:
                    self.shards[number].finish()
            except BaseException as error:
                self._stop(error)
                return

    def _stop(self, error: BaseException | None) -> None:
        with self._lock:
            self._todo.clear()
            if self._error is None:
                self._error = error
        for shard in self.shards if error is not None else ():
            shard.stop()

    def keep_shards(self, flush: Callable[[ShardWriter], None]) -> None:
        """Keep existing shard files instead of `write_shards`. Their `digests` must be filled in.

        If this or `finish` fails, the files stay, unless only this worker can commit them.

        Args:
            flush: Called for each shard, to flush its file again.
        """
        started = time.perf_counter()
        self.small.replace_existing()
        for shard in self.shards:
            shard.created, shard.prints = self.request.world_size == 1, None
        with self._removed_on_failure():
            for shard in self.shards:
                begun = time.perf_counter()
                flush(shard)
                shard.fsync_s = time.perf_counter() - begun
        self._write_s = time.perf_counter() - started

    def index(self) -> bytes:
        """Return the bytes of the index. The `digests` of the shards must be filled in."""
        request, save_id = self.request, self.save_id
        items_record = None
        if request.layout == DCP:
            self._items, table = encode_items(request.structure, request.objects, save_id, request.rank)
            checksum = file_checksum(self._items)
            items_record = ObjectsRecord(name=self.small.items_name, nbytes=len(self._items), checksum=checksum)
            self.dcp = (request.structure, table)
        objects = ObjectsRecord(
            name=self.small.objects_name,
            nbytes=len(request.objects),
            checksum=file_checksum(request.objects),
        )
        shards = tuple(
            ShardRecord(name=os.path.basename(s.path), nbytes=s.nbytes, digests=bytes(s.digests), origin=s.origin)
            for s in self.shards
        )
        return encode_index(
            RankIndex(
                save_id=save_id,
                rank=request.rank,
                world_size=request.world_size,
                block_nbytes=self.block_nbytes,
                shards=shards,
                objects=objects,
                structure=request.structure,
                layout=request.layout,
                items=items_record,
            )
        )

    def _write_small_files(self) -> RankRecord:
        """Write objects, index and items, flush the directory, and return the rank's entry in the manifest."""
        request, index = self.request, self.index()
        if request.layout == DCP:
            self.small.write(self.small.items_name, self._items)
            reach("rank: items written")
        self.small.write(self.small.objects_name, request.objects)
        reach("rank: objects written")
        self.small.write(self.small.index_name, index)
        reach("rank: index written")
        self.check()
        if request.fsync:
            self._store.sync(request.path)
        reach("rank: durable")
        return RankRecord(
            rank=request.rank,
            index_name=self.small.index_name,
            index_nbytes=len(index),
            index_checksum=file_checksum(index),
            n_tensors=request.n_tensors,
            n_files=len(self.shards) + 2 + (request.layout == DCP),
            nbytes=sum(s.nbytes for s in self.shards) + len(request.objects) + len(self._items) + len(index),
        )

    def remove_created(self) -> None:
        """Remove the files that this writer created. One that cannot be removed is left to a later `gc`, and logged."""
        for path in [s.path for s in self.shards if s.created] + self.small.created:
            try:
                reach("failed: removing")
                self.files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                _logger.warning("cannot remove %s after a failed save: %s", path, error)

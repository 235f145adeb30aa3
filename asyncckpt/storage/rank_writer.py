"""One rank's files of one save: shards, objects and index, written from memory by several threads.

Every shard is created exclusively, reserved, written in extents by at least two threads, cut to its exact length,
fsynced through the descriptor that wrote it and closed; each of these may fail, and then the whole rank fails.

IMPORTANT: of the small files, what stands is replaced in one step. Of several ranks another node's worker has heard
that these files are durable, and may have committed them by now.
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
from asyncckpt.format.checksums import BLOCK_NBYTES, file_checksum
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
from asyncckpt.storage.checkpoint_dir import overtaken, refuse_foreign_metadata
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.shard_writer import Image, ShardWriter, is_page_aligned, shards_print
from asyncckpt.storage.store import Store

EXTENT_NBYTES = 16 << 20
"""One write. 4 to 64 MiB reach the same speed on the machines measured so far; whole blocks."""

MIN_EXTENT_NBYTES = 4 * BLOCK_NBYTES
"""Files below `EXTENT_NBYTES` per thread are cut finer, so that two threads share them. Chosen, not measured."""

DEFAULT_THREADS = 4
"""Four keep the disk busy while one of them digests: 5 to 10 % faster than two with 1.4 GB on two cores."""

_logger = logging.getLogger("asyncckpt.storage")


@dataclass(frozen=True, kw_only=True, slots=True)
class RankResult:
    """What was written: the rank's line in the manifest, bytes, seconds per phase, whether O_DIRECT served all.

    `seconds` has `write` (shards, with their fsync), `fsync` (of shards, summed over files) and `index` (the rest).
    `shards_print`: of what the shards hold (`shard_writer.shards_print`); `rest_print`: of all else, added by a worker.
    `dcp`: in layout "dcp" the rank's structure and the table of its items, for `format.dcp.metadata_of`.
    `tally`: of the structure, seeded by the run (`seed_of`), for the proof of coverage; None: not made.
    """

    record: RankRecord
    nbytes: int
    seconds: dict[str, float]
    direct: bool
    dcp: tuple[bytes, bytes] | None = None
    shards_print: bytes = b""
    rest_print: bytes = b""
    tally: Tally | None = None


class SmallFiles:
    """Writes objects, index and items of one rank, or replaces those that stand.

    Args:
        request: Of the rank.
        save_id: The request's.
        store: Where it lies.

    Attributes:
        paths: Of these files, the index first: it says that the others are whole.
        created: Paths to be removed if the save fails.
        stand: They are there already: see `stand_already`.
    """

    def __init__(self, request: SaveRequest, save_id: SaveId, store: Store) -> None:
        self._request, self._store = request, store
        names = [index_name(save_id, request.rank), objects_name(save_id, request.rank)]
        names += [items_name(save_id, request.rank)] if request.layout == DCP else []
        self.paths = [os.path.join(request.path, name) for name in names]
        self.created: list[str] = []
        self.stand = False

    def stand_already(self) -> None:
        """From here on `write` replaces, and what stands stays if the save fails: unless nobody else can commit it."""
        self.stand = True
        if self._request.world_size == 1:
            self.created = list(self.paths)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, flushed if the request says so.

        Raises:
            OSError: A call failed; what stood before stands.
        """
        path = os.path.join(self._request.path, name)
        self._store.put(path, data, durable=self._request.fsync, replace=self.stand)
        if not self.stand:
            self.created.append(path)


class RankWriter:
    """Writes all files of one rank and makes them durable, in one step (`write`) or in two.

    When a step raises, what was created is removed.

    Args:
        request: What to write; the directory exists.
        image: The bytes (format "B") that the parts lie in: a whole slot, private memory, or what makes them.
            Page-aligned for O_DIRECT.
        files: The storage seam.
        check: Called before and after each extent, and before the end; raises when the image may not be used any more.
        threads: How many write.
        progress: Called with the bytes of each extent that was written, from several threads.
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
    ) -> None:
        self.request, self.image, self.files, self.check = request, image, files, check
        self.save_id = SaveId.parse(request.save_id)
        self._store = store_over(files, umask=request.umask)
        self._write_s = 0.0
        aligned = is_page_aligned(image)
        self.shards = [
            self._store.shard_writer(
                os.path.join(request.path, shard_name(self.save_id, request.rank, part, request.layout)),
                image,
                offset,
                nbytes,
                aligned=aligned and offset % PAGE_NBYTES == 0,
                fsync=request.fsync,
            )
            for part, (offset, nbytes) in enumerate(request.parts)
        ]
        self.dcp: tuple[bytes, bytes] | None = None
        self._items = b""
        self.small = SmallFiles(request, self.save_id, self._store)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads, self._progress = threads, progress
        self._remaining: dict[int, int] = {}
        self._todo = self._plan()

    def _plan(self) -> list[tuple[int, int, int]]:
        """Return (shard number, start, end) of every extent, in reverse: threads pop from the end."""
        todo = []
        for number, shard in enumerate(self.shards):
            share = round_up(-(-shard.extent_nbytes_total // self._threads), BLOCK_NBYTES)
            step = max(MIN_EXTENT_NBYTES, min(EXTENT_NBYTES, share))
            starts = range(0, shard.extent_nbytes_total, step)
            self._remaining[number] = len(starts)
            todo += [(number, start, min(start + step, shard.extent_nbytes_total)) for start in starts]
        return todo[::-1]

    def write(self, pool: Executor) -> RankResult:
        """Write everything.

        Args:
            pool: Runs the other writing threads. The calling thread writes too, beside `threads - 1` of them, so that a
                busy pool only slows it down.

        Returns:
            The result; every file is complete, and durable when `request.fsync`.

        Raises:
            CheckpointExistsError: Another save has committed there meanwhile, which is not to be replaced; or a
                `.metadata` that is not ours stands where one of ours is to go.
            UnsupportedLeafError: A leaf has no form in the layout.
            OSError: A file call failed, or a part does not carry the save id.
            Exception: Whatever `check` raises.

        Blocks: for the writes. No thread uses the image any more when this returns or raises.
        """
        self.write_shards(pool)
        return self.finish(self.request)

    def write_shards(self, pool: Executor) -> None:
        """Write the parts, as `write`, for whoever knows structure and objects only afterwards."""
        started = time.perf_counter()
        with self._removed_on_failure():
            if self.request.layout == DCP:
                refuse_foreign_metadata(self.request.path, self.save_id, self._store)
            self._write_shards(pool)
        self._write_s = time.perf_counter() - started

    def finish(self, request: SaveRequest) -> RankResult:
        """Write objects and index of `request`, whose shards are written; its parts are those of the first request."""
        started = time.perf_counter()
        self.request = request
        with self._removed_on_failure():
            record = self._write_small_files()
        seconds = {
            "write": self._write_s,
            "fsync": sum(s.fsync_s for s in self.shards),
            "index": time.perf_counter() - started,
        }
        direct = all(s.direct for s in self.shards)
        return RankResult(
            record=record,
            nbytes=record.nbytes,
            seconds=seconds,
            direct=direct,
            dcp=self.dcp,
            shards_print=shards_print(self.shards),
        )

    @contextlib.contextmanager
    def _removed_on_failure(self) -> Iterator[None]:
        try:
            with overtaken(self.request.path, self.save_id, self._store, overwrite=self.request.overwrite):
                yield
        except BaseException:
            self.remove_created()
            raise

    def _write_shards(self, pool: Executor) -> None:
        for number in range(len(self.shards)):
            self._check_image(number)
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
            raise AssertionError("extents were left unwritten without an error")

    def _end(self, futures: list[Future[None]]) -> None:
        """Let nothing more be written, end the other threads, and close what they leave open."""
        # IMPORTANT: no thread may still use the image or a descriptor when this returns, whatever happened.
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
            raise OSError(errno.EINVAL, f"the image does not carry save id {self.save_id}", path)

    def _run(self) -> None:
        """One thread: take extents until none is left or one has failed. Errors are kept, not raised."""
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
        """In the place of `write_shards`: the files stand already, and `digests` are filled in; flush each again.

        What stands stays, if this fails: but where nobody else can commit it.
        """
        started = time.perf_counter()
        self.small.stand_already()
        for shard in self.shards:
            shard.created = self.request.world_size == 1
        with self._removed_on_failure():
            for shard in self.shards:
                begun = time.perf_counter()
                flush(shard)
                shard.fsync_s = time.perf_counter() - begun
        self._write_s = time.perf_counter() - started

    def index(self) -> bytes:
        """Return the index, of shards whose digests are filled in."""
        request, save_id = self.request, self.save_id
        items_record = None
        if request.layout == DCP:
            self._items, table = encode_items(request.structure, request.objects, save_id, request.rank)
            name, checksum = items_name(save_id, request.rank), file_checksum(self._items)
            items_record = ObjectsRecord(name=name, nbytes=len(self._items), checksum=checksum)
            self.dcp = (request.structure, table)
        objects = ObjectsRecord(
            name=objects_name(save_id, request.rank),
            nbytes=len(request.objects),
            checksum=file_checksum(request.objects),
        )
        shards = tuple(
            ShardRecord(name=os.path.basename(s.path), nbytes=s.nbytes, digests=bytes(s.digests)) for s in self.shards
        )
        return encode_index(
            RankIndex(
                save_id=save_id,
                rank=request.rank,
                world_size=request.world_size,
                shards=shards,
                objects=objects,
                structure=request.structure,
                layout=request.layout,
                items=items_record,
            )
        )

    def _write_small_files(self) -> RankRecord:
        """Write objects and index, flush the directory, and return the rank's line in the manifest."""
        request, save_id, index = self.request, self.save_id, self.index()
        if request.layout == DCP:
            self.small.write(items_name(save_id, request.rank), self._items)
            reach("rank: items written")
        self.small.write(objects_name(save_id, request.rank), request.objects)
        reach("rank: objects written")
        self.small.write(index_name(save_id, request.rank), index)
        reach("rank: index written")
        self.check()
        if request.fsync:
            self._store.sync(request.path)
        reach("rank: durable")
        return RankRecord(
            rank=request.rank,
            index_name=index_name(save_id, request.rank),
            index_nbytes=len(index),
            index_checksum=file_checksum(index),
            n_tensors=request.n_tensors,
            n_files=len(self.shards) + 2 + (request.layout == DCP),
            nbytes=sum(s.nbytes for s in self.shards) + len(request.objects) + len(self._items) + len(index),
        )

    def remove_created(self) -> None:
        """Remove what this call created; a file that resists is left to a later clean-up."""
        for path in [s.path for s in self.shards if s.created] + self.small.created:
            try:
                reach("failed: removing")
                self.files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                _logger.warning("cannot remove %s after a failed save: %s", path, error)

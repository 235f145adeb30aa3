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
from dataclasses import dataclass, field

from asyncckpt.basics.failpoints import reach
from asyncckpt.format.checksums import BLOCK_NBYTES, file_checksum
from asyncckpt.format.dcp import encode_items
from asyncckpt.format.index import ObjectsRecord, RankIndex, ShardRecord, encode_index
from asyncckpt.format.layout import PAGE_NBYTES, SAVE_ID_NBYTES, SAVE_ID_OFFSET, round_up, save_id_bytes
from asyncckpt.format.manifest import RankRecord
from asyncckpt.format.names import (
    DCP,
    SAFETENSORS,
    SaveId,
    index_name,
    items_name,
    objects_name,
    replacing_name,
    shard_name,
)
from asyncckpt.storage.checkpoint_dir import overtaken, refuse_foreign_metadata
from asyncckpt.storage.coverage import Tally
from asyncckpt.storage.files import MODE_FILE, Files
from asyncckpt.storage.local import LocalStore
from asyncckpt.storage.shard_writer import Image, ShardWriter, is_page_aligned, shards_print
from asyncckpt.storage.store import Store

EXTENT_NBYTES = 16 << 20
"""One write. 4 to 64 MiB reach the same speed on the machines measured so far; whole blocks."""

MIN_EXTENT_NBYTES = 4 * BLOCK_NBYTES
"""Files below `EXTENT_NBYTES` per thread are cut finer, so that two threads share them. Chosen, not measured."""

DEFAULT_THREADS = 4
"""Four keep the disk busy while one of them digests: 5 to 10 % faster than two with 1.4 GB on two cores."""

_logger = logging.getLogger("asyncckpt.storage")


def _unheard(nbytes: int) -> None:
    """Nobody asked for progress."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RankJob:
    """What to write.

    Attributes:
        path: The checkpoint's directory; it exists.
        save_id, rank, world_size: Make the names.
        parts: One (offset in the image, exact length) per shard file; offsets are whole pages.
        structure, objects: Bytes to store as they are.
        n_tensors: For the manifest's totals.
        fsync: False leaves flushing to the kernel.
        overwrite: Whether an older checkpoint may stand there.
        umask: Of the files' mode 0666.
        threads: Threads that write; 0 takes `rank_writer.DEFAULT_THREADS`.
        layout: What the parts look like, one of `names.LAYOUTS`.
        progress: Called with the bytes of each extent that was written, from several threads.
    """

    path: str
    save_id: SaveId
    rank: int
    world_size: int
    parts: tuple[tuple[int, int], ...]
    structure: bytes
    objects: bytes
    n_tensors: int
    fsync: bool = True
    overwrite: bool = False
    umask: int = 0o022
    threads: int = 0
    layout: str = SAFETENSORS
    progress: Callable[[int], None] = field(default=_unheard, compare=False)


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


def small_paths(job: RankJob) -> list[str]:
    """Return the paths of these files, the index first: it says that the others are whole."""
    names = [index_name(job.save_id, job.rank), objects_name(job.save_id, job.rank)]
    names += [items_name(job.save_id, job.rank)] if job.layout == DCP else []
    return [os.path.join(job.path, name) for name in names]


class SmallFiles:
    """Writes objects, index and items of one rank, or replaces those that stand.

    Args:
        job: Where to.
        store: That has renames.

    Attributes:
        created: Paths to be removed if the save fails.
        stand: They are there already: see `stand_already`.
    """

    def __init__(self, job: RankJob, store: Store) -> None:
        self._job, self._store = job, store
        self.created: list[str] = []
        self.stand = False

    def stand_already(self) -> None:
        """From here on `write` replaces, and what stands stays if the save fails: unless nobody else can commit it."""
        self.stand = True
        if self._job.world_size == 1:
            self.created = small_paths(self._job)

    def write(self, name: str, data: bytes) -> None:
        """Write one file, flushed if the job says so.

        Raises:
            OSError: A call failed; what stood before stands.
        """
        path = os.path.join(self._job.path, name)
        if self.stand:
            self._replace(path, data)
            return
        self._store.put(path, data, durable=self._job.fsync)
        self.created.append(path)

    def _replace(self, path: str, data: bytes) -> None:
        temporary = replacing_name(path)
        with contextlib.suppress(FileNotFoundError):
            self._store.remove(temporary)  # of a worker that died here
        self._store.put(temporary, data, durable=self._job.fsync)
        try:
            reach("small file: replacing")
            self._store.move(temporary, path, replace=True)
            reach("small file: replaced")
        except BaseException:
            with contextlib.suppress(OSError):
                self._store.remove(temporary)
            raise


def write_rank_files(
    job: RankJob, image: Image, *, files: Files, pool: Executor, check: Callable[[], None]
) -> RankResult:
    """Write all files of one rank and make them durable.

    The calling thread writes too, beside `threads - 1` of `pool`, so that a busy pool only slows it down.

    Args:
        job: What to write.
        image: The bytes (format "B") that the parts lie in: a whole slot, private memory, or what makes them.
            Page-aligned for O_DIRECT.
        files: The storage seam.
        pool: Runs the other writing threads.
        check: Called before and after each extent, and before the end; raises when the image may not be used any more.

    Returns:
        The result; every file is complete, and durable when `job.fsync`.

    Raises:
        CheckpointExistsError: Another save has committed there meanwhile, which is not to be replaced; or a `.metadata`
            that is not ours stands where one of ours is to go.
        UnsupportedLeafError: A leaf has no form in the layout.
        OSError: A file call failed, or a part does not carry the save id. What this call created is removed.
        Exception: Whatever `check` raises; the same.

    Blocks: for the writes. No thread uses `image` any more when this returns or raises.
    """
    writer = RankWriter(job, image, files, check)
    writer.write_shards(pool)
    return writer.finish(job)


class RankWriter:
    """`write_rank_files` in two steps, for whoever knows structure and objects only after the shards are written.

    Arguments and errors as there; when a step raises, what was created is removed.
    """

    def __init__(self, job: RankJob, image: Image, files: Files, check: Callable[[], None]) -> None:
        self.job, self.image, self.files, self.check = job, image, files, check
        self._store = LocalStore(files, umask=job.umask)
        self._write_s = 0.0
        self.mode = MODE_FILE & ~job.umask
        aligned = is_page_aligned(image)
        self.shards = [
            ShardWriter(
                os.path.join(job.path, shard_name(job.save_id, job.rank, part, job.layout)),
                image,
                offset,
                nbytes,
                aligned=aligned and offset % PAGE_NBYTES == 0,
                mode=self.mode,
                fsync=job.fsync,
                files=files,
            )
            for part, (offset, nbytes) in enumerate(job.parts)
        ]
        self.dcp: tuple[bytes, bytes] | None = None
        self._items = b""
        self._small = SmallFiles(job, self._store)
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        self._threads = job.threads or DEFAULT_THREADS
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

    def write_shards(self, pool: Executor) -> None:
        """Write the parts. Blocks for the writes; no thread uses the image any more when this returns or raises."""
        started = time.perf_counter()
        with self._removed_on_failure():
            if self.job.layout == DCP:
                refuse_foreign_metadata(self.job.path, self.job.save_id, self._store)
            self._write_shards(pool)
        self._write_s = time.perf_counter() - started

    def finish(self, job: RankJob) -> RankResult:
        """Write objects and index of `job`, whose shards are written; the parts are those of the first job."""
        started = time.perf_counter()
        self.job = job
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
            with overtaken(self.job.path, self.job.save_id, self._store, overwrite=self.job.overwrite):
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
        offset, nbytes = self.job.parts[number]
        start = offset + SAVE_ID_OFFSET
        found = bytes(self.image[start : start + SAVE_ID_NBYTES])
        if found != save_id_bytes(self.job.save_id) or offset + nbytes > len(self.image):
            path = self.shards[number].path
            raise OSError(errno.EINVAL, f"the image does not carry save id {self.job.save_id}", path)

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
                self.job.progress(end - start)
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

    def keep_shards(self, flush: Callable[[ShardWriter], None]) -> None:
        """In the place of `write_shards`: the files stand already, and `digests` are filled in; flush each again.

        What stands stays, if this fails: but where nobody else can commit it.
        """
        started = time.perf_counter()
        self._small.stand_already()
        for shard in self.shards:
            shard.created = self.job.world_size == 1
        with self._removed_on_failure():
            for shard in self.shards:
                begun = time.perf_counter()
                flush(shard)
                shard.fsync_s = time.perf_counter() - begun
        self._write_s = time.perf_counter() - started

    def index(self) -> bytes:
        """Return the index, of shards whose digests are filled in."""
        job = self.job
        items_record = None
        if job.layout == DCP:
            self._items, table = encode_items(job.structure, job.objects, job.save_id, job.rank)
            name, checksum = items_name(job.save_id, job.rank), file_checksum(self._items)
            items_record = ObjectsRecord(name=name, nbytes=len(self._items), checksum=checksum)
            self.dcp = (job.structure, table)
        objects = ObjectsRecord(
            name=objects_name(job.save_id, job.rank), nbytes=len(job.objects), checksum=file_checksum(job.objects)
        )
        shards = tuple(
            ShardRecord(name=os.path.basename(s.path), nbytes=s.nbytes, digests=bytes(s.digests)) for s in self.shards
        )
        return encode_index(
            RankIndex(
                save_id=job.save_id,
                rank=job.rank,
                world_size=job.world_size,
                shards=shards,
                objects=objects,
                structure=job.structure,
                layout=job.layout,
                items=items_record,
            )
        )

    def _write_small_files(self) -> RankRecord:
        """Write objects and index, flush the directory, and return the rank's line in the manifest."""
        job, index = self.job, self.index()
        if job.layout == DCP:
            self._small.write(items_name(job.save_id, job.rank), self._items)
            reach("rank: items written")
        self._small.write(objects_name(job.save_id, job.rank), job.objects)
        reach("rank: objects written")
        self._small.write(index_name(job.save_id, job.rank), index)
        reach("rank: index written")
        self.check()
        if job.fsync:
            self._store.sync(job.path)
        reach("rank: durable")
        return RankRecord(
            rank=job.rank,
            index_name=index_name(job.save_id, job.rank),
            index_nbytes=len(index),
            index_checksum=file_checksum(index),
            n_tensors=job.n_tensors,
            n_files=len(self.shards) + 2 + (job.layout == DCP),
            nbytes=sum(s.nbytes for s in self.shards) + len(job.objects) + len(self._items) + len(index),
        )

    def remove_created(self) -> None:
        """Remove what this call created; a file that resists is left to a later clean-up."""
        for path in [s.path for s in self.shards if s.created] + self._small.created:
            try:
                reach("failed: removing")
                self.files.unlink(path)
            except FileNotFoundError:
                pass
            except OSError as error:
                _logger.warning("cannot remove %s after a failed save: %s", path, error)

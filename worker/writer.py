"""Jobs that touch storage: prepare a directory, write one rank's files, commit, clean up, look for the lineage.

It owns the pool of writing threads, and wraps whatever goes wrong into one error that says what to do.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, TypeVar

from asyncckpt import __version__
from asyncckpt.errors import AsyncCkptError, SaveFailedError
from asyncckpt.failpoints import reach
from asyncckpt.format.names import SaveId
from asyncckpt.memory.slot import SlotError
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.storage.catalog import next_epoch_beside
from asyncckpt.storage.commit import publish, remove_files_of, remove_leftovers
from asyncckpt.storage.directory import prepare_directory, remove_made
from asyncckpt.storage.failures import save_failure, whose
from asyncckpt.storage.files import Files
from asyncckpt.storage.home import Home, home_of
from asyncckpt.storage.pace import Pace
from asyncckpt.storage.pace_file import DevicePaces
from asyncckpt.storage.rank_files import DEFAULT_THREADS, EXTENT_NBYTES, write_rank_files
from asyncckpt.storage.rank_job import RankJob, RankResult
from asyncckpt.storage.record import build_manifest, dcp_metadata_of
from asyncckpt.storage.resuming import is_committed, resume_rank_files
from asyncckpt_worker.actions import Commit, Prepare, Write
from asyncckpt_worker.early import write_early
from asyncckpt_worker.events import SaveKey
from asyncckpt_worker.freshness import rest_print
from asyncckpt_worker.preflight import check_disk, check_root
from asyncckpt_worker.rings import Prove, unproved, write_ring
from asyncckpt_worker.scheduler import LANES
from asyncckpt_worker.shared import await_shared
from asyncckpt_worker.slots import SlotStore

MIN_THREADS = 2
MAX_POOL_THREADS = 64
"""Threads that write, of all saves together; they are started when they are needed."""

WRITE_PACES = (Pace(DEFAULT_THREADS, EXTENT_NBYTES), Pace(2 * DEFAULT_THREADS, EXTENT_NBYTES), Pace(2, EXTENT_NBYTES))
"""What is tried on a device: the default, more threads, fewer. The size of a write made no difference (rank_files)."""

T = TypeVar("T")
_logger = logging.getLogger("asyncckpt.worker")


class Writer:
    """Performs storage jobs. Every method may be called from several threads, and raises only errors of our tree.

    Args:
        files: The storage seam.
        slots: Where the snapshots lie.
        roots: Directories below which it may write; empty allows every path.
        threads: Per save, unless the save asks for a number; 0 takes the default.
        paces: Where neither says a number: what is faster on which device.
    """

    def __init__(
        self, files: Files, slots: SlotStore, roots: Sequence[str], threads: int, paces: DevicePaces | None = None
    ) -> None:
        self._files = files
        self._slots = slots
        self._roots = tuple(roots)
        self._threads, self._paces = max(threads or DEFAULT_THREADS, MIN_THREADS), None if threads else paces
        n_pool = min(MAX_POOL_THREADS, LANES["write"] * max(self._threads, *(pace.threads for pace in WRITE_PACES)))
        self._pool = ThreadPoolExecutor(n_pool, thread_name_prefix="asyncckpt-io")
        self._written: dict[SaveKey, list[int]] = {}

    def prepare(self, job: Prepare) -> bool:
        """Make the directory and look for what would make the save fail.

        Returns:
            Whether the save has been committed already: by the worker before, which is dead.

        Raises:
            CheckpointExistsError: A manifest is there that is not to be replaced, or above it.
            SaveFailedError: Outside the roots, no room, or the directory cannot be made.
        """
        save_id, rank = job.key

        def run() -> bool:
            reach("worker: preparing")
            check_root(job.path, self._roots)
            if job.resumed and is_committed(job.path, SaveId.parse(save_id), files=self._files):
                remove_leftovers(job.path, SaveId.parse(save_id), files=self._files)
                return True
            made = prepare_directory(
                job.path,
                save_id=SaveId.parse(save_id),
                files=self._files,
                umask=job.umask,
                fsync=job.fsync,
                overwrite=job.overwrite,
                resumed=job.resumed,
            )
            try:
                if not job.resumed:  # its files may have taken the room that they need
                    check_disk(job.path, job.nbytes, self._files)
            except OSError:
                remove_made(made, self._files)
                raise
            return False

        return self._wrapped(run, save_id, rank, job.step, job.path)

    def home(self, path: str) -> Home:
        """Return which directory a save goes to, so that its snapshot is not offered once somebody has removed that."""
        return home_of(path, self._files)

    def write(self, job: Write, prove: Prove = unproved) -> tuple[RankResult, bool]:
        """Write one rank's files from its slot; those that the worker before has made durable are kept.
        `prove` looks at the request of the seal, where writing begins before that.

        Returns:
            The result, and whether the shards were kept.

        Raises:
            SaveFailedError: A call failed, or the slot was reopened meanwhile. Files of this rank are removed.
        """
        request = job.request

        def run() -> tuple[RankResult, bool]:
            reach("worker: writing")
            pieces = self._written[job.key] = []  # appended to by threads, which needs no lock
            try:
                return filed(pieces)
            finally:
                self._written.pop(job.key, None)

        def filed(pieces: list[int]) -> tuple[RankResult, bool]:
            pace = self._pace(request)
            threads = pace.threads if pace else request.write_threads or self._threads
            with self._slots.use(job.slot) as memory:
                self._slots.check_unspoiled(job.slot, job.generation)
                if request.ring_segments:
                    rank_job = self._rank_job(request, request.write_threads or self._threads, pieces.append)
                    return write_ring(job, rank_job, memory, self._slots, prove, files=self._files, pool=self._pool)

                if job.early:
                    rank_job = self._rank_job(request, threads, pieces.append)
                    found = write_early(job, rank_job, memory, self._slots, prove, files=self._files, pool=self._pool)
                    return found, False

                def check() -> None:
                    if not memory.control.is_sealed(job.generation):
                        raise SlotError(f"slot {job.slot} was reopened while generation {job.generation} was written")

                rank_job = self._rank_job(request, threads, pieces.append)
                view = memory.mapping.view()
                try:
                    if job.resumed:
                        result, kept = resume_rank_files(
                            rank_job, view, files=self._files, pool=self._pool, check=check
                        )
                    else:
                        result = write_rank_files(rank_job, view, files=self._files, pool=self._pool, check=check)
                        kept = False
                finally:
                    view.release()
            if self._paces is not None and pace is not None and result.direct and not kept:
                self._paces.took(request.path, pace, result.nbytes, result.seconds["write"])
            return replace(result, rest_print=rest_print(request)), kept

        return self._wrapped(run, request.save_id, request.rank, request.step, request.path)

    def written(self) -> dict[SaveKey, int]:
        """Return how many bytes of shards have been written so far, of what is being written now."""
        return {key: sum(list(pieces)) for key, pieces in list(self._written.items())}

    def _pace(self, request: SaveRequest) -> Pace | None:
        """Return what the device wants; None where somebody has said it."""
        return None if self._paces is None or request.write_threads else self._paces.choose(request.path)

    def _rank_job(self, request: SaveRequest, threads: int, progress: Callable[[int], None]) -> RankJob:
        return RankJob(
            path=request.path,
            save_id=SaveId.parse(request.save_id),
            rank=request.rank,
            world_size=request.world_size,
            parts=tuple((p.offset, p.nbytes) for p in request.parts),
            structure=request.structure,
            objects=request.objects,
            n_tensors=request.n_tensors,
            fsync=request.fsync,
            overwrite=request.overwrite,
            umask=request.umask,
            layout=request.layout,
            progress=progress,
            threads=min(MAX_POOL_THREADS, max(threads, MIN_THREADS)),
        )

    def commit(self, job: Commit) -> dict[str, Any]:
        """Publish the manifest, then remove what earlier attempts and a replaced checkpoint left.

        Returns:
            The report's figures of this phase.

        Raises:
            CheckpointExistsError: Another save's manifest is there, and not to be replaced; nothing was changed.
            CommitUnknownError: Nobody knows whether the manifest stands.
            SaveFailedError: Nothing was published.
        """
        request, results = job.requests[0], job.results
        assert request.step is not None, "a rank 0 that seals without one contradicts itself"
        step = request.step
        begun = time.perf_counter()

        def run() -> None:
            reach("worker: committing")
            save_id = SaveId.parse(request.save_id)
            dcp_metadata = dcp_metadata_of(save_id, results, [r.structure for r in job.requests])
            if job.remote:
                await_shared(request.path, [results[rank].record for rank in job.remote], self._files)
                reach("commit: others seen")
            manifest = build_manifest(
                save_id,
                results,
                step=step,
                world_size=request.world_size,
                fsync=all(r.fsync for r in job.requests),
                metadata=request.metadata,
                package=__version__,
                dcp_metadata=dcp_metadata,
            )
            publish(
                request.path,
                manifest,
                files=self._files,
                umask=request.umask,
                overwrite=request.overwrite,
                dcp_metadata=dcp_metadata,
            )

        self._wrapped(run, request.save_id, request.rank, request.step, request.path)
        seconds = time.perf_counter() - begun
        removed = remove_leftovers(request.path, SaveId.parse(request.save_id), files=self._files)
        if removed:
            _logger.info("removed %d leftovers", len(removed), extra={"save_id": request.save_id})
        return {"seconds_commit": seconds}

    def remove(self, save_id: str, path: str) -> None:
        """Remove the files of a save that failed; errors are logged only."""
        remove_files_of(path, SaveId.parse(save_id), files=self._files)

    def lineage(self, path: str) -> int:
        """Return the epoch of a run whose first checkpoint is at `path`.

        Raises:
            SaveFailedError: The siblings cannot be read.
        """

        def run() -> int:
            check_root(path, self._roots)
            reach("worker: lineage asked for")
            return next_epoch_beside(path, self._files)

        return self._wrapped(run, None, None, None, path)

    def close(self) -> None:
        """Let the pool's threads end; does not wait for them."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @staticmethod
    def _wrapped(run: Callable[[], T], save_id: str | None, rank: int | None, step: int | None, path: str) -> T:
        try:
            return run()
        except BaseException as error:
            raise wrap(error, save_id, rank, step, path) from error


def wrap(error: BaseException, save_id: str | None, rank: int | None, step: int | None, path: str) -> AsyncCkptError:
    """Return `error` as one of our tree that says what happened to what, and what to do."""
    if isinstance(error, AsyncCkptError):
        facts = {"save_id": save_id, "rank": rank, "step": step, "path": path, **error.facts()}
        return type(error)(error.message, **{n: v for n, v in facts.items() if n in error.fields})
    if isinstance(error, OSError):
        return save_failure(error, save_id=save_id, rank=rank, step=step, path=path)
    if isinstance(error, SlotError):
        code, advice = "slot_reused", "the trainer wrote to the slot before the save had ended: report this as a bug"
    else:
        code, advice = "internal", "this is a bug in asyncckpt: report it with the worker's log"
        _logger.error("unexpected error", exc_info=error, extra={"save_id": save_id})
    detail = str(error) or type(error).__name__
    what = f"save {save_id} ({whose(step, rank)}) to {path}" if save_id else f"looking beside {path}"
    return SaveFailedError(
        f"{what} failed: {detail}; nothing was published; {advice}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )

"""Jobs that touch storage: prepare a directory, write one rank's files, commit, clean up, find the next epoch.

Every failure becomes one error of `asyncckpt.errors` that says what to do.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from dataclasses import replace
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import AsyncCkptError, SaveFailedError
from asyncckpt.format.names import DCP, SaveId
from asyncckpt.memory.arena import SlotMemory
from asyncckpt.memory.slot import SlotError
from asyncckpt.storage.catalog import next_epoch_beside
from asyncckpt.storage.checkpoint_dir import NO_IDENTITY, identity_of, prepare_directory, remove_made
from asyncckpt.storage.commit import commit_save, remove_files_of, remove_leftovers
from asyncckpt.storage.files import Files, save_failure, step_and_rank
from asyncckpt.storage.locate import files_at, store_at
from asyncckpt.storage.mounts.probe import is_native
from asyncckpt.storage.rank_writer import DEFAULT_THREADS, RankResult, RankWriter
from asyncckpt.storage.recovery import is_committed, resume_rank_files
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.store import DirectoryIdentity, Store
from asyncckpt_worker.core.actions import Commit, Prepare, ScanLineage, Write
from asyncckpt_worker.core.events import SaveKey
from asyncckpt_worker.io.content_digest import rest_print
from asyncckpt_worker.io.remote_ranks import Structures, dcp_part_at, index_at, wait_until_visible
from asyncckpt_worker.io.slot_store import SlotStore
from asyncckpt_worker.io.stream_source import CheckRequest, unchecked, write_streamed

MIN_THREADS = 2
MAX_WRITE_THREADS = 64
"""Maximum threads that write one rank's files."""

RESERVE_INODES = 8

_logger = logging.getLogger("asyncckpt.worker")


class Writer:
    """Performs storage jobs. Safe to call from several threads. Raises only errors of `asyncckpt.errors`.

    Args:
        files: File calls.
        slots: Slots of this worker.
        roots: Directories below which it may write; empty allows every path.
        threads: Threads that write one rank's files, unless the save asks for a number; 0 is the default.

    Attributes:
        threads: That number, never 0.
    """

    def __init__(self, files: Files, slots: SlotStore, roots: Sequence[str], threads: int) -> None:
        self._files = files
        self._slots = slots
        self._roots = tuple(roots)
        self.threads = max(threads or DEFAULT_THREADS, MIN_THREADS)
        self._written: dict[SaveKey, list[int]] = {}
        self._history = ShardHistory()

    def was_committed(self, job: Prepare) -> bool:
        """Return whether a dead worker has committed the save; then also remove files of earlier saves.

        IMPORTANT: called before `prepare`, which relies on the check of the roots here.

        Raises:
            SaveFailedError: The path is outside the roots, or it cannot be known.
        """
        with _wrapped(*job.key, job.step, job.path):
            reach("worker: preparing")
            check_root(job.path, self._roots)
            if not job.resumed:
                return False
            save_id, store = SaveId.parse(job.key[0]), store_at(job.path, self._files, umask=job.umask)
            if not is_committed(job.path, save_id, store=store):
                return False
            self._remove_leftovers(job.path, job.step, save_id, store)
            return True

    def prepare(self, job: Prepare) -> None:
        """Create the directory, and check what would make the save fail.

        Raises:
            CheckpointExistsError: A manifest that must not be replaced is at the path or above it.
            SaveFailedError: There is no room, or the directory cannot be created.
        """
        with _wrapped(*job.key, job.step, job.path):
            store = store_at(job.path, self._files, umask=job.umask)
            made = prepare_directory(
                job.path,
                save_id=SaveId.parse(job.key[0]),
                store=store,
                fsync=job.fsync,
                overwrite=job.overwrite,
                resumed=job.resumed,
            )
            try:
                if not job.resumed:  # its own files may already take the space
                    check_disk(job.path, job.nbytes, store.as_files())
            except OSError:
                remove_made(made, store)
                raise

    def directory_identity(self, path: str) -> DirectoryIdentity:
        """Return the identity of a save's directory, since snapshots of removed checkpoints are not loaded.

        It is `NO_IDENTITY` if the store cannot be used: then `prepare` has raised the reason.
        """
        try:
            return identity_of(path, store_at(path, self._files))
        except AsyncCkptError:
            return NO_IDENTITY

    def write(self, job: Write, pool: Executor, check_request: CheckRequest = unchecked) -> tuple[RankResult, bool]:
        """Write one rank's files from its slot; files that a dead worker has made durable are kept.

        Args:
            job: The action.
            pool: Runs helper threads.
            check_request: Called with the request before anything is written. An early write, and one through a ring,
                call it again with the sealed request, whose structure may differ.

        Returns:
            The result, and whether the shards were kept.

        Raises:
            CorruptCheckpointError, UnsupportedFormatError: As `check_request`.
            SaveFailedError: A call failed, or the slot was reopened meanwhile. Files of this rank were removed.
        """
        request = job.request
        threads = min(MAX_WRITE_THREADS, max(request.write_threads or self.threads, MIN_THREADS))
        pieces = self._written[job.key] = []  # several threads append, which needs no lock
        try:
            with _wrapped(request.save_id, request.rank, request.step, request.path):
                tally = check_request(request)
                reach("worker: writing")
                files = files_at(request.path, self._files)
                with self._slots.use(job.slot) as memory:
                    if request.ring_segments or job.early:
                        return write_streamed(
                            job,
                            memory,
                            self._slots,
                            check_request,
                            files=files,
                            pool=pool,
                            threads=threads,
                            progress=pieces.append,
                            history=self._history,
                        )
                    result, kept = _write_sealed(
                        job, memory, files, pool, threads=threads, progress=pieces.append, history=self._history
                    )
                return replace(result, rest_print=rest_print(request), tally=tally), kept
        finally:
            self._written.pop(job.key, None)

    def written(self) -> dict[SaveKey, int]:
        """Return the number of shard bytes that running writes have written so far."""
        return {key: sum(list(pieces)) for key, pieces in list(self._written.items())}

    def structures(self, job: Commit) -> Sequence[bytes]:
        """Return the structures of all ranks, by rank; those of other nodes are read from their indexes on access.

        An access may raise SaveFailedError or CorruptCheckpointError, and block as `wait_until_visible`.
        """
        first = job.requests[0]

        def read(rank: int) -> bytes:
            with _wrapped(first.save_id, rank, first.step, first.path):
                record, files = job.results[rank].record, files_at(first.path, self._files)
                wait_until_visible(first.path, [record], files)
                return index_at(first.path, record, files).structure

        return Structures([request.structure for request in job.requests], read)

    def commit(self, job: Commit) -> dict[str, Any]:
        """Publish the manifest, then remove files of earlier attempts and of a replaced checkpoint.

        Returns:
            Figures of the commit for the report.

        Raises:
            CheckpointExistsError: Another save's manifest exists and must not be replaced; nothing was changed.
            CommitUnknownError: It is not known whether the manifest was published.
            SaveFailedError: Nothing was published.
        """
        request, results = job.requests[0], list(job.results)
        begun = time.perf_counter()
        with _wrapped(request.save_id, request.rank, request.step, request.path):
            reach("worker: committing")
            store = store_at(request.path, self._files, umask=request.umask)
            if job.remote:
                wait_until_visible(request.path, [results[rank].record for rank in job.remote], store.as_files())
                reach("commit: others seen")
            for rank in job.remote if request.layout == DCP else ():
                part = dcp_part_at(request.path, results[rank].record, store.as_files())
                results[rank] = replace(results[rank], dcp=part)
            commit_save(job.requests, results, store=store, package=__version__)
        seconds = time.perf_counter() - begun
        self._remove_leftovers(request.path, request.step, SaveId.parse(request.save_id), store)
        return {"seconds_commit": seconds}

    @staticmethod
    def _remove_leftovers(path: str, step: int | None, committed: SaveId, store: Store) -> None:
        """Remove files of earlier saves.

        IMPORTANT: raises nothing, since the save is committed and must not end as failed.
        """
        facts = {"save_id": committed}
        try:
            removed = remove_leftovers(path, committed, store=store)
        except Exception:
            text = "save of step %s to %s: files of earlier saves were not removed"
            _logger.exception(text, step, path, extra=facts)
        else:
            if removed:
                text = "save of step %s to %s: removed %d files of earlier saves"
                _logger.info(text, step, path, len(removed), extra=facts)

    def remove(self, save_id: str, path: str) -> None:
        """Remove the files of a failed save; errors are only logged."""
        remove_files_of(path, SaveId.parse(save_id), store=store_at(path, self._files))

    def lineage(self, job: ScanLineage) -> int:
        """Return the epoch for a new run at the path (`next_epoch_beside`).

        Raises:
            SaveFailedError: The checkpoints beside the path cannot be read.
        """
        with _wrapped(None, None, None, job.path):
            check_root(job.path, self._roots)
            reach("worker: lineage asked for")
            return next_epoch_beside(job.path, store_at(job.path, self._files, brief=True))


def _write_sealed(
    job: Write,
    memory: SlotMemory,
    files: Files,
    pool: Executor,
    *,
    threads: int,
    progress: Callable[[int], None],
    history: ShardHistory,
) -> tuple[RankResult, bool]:
    """Write one rank's files from a sealed slot.

    Returns:
        The result, without `rest_print` and `tally`; and whether the shards were kept.

    Raises:
        SlotError: The slot was reopened meanwhile.
        OSError, AsyncCkptError: As `RankWriter.write`.
    """

    def check() -> None:
        if not memory.control.is_sealed(job.generation):
            raise SlotError(f"slot {job.slot} was reopened while generation {job.generation} was written")

    view = memory.mapping.view()
    try:
        writer = RankWriter(job.request, view, files, check=check, threads=threads, progress=progress, history=history)
        return resume_rank_files(writer, pool) if job.resumed else (writer.write(pool), False)
    finally:
        view.release()


@contextlib.contextmanager
def _wrapped(save_id: str | None, rank: int | None, step: int | None, path: str) -> Iterator[None]:
    """Raise an error of the block as one of `asyncckpt.errors`."""
    try:
        yield
    except BaseException as error:
        raise wrap(error, save_id, rank, step, path) from error


def wrap(error: BaseException, save_id: str | None, rank: int | None, step: int | None, path: str) -> AsyncCkptError:
    """Return `error` as one of `asyncckpt.errors`, with the save, the cause, and what to do."""
    if isinstance(error, AsyncCkptError):
        facts = {"save_id": save_id, "rank": rank, "step": step, "path": path, **error.facts()}
        return type(error)(error.message, **{n: v for n, v in facts.items() if n in error.fields})
    if isinstance(error, OSError):
        return save_failure(error, save_id=save_id, rank=rank, step=step, path=path)
    if isinstance(error, SlotError):
        code, advice = "slot_reused", "the trainer wrote to the slot before the save had ended: report this as a bug"
    else:
        code, advice = "internal", "this is a bug in asyncckpt: report it with the worker's log"
        what = f"save of step {step} to {path}" if save_id else f"the scan beside {path}"
        _logger.error("%s: a bug in asyncckpt", what, exc_info=error, extra={"save_id": save_id})
    detail = str(error) or type(error).__name__
    what = f"save {save_id} ({step_and_rank(step, rank)}) to {path}" if save_id else f"the scan beside {path}"
    return SaveFailedError(
        f"{what} failed: {detail}; nothing was published; {advice}",
        code=code,
        rank=rank,
        path=path,
        detail=detail,
        save_id=save_id,
        step=step,
    )


def check_root(path: str, roots: Sequence[str]) -> None:
    """Check that `path` is below one of `roots`, after following symbolic links.

    Raises:
        SaveFailedError: It is not; code EPERM.
    """
    if not roots:
        return
    real = path if is_object_url(path) else os.path.realpath(path)
    # IMPORTANT: names first. Following the links of a root waits for its file system, which may hang.
    if any(_is_below(real, root) for root in (*roots, *map(os.path.realpath, roots))):
        return
    detail = f"it is not below the roots that this worker may write to: {', '.join(roots)}"
    raise SaveFailedError(
        f"cannot save to {path}: {detail}; choose a path there, or start the worker with another --root",
        code="EPERM",
        path=path,
        detail=detail,
    )


def _is_below(real: str, root: str) -> bool:
    if is_object_url(real) or is_object_url(root):
        return real == root or real.startswith(root.rstrip("/") + "/")
    return os.path.commonpath((real, root)) == os.path.normpath(root)


def check_disk(path: str, nbytes: int, files: Files) -> None:
    """Check that the file system of the existing directory `path` has room for `nbytes`; not for object stores.

    Raises:
        OSError: ENOSPC: it has not; else statvfs failed.
    """
    if is_object_url(path):
        return
    found = files.statvfs(path)
    free = (found.f_bfree if os.geteuid() == 0 else found.f_bavail) * found.f_frsize
    if free < nbytes:
        raise OSError(errno.ENOSPC, f"{free:,} bytes are free, {nbytes:,} are needed", path)
    # Mounts of object stores may report inodes, and none of them free.
    if found.f_files and found.f_favail < RESERVE_INODES and is_native(path, files):
        raise OSError(errno.ENOSPC, f"{found.f_favail} inodes are free", path)

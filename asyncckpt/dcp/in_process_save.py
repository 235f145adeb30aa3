"""A save that the training process writes itself, without a worker: its files, its commit, removal after a failure."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.paths import current_umask
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.dcp.commit import commit_all
from asyncckpt.dcp.tensor_stream import LazyImage, Resolve, in_file_order, settle
from asyncckpt.dcp.worker_session import SaveTask
from asyncckpt.dcp.write_plan import WriteOptions, lay_out, rank_result
from asyncckpt.errors import CommitUnknownError
from asyncckpt.format.names import SaveId
from asyncckpt.format.structure import TensorEntry
from asyncckpt.staging.device import CudaDevice
from asyncckpt.staging.save_request import build_request
from asyncckpt.storage import commit
from asyncckpt.storage.checkpoint_dir import prepare_directory, remove_made
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.rank_writer import RankWriter

CHECK_INTERVAL_S = 0.05
"""How often a waiting thread checks whether the calling thread has failed. Chosen, not measured: that is rare."""

_Answer = SimpleQueue["torch.Tensor | Exception"]


class _Stopped(Exception):
    """The thread that calls the planner has failed."""


class CallingThreadResolver:
    """Resolves tensors in the thread that called `write_data`, on request of the writing threads. Used for one `serve`.

    Args:
        resolves: Functions that resolve the tensors, in the order of the files.
        settle: Called in the calling thread with each tensor before another thread gets it.
    """

    def __init__(self, resolves: Sequence[Resolve], settle: Callable[[torch.Tensor], None] = lambda made: None) -> None:
        self._resolves, self._settle = resolves, settle
        self._requests: SimpleQueue[tuple[int, _Answer] | None] = SimpleQueue()
        self._made: dict[int, torch.Tensor] = {}
        self._next = 0
        self._failure: Exception | None = None
        self._stopped = False

    def resolves(self) -> list[Resolve]:
        """Return functions for other threads: each requests a tensor from the thread in `serve`, and waits for it."""
        return [partial(self._request, number) for number in range(len(self._resolves))]

    def _request(self, number: int) -> torch.Tensor:
        answer: _Answer = SimpleQueue()
        self._requests.put((number, answer))
        while True:
            try:
                found = answer.get(timeout=CHECK_INTERVAL_S)
            except Empty:
                self.check()
                continue
            if isinstance(found, Exception):
                raise found
            return found

    def check(self) -> None:
        """Raise `_Stopped` if the thread in `serve` has stopped, so that no tensor will be resolved any more."""
        if self._stopped:
            raise _Stopped

    def serve(self, work: Callable[[], None]) -> None:
        """Run `work` in another thread, and resolve the tensors that it requests.

        Raises:
            Exception: An error of `work`, in which errors of the planner are raised.

        Blocks: until `work` has ended. No thread is left when this returns or raises.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                self._requests.put(None)

        thread = threading.Thread(target=run, name="asyncckpt-write-all")
        is_over, interrupted = False, None
        try:
            with signals_deferred():
                thread.start()
            while (request := self._requests.get()) is not None:
                self._answer_request(*request)
            is_over = True
        finally:
            # IMPORTANT: all calls are inside the inner `try`, where a second signal may be handled: the thread must end
            # before its memory and descriptors are reused.
            while True:
                try:
                    self._stopped = not is_over  # waiting and writing threads check it
                    if thread.ident is not None:
                        with signals_deferred():
                            thread.join()
                    break
                except BaseException as error:
                    interrupted = error
        if interrupted is not None:
            raise interrupted
        if errors:
            raise errors[0]

    def _answer_request(self, number: int, answer: _Answer) -> None:
        """Resolve a tensor. After the planner has failed once, every further request gets the same error."""
        if self._failure is None:
            try:
                answer.put(self._tensor(number))
                return
            except Exception as error:
                self._failure = error
        answer.put(self._failure)

    def _tensor(self, number: int) -> torch.Tensor:
        if number < self._next and number not in self._made:
            return self._resolved(number)  # again: tensors on the CPU that were resolved ahead are not kept
        while self._next <= number:
            self._made[self._next] = self._resolved(self._next)
            self._next += 1
        return self._made.pop(number)

    def _resolved(self, number: int) -> torch.Tensor:
        made = self._resolves[number]()
        self._settle(made)
        return made


MIN_THREADS = 3
"""Writing threads, at least. Measured with 1.6 GB on two cores: 2.8 s with one thread, 2.3 s with two, 2.05 s with
three or four. While a single thread copies and computes checksums, the disk is idle."""


class UnfinishedFiles(NamedTuple):
    """The coordinator's files, of which index and objects are not written yet, and the tensors in them."""

    writer: RankWriter
    tensors: tuple[TensorEntry, ...]


def write_part(
    plan: SavePlan,
    planner: SavePlanner,
    task: SaveTask,
    options: WriteOptions,
    config: CheckpointerConfig,
    files: Files,
    *,
    keep_open: bool,
) -> tuple[list[WriteResult], UnfinishedFiles | None]:
    """Write the files of this rank.

    Args:
        plan, planner: The plan of this rank and its planner.
        task: This rank's part in the save.
        options, config: Settings.
        files: The storage seam.
        keep_open: Do not write index and objects; True on the coordinator.

    Returns:
        A result for each item and one for the rank; and, with `keep_open`, the files that are to be finished.

    Raises:
        UnsupportedLeafError, DuplicateNameError: A leaf cannot be stored.
        CheckpointExistsError, OSError: Writing failed. Files that were created are removed.
        Exception: An error of the planner.

    Blocks: until the files are written.
    """
    laid_out = lay_out(plan, planner, one_file=options.one_file)
    resolves, order = list(laid_out.resolves), in_file_order(laid_out.layout)
    device, serving = CudaDevice(), None
    if options.threads == 1:
        serving = CallingThreadResolver([resolves[n] for n in order], partial(settle, device=device))
        for n, resolve in zip(order, serving.resolves(), strict=True):
            resolves[n] = resolve
    threads = max(options.threads, MIN_THREADS)
    with LazyImage(laid_out.layout, resolves, task.save_id, options.copy_ahead_nbytes, device) as image:
        request = build_request(
            config,
            RankInfo(task.rank, task.world_size),
            task.save_id,
            path=options.path,
            step=None,
            parts=image.parts,
            structure=laid_out.structure,
            n_tensors=laid_out.n_tensors,
        )
        check = serving.check if serving is not None else lambda: None
        writer = RankWriter(request, image, files, check=check, threads=threads)
        with ThreadPoolExecutor(threads - 1, "asyncckpt-write") as pool:
            if serving is not None:
                serving.serve(partial(writer.write_shards, pool))
            else:
                writer.write_shards(pool)
    results = laid_out.results_of(task.save_id, task.rank)
    if keep_open:
        return [*results, rank_result(task.rank, None)], UnfinishedFiles(writer, laid_out.tensors)
    return [*results, rank_result(task.rank, writer.finish(request))], None


_log = logging.getLogger("asyncckpt.dcp")


class InProcessSave:
    """One rank's part in a save that the training processes write themselves.

    Args:
        path: The checkpoint's directory.
        config: `fsync` and `overwrite` as `StorageWriter` has them.
        files: The storage seam.
    """

    def __init__(self, path: str, config: CheckpointerConfig, files: Files) -> None:
        self._path, self._config, self._files = path, config, files
        self._unfinished: UnfinishedFiles | None = None
        self._abandoned: weakref.finalize[Any, InProcessSave] | None = None

    def begin(self, epoch: int, world_size: int) -> list[SaveTask]:
        """Create the directory, and return the tasks of all ranks. Called on the coordinator.

        Raises:
            CheckpointExistsError: A checkpoint is at the path, and `overwrite` is False.
            OSError: The directory cannot be created.
        """
        save_id = SaveId(epoch, 0, secrets.token_hex(6))
        made = self._prepare_directory(save_id)
        # If the save is not committed, this removes the files of all ranks.
        self._abandoned = weakref.finalize(self, _remove, self._path, save_id, self._files, made, os.getpid())
        return [SaveTask(save_id=save_id, rank=rank, world_size=world_size) for rank in range(world_size)]

    def write(
        self, plan: SavePlan, planner: SavePlanner, task: SaveTask, options: WriteOptions, *, is_coordinator: bool
    ) -> list[WriteResult]:
        """Write this rank's files; see `write_part`.

        Raises:
            UnsupportedLeafError, DuplicateNameError: A leaf cannot be stored.
            CheckpointExistsError, OSError: Writing failed. Files that this call created are removed.
            Exception: An error of the planner.

        Blocks: until the files are written.
        """
        if not is_coordinator:
            self._prepare_directory(task.save_id)
        try:
            results, self._unfinished = write_part(
                plan, planner, task, options, self._config, self._files, keep_open=is_coordinator
            )
        except BaseException:
            if task.world_size == 1:  # with several ranks, others may still be writing
                self.abandon()
            raise
        return results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Commit. Called on the coordinator.

        Raises:
            SaveFailedError, CheckpointExistsError, CommitUnknownError, OSError: See `commit_all`.

        Blocks: for fsync; with `overwrite` also while another save commits at the path.
        """
        unfinished = self._unfinished
        assert unfinished is not None, "finish comes after this writer's write_data"
        try:
            commit_all(*unfinished, metadata, results, self._files)
        except CommitUnknownError:
            self._committed()
            raise
        except BaseException:
            self.abandon()
            raise
        self._committed()
        try:
            commit.remove_leftovers(self._path, keep=unfinished.writer.save_id, store=store_over(self._files))
        except OSError as error:
            _log.warning(
                "save %s to %s: files of earlier saves could not be removed: %s",
                unfinished.writer.save_id,
                self._path,
                error,
            )

    def abandon(self) -> None:
        """Remove the files of the save, unless it was committed."""
        if self._abandoned is not None:
            self._abandoned()
        self._abandoned = self._unfinished = None

    def _prepare_directory(self, save_id: SaveId) -> list[str]:
        return prepare_directory(
            self._path,
            save_id=save_id,
            store=store_over(self._files, umask=current_umask()),
            fsync=self._config.fsync,
            overwrite=self._config.overwrite,
        )

    def _committed(self) -> None:
        """Never remove the files: they are part of a checkpoint, or may be."""
        if self._abandoned is not None:
            self._abandoned.detach()
        self._abandoned = self._unfinished = None


def _remove(path: str, save_id: SaveId, files: Files, made: Sequence[str], pid: int) -> None:
    """Remove the files of a save that was never committed.

    IMPORTANT: only the coordinator may do this, since only it can commit the save. Any other rank might remove files
    while the coordinator commits.
    """
    if os.getpid() != pid:  # a forked child finalizes its copy of the writer
        return
    with contextlib.suppress(OSError):
        commit.remove_files_of(path, save_id, store=store_over(files))
        remove_made(made, store_over(files))

"""A save that the process that calls `dcp.save` writes: its files, its commit, and what becomes of failed ones."""

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
from asyncckpt.dcp.tensor_stream import Resolve, StreamedImage, in_file_order, settle
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

LOOK_EVERY_S = 0.05
"""Whether the thread that serves has failed. Chosen: that is rare, and ends the save."""

_Answer = SimpleQueue["torch.Tensor | Exception"]


class _Stopped(Exception):
    """The thread that calls the planner has failed."""


class CallersResolves:
    """Resolves tensors in the thread that called `write_data`, for the threads that write. For one `serve`.

    Args:
        resolves: In the order of the files.
        settle: Called with each tensor before another thread gets it, in the thread that has made it.
    """

    def __init__(self, resolves: Sequence[Resolve], settle: Callable[[torch.Tensor], None] = lambda made: None) -> None:
        self._resolves, self._settle = resolves, settle
        self._wishes: SimpleQueue[tuple[int, _Answer] | None] = SimpleQueue()
        self._made: dict[int, torch.Tensor] = {}
        self._next = 0
        self._failure: Exception | None = None
        self._stopped = False

    def resolves(self) -> list[Resolve]:
        """Return what other threads call instead: each asks the thread that serves, and waits for it."""
        return [partial(self._asked, number) for number in range(len(self._resolves))]

    def _asked(self, number: int) -> torch.Tensor:
        answer: _Answer = SimpleQueue()
        self._wishes.put((number, answer))
        while True:
            try:
                found = answer.get(timeout=LOOK_EVERY_S)
            except Empty:
                self.check()
                continue
            if isinstance(found, Exception):
                raise found
            return found

    def check(self) -> None:
        """Raise in a thread that writes, when there is nobody any more to make what it needs."""
        if self._stopped:
            raise _Stopped

    def serve(self, work: Callable[[], None]) -> None:
        """Do `work` in another thread, and make what it asks for.

        Raises:
            Exception: Whatever `work` raises, which gets what the planner raised.

        Blocks: for the work. No thread is left when this returns or raises.
        """
        errors: list[BaseException] = []

        def run() -> None:
            try:
                work()
            except BaseException as error:
                errors.append(error)
            finally:
                self._wishes.put(None)

        thread = threading.Thread(target=run, name="asyncckpt-write-all")
        is_over, interrupted = False, None
        try:
            with signals_deferred():
                thread.start()
            while (wish := self._wishes.get()) is not None:
                self._fulfil(*wish)
            is_over = True
        finally:
            # IMPORTANT: no call outside of the inner `try`: a second signal may be handled there, and the thread uses
            # memory and descriptors that others may have next.
            while True:
                try:
                    self._stopped = not is_over  # who waits for an answer, or writes, sees it
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

    def _fulfil(self, number: int, answer: _Answer) -> None:
        """Answer. A planner that has failed is asked no more: every other wish gets the same error."""
        if self._failure is None:
            try:
                answer.put(self._tensor(number))
                return
            except Exception as error:
                self._failure = error
        answer.put(self._failure)

    def _tensor(self, number: int) -> torch.Tensor:
        if number < self._next and number not in self._made:
            return self._resolved(number)  # once more: of what is on no device nothing is kept early
        while self._next <= number:
            self._made[self._next] = self._resolved(self._next)
            self._next += 1
        return self._made.pop(number)

    def _resolved(self, number: int) -> torch.Tensor:
        made = self._resolves[number]()
        self._settle(made)
        return made


MIN_THREADS = 3
"""That write. 1.6 GB on two cores take 2.8 s by one, 2.3 by two, 2.05 by three or four: while one thread copies and
digests, the disk has nothing to do."""


class Unfinished(NamedTuple):
    """The coordinator's files but for index and objects, and the tensors in them."""

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
) -> tuple[list[WriteResult], Unfinished | None]:
    """Write what `plan` gives to this rank.

    Args:
        plan, planner: What to write.
        task: Of the save.
        options, config: How.
        files: The storage seam.
        keep_open: Leave index and objects to the caller: this is the coordinator.

    Returns:
        A result for each item, and one for the rank; and what is left to do.

    Raises:
        UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
        CheckpointExistsError, OSError: Storage. What was created is removed.
        Exception: Whatever the planner raises.

    Blocks: for the writes.
    """
    laid_out = lay_out(plan, planner, one_file=options.one_file)
    resolves, order = list(laid_out.resolves), in_file_order(laid_out.layout)
    device, serving = CudaDevice(), None
    if options.threads == 1:
        serving = CallersResolves([resolves[n] for n in order], partial(settle, device=device))
        for n, resolve in zip(order, serving.resolves(), strict=True):
            resolves[n] = resolve
    threads = max(options.threads, MIN_THREADS)
    with StreamedImage(
        laid_out.layout, laid_out.specs, resolves, task.save_id, options.copy_ahead_nbytes, device
    ) as image:
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
        return [*results, rank_result(task.rank, None)], Unfinished(writer, laid_out.tensors)
    return [*results, rank_result(task.rank, writer.finish(request))], None


_log = logging.getLogger("asyncckpt.dcp")


class InProcess:
    """One save of one rank that this process writes itself.

    Args:
        path: The checkpoint's directory.
        config: `fsync` and `overwrite` as `StorageWriter` has them.
        files: The storage seam.
    """

    def __init__(self, path: str, config: CheckpointerConfig, files: Files) -> None:
        self._path, self._config, self._files = path, config, files
        self._unfinished: Unfinished | None = None
        self._abandoned: weakref.finalize[Any, InProcess] | None = None

    def begin(self, epoch: int, world_size: int) -> list[SaveTask]:
        """Make the directory, and the tasks of all ranks; the coordinator calls it.

        Raises:
            CheckpointExistsError: A checkpoint is at the path that is not to be replaced.
            OSError: The directory cannot be made.
        """
        save_id = SaveId(epoch, 0, secrets.token_hex(6))
        made = self._prepare_directory(save_id)
        # It takes along whatever ranks have written, should this save come to nothing.
        self._abandoned = weakref.finalize(self, _remove, self._path, save_id, self._files, made, os.getpid())
        return [SaveTask(save_id=save_id, rank=rank, world_size=world_size) for rank in range(world_size)]

    def write(
        self, plan: SavePlan, planner: SavePlanner, task: SaveTask, options: WriteOptions, *, is_coordinator: bool
    ) -> list[WriteResult]:
        """Write this rank's files.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
            CheckpointExistsError, OSError: Storage. What this call created is removed.
            Exception: Whatever the planner raises.

        Blocks: for the writes.
        """
        if not is_coordinator:
            self._prepare_directory(task.save_id)
        try:
            results, self._unfinished = write_part(
                plan, planner, task, options, self._config, self._files, keep_open=is_coordinator
            )
        except BaseException:
            if task.world_size == 1:  # else others may still be writing
                self.abandon()
            raise
        return results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Commit; of the coordinator.

        Raises:
            SaveFailedError, CheckpointExistsError, CommitUnknownError, OSError: As `commit_all`.

        Blocks: for fsync; with `overwrite` for another save that is being published there.
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
            _log.warning("leftovers stay in %s: %s", self._path, error)

    def abandon(self) -> None:
        """Remove what is there of the save, if it was not committed."""
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
        """The files are the checkpoint's now, or may be: never remove them."""
        if self._abandoned is not None:
            self._abandoned.detach()
        self._abandoned = self._unfinished = None


def _remove(path: str, save_id: SaveId, files: Files, made: Sequence[str], pid: int) -> None:
    """Remove the files of a save that was never committed.

    IMPORTANT: only its coordinator, which alone could commit it, may; any other rank might take away what is being
    published.
    """
    if os.getpid() != pid:  # a forked child lets its copy of the writer go
        return
    with contextlib.suppress(OSError):
        commit.remove_files_of(path, save_id, store=store_over(files))
        remove_made(made, store_over(files))

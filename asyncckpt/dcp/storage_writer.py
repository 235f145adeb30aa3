"""`StorageWriter`: stock `dcp.save` and `dcp.async_save` write an asyncckpt checkpoint."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.checkpoint import staging
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.paths import absolute_path, is_local_path
from asyncckpt.config import CheckpointerConfig, check_keywords
from asyncckpt.dcp.in_process_save import InProcessSave
from asyncckpt.dcp.worker_save import FIELDS, WorkerSaves
from asyncckpt.dcp.worker_session import SaveTask, WorkerInfo, forget_received, received_task
from asyncckpt.dcp.write_plan import (
    WriteOptions,
    chunks_in,
    chunks_to_save,
    is_checkpointable,
    leaves_of,
    refuse_unstorable,
    sorted_out,
    tensor_leaves,
)
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import (
    AsyncCkptError,
    ConfigError,
    DuplicateNameError,
    ReentrantCallError,
    SaveFailedError,
    UnsupportedLeafError,
)
from asyncckpt.format.dcp import DCP_VERSION
from asyncckpt.format.names import SaveId
from asyncckpt.storage import catalog
from asyncckpt.storage.files import Files, save_failure
from asyncckpt.storage.local import store_over
from asyncckpt.torch_tensors import check_memory_is_real

_begun: deque[tuple[SaveId, int]] = deque(maxlen=64)
"""The latest (save ID, rank) for which `write_data` was called in this process. A plan with one of them was cached."""


class SaveLock:
    """Allows one save of a writer at a time."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._at_work = threading.Lock()
        self._owner: int | None = None
        self._pid = os.getpid()

    @contextlib.contextmanager
    def begin_save(self) -> Iterator[None]:
        """Hold the lock while the previous save is ended; the next save belongs to the calling thread.

        Raises:
            ReentrantCallError: The previous save is being staged or committed.
        """
        with self._step():
            self._owner = threading.get_ident()
            yield

    @contextlib.contextmanager
    def step_of_save(self) -> Iterator[None]:
        """Hold the lock during a step of the save.

        Raises:
            ReentrantCallError: Another thread has begun a save or closed the writer, or is in a step of a save.
        """
        self._leave_parents_save()
        if self._owner not in (None, threading.get_ident()):
            raise ReentrantCallError(
                "another thread has begun a save with this StorageWriter, or closed it, before this save was finished; "
                "this save was ended, and nothing of it was published. Use one writer for each concurrent save"
            )
        with self._step():
            yield

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._leave_parents_save()
        taken = False
        try:
            with signals_deferred():  # a signal after `acquire` and before the assignment would leave the lock held
                taken = self._at_work.acquire(blocking=False)
            if not taken:
                raise ReentrantCallError(
                    "another save with this StorageWriter is being staged or committed; it continues. Wait until it "
                    "has ended (after `dcp.async_save`, for its future), or use another writer"
                )
            yield
        finally:
            if taken:
                self._at_work.release()

    def _leave_parents_save(self) -> None:
        """In a forked child, forget a save that was running in the parent: no thread of the child continues it."""
        if os.getpid() != self._pid:
            self._forget()


class StagedChunks(torch.Tensor):
    """Copies of the chunks of a checkpointable tensor, with the methods that stock planners call on such tensors.

    It is a tensor because torch calls the methods only on tensors; it has no elements of its own.
    """

    _items: Sequence[WriteItem]
    _copies: Sequence[torch.Tensor]

    @staticmethod
    def __new__(cls, items: Sequence[WriteItem], copies: Sequence[torch.Tensor]) -> StagedChunks:
        self = torch.Tensor._make_subclass(cls, torch.empty(0, device="cpu"))
        self._items, self._copies = items, copies
        return self

    def __create_write_items__(self, fqn: str, _: Any) -> list[WriteItem]:
        indexes = [dataclasses.replace(item.index, fqn=fqn) for item in self._items]
        return [dataclasses.replace(item, index=index) for item, index in zip(self._items, indexes, strict=True)]

    def __get_tensor_shard__(self, index: MetadataIndex) -> torch.Tensor:
        return next(
            copy for item, copy in zip(self._items, self._copies, strict=True) if item.index.offset == index.offset
        )


def _replaced(value: Any, replace: Callable[[str, Any], Any], name: str = "") -> Any:
    """Return nested dicts and lists with values replaced by `replace(name, value)`, except where that is None."""
    found = replace(name, value)
    if found is not None:
        return found
    if isinstance(value, dict):
        return {key: _replaced(member, replace, f"{name}.{key}" if name else str(key)) for key, member in value.items()}
    if type(value) is list:
        return [_replaced(member, replace, f"{name}.{number}") for number, member in enumerate(value)]
    return value


class Stager(BlockingAsyncStager):
    """Torch's stager, extended: it also caches copies without a device, and copies checkpointable tensors.

    Torch's caches copies in pinned memory only, and fails without a device. A checkpointable tensor is copied chunk by
    chunk and replaced by a `StagedChunks`.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy of the state on the CPU; if the state has a tensor that cannot be stored, the state itself.

        IMPORTANT: do not raise for such a tensor here. The other ranks may have none, and would wait for this rank. The
        save is refused later, on all ranks.
        """
        items: dict[str, list[WriteItem]] = {}

        def chunks_of(fqn: str, value: Any) -> list[torch.Tensor] | None:
            if not is_checkpointable(value):
                return None
            found = list(chunks_to_save(fqn, value))
            items[fqn] = [item for item, _ in found]
            return [chunk.detach() for _, chunk in found]

        try:
            refuse_unstorable((fqn, value) for fqn, value in tensor_leaves(state_dict) if not is_checkpointable(value))
            chunks = _replaced(state_dict, chunks_of)
        except (UnsupportedLeafError, DuplicateNameError):
            return state_dict
        if not items:
            return self._copied(state_dict)
        return _replaced(  # type: ignore[no-any-return]
            self._copied(chunks), lambda fqn, value: StagedChunks(items[fqn], value) if fqn in items else None
        )

    def _copied(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        if self.cache_staged_state_dict and self.state_dict_cache is None and not torch.accelerator.is_available():
            # This name is private to torch. If a later torch lacks it, the first save copies twice.
            allocate = getattr(staging, "_create_cpu_state_dict", BlockingAsyncStager().stage)
            self.state_dict_cache = allocate(state_dict)
        return super().stage(state_dict)


_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_MAX_FRAMES = 8
"""Frames between torch's call and the writer's method that are searched: subclasses and wrappers add some."""


_STOCKS_ALONE = frozenset({"_extensions", "serialization_format"})
"""Arguments of torch's `FileSystemWriter` that are refused."""


class StorageWriter(TorchStorageWriter, Stager):
    """Write asyncckpt checkpoints with stock `torch.distributed.checkpoint.save` and `async_save`.

    The checkpoint is committed in one step by its manifest. It also loads with `asyncckpt.load`, `StorageReader` and
    torch's `HuggingFaceStorageReader`. Until the commit, and after a failed save, an older checkpoint at the path stays
    complete. Each save has a new save ID, whose epoch is larger than those of all saves in the parent directory.

    With a worker: every rank copies its state into memory of the worker on its node, which writes it. Once all ranks
    have staged, the save is completed even if the trainers are killed. The memory, as large as the state, is kept for
    the next save of this writer, until `close()` or until the writer is garbage. A state that is larger than
    `arena_limit_bytes`, or than the memory that is left, is written in segments through less memory.

    Without a worker on some rank, unless `endpoint` was given: the ranks write the files themselves, and this is
    logged. It takes a buffer of 16 MiB for each of three threads. If a trainer is killed, the save is lost. If the save
    fails on another rank, its files are removed when the coordinator's writer is reset, used again or garbage.

    One save at a time. If another thread begins a save while the first is being staged or committed, the second raises
    `ReentrantCallError`. If it begins one between these steps, the first raises that error.

    Args:
        path: Directory of the checkpoint; the `checkpoint_id` of `dcp.save` takes precedence.
        single_file_per_rank: One shard file per rank. False: one per tensor, at most 1000.
        sync_files: Whether files and directories are fsynced.
        thread_count: Threads of each rank that call the planner for tensors. With 1, the planner is called in the
            thread that calls `dcp.save`, in the order of the files.
        per_thread_copy_ahead: Bytes per thread that are copied from CUDA devices before they are written.
        cache_staged_state_dict: Whether `stage` keeps its copies, pinned if there is a device, for the next
            `dcp.async_save` with this writer. That must not begin before this save has ended.
        overwrite: Whether an older checkpoint at the path is replaced, in one step. False: it is refused.
        endpoint: Endpoint of a running worker, `ipc://...`, which must answer. Default: `$ASYNCCKPT_ENDPOINT`, else
            this user's worker of this job, which is started if there is none.
        use_worker: Whether workers write. False: the ranks write the files themselves.
        **fields: Fields of `CheckpointerConfig`: `arena_limit_bytes`, `commit_timeout_s`, `on_worker_loss`,
            `slot_timeout_s`, `worker_start_timeout_s`, `worker_timeout_s`, `write_threads`.

    Raises:
        ConfigError: A number is below its minimum, a field is unknown, or `use_worker=False` with settings of a worker.
        UnsupportedPathError: `path` is a URL or no path.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        *,
        endpoint: str | None = None,
        use_worker: bool = True,
        **fields: Any,
    ) -> None:
        for name, value, least in (
            ("thread_count", thread_count, 1),
            ("per_thread_copy_ahead", per_thread_copy_ahead, 0),
        ):
            if type(value) is not int or value < least:
                raise ConfigError(
                    f"{name}={value!r}: expected an integer from {least} on", field=name, value=repr(value)
                )
        Stager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self.path = absolute_path(path)
        self.single_file_per_rank, self.sync_files = single_file_per_rank, sync_files
        self.thread_count, self.per_thread_copy_ahead = thread_count, per_thread_copy_ahead
        self.overwrite = overwrite
        self._files = Files()
        for name in _STOCKS_ALONE & fields.keys():
            raise ConfigError(
                f"{name} is of torch's FileSystemWriter only: the format of asyncckpt's files is fixed, and streams "
                "that other code transforms could not be verified",
                field=name,
            )
        check_keywords(StorageWriter, fields, FIELDS)
        if not use_worker and (endpoint is not None or fields):
            name = "endpoint" if endpoint is not None else sorted(fields)[0]
            raise ConfigError(f"{name} is about the worker, which use_worker=False does not use", field=name)
        self._by_worker = WorkerSaves(endpoint, fields) if use_worker else None
        self._forget_save()

    def _forget_save(self) -> None:
        self._one = SaveLock()
        self._is_coordinator, self._rank = False, 0
        self._worker_info: WorkerInfo | None = None
        self._task: SaveTask | None = None
        self._in_process: InProcessSave | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for another process, without staged tensors and without a save that is running here."""
        own = ("_one", "_is_coordinator", "_rank", "_worker_info", "_task", "_in_process")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**state, "state_dict_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_save()

    @property
    def checkpoint_id(self) -> str:
        """Path of the checkpoint."""
        return self.path

    @property
    def save_id(self) -> str | None:
        """Save ID of the latest save, as in `storage_meta()`; None until its ranks have agreed on a plan."""
        return str(self._task.save_id) if self._task else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Prepare for another save, to `checkpoint_id` if one is given. A save that was not committed is ended.

        Raises:
            UnsupportedPathError: `checkpoint_id` is a URL or no path.
            ReentrantCallError: Another thread is staging or committing a save with this writer.
        """
        with self._one.begin_save():
            self._abandon()
            if checkpoint_id is not None:
                self.path = absolute_path(checkpoint_id)

    def close(self) -> None:
        """Disconnect from the worker, and free its memory and the staged copies. A later save connects again.

        Raises:
            ReentrantCallError: Another thread is staging or committing a save with this writer.

        Blocks: a few seconds at most, if the worker does not answer.
        """
        with self._one.begin_save():
            self._abandon()
            if self._by_worker is not None:
                self._by_worker.close()
            self.state_dict_cache = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, after a check that all tensors of the planner's state can be stored.

        Raises:
            ConfigError: `use_collectives=False`: without collective calls there is no common commit.
            ReentrantCallError: See `reset`.
            UnsupportedLeafError: A tensor subclass has its elements not in its memory, and gives no chunks that are
                (`torch.distributed._checkpointable`); `leaf` is its FQN. Or torch is in FakeTensorMode.
            DuplicateNameError: A checkpointable tensor has a name that is reserved for tensors of one rank.
        """
        check_memory_is_real("dcp.save")
        with self._one.begin_save():
            self._abandon()
        forget_received()
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "dcp.save(use_collectives=False) saves one checkpoint for each rank, without a common commit; "
                "asyncckpt.dcp.StorageWriter needs use_collectives=True",
                field="use_collectives",
                value=repr(False),
            )
        # IMPORTANT: before the planner creates its plan, since stock planners call methods on such tensors that may
        # raise another error. `dcp.save` raises an error of this call on all ranks.
        refuse_unstorable(leaves_of(_planner_of_caller()).items())
        self._is_coordinator = is_coordinator
        rank = kwargs.get("rank")
        self._rank = rank if type(rank) is int else find_rank_info(None).rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Check that all items can be stored, and connect to this rank's worker.

        Returns:
            The plan; it holds a description of the worker, for the coordinator.

        Raises:
            UnsupportedLeafError, DuplicateNameError: A tensor cannot be stored; names it.
            WorkerUnavailableError: No worker answers at the `endpoint` that was given.

        Blocks: until a worker has started, up to `worker_start_timeout_s`.
        """
        sorted_out(plan.items)
        if self._by_worker is None:
            worker_info = WorkerInfo(rank=self._rank, instance="", why="use_worker=False")
        else:
            worker_info = self._by_worker.connect(
                self._rank, is_coordinator=self._is_coordinator, fsync=self.sync_files, overwrite=self.overwrite
            )
        self._worker_info = worker_info
        return dataclasses.replace(plan, storage_data=worker_info)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Choose the save ID; return the plans, each with the `SaveTask` of its rank. Called on the coordinator.

        Raises:
            CheckpointExistsError: A checkpoint is at the path, and `overwrite` is False.
            SaveFailedError: The parent directory cannot be read.
            AsyncCkptError: `endpoint` was given, and the workers of several nodes cannot be connected.

        Blocks: for the workers of several nodes, and for the end of a failed save, up to `worker_timeout_s` each; while
            an earlier save to the path, that was interrupted, is committed, up to `commit_timeout_s`.
        """
        given: list[SaveTask] | None = None
        with self._one.step_of_save(), self._failures(None):
            epoch = catalog.next_epoch_beside(self.path, store_over(self._files))
            if self._by_worker is not None and self._worker_info is not None:
                given = self._by_worker.begin(self.path, self._worker_info, epoch, plans, self._files)
            if given is None:
                given = self._in_this_process().begin(epoch, len(plans))
        self._task = given[self._rank if self._rank < len(given) else 0]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, given, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stage this rank's files for the worker, or write them if there is no worker.

        Returns:
            A completed future with the results.

        Raises:
            UnsupportedLeafError, DuplicateNameError: A leaf cannot be stored.
            CheckpointExistsError, SaveFailedError: Writing failed. Files that this call created are removed.
            AsyncCkptError: The worker died, or frees no memory in time.
            Exception: An error of the planner.

        Blocks: for the copy and for memory of the worker; without a worker, for the writes.
        """
        with self._one.step_of_save():
            task = received_task() or self._task or plan.storage_data
            if not isinstance(task, SaveTask) or (task.save_id, task.rank) in _begun:
                # The planner has cached the plan of an earlier save (ADR 0058).
                raise SaveFailedError(
                    f"save to {self.path}: rank {self._rank} did not receive the coordinator's task for this save; "
                    "nothing was written. Use a planner that does not cache plans",
                    code="task",
                    path=self.path,
                    detail="the plan belongs to another save, or was not sent through a process group",
                )
            self._task = task
            _begun.append((task.save_id, task.rank))
            results = self._write(plan, planner, task)
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def _write(self, plan: SavePlan, planner: SavePlanner, task: SaveTask) -> list[WriteResult]:
        options = WriteOptions(
            path=self.path,
            threads=self.thread_count,
            one_file=self.single_file_per_rank,
            copy_ahead_nbytes=self.per_thread_copy_ahead * self.thread_count,
        )
        with self._failures(task.save_id, task.rank):
            if task.by_worker and self._by_worker is not None:
                return self._by_worker.write(plan, planner, task, options)
            write = self._in_this_process().write
            return write(plan, planner, task, options, is_coordinator=self._is_coordinator)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit. Called on the coordinator.

        Args:
            metadata: The planner's metadata; gets the places of all chunks and the save ID.
            results: The results of all ranks.

        Raises:
            SaveFailedError: Code `coverage`: an element would not be stored exactly once; or the name of an errno.
            CheckpointExistsError: Another save has committed at the path meanwhile, and `overwrite` is False.
            CommitUnknownError: It is not known whether the manifest is on disk; nothing was removed.
            CommitTimeoutError, WorkerUnavailableError: It is not known yet whether the save will be committed: the
                worker, or the next one, continues it.

        Blocks: until everything is on disk; with `overwrite` also while another save commits at the path.
        """
        with self._one.step_of_save():
            task = self._task
            assert task is not None, "finish comes after this writer's write_data"
            with self._failures(task.save_id, task.rank):
                by_worker = self._by_worker if task.by_worker else None
                (by_worker or self._in_this_process()).finish(metadata, results)
        metadata.storage_data = chunks_in(results)
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION

    def storage_meta(self) -> StorageMeta | None:
        """Return path and save ID; the save ID is None until the ranks have agreed on a plan."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` is a local path."""
        return is_local_path(checkpoint_id)

    def _in_this_process(self) -> InProcessSave:
        if self._in_process is None:
            config = CheckpointerConfig(fsync=self.sync_files, overwrite=self.overwrite)
            self._in_process = InProcessSave(self.path, config, self._files)
        return self._in_process

    def _abandon(self) -> None:
        """End a save that was begun and not committed."""
        if self._in_process is not None:
            self._in_process.abandon()
        if self._by_worker is not None:
            self._by_worker.abandon()
        self._in_process = self._worker_info = self._task = None

    @contextlib.contextmanager
    def _failures(self, save_id: SaveId | None, rank: int = 0) -> Iterator[None]:
        try:
            yield
        except AsyncCkptError:
            raise
        except OSError as error:
            if error.errno is None:  # of no file call: a planner, or a signal handler (TimeoutError), has raised it
                raise
            name = None if save_id is None else str(save_id)
            raise save_failure(error, save_id=name, rank=rank, step=None, path=self.path) from error


def _planner_of_caller() -> Any:
    """Return the planner of the calling `dcp.save`, from its frame: torch passes it to writers only later."""
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        frame = frame and frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == _SAVER:
            return frame.f_locals.get("planner")
    return None

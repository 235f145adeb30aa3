"""`StorageWriter`: what stock `dcp.save` and `dcp.async_save` write, as a checkpoint of asyncckpt's."""

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
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.storage import StorageWriter as TorchStorageWriter
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.paths import absolute_path, is_local_path
from asyncckpt.config import CheckpointerConfig, check_keywords
from asyncckpt.dcp.direct_save import InProcess
from asyncckpt.dcp.worker_save import FIELDS, ByWorker
from asyncckpt.dcp.worker_session import SaveTask, WorkerInfo, forget_received, received_task
from asyncckpt.dcp.write_plan import (
    WriteOptions,
    chunks_in,
    chunks_to_save,
    is_checkpointable,
    refuse_wrappers,
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
"""The latest saves, and ranks of this process that have begun to write in them: their plans are of no other save."""


class OneAtATime:
    """Lets one save of a writer begin only when the one before has ended. One per writer."""

    def __init__(self) -> None:
        self._forget()

    def _forget(self) -> None:
        self._at_work = threading.Lock()
        self._owner: int | None = None
        self._pid = os.getpid()

    @contextlib.contextmanager
    def beginning(self) -> Iterator[None]:
        """Surround what ends the save before; from here the save is this thread's.

        Raises:
            ReentrantCallError: A step of that is under way.
        """
        with self._step():
            self._owner = threading.get_ident()
            yield

    @contextlib.contextmanager
    def going_on(self) -> Iterator[None]:
        """Surround a step of the save.

        Raises:
            ReentrantCallError: Another thread has begun another one, or closed the writer; or is in a step.
        """
        self._leave_parents_save()
        if self._owner not in (None, threading.get_ident()):
            raise ReentrantCallError(
                "another thread has begun a save with this StorageWriter, or closed it, before this one was over; this "
                "one has ended, and nothing of it was published. Use a writer for each save that overlaps another"
            )
        with self._step():
            yield

    @contextlib.contextmanager
    def _step(self) -> Iterator[None]:
        self._leave_parents_save()
        taken = False
        try:
            with signals_deferred():  # a signal between the two halves of it would leave the lock taken for ever
                taken = self._at_work.acquire(blocking=False)
            if not taken:
                raise ReentrantCallError(
                    "a save with this StorageWriter is being staged or committed: wait for its end (of "
                    "`dcp.async_save`, for its future), or use another writer; that save goes on"
                )
            yield
        finally:
            if taken:
                self._at_work.release()

    def _leave_parents_save(self) -> None:
        """In a forked child nobody goes on with the save that was under way."""
        if os.getpid() != self._pid:
            self._forget()


class StagedChunks(torch.Tensor):
    """Copies of the chunks of a checkpointable tensor, with the methods by which stock planners ask a tensor for them.

    It is a tensor because torch looks for the methods in tensors only; it has no elements of its own.
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
    """Return nested dicts and lists with what `replace` gives for names and values; None: what is there stays."""
    found = replace(name, value)
    if found is not None:
        return found
    if isinstance(value, dict):
        return {key: _replaced(member, replace, f"{name}.{key}" if name else str(key)) for key, member in value.items()}
    if type(value) is list:
        return [_replaced(member, replace, f"{name}.{number}") for number, member in enumerate(value)]
    return value


class Stager(BlockingAsyncStager):
    """As torch's, which keeps its copies in pinned memory only, and fails where there is no device to pin it for.

    A checkpointable tensor is copied chunk by chunk, and `StagedChunks` takes its place.
    """

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return a copy on the CPU; the state itself where the save will be refused for a tensor subclass in it.

        IMPORTANT: it is not refused here. The other ranks may have no such tensor, and would wait for this one.
        """
        items: dict[str, list[WriteItem]] = {}

        def chunks_of(fqn: str, value: Any) -> list[torch.Tensor] | None:
            if not is_checkpointable(value):
                return None
            found = list(chunks_to_save(fqn, value))
            items[fqn] = [item for item, _ in found]
            return [chunk.detach() for _, chunk in found]

        try:
            refuse_wrappers((fqn, value) for fqn, value in tensor_leaves(state_dict) if not is_checkpointable(value))
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
            # Where torch has dropped this name, which is its own, the first copy is made twice.
            allocate = getattr(staging, "_create_cpu_state_dict", BlockingAsyncStager().stage)
            self.state_dict_cache = allocate(state_dict)
        return super().stage(state_dict)


_SAVER = "torch.distributed.checkpoint.state_dict_saver"
_MAX_FRAMES = 8
"""Between torch's call and a writer's method: those of subclasses and wrappers."""


class StorageWriter(TorchStorageWriter, Stager):
    """Writes with stock `torch.distributed.checkpoint`: files of asyncckpt's format, committed at once by a manifest.

    The checkpoint also loads with `asyncckpt.load`, `StorageReader` and torch's `HuggingFaceStorageReader`. Until the
    manifest stands, an older checkpoint at the path is whole; a save that fails leaves it so. The save id of each save
    is new, its epoch above all that were begun beside its path.

    Every rank stages into memory of the worker on its node, which writes; from the end of the staging on, trainers that
    are killed take nothing along. That memory, as large as the state, is kept for the next save of this writer, until
    `close()` or until nobody holds the writer; of a state that is larger than `arena_limit_bytes`, or than what the
    machine has left, segments pass through less. Where not every rank has a worker, and none was named, the ranks write
    by themselves, which is logged: with a buffer of 16 MiB for each of three threads, and a trainer that is killed
    takes the save along. The files of one that failed elsewhere go then when the coordinator's writer is reset, used
    again or let go. One save at a time: what another thread begins while one is being staged or committed raises
    `ReentrantCallError`, and the first goes on; between these, it takes the writer, and the first ends by that error.

    Args:
        path: The checkpoint's directory; `checkpoint_id` of `dcp.save` takes its place.
        single_file_per_rank: One shard file per rank; False: one per tensor, at most 1000.
        sync_files: Whether files and directories are fsynced.
        thread_count: Threads of each rank that call the planner for tensors. With one, that is the thread that calls
            `dcp.save`, which goes through the files in order.
        per_thread_copy_ahead: Of tensors on a CUDA device, so many bytes per thread are fetched ahead of being written.
        cache_staged_state_dict: Whether `stage` keeps its copies, pinned where there is a device, for the next
            `dcp.async_save` with this writer, which has to come after the end of this one.
        overwrite: Whether an older checkpoint at the path is replaced, in one step; else it is refused.
        endpoint: Of a running worker, `ipc://...`, which must answer; default: `$ASYNCCKPT_ENDPOINT`, else this user's
            worker of this job, which is started when there is none.
        use_worker: False: the ranks write by themselves, without a worker.
        **fields: Of `CheckpointerConfig`: `arena_limit_bytes`, `commit_timeout_s`, `on_worker_loss`, `slot_timeout_s`,
            `worker_start_timeout_s`, `worker_timeout_s`, `write_threads`.

    Raises:
        ConfigError: A number below its minimum, another field, or settings of a worker that is not to be used.
        UnsupportedPathError: A URL, or no path at all.
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
                    f"{name}={value!r}: an integer from {least} on is wanted", field=name, value=repr(value)
                )
        Stager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self.path = absolute_path(path)
        self.single_file_per_rank, self.sync_files = single_file_per_rank, sync_files
        self.thread_count, self.per_thread_copy_ahead = thread_count, per_thread_copy_ahead
        self.overwrite = overwrite
        self._files = Files()
        check_keywords(StorageWriter, fields, FIELDS)
        if not use_worker and (endpoint is not None or fields):
            name = "endpoint" if endpoint is not None else sorted(fields)[0]
            raise ConfigError(f"{name} is about the worker, and use_worker=False says to do without one", field=name)
        self._by_worker = ByWorker(endpoint, fields) if use_worker else None
        self._forget_save()

    def _forget_save(self) -> None:
        self._one = OneAtATime()
        self._is_coordinator, self._rank = False, 0
        self._worker_info: WorkerInfo | None = None
        self._task: SaveTask | None = None
        self._in_process: InProcess | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: neither staged tensors nor a save that is under way here."""
        own = ("_one", "_is_coordinator", "_rank", "_worker_info", "_task", "_in_process")
        state = {name: value for name, value in self.__dict__.items() if name not in own}
        return {**state, "state_dict_cache": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget_save()

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint goes."""
        return self.path

    @property
    def save_id(self) -> str | None:
        """Of the save that was begun last, as `storage_meta()` says it; None before its ranks have agreed on a plan."""
        return str(self._task.save_id) if self._task else None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin anew, at `checkpoint_id` if one is given.

        Raises:
            UnsupportedPathError: A URL, or no path at all.
            ReentrantCallError: A save with this writer is being staged or committed by another thread.
        """
        with self._one.beginning():
            self._abandon()
            if checkpoint_id is not None:
                self.path = absolute_path(checkpoint_id)

    def close(self) -> None:
        """Let the worker go, and the memory with it; staged copies too. A later save takes them anew.

        Raises:
            ReentrantCallError: A save is being staged or committed by another thread: wait for it.

        Blocks: a few seconds at most, where the worker does not answer.
        """
        with self._one.beginning():
            self._abandon()
            if self._by_worker is not None:
                self._by_worker.close()
            self.state_dict_cache = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Begin a save, if the planner, which has its state by now, holds nothing that cannot be stored.

        Raises:
            ConfigError: `use_collectives=False`: ranks that do not meet have no common commit.
            ReentrantCallError: As `reset`.
            UnsupportedLeafError: A tensor subclass whose elements do not lie in its memory, and that gives no chunks
                that do (`torch.distributed._checkpointable`); `leaf` is its FQN. Or torch makes no real tensors here,
                in FakeTensorMode.
            DuplicateNameError: A tensor that gives its chunks has a name that is reserved for tensors of one rank.
        """
        check_memory_is_real("dcp.save")
        with self._one.beginning():
            self._abandon()
        forget_received()
        if not kwargs.get("use_collectives", True):
            raise ConfigError(
                "dcp.save(use_collectives=False) makes a checkpoint of each rank, with no common commit; "
                "asyncckpt.dcp.StorageWriter needs the collectives",
                field="use_collectives",
                value=repr(False),
            )
        # IMPORTANT: before the planner makes its plan, for which stock planners ask such tensors what they need not
        # answer, and before any rank begins: from here, an error of one rank is all ranks'.
        planner = _planner_of_caller()
        if isinstance(planner, DefaultSavePlanner):
            refuse_wrappers(planner.state_dict.items())
        self._is_coordinator = is_coordinator
        rank = kwargs.get("rank")
        self._rank = rank if type(rank) is int else find_rank_info(None).rank

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what cannot be stored, before anything is written, and find this rank's worker.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Naming the tensor.
            WorkerUnavailableError: Nobody answers at the endpoint that was named.

        Blocks: for a worker to start.
        """
        sorted_out(plan.items)
        if self._by_worker is None:
            worker_info = WorkerInfo(rank=self._rank, instance="", why="use_worker=False")
        else:
            worker_info = self._by_worker.worker_info(
                self._rank, is_coordinator=self._is_coordinator, fsync=self.sync_files, overwrite=self.overwrite
            )
        self._worker_info = worker_info
        return dataclasses.replace(plan, storage_data=worker_info)

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give the save its id, and each rank's plan a task with it.

        Raises:
            CheckpointExistsError: A checkpoint is at the path that is not to be replaced.
            SaveFailedError: The directory beside it cannot be looked at.
            AsyncCkptError: The workers of several nodes, of which one was named, cannot be linked.
        """
        given: list[SaveTask] | None = None
        with self._one.going_on(), self._failures(None):
            epoch = catalog.next_epoch_beside(self.path, store_over(self._files))
            if self._by_worker is not None and self._worker_info is not None:
                given = self._by_worker.begin(self.path, self._worker_info, epoch, plans, self._files)
            if given is None:
                given = self._in_this_process().begin(epoch, len(plans))
        self._task = given[self._rank if self._rank < len(given) else 0]
        return [dataclasses.replace(plan, storage_data=task) for plan, task in zip(plans, given, strict=True)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Stage this rank's files and hand them to the worker; or write them.

        Raises:
            UnsupportedLeafError, DuplicateNameError: Something cannot be stored.
            CheckpointExistsError, SaveFailedError: Storage. What this call created is removed.
            AsyncCkptError: The worker is lost, or does not get on.
            Exception: Whatever the planner raises.

        Blocks: for the copy, and for memory; where this process writes, for the writes.
        """
        with self._one.going_on():
            task = received_task() or self._task or plan.storage_data
            if not isinstance(task, SaveTask) or (task.save_id, task.rank) in _begun:
                # A planner that caches plans goes on with that of an earlier save (ADR 0058).
                raise SaveFailedError(
                    f"the save to {self.path}: this rank was not told what the coordinator has decided; nothing was "
                    "written. Save with a planner that does not cache plans",
                    code="ticket",
                    path=self.path,
                    detail="the plan is of another save, or was not sent through a process group",
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
        """Commit.

        Raises:
            SaveFailedError: Code `coverage`: a tensor would not be stored exactly once; or an errno's name.
            CheckpointExistsError: Another save has committed there meanwhile, which is not to be replaced.
            CommitUnknownError: Nobody knows whether the manifest is there; nothing was deleted.
            CommitTimeoutError, WorkerUnavailableError: Nobody knows yet; the worker, or the next one, goes on with it.

        Blocks: until everything is durable; with `overwrite` for another save that is being published there.
        """
        with self._one.going_on():
            task = self._task
            assert task is not None, "finish comes after this writer's write_data"
            with self._failures(task.save_id, task.rank):
                by_worker = self._by_worker if task.by_worker else None
                (by_worker or self._in_this_process()).finish(metadata, results)
        metadata.storage_data = chunks_in(results)
        metadata.storage_meta = self.storage_meta()
        metadata.version = DCP_VERSION

    def storage_meta(self) -> StorageMeta | None:
        """Return where the checkpoint goes, and its save id once it has one."""
        return StorageMeta(checkpoint_id=self.path, save_id=self.save_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of this machine's file systems."""
        return is_local_path(checkpoint_id)

    def _in_this_process(self) -> InProcess:
        if self._in_process is None:
            config = CheckpointerConfig(fsync=self.sync_files, overwrite=self.overwrite)
            self._in_process = InProcess(self.path, config, self._files)
        return self._in_process

    def _abandon(self) -> None:
        """End what this writer has begun and will not commit."""
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
            name = None if save_id is None else str(save_id)
            raise save_failure(error, save_id=name, rank=rank, step=None, path=self.path) from error


def _planner_of_caller() -> Any:
    """Return the planner of the `dcp.save` that calls: torch shows it to a writer only when all ranks have begun."""
    frame = inspect.currentframe()
    for _ in range(_MAX_FRAMES):
        frame = frame and frame.f_back
        if frame is not None and frame.f_globals.get("__name__") == _SAVER:
            return frame.f_locals.get("planner")
    return None

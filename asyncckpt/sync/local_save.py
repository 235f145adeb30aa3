"""The steps of one rank in a save without a worker: stage, write, run the hook, publish, clean up."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.failpoints import reach
from asyncckpt.basics.paths import current_umask
from asyncckpt.client.epochs import EpochCache
from asyncckpt.client.slot import PrivateStagingBuffer
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.config import CheckpointerConfig
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    InsufficientMemoryError,
    SaveFailedError,
    StagingError,
)
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.format.names import SaveId
from asyncckpt.memory.headroom import check_memory
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.planning.planner import PlanCache
from asyncckpt.planning.save_plan import SavePlan
from asyncckpt.protocol.request import SaveRequest
from asyncckpt.staging.copy_engine import CopyEngine
from asyncckpt.staging.cpu_copy import SlotImage
from asyncckpt.staging.save_request import ContextDigests, build_request
from asyncckpt.state_dict.flatten import Flattened
from asyncckpt.storage import catalog, commit
from asyncckpt.storage.checkpoint_dir import prepare_directory, remove_made
from asyncckpt.storage.files import Files, save_failure
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import files_at, with_storage_options
from asyncckpt.storage.rank_writer import DEFAULT_THREADS, RankResult, RankWriter
from asyncckpt.storage.reuse.shard_history import ShardHistory
from asyncckpt.storage.store import Store

_log = logging.getLogger("asyncckpt.sync")


class LocalSave:
    """Stages into private memory, which is kept for the next save. The caller decides the order of the steps.

    Args:
        config: For layout and writing options.
        ranks: The ranks that save together.
        hooks: The user's commit hooks.
        files: System calls on files; tests replace it.

    Attributes:
        plans: Plans by structure.
    """

    def __init__(
        self, config: CheckpointerConfig, ranks: Coordination, hooks: HookRunner, files: Files | None = None
    ) -> None:
        self.config, self.ranks, self.hooks = config, ranks, hooks
        self.plans = PlanCache(
            files_per_rank=config.files_per_rank,
            rank=ranks.rank.rank,
            allow_pickle=config.allow_pickle,
            max_shard_nbytes=config.max_shard_bytes,
            layout=config.layout,
            groups_by_role=config.reuse == "auto",
        )
        self._files, self._history = files, ShardHistory()
        self._made: list[str] = []
        self._memory: PrivateStagingBuffer | None = None
        self._image: SlotImage | None = None
        self._engine = CopyEngine(config)
        self._digests = ContextDigests()
        self._epochs = EpochCache(self._next_epoch)
        self._pool = ThreadPoolExecutor(config.write_threads or DEFAULT_THREADS, thread_name_prefix="asyncckpt-write")

    def _files_at(self, path: str) -> Files:
        with with_storage_options(self.config.storage_options):
            return files_at(path, files=self._files)

    def _store_at(self, path: str) -> Store:
        return store_over(self._files_at(path), umask=current_umask())

    @contextlib.contextmanager
    def failures(self, save_id: SaveId, path: str, step: int | None) -> Iterator[None]:
        """Convert an OSError inside the block.

        Raises:
            SaveFailedError: Naming the system call, rank and path.
        """
        try:
            yield
        except AsyncCkptError:
            raise
        except OSError as error:
            rank = self.ranks.rank.rank
            raise save_failure(error, save_id=str(save_id), rank=rank, step=step, path=path) from error

    def _next_epoch(self, path: str, run: str, least: int, brief: bool) -> int:
        return catalog.check_epoch(max(least, catalog.next_epoch_beside(path, self._store_at(path))), path)

    def epoch_for(self, path: str, run: str) -> int:
        """Return the epoch of a save to `path`."""
        return self._epochs.epoch_for(path, run)

    def write_files(
        self, plan: SavePlan, flat: Flattened, leaves: list[Any], save_id: SaveId, path: str, kw: Mapping[str, Any]
    ) -> tuple[SaveRequest, RankResult]:
        """Stage and write this rank's files; `kw`: `step` and `metadata`.

        Returns:
            The request to the writer, and what it wrote.

        Raises:
            StagingError: torch could not copy a tensor.
            InsufficientMemoryError, SaveFailedError, CheckpointExistsError: As `SyncWriter.write`.
        """
        began, step = time.perf_counter(), kw["step"]
        with self.failures(save_id, path, step):
            self._made = prepare_directory(
                path,
                save_id=save_id,
                store=self._store_at(path),
                fsync=self.config.fsync,
                overwrite=self.config.overwrite,
            )
            buffer, image = self._image_for(plan)
            try:
                device_map = self._engine.device_map(image, flat.tensors)
                work = image.split(frozenset())
                self._engine.copy(buffer, image, flat.tensors, device_map, save_id, work, overlapped=False)
            except BaseException as error:
                buffer.settle()
                if isinstance(error, AsyncCkptError) or not isinstance(error, RuntimeError):
                    raise
                raise StagingError(
                    f"step {step}: copying the state into memory failed: {error}",
                    save_id=str(save_id),
                    step=step,
                    path=path,
                ) from error
            copied = time.perf_counter() - began
            reach("sync: copied")
            request = build_request(
                self.config,
                self.ranks.rank,
                save_id,
                path=path,
                step=step,
                parts=plan.part_ranges(),
                structure=self._digests.structure_of(plan, leaves),
                n_tensors=plan.n_tensors,
                leaves=leaves,
                metadata=kw.get("metadata"),
            )
            threads = request.write_threads or DEFAULT_THREADS
            result = RankWriter(
                request,
                buffer.mapping.view(),
                self._files_at(request.path),
                threads=threads,
                history=self._history,
            ).write(self._pool)
        return request, replace(result, seconds={"copy": copied, **result.seconds})

    def ask_hook(self, path: str, save_id: SaveId, step: int, extra: Mapping[str, Any]) -> None:
        """Call `pre_commit`.

        Raises:
            SaveFailedError: It raised: a veto.
        """
        veto = self.hooks.before(path, extra)
        if veto is not None:
            rank = self.ranks.rank.rank
            raise SaveFailedError(
                f"save of step {step} to {path}: pre_commit of rank {rank} vetoed it: {veto}; nothing was published",
                code="vetoed",
                rank=rank,
                path=path,
                detail=veto,
                save_id=str(save_id),
                step=step,
            )

    def publish(self, request: SaveRequest, results: Sequence[RankResult]) -> None:
        """Commit a checkpoint: all ranks have written their files.

        Args:
            request: The request of rank 0.
            results: What each rank wrote.

        Raises:
            CheckpointExistsError, CommitUnknownError, OSError: As `storage.commit.commit_save`.
        """
        store = store_over(self._files_at(request.path), umask=request.umask)
        commit.commit_save([request], results, store=store, package=__version__)
        self._made = []

    def remove(self, path: str, save_id: SaveId) -> None:
        """Remove the files of a failed save, and directories that it made.

        Files that cannot be removed are left: the next save to `path` removes them.
        """
        with contextlib.suppress(OSError):
            commit.remove_files_of(path, save_id, store=self._store_at(path))
            if self.ranks.alone:  # with several ranks, another rank may have made the directories
                remove_made(self._made, self._store_at(path))
        self._made = []

    def clean_up(self, path: str, save_id: SaveId) -> None:
        """Remove files that failed saves have left in the directory of a committed checkpoint. Does not fail."""
        try:
            commit.remove_leftovers(path, keep=save_id, store=self._store_at(path))
        except OSError as error:
            _log.warning("files of failed saves cannot be removed from %s: %s", path, error)

    def _image_for(self, plan: SavePlan) -> tuple[PrivateStagingBuffer, SlotImage]:
        wanted = PAGE_NBYTES + plan.body_nbytes
        limit = self.config.arena_limit_bytes
        if limit is not None and wanted > limit:
            raise InsufficientMemoryError(
                f"the snapshot needs {wanted} bytes of memory, but arena_limit_bytes is {limit}; raise the limit",
                nbytes=wanted,
                limit=limit,
            )
        if self._memory is None or not self._memory.is_quiet() or self._memory.mapping.nbytes < wanted:
            self._drop()
            check_memory(wanted, 0)
            try:
                self._memory = PrivateStagingBuffer(memory=Memory(-1, wanted))
            except OSError as error:
                raise InsufficientMemoryError(
                    f"the snapshot needs {wanted} bytes of memory, and the kernel refused: {error}", nbytes=wanted
                ) from error
        if self._image is None or self._image.plan is not plan:
            self._image = SlotImage(self._memory.mapping.address, plan)
        return self._memory, self._image

    def _drop(self) -> None:
        self._image = None  # views must be dropped before the memory is unmapped
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Free memory and threads. Idempotent."""
        self._pool.shutdown()
        self._drop()

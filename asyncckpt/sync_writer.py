"""Writes a checkpoint in this process, with no worker: the same format, the same durability, in the caller's time."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from asyncckpt import __version__
from asyncckpt.config import CheckpointerConfig, RankInfo
from asyncckpt.errors import AsyncCkptError, InsufficientMemoryError, StagingError
from asyncckpt.format.layout import PAGE_NBYTES
from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId
from asyncckpt.format.objects import encode_objects
from asyncckpt.handle import SaveReport
from asyncckpt.lineage import Lineage
from asyncckpt.memory.headroom import check_memory
from asyncckpt.memory.mapping import Mapping as Memory
from asyncckpt.parts import CheckpointWriter
from asyncckpt.planning.leaves import encode_leaves
from asyncckpt.planning.plan import SavePlan
from asyncckpt.planning.planner import PlanCache
from asyncckpt.staging.copy_cpu import SlotImage
from asyncckpt.staging.umask import current_umask
from asyncckpt.storage import catalog, commit
from asyncckpt.storage.failures import save_failure
from asyncckpt.storage.files import Files
from asyncckpt.storage.rank_files import DEFAULT_THREADS, RankJob, RankResult, write_rank_files
from asyncckpt.storage.record import build_manifest

_log = logging.getLogger("asyncckpt.sync")


class SyncWriter(CheckpointWriter):
    """Stages into private memory, kept for the next save, then writes and commits.

    Args:
        config: For layout and writing options.
        rank: Of this process; one of one.
        files: The storage seam; tests replace it.
    """

    def __init__(self, config: CheckpointerConfig, rank: RankInfo, files: Files | None = None) -> None:
        self._config, self._rank, self._files = config, rank, files or Files()
        self._plans = PlanCache(files_per_rank=config.files_per_rank)
        self._memory: Memory | None = None
        self._image: SlotImage | None = None
        self._lineage = Lineage(lambda path, *_: catalog.next_epoch_beside(path, files=self._files))
        self._pool = ThreadPoolExecutor(config.write_threads or DEFAULT_THREADS, thread_name_prefix="asyncckpt-write")

    def write(self, state_dict: Mapping[str, Any], path: str, **kw: Any) -> SaveReport:
        """Write and commit. Blocks until the checkpoint is durable.

        Args:
            state_dict: The state.
            path: Absolute path of the checkpoint's directory.
            **kw: `step`, `save_id` (its epoch is filled in here), `metadata`; others are ignored.

        Raises:
            UnsupportedLeafError, DuplicateNameError: The state cannot be stored.
            InsufficientMemoryError: The snapshot does not fit into memory.
            CheckpointExistsError, SaveFailedError, CommitUnknownError: Storage; see `asyncckpt.errors`.
        """
        began = time.perf_counter()
        plan, flat = self._plans.take(state_dict)
        leaves = encode_leaves(flat)
        save_id: SaveId = kw["save_id"]
        try:
            save_id = save_id._replace(epoch=self._lineage.epoch_for(path, save_id.run_id))
            umask = current_umask()
            commit.prepare_directory(path, files=self._files, umask=umask, fsync=self._config.fsync)
            image = self._image_for(plan)
            try:
                image.fill(flat.tensors, save_id)
            except RuntimeError as error:
                raise StagingError(
                    f"step {kw['step']}: copying the state into memory failed: {error}",
                    save_id=str(save_id),
                    step=kw["step"],
                    path=path,
                ) from error
            copied = time.perf_counter()
            job = self._job(plan, path, save_id, encode_objects(save_id, leaves), umask)
            result = self._write(job)
            manifest = self._manifest(job, result, kw)
            commit.publish(path, manifest, files=self._files, umask=umask)
        except AsyncCkptError:
            raise
        except OSError as error:
            rank = self._rank.rank
            raise save_failure(error, save_id=str(save_id), rank=rank, step=kw["step"], path=path) from error
        self._clean_up(path, save_id)
        ended = time.perf_counter()
        seconds = {"copy": copied - began, **result.seconds, "total": ended - began}
        return SaveReport(
            save_id=str(save_id), nbytes=result.nbytes, seconds=seconds, details={"direct": result.direct}
        )

    def _clean_up(self, path: str, save_id: SaveId) -> None:
        """Remove what other attempts left; the checkpoint stands whether that works or not."""
        try:
            commit.remove_leftovers(path, keep=save_id, files=self._files)
        except OSError as error:
            _log.warning("leftovers stay in %s: %s", path, error)

    def _image_for(self, plan: SavePlan) -> SlotImage:
        wanted = PAGE_NBYTES + plan.body_nbytes
        limit = self._config.arena_limit_bytes
        if limit is not None and wanted > limit:
            raise InsufficientMemoryError(
                f"the snapshot needs {wanted} bytes of memory, arena_limit_bytes is {limit}; raise the limit",
                nbytes=wanted,
                limit=limit,
            )
        if self._memory is None or self._memory.nbytes < wanted:
            self._drop()
            check_memory(wanted, 0)
            try:
                self._memory = Memory(-1, wanted)
            except OSError as error:
                raise InsufficientMemoryError(
                    f"the snapshot needs {wanted} bytes of memory, and the kernel refused: {error}", nbytes=wanted
                ) from error
        if self._image is None or self._image.plan is not plan:
            self._image = SlotImage(self._memory.address, plan)
        return self._image

    def _job(self, plan: SavePlan, path: str, save_id: SaveId, objects: bytes, umask: int) -> RankJob:
        return RankJob(
            path=path,
            save_id=save_id,
            rank=self._rank.rank,
            world_size=self._rank.world_size,
            parts=tuple((p.offset, p.nbytes) for p in plan.part_ranges()),
            structure=plan.structure,
            objects=objects,
            n_tensors=plan.n_tensors,
            fsync=self._config.fsync,
            umask=umask,
            threads=self._config.write_threads or 0,
        )

    def _write(self, job: RankJob) -> RankResult:
        assert self._memory is not None
        return write_rank_files(job, self._memory.view(), files=self._files, pool=self._pool, check=lambda: None)

    def _manifest(self, job: RankJob, result: RankResult, kw: Mapping[str, Any]) -> Manifest:
        return build_manifest(
            job.save_id,
            [result],
            step=kw["step"],
            world_size=job.world_size,
            fsync=job.fsync,
            metadata=json.dumps(kw.get("metadata") or {}),
            package=__version__,
        )

    def _drop(self) -> None:
        self._image = None  # the views go before the mapping
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def close(self) -> None:
        """Free memory and threads. Twice is fine."""
        self._pool.shutdown()
        self._drop()

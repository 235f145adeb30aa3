"""Saves that the workers write. Once every rank has staged and the coordinator has sealed, trainers may be killed."""

from __future__ import annotations

import concurrent.futures
import logging
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult

from asyncckpt.config import CheckpointerConfig, RankInfo, endpoint_from_environment
from asyncckpt.dcp.worker_part import RequestSizeEstimate, UnsealedPart, stage_part
from asyncckpt.dcp.worker_session import SaveTask, WorkerInfo, WorkerSession, received_worker_infos
from asyncckpt.dcp.write_plan import WriteOptions
from asyncckpt.distributed.process_group import find_rank_info
from asyncckpt.errors import AsyncCkptError, CommitTimeoutError
from asyncckpt.format.names import SaveId
from asyncckpt.storage.checkpoint_dir import check_target_directory
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over

FIELDS = frozenset(
    {
        "arena_limit_bytes",
        "commit_timeout_s",
        "on_worker_loss",
        "slot_timeout_s",
        "worker_start_timeout_s",
        "worker_timeout_s",
        "write_threads",
    }
)
"""Fields of `CheckpointerConfig` about the worker that are no arguments of torch's `FileSystemWriter`."""

VERDICT_S = 30.0
"""`finish` waits this much longer than `commit_timeout_s`, after which the future of a commit fails by itself. Chosen,
not measured."""

_log = logging.getLogger("asyncckpt.dcp")


class WorkerSaves:
    """Saves of one `StorageWriter` that the workers write. Keeps connection and memory between saves.

    Args:
        endpoint: Endpoint of a running worker; None: `$ASYNCCKPT_ENDPOINT`, else this user's worker of this job.
        fields: Values of the fields in `FIELDS`.

    Raises:
        ConfigError: A value is invalid.
    """

    def __init__(self, endpoint: str | None, fields: Mapping[str, Any]) -> None:
        self._endpoint = endpoint or endpoint_from_environment()
        self._config = CheckpointerConfig.resolve(None, fields)
        self._forget()

    def _forget(self) -> None:
        self._session: WorkerSession | None = None
        self._finalizer: weakref.finalize[Any, WorkerSaves] | None = None
        self._save_id: SaveId | None = None
        self._unsealed: UnsealedPart | None = None
        self._size_estimate = RequestSizeEstimate()
        self._handed_over: tuple[SaveId, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return the settings only: another process connects by itself."""
        return {"_endpoint": self._endpoint, "_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # ---- before the plan --------------------------------------------------------------------------------------------

    def connect(self, rank: int, *, is_coordinator: bool, fsync: bool, overwrite: bool) -> WorkerInfo:
        """Connect to a worker, or start one, and keep the settings of the save that begins.

        Args:
            rank: Rank of this process in the group that saves.
            is_coordinator: Whether it is the coordinator of the save.
            fsync, overwrite: Settings of the save.

        Returns:
            A description of the worker; or, if there is none and neither an argument nor `$ASYNCCKPT_ENDPOINT` names an
            endpoint, the reason.

        Raises:
            AsyncCkptError: No worker answers at the endpoint that was given.

        Blocks: up to `worker_start_timeout_s`.
        """
        self._config = replace(
            self._config,
            fsync=fsync,
            overwrite=overwrite,
            layout="safetensors",
            on_busy="wait",
            keep_in_memory="none",
            slots=2,
        )
        try:
            # A guess, which usually saves a second connection. The task has the real values.
            world_size = max(find_rank_info(None).world_size, rank + 1)
            guess = RankInfo(0 if is_coordinator else rank, world_size)
            return WorkerInfo(rank=rank, instance=self._session_here().instance(guess, self._config), why="")
        except AsyncCkptError as error:
            if self._endpoint is not None:
                raise
            return WorkerInfo(rank=rank, instance="", why=error.message)

    def _session_here(self) -> WorkerSession:
        if self._session is None or self._session.is_inherited:
            self._session = session = WorkerSession(self._endpoint)
            self._finalizer = weakref.finalize(self, session.abandon)
            self._finalizer.atexit = False  # `process_lifecycle` closes the session at exit, in the right order
        return self._session

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def begin(
        self, path: str, own: WorkerInfo, epoch: int, plans: Sequence[SavePlan], files: Files
    ) -> list[SaveTask] | None:
        """Return the tasks of all ranks, in the order of their plans. Called on the coordinator.

        Waits until the worker has ended a save that failed; and, if `finish` was interrupted (Ctrl-C), until an earlier
        save to the same path is committed. After its deadline it goes on: the worker then refuses the save if an
        earlier one at the path is open.

        Returns:
            The tasks. None: not every rank has a worker, so the ranks have to write the files themselves.

        Raises:
            CheckpointExistsError: A checkpoint is at the path, and `overwrite` is False.
            OSError: The path cannot be read.
            AsyncCkptError: An endpoint was given, and the workers of several nodes cannot be connected.

        Blocks: for the workers of several nodes, and for the end of a failed save, up to `worker_timeout_s` each; while
            an earlier save is committed, up to `commit_timeout_s`.
        """
        world_size = len(plans)
        found = {**received_worker_infos(), own.rank: own}
        order = [own.rank] if world_size == 1 else list(range(world_size))
        why = [f"rank {r}: {found[r].why if r in found else 'no report'}" for r in order if not _has(found, r)]
        if not why:
            # The coordinator is the save's rank 0, whose worker commits. It changes places with the first plan's rank,
            # so that `places` leads from plans to ranks of the save and back.
            places = list(range(world_size))
            at = order.index(own.rank)
            places[0], places[at] = places[at], places[0]
            instances = [found[order[place]].instance for place in places]
            try:
                given = self._session_here().lead(instances, self._config, epoch, places)
            except AsyncCkptError as error:
                if self._endpoint is not None:
                    raise
                why = [error.message]
            else:
                self._save_id = given[0].save_id  # from here `abandon` must end the save: other ranks may be staging
                self._await_earlier(path)
                self._size_estimate.record_plans(plans, at)
                check_target_directory(
                    path, save_id=given[0].save_id, store=store_over(files), overwrite=self._config.overwrite
                )
                return given
        text = "save to %s: the training processes write it themselves, because not every rank has a worker: %s"
        _log.warning(text, path, "; ".join(why[:3]))
        return None

    # ---- the save ---------------------------------------------------------------------------------------------------

    def write(self, plan: SavePlan, planner: SavePlanner, task: SaveTask, options: WriteOptions) -> list[WriteResult]:
        """Stage this rank's part; see `stage_part`.

        Raises:
            AsyncCkptError, Exception: See `stage_part`; the save has ended on all ranks.

        Blocks: see `stage_part`.
        """
        session = self._session_here()
        self._save_id = task.save_id
        process = session.join(task, self._config)
        results, self._unsealed = stage_part(plan, planner, task, options, process, self._size_estimate)
        return results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Seal the coordinator's part, and wait for the commit.

        Raises:
            SaveFailedError, UnsupportedLeafError: See `UnsealedPart.seal`; or the worker reports it.
            CheckpointExistsError, CommitUnknownError: The worker reports it.
            CommitTimeoutError: The save is not committed in time; the worker continues it.
            AsyncCkptError: The worker is lost.

        Blocks: up to `commit_timeout_s` + `VERDICT_S`.
        """
        unsealed, self._unsealed = self._unsealed, None
        assert unsealed is not None, "finish comes after this writer's write_data"
        # IMPORTANT: set before the seal: a signal that arrives during the seal is raised at its end.
        self._handed_over = SaveId.parse(unsealed.request.save_id), unsealed.request.path
        try:
            future = unsealed.seal(metadata, results)
        except BaseException as error:
            self.abandon(f"its coordinator failed: {error!r}")
            raise
        timeout_s = self._config.commit_timeout_s + VERDICT_S
        if not concurrent.futures.wait([future], timeout_s).done:
            text = f"save {self._save_id} was not committed within {timeout_s:g} s; the worker continues it"
            raise CommitTimeoutError(text, timeout_s=timeout_s, save_id=str(self._save_id))
        future.result(0)

    def _await_earlier(self, path: str) -> None:
        """Wait until the worker knows the end of earlier saves: another rank may use their path before it does."""
        self._session_here().await_withdrawals(self._config.worker_timeout_s)
        if self._handed_over is not None and self._handed_over[1] == path and self._session is not None:
            self._session.await_end(self._handed_over[0], self._config.commit_timeout_s)

    def abandon(self, reason: str = "its coordinator has begun another save, or was closed") -> None:
        """End the latest save on all ranks, unless its slot was sealed. Does not wait."""
        save_id, self._save_id, self._unsealed = self._save_id, None, None
        if save_id is not None and self._session is not None:
            self._session.withdraw(save_id, reason)

    def close(self) -> None:
        """Disconnect from the worker; a later save connects again.

        Blocks: a few seconds at most, if the worker does not answer.
        """
        self.abandon()
        session, self._session = self._session, None
        if self._finalizer is not None:
            self._finalizer.detach()
        if session is not None and not session.is_inherited:
            session.close()


def _has(found: Mapping[int, WorkerInfo], rank: int) -> bool:
    return rank in found and bool(found[rank].instance)

"""Saves that the workers write: every rank stages, and may be killed once the coordinator's slot is sealed."""

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
from asyncckpt.dcp.worker_part import SealRoom, Unsealed, stage_part
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
"""Of `CheckpointerConfig`: what is about the worker, and has no argument of torch's that says it."""

VERDICT_S = 30.0
"""Beyond `commit_timeout_s`, by which the future of a commit completes by itself, who waits gives up. Chosen."""

_log = logging.getLogger("asyncckpt.dcp")


class ByWorker:
    """Lets the workers write the saves of one `StorageWriter`. Keeps its connection and its memory from save to save.

    Args:
        endpoint: Of a running worker; None: `$ASYNCCKPT_ENDPOINT`, else this user's worker of this job.
        fields: Of `CheckpointerConfig`, those of `FIELDS`.

    Raises:
        ConfigError: An impossible value.
    """

    def __init__(self, endpoint: str | None, fields: Mapping[str, Any]) -> None:
        self._endpoint = endpoint or endpoint_from_environment()
        self._config = CheckpointerConfig.resolve(None, fields)
        self._forget()

    def _forget(self) -> None:
        self._session: WorkerSession | None = None
        self._left: weakref.finalize[Any, ByWorker] | None = None
        self._save_id: SaveId | None = None
        self._unsealed: Unsealed | None = None
        self._seal_room = SealRoom()
        self._handed_over: tuple[SaveId, str] | None = None

    def __getstate__(self) -> dict[str, Any]:
        """Return what another process needs: the settings."""
        return {"_endpoint": self._endpoint, "_config": self._config}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    # ---- before the plan --------------------------------------------------------------------------------------------

    def worker_info(self, rank: int, *, is_coordinator: bool, fsync: bool, overwrite: bool) -> WorkerInfo:
        """Find a worker, or start one.

        Args:
            rank: Of this process in the group that saves.
            is_coordinator: Whether it coordinates.
            fsync, overwrite: Of the save.

        Raises:
            AsyncCkptError: Nobody answers at the endpoint that was named. Else the returned `WorkerInfo`
                says why there is none.

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
            # IMPORTANT: a guess, with which a save needs no second connection; the task says it for certain.
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
            self._left = weakref.finalize(self, session.abandon)
            self._left.atexit = False  # `ends` closes it in order
        return self._session

    # ---- the plan ---------------------------------------------------------------------------------------------------

    def begin(
        self, path: str, own: WorkerInfo, epoch: int, plans: Sequence[SavePlan], files: Files
    ) -> list[SaveTask] | None:
        """Return the tasks of all ranks, in the order of their plans; the coordinator calls it.

        Waits first for a save to the same path that was handed over and not waited for to its end (Ctrl-C).

        Returns:
            None: not every rank has a worker, so that the save is written in the processes themselves.

        Raises:
            CheckpointExistsError: A checkpoint is at the path that is not to be replaced.
            OSError: It cannot be looked at.
            AsyncCkptError: Workers of several nodes, of which one was named, cannot be linked.

        Blocks: for that save, up to `commit_timeout_s`; what is refused then is refused by the worker.
        """
        world_size = len(plans)
        found = {**received_worker_infos(), own.rank: own}
        order = [own.rank] if world_size == 1 else list(range(world_size))
        why = [f"rank {r}: {found[r].why if r in found else 'it has not said'}" for r in order if not _has(found, r)]
        if not why:
            # The coordinator is the save's rank 0, whose worker commits.
            numbers = list(range(world_size))
            at = order.index(own.rank)
            numbers[0], numbers[at] = numbers[at], numbers[0]
            instances = [found[order[n]].instance for n in numbers]
            try:
                given = self._session_here().lead(instances, self._config, epoch, numbers)
            except AsyncCkptError as error:
                if self._endpoint is not None:
                    raise
                why = [error.message]
            else:
                self._save_id = given[0].save_id  # the other ranks may stage, and be ended, before this one writes
                self._await_earlier(path)
                self._seal_room.note_plans(plans, at)
                check_target_directory(
                    path, save_id=given[0].save_id, store=store_over(files), overwrite=self._config.overwrite
                )
                return given
        text = "the save to %s is written in the training process, for there is no worker: %s"
        _log.warning(text, path, "; ".join(why[:3]))
        return None

    # ---- the save ---------------------------------------------------------------------------------------------------

    def write(self, plan: SavePlan, planner: SavePlanner, task: SaveTask, options: WriteOptions) -> list[WriteResult]:
        """Stage this rank's part.

        Raises:
            AsyncCkptError, Exception: As `stage_part`; the save has ended then.

        Blocks: as there.
        """
        session = self._session_here()
        self._save_id = task.save_id
        process = session.join(task, self._config)
        results, self._unsealed = stage_part(plan, planner, task, options, process, self._seal_room)
        return results

    def finish(self, metadata: Metadata, results: Sequence[Sequence[WriteResult]]) -> None:
        """Seal the coordinator's part, and wait for the commit.

        Raises:
            SaveFailedError, UnsupportedLeafError: As `Unsealed.seal`; or the worker says so.
            CheckpointExistsError, CommitUnknownError: As the worker says.
            CommitTimeoutError: It is not committed in time; the worker goes on with it.
            AsyncCkptError: The worker is lost.

        Blocks: up to `commit_timeout_s` and a little more.
        """
        unsealed, self._unsealed = self._unsealed, None
        assert unsealed is not None, "finish comes after this writer's write_data"
        # IMPORTANT: before the seal, at whose end a signal is raised that came while it was handed over.
        self._handed_over = SaveId.parse(unsealed.request.save_id), unsealed.request.path
        try:
            future = unsealed.seal(metadata, results)
        except BaseException as error:
            self.abandon(f"its coordinator failed: {error!r}")
            raise
        timeout_s = self._config.commit_timeout_s + VERDICT_S
        if not concurrent.futures.wait([future], timeout_s).done:
            text = f"save {self._save_id} was not committed within {timeout_s:g} s; the worker goes on with it"
            raise CommitTimeoutError(text, timeout_s=timeout_s, save_id=str(self._save_id))
        future.result(0)

    def _await_earlier(self, path: str) -> None:
        if self._handed_over is not None and self._handed_over[1] == path and self._session is not None:
            self._session.await_end(self._handed_over[0], self._config.commit_timeout_s)

    def abandon(self, reason: str = "its coordinator has begun another save, or was closed") -> None:
        """End the save that was begun last, unless it was handed over. Does not wait."""
        save_id, self._save_id, self._unsealed = self._save_id, None, None
        if save_id is not None and self._session is not None:
            self._session.withdraw(save_id, reason)

    def close(self) -> None:
        """Let the worker go; a later save finds it again.

        Blocks: a few seconds at most, where it does not answer.
        """
        self.abandon()
        session, self._session = self._session, None
        if self._left is not None:
            self._left.detach()
        if session is not None and not session.is_inherited:
            session.close()


def _has(found: Mapping[int, WorkerInfo], rank: int) -> bool:
    return rank in found and bool(found[rank].instance)

"""StockSaver: saves a framework's own files by way of our worker, and publishes them under the framework's names.

A save stages into the worker's memory and returns; the worker commits a checkpoint of ours in a hidden directory beside
the target, and a process of its own (`exporter`) makes the framework's files of it and renames them into place. Both
outlive the trainer. What was staged is thus published whatever happens to the trainer, and nothing half-written ever
bears the framework's name.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from typing import Any

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.config import RankInfo
from asyncckpt.errors import WaitTimeoutError
from asyncckpt.handle import SaveHandle
from asyncckpt.integrations.capturing import Captured
from asyncckpt.integrations.exporter import finish_exports, remove_if_empty
from asyncckpt.integrations.exporter_process import ExporterProcess
from asyncckpt.integrations.pending_saves import PendingSave, PendingSaves
from asyncckpt.integrations.spool import Job, job_for, spool_of
from asyncckpt.integrations.stock_files import STOCK_KEY, rank_key
from asyncckpt.integrations.stock_state import state_of
from asyncckpt.managing.root_lock import RootLock, claim
from asyncckpt.one_answer import same_answer
from asyncckpt.paths import absolute_path

EXPORTER_END_S = 5.0
"""How long an exporter that has nothing left to do may take to end. Chosen."""

AGREE_TIMEOUT_S = 60.0
"""How long ranks wait for each other before their first save; as `plan_timeout_s` has it."""

_POLL_S = 0.02

_log = logging.getLogger("asyncckpt.integrations")


class StockSaver:
    """See the module. One thread saves, and asks.

    Args:
        checkpointer: Saves with it, and leaves closing it to the caller; None makes one of its own.
        rank_info: Which rank this is; default: torch.distributed's. `RankInfo(0, 1)`: only one rank saves.
        **fields: Fields of `CheckpointerConfig`, for the checkpointer that it makes.

    Attributes:
        checkpointer: What it saves with; attach optimizers to it.
    """

    def __init__(
        self, *, checkpointer: AsyncCheckpointer | None = None, rank_info: RankInfo | None = None, **fields: Any
    ) -> None:
        self._is_own = checkpointer is None
        self.checkpointer = checkpointer or AsyncCheckpointer(rank_info=rank_info, **fields)
        self._given_rank = rank_info
        self._token = ""
        self._count = 0
        self._exporter = ExporterProcess(timeout_s=self.checkpointer.config.commit_timeout_s)
        self._pending = PendingSaves(self._exporter)
        self._spools: set[str] = set()
        self._alone: dict[str, RootLock | None] = {}

    @property
    def _rank(self) -> RankInfo:
        return self._given_rank or self.checkpointer.rank_info

    def save(
        self,
        target: str | os.PathLike[str],
        files: Mapping[str, Captured | bytes],
        *,
        step: int,
        is_directory: bool = True,
    ) -> SaveHandle:
        """Stage the files of `target`, and return; tensors may be changed as after `AsyncCheckpointer.save`.

        With several ranks all of them call it, each with its own files.

        Args:
            target: The framework's directory, or file; what stands there is replaced when the new one is complete.
            files: By name below the directory; of a target that is a file, one under any name.
            step: Of the training.
            is_directory: Whether the target is one.

        Raises:
            UnsupportedPathError, CheckpointerClosedError, ForkedError, ReentrantCallError: As `AsyncCheckpointer.save`.
            OSError: The hidden directory cannot be made.
        """
        job = self._next(target, is_directory=is_directory)
        return self._save(job, {STOCK_KEY: {rank_key(self._rank.rank): state_of(files)}}, step)

    def save_moved(
        self,
        target: str | os.PathLike[str],
        state: Mapping[str, Any],
        files: Mapping[str, Captured | bytes],
        *,
        step: int,
    ) -> SaveHandle:
        """As `save`, for a directory that is the checkpoint of ours itself, in the checkpointer's layout.

        Args:
            target: See `save`.
            state: What the checkpoint holds.
            files: What the framework wants beside it.
            step: Of the training.

        Raises:
            Exception: As `save`.
        """
        job = self._next(target, is_directory=True, moved=True)
        whole = {**state, STOCK_KEY: {rank_key(self._rank.rank): state_of(files)}} if files else dict(state)
        return self._save(job, whole, step)

    def _save(self, job: Job, state: Mapping[str, Any], step: int) -> SaveHandle:
        pid = None
        if self._rank.rank == 0:
            spool = os.path.dirname(job.path)
            os.makedirs(spool, exist_ok=True)
            self._spools.add(spool)
            job.write()
            # IMPORTANT: before the save: whatever is staged has somebody who publishes it, if we die the next moment.
            pid = self._exporter.submit(job)
        try:
            handle = self.checkpointer.save(state, job.native, step=step)
        except BaseException:
            if pid is not None:
                job.close()
            raise
        if pid is not None:
            handle.written.add_done_callback(lambda done: _take_back(job, done))
        mine = job if pid is not None else None
        self._pending.saves.append(PendingSave(job.target, handle, mine, pid))
        return handle

    def _next(self, target: str | os.PathLike[str], *, is_directory: bool, moved: bool = False) -> Job:
        """Return a job for the target, whose checkpoint of ours has a name of its own, equal on all ranks."""
        self.poll()
        if not self._token:
            self._token = self._same(lambda: secrets.token_hex(4), AGREE_TIMEOUT_S)
        path = absolute_path(target)
        self._pending.keep(path)
        self._count += 1
        name = f"{os.path.basename(path)}.{self._token}.{self._count}"
        return job_for(path, name, is_directory=is_directory, moved=moved)

    def _same(self, ask: Callable[[], str], timeout_s: float) -> str:
        """Return rank 0's answer on every rank."""
        ranks = self.checkpointer._coordination
        return ask() if ranks is None else same_answer(ranks, ask, timeout_s, "a framework's save")

    def poll(self) -> list[str]:
        """Return the targets that were published since the last call. Blocks for nothing; reaps what has ended."""
        return self._pending.poll()

    def pending(self) -> list[str]:
        """Return the targets that are not published yet, oldest first.

        First those that could not be, and are tried again: `wait` does not wait for them.
        """
        return self._pending.pending()

    def discard(self, target: str | os.PathLike[str]) -> None:
        """Remove a target, once what was saved after it, or is being saved now, is published: never the last one.

        If those saves fail, it stays.
        """
        self._pending.discard(absolute_path(target))

    def wait(self, timeout_s: float | None = None, *, target: str | os.PathLike[str] | None = None) -> list[str]:
        """Wait until everything, or what goes to `target`, is published; return what was.

        Args:
            timeout_s: None: as long as a save may take, and as long again for its export.
            target: None: everything.

        Raises:
            WaitTimeoutError: Something is still under way; it goes on.
        """
        timeout_s = 2 * self.checkpointer.config.commit_timeout_s if timeout_s is None else timeout_s
        deadline = time.monotonic() + timeout_s
        path = None if target is None else absolute_path(target)
        published = self.poll()
        while any(path in (None, one.target) for one in self._pending.saves):
            if time.monotonic() >= deadline:
                raise WaitTimeoutError(
                    f"after {timeout_s:g} s not published yet: {', '.join(self.pending())}",
                    save_ids=[str(one.handle.save_id) for one in self._pending.saves],
                    timeout_s=timeout_s,
                )
            time.sleep(_POLL_S)
            published += self.poll()
        return published

    def settle(self) -> list[str]:
        """As `wait`, and on no rank before rank 0, which publishes, has done it; a collective.

        Not one of the process group's, which may give up while a large checkpoint is still being published.

        Raises:
            WaitTimeoutError: As `wait`.
            PlanTimeoutError, SaveFailedError: Some ranks did not call; rank 0 has failed.
        """
        timeout_s = 2 * self.checkpointer.config.commit_timeout_s
        published = [] if self._rank.rank == 0 else self.wait(timeout_s)
        answer = self._same(lambda: json.dumps(self.wait(timeout_s)), timeout_s)
        return published or list(json.loads(answer))

    def recover(self, target: str | os.PathLike[str], *, timeout_s: float = 60.0) -> list[str]:
        """Publish what an earlier run had staged beside `target`, and return it; before asking what is there.

        Every rank calls it; rank 0 does it, and all return when it is done.
        """
        spool = spool_of(absolute_path(target))

        def finish() -> str:
            if not os.path.isdir(spool) or self._pending.saves:
                return "[]"
            self.checkpointer._await_saves_below(spool, time.monotonic() + timeout_s)
            return json.dumps(finish_exports(spool, timeout_s=timeout_s))

        return list(json.loads(self._same(finish, 3 * timeout_s)))

    def claim(self, directory: str | os.PathLike[str]) -> None:
        """Keep other trainings out of `directory` until the end, or the end of rank 0's process; a collective.

        Raises:
            DirectoryInUseError: One that is alive has it; on every rank.
            PlanTimeoutError, SaveFailedError: The ranks cannot agree.
        """
        path = absolute_path(directory)
        if path in self._alone:
            return

        lock = RootLock(path) if self._rank.rank == 0 else None
        claim(lock, self.checkpointer._coordination, AGREE_TIMEOUT_S)
        self._alone[path] = lock  # None: rank 0 has it

    def _release(self) -> None:
        while self._alone:
            one = self._alone.popitem()[1]
            if one is not None:
                one.release()

    def leave(self) -> None:
        """End without waiting, after an error: what is staged is published all the same, by those who outlive us."""
        self._pending.saves.clear()
        self._exporter.close()
        self._release()
        if self._is_own:
            self.checkpointer.leave()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait until everything is published, and free everything. What is not done in time goes on by itself.

        Raises:
            PendingSavesError: As `AsyncCheckpointer.close`.
        """
        try:
            self.wait(timeout_s)
        except WaitTimeoutError as error:
            _log.warning("%s; left to themselves", error)
        finally:
            self._exporter.close(EXPORTER_END_S if not self._pending.saves else 0.0)
            for spool in self._spools:
                remove_if_empty(spool)
            self._release()
            if self._is_own:
                self.checkpointer.close()


def _take_back(job: Job, written: Future[Any]) -> None:
    """A save that has failed is not waited for."""
    if written.exception() is not None:
        job.close()

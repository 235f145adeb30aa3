"""BackgroundSaver: saves a framework's own files by way of our worker, and publishes them under the framework's names.

A save stages into the worker's memory and returns. The worker commits a checkpoint of ours in a hidden directory beside
the target, and a process of its own (`_export`) makes the framework's files of it and renames them into place. Both
outlive the trainer. What was staged is thus published whatever happens to the trainer, and nothing incomplete ever has
the framework's name.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import torch

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.basics.paths import absolute_path
from asyncckpt.config import RankInfo
from asyncckpt.distributed.checkpoint_vote import same_answer
from asyncckpt.errors import WaitTimeoutError
from asyncckpt.integrations._capture import Pieces
from asyncckpt.integrations._export import PASSING, ExporterProcess, finish_exports
from asyncckpt.integrations._export_queue import (
    QUEUE_NAME,
    WILL_RETRY,
    ExportJob,
    Kind,
    job_for,
    remove_target,
)
from asyncckpt.integrations._file_manifest import RANK_KEY, STOCK_KEY, encode_manifest
from asyncckpt.manager.root_lock import RootLock, claim
from asyncckpt.save_handle import SaveHandle

MAX_TRIES = 3
"""Exporters for one save, each of which was killed before the next one started. Chosen, as are those below."""

EXPORTER_END_S = 5.0
"""How long an exporter that has nothing left to do may take to end."""

AGREE_TIMEOUT_S = 60.0
"""How long ranks wait for each other before their first save; as `plan_timeout_s` has it."""

_POLL_S = 0.02

_log = logging.getLogger("asyncckpt.integrations")


@dataclass(slots=True, eq=False)
class _Save:
    """A save that is not published yet. `job`, `exporter`: its export and the process that has it; on rank 0 only.

    `is_late`: it could not be published, and the exporter tries again.
    """

    target: str
    handle: SaveHandle
    job: ExportJob | None
    exporter: int | None
    n_tries: int = 1
    is_late: bool = False
    is_published: bool = False


class BackgroundSaver:
    """Saves a framework's files in the background. For one thread. It may be used again after `close` or `leave`.

    Args:
        rank_info: Which rank this is; default: torch.distributed's. `RankInfo(0, 1)`: only one rank saves.
        **fields: Fields of `CheckpointerConfig`, and `endpoint`.
    """

    def __init__(self, *, rank_info: RankInfo | None = None, **fields: Any) -> None:
        self._given_rank, self._fields = rank_info, fields
        self._checkpointer: AsyncCheckpointer | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._token, self._count = "", 0
        self._exporter = ExporterProcess()
        self._saves: list[_Save] = []
        self._removals: dict[str, list[_Save]] = {}
        self._claimed: dict[str, RootLock | None] = {}

    @property
    def checkpointer(self) -> AsyncCheckpointer:
        """What saves; made on first use."""
        if self._checkpointer is None:
            self._checkpointer = AsyncCheckpointer(rank_info=self._given_rank, **self._fields)
            self._checkpointer.attach(*self._optimizers)
        return self._checkpointer

    @property
    def _rank(self) -> RankInfo:
        return self._given_rank or self.checkpointer.rank_info

    def attach(self, *optimizers: Any) -> None:
        """Let what these own be copied behind forward and backward; their `step()` waits for it. Until `close`.

        Args:
            *optimizers: Also wrapped by Accelerate. Others than torch's are passed over.
        """
        inner = [getattr(one, "optimizer", one) for one in optimizers]
        new = [one for one in inner if isinstance(one, torch.optim.Optimizer) and one not in self._optimizers]
        self._optimizers += new
        if self._checkpointer is not None:
            self._checkpointer.attach(*new)

    def save(
        self,
        target: str | os.PathLike[str],
        files: Mapping[str, Pieces],
        *,
        step: int,
        kind: Kind = "directory",
        state: Mapping[str, Any] | None = None,
    ) -> SaveHandle:
        """Stage what is to be published at `target`, and return; tensors may change as after `AsyncCheckpointer.save`.

        With several ranks all of them call it, each with its own files.

        Args:
            target: The framework's directory, or file; what stands there is replaced when the new one is complete.
            files: By name below the directory; if the target is a file, one under any name.
            step: The training step.
            kind: What the target is.
            state: If it is "dcp": what the checkpoint holds, besides the files.

        Raises:
            UnsupportedPathError, CheckpointerClosedError, ForkedError, ReentrantCallError: As `AsyncCheckpointer.save`.
            OSError: The queue cannot be written, or no process started. A full disk is logged: the training goes on.
        """
        self.poll()
        if not self._token:
            self._token = self._same(lambda: secrets.token_hex(4), AGREE_TIMEOUT_S)
        path = absolute_path(target)
        self._removals.pop(path, None)
        self._count += 1
        short = os.path.basename(path)[:40]  # a name may have 255 bytes, and the job's has a suffix
        job = job_for(path, f"{short}.{self._token}.{self._count}", kind)
        whole = dict(state or {})
        if files or not whole:
            manifest, tensors = encode_manifest(files)
            part = [torch.frombuffer(manifest, dtype=torch.uint8), *tensors]
            whole[STOCK_KEY] = {RANK_KEY.format(self._rank.rank): part}
        if self._rank.rank != 0:
            self._saves.append(_Save(path, self.checkpointer.save(whole, job.native, step=step), None, None))
            return self._saves[-1].handle
        pid = None
        try:
            try:
                # IMPORTANT: before the save: whatever is staged has somebody to publish it if we die the next moment.
                pid = self._submit(job, job.write())
            except OSError as error:
                if error.errno not in PASSING:
                    raise
                _log.error("%s was not saved: %s", path, error)
            # IMPORTANT: even if nobody will publish it: the other ranks wait for this one.
            handle = self.checkpointer.save(whole, job.native, step=step)
        except BaseException:
            job.close()
            raise
        handle.written.add_done_callback(lambda done: _withdraw(job, done, pid))
        if pid is not None:
            self._saves.append(_Save(path, handle, job, pid))
        return handle

    def _submit(self, job: ExportJob, fd: int | None) -> int | None:
        return self._exporter.submit(job, fd, timeout_s=self.checkpointer.config.commit_timeout_s)

    def _same(self, ask: Callable[[], str], timeout_s: float) -> str:
        """Return rank 0's answer on every rank."""
        ranks = self.checkpointer._coordination
        return ask() if ranks is None else same_answer(ranks, ask, timeout_s, "a framework's save")

    def pending(self) -> list[str]:
        """Return the targets that are not published yet, oldest first.

        First those that could not be, and are tried again: `wait` does not wait for them.
        """
        return [one.target for one in sorted(self._saves, key=lambda one: not one.is_late)]

    def poll(self) -> list[str]:
        """Return the targets that were published since the last call, and remove what was discarded. Does not wait."""
        published = []
        for one in list(self._saves):
            failure = self._failure_of(one)
            if failure is None:
                continue
            if failure and not one.is_late:
                _log.error("%s was not %s", one.target, failure)
                one.is_late = failure.endswith(WILL_RETRY)
                if one.is_late:
                    continue
            elif not failure:
                one.is_published = True
                published.append(one.target)
                if one.is_late:
                    _log.warning("%s is published now, or what was saved after it", one.target)
            self._saves.remove(one)
        self._remove_discarded()
        return published

    def _remove_discarded(self) -> None:
        for target, awaited in list(self._removals.items()):
            others = [one for one in awaited if one.target != target]
            is_replaced = not others or any(one.is_published for one in others)
            if not any(one in self._saves and not (one in others and one.is_late and is_replaced) for one in awaited):
                del self._removals[target]
                if is_replaced:
                    remove_target(target)

    def _failure_of(self, one: _Save) -> str | None:
        """Return why a save has ended without being published; empty: it is published; None: it is in progress."""
        job = one.job
        if not one.handle.written.done():
            return None
        error = one.handle.written.peek()[1]
        if error is not None:
            return f"saved: {error}"
        if job is None or not job.is_open:
            return ""
        # IMPORTANT: in this order. It may be done, or fail, between two of these looks.
        is_alive = self._exporter.is_alive(one.exporter)
        said = _said(job)
        if not job.is_open:
            return ""
        if (said is None or one.is_late) and (is_alive or self._submitted_again(one, job)):
            return None
        return f"published: {said or 'its exporter was killed; the next start of the training tries again'}"

    def _submitted_again(self, one: _Save, job: ExportJob) -> bool:
        """Give a save whose exporter was killed to another one; False where that is of no use."""
        if one.n_tries >= MAX_TRIES:
            return False
        try:
            fd = job.lock()
            one.exporter = self._submit(job, fd)
            one.n_tries += fd is not None  # else another process does it
        except OSError as error:
            _log.warning("%s: no process can be started: %s", one.target, error)
            return False
        return True

    def will_exist(self, target: str | os.PathLike[str]) -> bool:
        """Return whether a target is there once all saves and removals are done, if they succeed."""
        path = absolute_path(target)
        return path not in self._removals and (path in self.pending() or os.path.exists(path))

    def discard(self, target: str | os.PathLike[str]) -> None:
        """Remove a target, once what was saved after it, or is being saved now, is published: never the last one.

        If those saves fail, it stays.
        """
        path = absolute_path(target)
        self._removals[path] = [one for one in self._saves if not one.is_late or one.target == path]
        self._remove_discarded()

    def _awaited(self) -> list[_Save]:
        return [one for one in self._saves if not one.is_late]

    def wait(self, timeout_s: float | None = None, *, target: str | os.PathLike[str] | None = None) -> list[str]:
        """Wait until everything, or what goes to `target`, is published; return what was.

        Args:
            timeout_s: None: as long as a save may take, and as long again for its export.
            target: None: everything.

        Raises:
            WaitTimeoutError: Something is still in progress; it goes on.
        """
        path = absolute_path(target) if target is not None and self._saves else None
        began, published = time.monotonic(), self.poll()
        while awaited := [one for one in self._awaited() if path in (None, one.target)]:
            timeout_s = 2 * self.checkpointer.config.commit_timeout_s if timeout_s is None else timeout_s
            if time.monotonic() >= began + timeout_s:
                raise WaitTimeoutError(
                    f"after {timeout_s:g} s not published yet: {', '.join(one.target for one in awaited)}",
                    save_ids=[str(one.handle.save_id) for one in awaited],
                    timeout_s=timeout_s,
                )
            time.sleep(_POLL_S)
            published += self.poll()
        return published

    def settle(self) -> list[str]:
        """As `wait`, and on no rank before rank 0, which publishes, has done it; a collective if anything was saved.

        Not one of the process group's, which may give up while a large checkpoint is still being published.

        Raises:
            WaitTimeoutError: As `wait`.
            PlanTimeoutError, SaveFailedError: Some ranks did not call; rank 0 has failed.
        """
        if self._checkpointer is None:
            return []
        published = [] if self._rank.rank == 0 else self.wait()
        timeout_s = 2 * self.checkpointer.config.commit_timeout_s
        answer = self._same(lambda: json.dumps(self.wait()), timeout_s)
        return published or list(json.loads(answer))

    def recover(self, directory: str | os.PathLike[str], *, timeout_s: float = 60.0) -> list[str]:
        """Publish what an earlier run had staged in `directory`, and return it; before asking what is there.

        Every rank calls it; rank 0 does it, and all return when it is done.
        """
        queue = os.path.join(absolute_path(directory), QUEUE_NAME)

        def finish() -> str:
            if not os.path.isdir(queue) or self._awaited():
                return "[]"
            self.checkpointer._await_saves_below(queue, time.monotonic() + timeout_s)
            return json.dumps(finish_exports(queue, timeout_s=timeout_s))

        return list(json.loads(self._same(finish, 3 * timeout_s)))

    def claim(self, directory: str | os.PathLike[str]) -> None:
        """Keep other trainings out of `directory` until the end, or the end of rank 0's process; a collective.

        Raises:
            DirectoryInUseError: One that is alive has it; on every rank.
            PlanTimeoutError, SaveFailedError: The ranks cannot agree.
        """
        path = absolute_path(directory)
        if path not in self._claimed:
            lock = RootLock(path) if self._rank.rank == 0 else None
            claim(lock, self.checkpointer._coordination, AGREE_TIMEOUT_S)
            self._claimed[path] = lock  # None: rank 0 has it

    def leave(self) -> None:
        """End without waiting, after an error: what is staged is published all the same, by those who outlive us."""
        checkpointer = self._end(0.0)
        if checkpointer is not None:
            checkpointer.leave()

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Wait until everything is published, and free everything. What is not done in time goes on by itself.

        Returns:
            As `wait`.

        Raises:
            PendingSavesError: As `AsyncCheckpointer.close`.
        """
        try:
            return self.wait(timeout_s)
        except WaitTimeoutError as error:
            _log.warning("%s; left to themselves", error)
            return []
        finally:
            checkpointer = self._end(0.0 if self._awaited() else EXPORTER_END_S)
            if checkpointer is not None:
                checkpointer.close()

    def _end(self, exporter_timeout_s: float) -> AsyncCheckpointer | None:
        self._exporter.close(exporter_timeout_s)
        while self._claimed:
            lock = self._claimed.popitem()[1]
            if lock is not None:
                lock.release()
        checkpointer, self._checkpointer, self._token = self._checkpointer, None, ""
        for one in (self._saves, self._removals, self._optimizers):
            one.clear()
        return checkpointer


@functools.cache
def warn_of_stock_saves(*reasons: str) -> bool:
    """Return whether there are reasons for which a framework saves its checkpoints itself; say so once."""
    if reasons:
        _log.warning("checkpoints are saved by the framework itself, in the training's time: %s", ", ".join(reasons))
    return bool(reasons)


def _withdraw(job: ExportJob, written: Future[Any], exporter: int | None) -> None:
    """A save that has failed is not waited for, and one that no exporter has is not kept."""
    if exporter is None or written.exception() is not None:
        job.close()


def _said(job: ExportJob) -> str | None:
    """Return why the exporter could not publish; None: it has not said so."""
    try:
        with open(job.failure_path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()[-2000:] or f"its disk has no room even for the reason{WILL_RETRY}"
    except OSError:
        return None

"""`BackgroundSaver`: saves a framework's own files in the background, and publishes them under the framework's names.

A save stages into the worker's memory and returns. The worker commits an asyncckpt checkpoint in a hidden directory
next to the target. A separate process, the exporter (`_export`), converts it into the framework's files and renames
these to the target. Worker and exporter outlive the trainer, so every staged save is published. An incomplete
checkpoint never has the framework's name.
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
from asyncckpt.integrations._export import TRANSIENT_ERRNOS, ExporterProcess, finish_exports
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
"""Exporters that are started for one save, each after the previous one was killed. Chosen, as are those below."""

EXPORTER_END_S = 5.0
"""Time that an exporter without further jobs may take to end."""

AGREE_TIMEOUT_S = 60.0
"""Seconds that ranks wait for each other before their first save; the default of `plan_timeout_s`."""

_POLL_S = 0.02

_log = logging.getLogger("asyncckpt.integrations")


@dataclass(slots=True, eq=False)
class _Save:
    """A save that is not published yet.

    Attributes:
        target: Absolute path of the framework's checkpoint.
        handle: Handle of the save.
        job: Its export job; None on other ranks than 0.
        exporter: Process ID of the exporter that has the job.
        n_tries: Number of exporters that were started for it.
        is_late: Whether publishing has failed and the exporter will try again.
        is_published: Whether it is published.
    """

    target: str
    handle: SaveHandle
    job: ExportJob | None
    exporter: int | None
    n_tries: int = 1
    is_late: bool = False
    is_published: bool = False


class BackgroundSaver:
    """Saves a framework's files in the background. Not thread-safe. May be used again after `close` or `leave`.

    Args:
        rank_info: Rank of this process; default: torch.distributed's. `RankInfo(0, 1)`: only one rank saves.
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
        """The checkpointer; created on first use."""
        if self._checkpointer is None:
            self._checkpointer = AsyncCheckpointer(rank_info=self._given_rank, **self._fields)
            self._checkpointer.attach(*self._optimizers)
        return self._checkpointer

    @property
    def _rank(self) -> RankInfo:
        return self._given_rank or self.checkpointer.rank_info

    def attach(self, *optimizers: Any) -> None:
        """Copy parameters and states of these optimizers during forward and backward; their `step()` waits for it.

        This lasts until `close`.

        Args:
            *optimizers: Optimizers of torch, also wrapped by Accelerate; others are ignored.
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
        """Stage the files to publish at `target`, and return. All ranks call it, each with its own files.

        When the tensors may be changed afterwards: see `AsyncCheckpointer.save`.

        Args:
            target: The framework's directory or file; an existing one is replaced when the new one is complete.
            files: Files by name below the directory; if the target is a file, one file under any name.
            step: Training step.
            kind: What the target is.
            state: For kind "dcp": the state dict that the checkpoint holds besides the files.

        Raises:
            UnsupportedPathError, CheckpointerClosedError, ForkedError, ReentrantCallError: See
                `AsyncCheckpointer.save`.
            OSError: The queue cannot be written, or no process can be started. A full disk is only logged.

        Blocks: for memory and the copy, as `AsyncCheckpointer.save`; in the first save for the other ranks, at most
            `AGREE_TIMEOUT_S`.
        """
        self.poll()
        if not self._token:
            self._token = self._answer_of_rank_0(lambda: secrets.token_hex(4), AGREE_TIMEOUT_S)
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
                # IMPORTANT: before the save: once it is staged, the exporter publishes it even if this process dies.
                pid = self._submit(job, job.write())
            except OSError as error:
                if error.errno not in TRANSIENT_ERRNOS:
                    raise
                _log.error("save of step %d to %s cannot be exported: %s", step, path, error)
            # IMPORTANT: save even if nothing can publish it: the other ranks wait for this one.
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

    def _answer_of_rank_0(self, ask: Callable[[], str], timeout_s: float) -> str:
        """Return rank 0's result of `ask` on every rank."""
        ranks = self.checkpointer._coordination
        return ask() if ranks is None else same_answer(ranks, ask, timeout_s, "a framework's save")

    def pending(self) -> list[str]:
        """Return the targets that are not published yet, oldest first.

        Targets whose export has failed and will be tried again come first; `wait` does not wait for them.
        """
        return [one.target for one in sorted(self._saves, key=lambda one: not one.is_late)]

    def poll(self) -> list[str]:
        """Return the targets that were published since the last call, and remove discarded ones. Does not wait."""
        published = []
        for one in list(self._saves):
            failure = self._failure_of(one)
            if failure is None:
                continue
            if failure and not one.is_late:
                _log.error("%s %s", one.target, failure)
                one.is_late = failure.endswith(WILL_RETRY)
                if one.is_late:
                    continue
            elif not failure:
                one.is_published = True
                published.append(one.target)
                if one.is_late:
                    _log.warning("%s: this save, or a later one to the same path, is published now", one.target)
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
        """Return that a save was not published, and why; empty: it is published; None: it is in progress."""
        job = one.job
        if not one.handle.written.done():
            return None
        error = one.handle.written.peek()[1]
        if error is not None:
            return f"was not saved: {error}"
        if job is None or not job.is_open:
            return ""
        # IMPORTANT: in this order: the job may end, or fail, between any two of these calls.
        is_alive = self._exporter.is_alive(one.exporter)
        reason = _failure_reason(job)
        if not job.is_open:
            return ""
        if (reason is None or one.is_late) and (is_alive or self._submitted_again(one, job)):
            return None
        return f"was not published: {reason or 'its exporter was killed; the next start of the training tries again'}"

    def _submitted_again(self, one: _Save, job: ExportJob) -> bool:
        """Submit the job of a killed exporter to a new one; return whether that was possible."""
        if one.n_tries >= MAX_TRIES:
            return False
        try:
            fd = job.lock()
            one.exporter = self._submit(job, fd)
            one.n_tries += fd is not None  # None: another process has the job
        except OSError as error:
            _log.warning("%s: no process can be started: %s", one.target, error)
            return False
        return True

    def will_exist(self, target: str | os.PathLike[str]) -> bool:
        """Return whether a target will exist once all saves and removals have succeeded."""
        path = absolute_path(target)
        return path not in self._removals and (path in self.pending() or os.path.exists(path))

    def discard(self, target: str | os.PathLike[str]) -> None:
        """Remove a target once a later save is published, so that there is always a checkpoint.

        If the later saves fail, the target stays.
        """
        path = absolute_path(target)
        self._removals[path] = [one for one in self._saves if not one.is_late or one.target == path]
        self._remove_discarded()

    def _awaited(self) -> list[_Save]:
        return [one for one in self._saves if not one.is_late]

    def wait(self, timeout_s: float | None = None, *, target: str | os.PathLike[str] | None = None) -> list[str]:
        """Wait until all saves, or those to `target`, are published; return the published targets.

        Args:
            timeout_s: Seconds to wait; None: twice `commit_timeout_s`, for a save and its export.
            target: Target to wait for; None: all.

        Raises:
            WaitTimeoutError: A save is still in progress; it continues.

        Blocks: up to `timeout_s`.
        """
        path = absolute_path(target) if target is not None and self._saves else None
        began, published = time.monotonic(), self.poll()
        while awaited := [one for one in self._awaited() if path in (None, one.target)]:
            timeout_s = 2 * self.checkpointer.config.commit_timeout_s if timeout_s is None else timeout_s
            if time.monotonic() >= began + timeout_s:
                raise WaitTimeoutError(
                    f"not published after {timeout_s:g} s: {', '.join(one.target for one in awaited)}",
                    save_ids=[str(one.handle.save_id) for one in awaited],
                    timeout_s=timeout_s,
                )
            time.sleep(_POLL_S)
            published += self.poll()
        return published

    def wait_all_ranks(self) -> list[str]:
        """Wait as `wait` does, on every rank until rank 0 has published. A collective, if anything was saved.

        It does not use the process group, whose timeout may be shorter than it takes to publish a large checkpoint.

        Raises:
            WaitTimeoutError: See `wait`.
            PlanTimeoutError: Some ranks did not call it in time.
            SaveFailedError: It failed on rank 0.

        Blocks: up to twice `commit_timeout_s`.
        """
        if self._checkpointer is None:
            return []
        published = [] if self._rank.rank == 0 else self.wait()
        timeout_s = 2 * self.checkpointer.config.commit_timeout_s
        answer = self._answer_of_rank_0(lambda: json.dumps(self.wait()), timeout_s)
        return published or list(json.loads(answer))

    def recover(self, directory: str | os.PathLike[str], *, timeout_s: float = 60.0) -> list[str]:
        """Publish saves of an earlier run to `directory` that are staged but not published; return their targets.

        Call it on every rank, before looking for checkpoints in `directory`. Rank 0 publishes; all ranks wait for it.

        Args:
            directory: The parent directory of the targets.
            timeout_s: Seconds to wait for the worker, and again for another process that publishes.

        Raises:
            PlanTimeoutError: Some ranks did not call it in time.
            SaveFailedError: It failed on rank 0.

        Blocks: up to three times `timeout_s`, apart from reading and writing the checkpoints.
        """
        queue = os.path.join(absolute_path(directory), QUEUE_NAME)

        def finish() -> str:
            if not os.path.isdir(queue) or self._awaited():
                return "[]"
            self.checkpointer._await_saves_below(queue, time.monotonic() + timeout_s)
            return json.dumps(finish_exports(queue, timeout_s=timeout_s))

        return list(json.loads(self._answer_of_rank_0(finish, 3 * timeout_s)))

    def claim(self, directory: str | os.PathLike[str]) -> None:
        """Lock `directory` against other trainings until `close`, or until the process of rank 0 ends. A collective.

        Raises:
            DirectoryInUseError: Another running training has locked it; raised on every rank.
            PlanTimeoutError, SaveFailedError: Some ranks did not call it in time, or it failed on rank 0.

        Blocks: for the other ranks, at most `AGREE_TIMEOUT_S`.
        """
        path = absolute_path(directory)
        if path not in self._claimed:
            lock = RootLock(path) if self._rank.rank == 0 else None
            claim(lock, self.checkpointer._coordination, AGREE_TIMEOUT_S)
            self._claimed[path] = lock  # None on the other ranks

    def leave(self) -> None:
        """End without waiting, after an error. Worker and exporter still publish all staged saves."""
        checkpointer = self._end(0.0)
        if checkpointer is not None:
            checkpointer.leave()

    def close(self, timeout_s: float | None = None) -> list[str]:
        """Wait until all saves are published, and free everything. After the timeout, worker and exporter finish alone.

        Args:
            timeout_s: See `wait`.

        Returns:
            The published targets.

        Raises:
            PendingSavesError: See `AsyncCheckpointer.close`.

        Blocks: up to `timeout_s`, and `EXPORTER_END_S` for the exporter.
        """
        try:
            return self.wait(timeout_s)
        except WaitTimeoutError as error:
            _log.warning("%s; worker and exporter finish them", error)
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
    """Log, once, the reasons why a framework has to save its checkpoints itself; return whether there are any."""
    if reasons:
        _log.warning(
            "the framework saves its checkpoints itself, while the training waits, because of: %s", ", ".join(reasons)
        )
    return bool(reasons)


def _withdraw(job: ExportJob, written: Future[Any], exporter: int | None) -> None:
    """Remove the job of a save that has failed, or for which there is no exporter."""
    if exporter is None or written.exception() is not None:
        job.close()


def _failure_reason(job: ExportJob) -> str | None:
    """Return why the exporter could not publish a job; None: it has not failed."""
    try:
        with open(job.failure_path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()[-2000:] or f"its disk is too full even for the reason{WILL_RETRY}"
    except OSError:
        return None

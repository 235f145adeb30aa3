"""AsyncCheckpointer: connects stager, worker client, hooks and reader; its parts do the work."""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, NoReturn

import torch

from asyncckpt import __version__
from asyncckpt.basics import process_lifecycle
from asyncckpt.basics.deferred_signals import signals_deferred
from asyncckpt.basics.process_lifecycle import EXIT_WAIT_S
from asyncckpt.checkpointer import Checkpointer, mirror_path, refuse_unknown
from asyncckpt.client.pending_saves import StagedSnapshot
from asyncckpt.client.worker_client import WorkerClient, await_saves_below
from asyncckpt.client.worker_links import Build, WorkerAccess
from asyncckpt.commit_hooks import HookRunner
from asyncckpt.components import CheckpointProcess, CheckpointReader, CheckpointStager
from asyncckpt.config import CheckpointerConfig, RankInfo, endpoint_from_environment, refuse_positional
from asyncckpt.distributed.process_group import Membership, find_exchange
from asyncckpt.distributed.run_agreement import Coordination
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    ConfigError,
    DuplicateNameError,
    ReentrantCallError,
    SaveSkippedError,
    StagingError,
    UnsupportedLeafError,
    WorkerUnavailableError,
)
from asyncckpt.format.names import SaveId
from asyncckpt.protocol import messages
from asyncckpt.protocol.endpoint import default_endpoint, socket_path
from asyncckpt.save_events import SaveEvents
from asyncckpt.save_handle import SaveHandle, SaveReport
from asyncckpt.save_tracker import SaveTracker
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.stager import HostStager, SlotStager

STAGED_SHARE = 0.9
"""The share of `leave`'s time for copies that still run. Chosen: to tell the worker takes milliseconds."""

_log = logging.getLogger("asyncckpt")
_NEEDS_DEFAULT_PARTS = "{} needs the default stager and process: leave out checkpoint_stager and checkpoint_process"
_ARGUMENT_ERRORS = (UnsupportedLeafError, DuplicateNameError, ConfigError)


class AsyncCheckpointer(Checkpointer):
    """Stages into memory of a worker process and returns; the worker writes, commits and completes the futures.

    Not thread-safe: call `save()` in one thread. Futures may be used in any thread.

    Args:
        endpoint: Endpoint of a running worker, `ipc://...`; default: `$ASYNCCKPT_ENDPOINT`, else this user's worker of
            this job, which is started if there is none.
        config: Settings; single fields may also be given as keywords.
        checkpoint_stager, checkpoint_process, reader: Custom parts that replace the default ones.
        commit_hook: A `CommitHook`, or any object with one of its methods.
        **fields: Fields of `CheckpointerConfig`.

    Raises:
        WorkerUnavailableError: A given endpoint cannot be reached.
        ConfigError: An invalid setting, a setting of a part that was replaced, or a positional argument.
        UnsupportedPlatformError: This is not Linux.
    """

    def __init__(
        self,
        *given: NoReturn,
        endpoint: str | None = None,
        config: CheckpointerConfig | None = None,
        checkpoint_stager: CheckpointStager | None = None,
        checkpoint_process: CheckpointProcess | None = None,
        reader: CheckpointReader | None = None,
        commit_hook: Any | None = None,
        **fields: Any,
    ) -> None:
        refuse_positional(given, "AsyncCheckpointer")
        super().__init__(CheckpointerConfig.resolve(config, fields), reader, endpoint)
        refuse_misplaced(
            fields, custom_stager=checkpoint_stager is not None, custom_process=checkpoint_process is not None
        )
        self._process: CheckpointProcess
        if checkpoint_process is not None and endpoint is not None:
            raise ConfigError("endpoint belongs to the worker, which checkpoint_process replaces", field="endpoint")
        if checkpoint_process is not None and commit_hook is not None:
            raise ConfigError(
                "commit_hook belongs to the worker, which checkpoint_process replaces", field="commit_hook"
            )
        self._retired: list[WorkerClient] = []
        if checkpoint_process is None:
            self._named, self._hooks = endpoint or endpoint_from_environment(), HookRunner(commit_hook)
            self._custom_stager = checkpoint_stager
            self._reach_worker(self._member, at_once=True)
        else:
            self._process, self._stager = (
                checkpoint_process,
                checkpoint_stager or HostStager(allow_pickle=self.config.allow_pickle),
            )
        has_custom_parts = not (isinstance(self._stager, SlotStager) and isinstance(self._process, WorkerClient))
        self._takes_extra = has_custom_parts or commit_hook is not None
        self._tracker = SaveTracker(on_error=self.config.on_error)
        self._events = SaveEvents(self.config.events, self._overlap)
        # IMPORTANT: taken by `with` only, whatever `locked` has said. An interrupt between `acquire` and a `try` would
        # leave it locked. Of two threads that both find it unlocked, one waits for the other's save.
        self._saving = threading.Lock()
        process_lifecycle.register(self)

    def _reach_worker(self, member: Membership, *, at_once: bool, overlap: Overlap | None = None) -> None:
        """Make the parts that depend on the rank."""
        process, ranks = reach_worker(self.config, member, self._named, self._hooks, at_once=at_once)
        stager = self._custom_stager or SlotStager(process, ranks, self.config, overlap=overlap)
        self._process, self._coordination, self._stager = process, ranks, stager
        self._await_saves_below = lambda root, deadline: await_saves_below(root, deadline, process)

    def _follow_ranks(self) -> None:
        if self._closed or os.getpid() != self._owner_pid or self._member.is_current() or self._in_callback():
            return
        if self._saving.locked():
            return  # the next call in the training thread does it
        with self._saving:
            super()._follow_ranks()

    def _take_ranks(self, member: Membership) -> None:
        before = self._process
        if isinstance(before, WorkerClient):
            self._reach_worker(member, at_once=False, overlap=self._overlap)
            self._retired = [*(process for process in self._retired if not process.has_ended), before]
            before.retire()  # its saves end as saves of the old rank
        super()._take_ranks(member)

    def _workers(self) -> list[WorkerClient]:
        """Return the worker clients of all ranks that this process has had, the current one last."""
        return [*self._retired, *([self._process] if isinstance(self._process, WorkerClient) else [])]

    def save(
        self,
        state_dict: Mapping[str, Any],
        path: str | os.PathLike[str],
        *,
        step: int | None = None,
        metadata: Mapping[str, Any] | None = None,
        mirror: str | os.PathLike[str] | None = None,
        **kw: Any,
    ) -> SaveHandle:
        """Stage `state_dict` for `path`, and return. Tensors may be changed once it has returned.

        Exception: tensors that an attached optimizer owns may be copied later, depending on `staging`; so may all
        tensors with `staging="overlap"`, if no optimizer is attached. They may be changed once `staged` is done, or
        after `fence()`; an attached optimizer's `step()` and `load_state_dict()` wait for the copy. All other tensors
        are copied by this call; those on a GPU, before later work in the current stream. Work in other streams must
        wait for that stream, or for `staged`.

        Blocks: for the copy, and for a free slot as `on_busy` says. The first save also waits for the worker and, with
        several ranks, up to `plan_timeout_s` for the other ranks: every rank must call it. Later saves do not wait for
        other ranks, except one save after a rank has saved something new, or after replicas were found to differ: it
        waits as the first one does.

        Args:
            state_dict: Nested dicts, lists and tuples of tensors, plain values, and objects with a `state_dict()`
                (modules, optimizers), which is stored in their place; for a wrapped module, that of the bare model.
            path: The checkpoint's directory, which is made if it is missing, relative to this process's working
                directory; or a URL in an object store, such as `s3://bucket/run/step-100`.
            step: An int, of Python or numpy, from 0. Default: the top-level leaf `step` if it is such an int or a 0-d
                integer tensor in host memory, else the number of this save.
            metadata: JSON to keep in the manifest.
            mirror: Directory or URL of a second place for this checkpoint, such as `s3://bucket/run/step-100`. Once the
                checkpoint is committed at `path`, the worker copies it there, behind the training, and tries again for
                as long as it takes. All ranks must give the same.
            **kw: Passed to custom stagers and processes, and to the commit hook.

        Returns:
            A handle with the futures `staged`, `durable`, `written`, and with a mirror also `mirrored`. Errors of slot,
            worker or disk are set on them; after a failed save the checkpointer works as before.

        Raises:
            UnsupportedLeafError, DuplicateNameError, UnsupportedPathError, ConfigError: An argument is invalid.
            CheckpointerClosedError, ForkedError, ReentrantCallError: The checkpointer cannot be used here.
        """
        self._check_usable()
        self._follow_ranks()
        # IMPORTANT: every call takes a save id, even if it fails, so that sequences are equal on all ranks.
        save_id, is_grad_enabled = self._next_save_id(), torch.is_grad_enabled()
        try:
            self._refuse_in_callback("save()")
            if self._saving.locked():
                raise ReentrantCallError(
                    "save() was called while another save() runs: by a signal handler, or in a second thread. Set a "
                    "flag there, and save in the training loop"
                )
            with self._saving:
                began = time.perf_counter()
                handle = self._save(state_dict, save_id, path, step, metadata, mirror, kw)
                return self._events.saved(handle, began) if self._rank.rank == 0 else handle
        except BaseException as error:
            torch.set_grad_enabled(is_grad_enabled)  # an interrupt in `torch.no_grad()` itself leaves it off
            self._decline(save_id, path, error)
            raise

    def _save(
        self,
        state_dict: Mapping[str, Any],
        save_id: SaveId,
        path: str | os.PathLike[str],
        step: int | None,
        metadata: Mapping[str, Any] | None,
        mirror: str | os.PathLike[str] | None,
        kw: dict[str, Any],
    ) -> SaveHandle:
        arguments = self._arguments(state_dict, path, step, metadata, save_id)
        if mirror is not None:
            if not (isinstance(self._stager, SlotStager) and isinstance(self._process, WorkerClient)):
                raise ConfigError(_NEEDS_DEFAULT_PARTS.format("mirror="), field="mirror")
            arguments["mirror"] = mirror_path(mirror, arguments["path"], self.config)
        if not self._takes_extra:
            refuse_unknown(kw)
        handle = SaveHandle(
            step=arguments["step"], path=arguments["path"], save_id=save_id, has_mirror=mirror is not None
        )
        try:
            try:
                result = self._stager.stage(state_dict, **arguments, **kw)
            except Exception as error:
                if isinstance(error, _ARGUMENT_ERRORS):
                    raise
                self._decline(save_id, path, error)
                self._tracker.add(handle)
                handle.fail(error)
                return handle
            self._tracker.add(handle)
            try:
                # IMPORTANT: an interrupt could leave a future locked, for which the session's thread would wait.
                with signals_deferred():
                    hand_over(self._process, handle, result, arguments, kw)
            except Exception as error:
                self._decline(save_id, path, error)
                handle.fail(error)
            return handle
        except BaseException as error:
            if not isinstance(error, Exception):  # an interrupt: the caller gets no handle to wait for
                handle.fail(error)
            raise

    def _decline(self, save_id: SaveId, path: Any, error: BaseException) -> None:
        """Tell the other ranks not to wait for this one."""
        if isinstance(self._process, WorkerClient):
            skipped = isinstance(error, SaveSkippedError)
            self._process.decline(save_id, self._path_if_any(path), repr(error), skipped=skipped)

    # ---- copies behind the training ---------------------------------------------------------------------------------

    def attach(self, *optimizers: Any) -> None:
        """Copy the tensors that these optimizers own during forward and backward, from the next save on.

        An optimizer owns its parameters and the tensors in its `state`, which change in `step()` only. They are copied
        in a thread after `save()` has returned; `step()` and `load_state_dict()` of the optimizer wait for the copy.
        With `staging="blocking"` they are copied before `save()` returns.

        The condition: nothing else changes these tensors before `fence()` or `staged`. A module may be attached too:
        then its `load_state_dict()` waits as well. That of any other module, and every other write, fails the save
        with `SnapshotTornError` if a version counter records it. Not promised: writes that no version counter records
        (`.data`, raw pointers, fused kernels outside `step()`, CUDA graphs) between `save()` and the fence.
        `overlap_check` searches for them, and cannot find all.

        Args:
            *optimizers: `torch.optim.Optimizer` objects, and `torch.nn.Module` objects. Idempotent. Optimizers are not
                kept alive.

        Raises:
            ConfigError: An argument is neither; or an optimizer whose `step()` calls no hooks because it only wraps
                another one (attach that one); or the stager is custom.
            CheckpointerClosedError, ForkedError: The checkpointer cannot be used here.
        """
        self._check_usable()
        overlap = self._overlap
        if overlap is None:
            raise ConfigError(_NEEDS_DEFAULT_PARTS.format("attach()"), field="attach")
        overlap.attach(*optimizers)
        self._events.watch(optimizers)

    def detach(self) -> None:
        """Undo `attach` for all optimizers and modules. Idempotent.

        Blocks: as `fence()`.

        Raises:
            CheckpointerClosedError, ForkedError, ReentrantCallError: As `fence()`.
        """
        self._check_usable()
        self._events.unwatch()
        if self._overlap is not None:
            self._overlap.detach()

    def fence(self) -> None:
        """Wait until all saves have been copied: for code that changes tensors outside of hooked calls.

        For tensors on GPUs, the calling thread's current streams wait, not the CPU. Code that changes such tensors in
        other streams, or in another thread, must wait for `staged`.

        Blocks: for running copies, at most 60 s; a copy that has not ended by then is cancelled, and its save fails.

        Raises:
            ReentrantCallError: Called by a callback of `staged`, in the thread that copies.
            CheckpointerClosedError, ForkedError: The checkpointer cannot be used here.
        """
        self._check_usable()
        if self._overlap is not None:
            self._overlap.fence.wait()

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Do the one-time work of the first save of such a state now: plan it, get memory, fault its pages in.

        The first save is then as fast as later ones. Optional; with several structures, call it for each.

        Blocks: for the worker and the memory, 0.3 s and more per GB. With several ranks it is a collective, and waits
        for the others up to `plan_timeout_s`.

        Args:
            state_dict: As for `save()`; its values do not matter.

        Raises:
            UnsupportedLeafError, DuplicateNameError: It cannot be saved.
            PlanTimeoutError, RanksDisagreeError, SaveFailedError: Ranks are missing, disagree, or have failed.
            InsufficientMemoryError, WorkerUnavailableError: No memory; no worker.
            SlotTimeoutError, SaveSkippedError, SlotBusyError: Every slot is in use and too small, as `on_busy` says.
            ConfigError: The stager is custom.
            CheckpointerClosedError, ForkedError, ReentrantCallError: The checkpointer cannot be used here.
        """
        self._check_usable()
        self._follow_ranks()
        if not isinstance(self._stager, SlotStager):
            raise ConfigError(_NEEDS_DEFAULT_PARTS.format("prepare()"), field="prepare")
        self._refuse_in_callback("prepare()")  # without telling the other ranks, which would wait for this very thread
        if self._saving.locked():
            refused = ReentrantCallError("prepare() was called while save() runs")
            return self._stager.prepare(state_dict, refused=refused)
        with self._saving:
            self._stager.prepare(state_dict)

    def load(self, path: str | os.PathLike[str], state_dict: Any = None, **kw: Any) -> Any:
        """As `Checkpointer.load`; with a `state_dict`, waits for running copies first, as `fence()`."""
        self._check_usable()
        if state_dict is not None and self._overlap is not None:
            self._overlap.fence.wait(ordered=False)
        return super().load(path, state_dict, **kw)

    @property
    def _overlap(self) -> Overlap | None:
        """The copies behind the training; None with a custom stager."""
        return self._stager.overlap if isinstance(self._stager, SlotStager) else None

    # ---- the end of saves, and of the checkpointer ------------------------------------------------------------------

    def _facts(self) -> dict[str, Any]:
        worker = {"endpoint": self._process.endpoint} if isinstance(self._process, WorkerClient) else {}
        return {**worker, "staging": self.config.staging, "pending": self._tracker.n_pending, **super()._facts()}

    def pending(self) -> list[SaveHandle]:
        """Return the handles that are not yet written, oldest first.

        Raises:
            ForkedError: In a forked child.
        """
        self._check_owner()
        return self._tracker.pending()

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended.

        Args:
            timeout: Seconds; None waits as long as `commit_timeout_s` lets a save live.

        Raises:
            WaitTimeoutError: Saves are still pending; they continue.
            PendingSavesError: `on_error="raise"`, and there are errors that were not fetched from a future.
        """
        self._check_usable()
        self._refuse_in_callback("wait()")
        self._tracker.wait(timeout)
        self._tracker.raise_errors()

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for pending saves, then free everything. Idempotent; no-op in a forked child.

        Args:
            timeout_s: Default: `worker_shutdown_timeout_s`. The worker finishes saves that are still pending after it;
                their futures hold `CheckpointerClosedError`.

        Raises:
            PendingSavesError: `on_error="raise"`, and there are errors that were not fetched from a future.
            ReentrantCallError: Called by a future's callback or a hook.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._refuse_in_callback("close()")
        self._closed = True
        for handle in self._tracker.settle(self.config.worker_shutdown_timeout_s if timeout_s is None else timeout_s):
            _log.warning("save of step %d to %s: close() leaves it to the worker", handle.step, handle.path)
        self._close_parts()
        self._tracker.raise_errors()

    def _close_parts(self) -> None:
        process_lifecycle.unregister(self)
        self._events.unwatch()
        try:
            self._stager.close()
        finally:
            for process in self._retired:
                process.close()
            self._process.close()  # no effect on a WorkerClient that is closed already
            for handle in self._tracker.pending():  # only with a custom process: WorkerClient has ended its saves
                handle.fail(CheckpointerClosedError("the checkpointer was closed before this save had ended"))
            self._events.close()

    def _refuse_in_callback(self, call: str) -> None:
        if self._in_callback():
            raise ReentrantCallError(f"{call} was called by a callback or hook, in the thread that completes saves")

    def _in_callback(self) -> bool:
        copies_here = isinstance(self._stager, SlotStager) and self._stager.overlap.copier.in_thread()
        return copies_here or any(process.in_client_thread() for process in self._workers())

    def leave(self, timeout_s: float = EXIT_WAIT_S, *, at_exit: bool = False) -> None:
        """End without waiting for writes, after an exception or at interpreter exit. Staged snapshots are not lost.

        Blocks: at most `timeout_s`. Idempotent; no-op in a forked child.
        """
        if self._closed or os.getpid() != self._owner_pid:
            return
        self._closed = True
        deadline = time.monotonic() + timeout_s
        # A daemon thread of the user's may be in save(), and must not be in torch when the interpreter is finalised.
        if at_exit and self._saving.acquire(timeout=timeout_s * STAGED_SHARE / 2):
            self._saving.release()
        if isinstance(self._stager, SlotStager):
            copies_s = max(0.0, deadline - time.monotonic()) * STAGED_SHARE
            self._stager.overlap.leave(copies_s, join_s=timeout_s * (1 - STAGED_SHARE) / 2)
        for process in reversed(self._workers()):
            process.flush((deadline - time.monotonic()) / 2)
            process.close(max(0.0, deadline - time.monotonic()), at_exit=at_exit)
        if not (at_exit and isinstance(self._process, WorkerClient)):
            self._close_parts()

    def __del__(self) -> None:
        if not getattr(self, "_closed", True) and hasattr(self, "_tracker") and os.getpid() == self._owner_pid:
            warnings.warn(
                "an AsyncCheckpointer was dropped without close()", ResourceWarning, source=self, stacklevel=2
            )
            self._closed = True
            # IMPORTANT: never wait here. The garbage collector may call this in any thread, under any lock.
            if not isinstance(self._process, WorkerClient):
                self._close_parts()
            elif isinstance(self._stager, SlotStager):  # running copies end, and are submitted, first
                self._stager.overlap.copier.when_idle(self._process.abandon)
            else:
                self._process.abandon()

    def close_inherited_fds(self) -> None:
        """In a forked child: close the child's copies of our fds, so that it keeps no memory alive."""
        for process in self._workers():
            process.close_inherited_fds()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        if kind is None:
            self.close()
        else:
            self.leave()


def make_async_checkpointer(
    config: CheckpointerConfig | None = None, rank_info: RankInfo | None = None, commit_hook: Any | None = None
) -> AsyncCheckpointer:
    """Return an `AsyncCheckpointer` with the default parts.

    Args:
        config: Settings; None: from the environment, and defaults.
        rank_info: Rank of this process; None: that of `config`, else torch.distributed's, else that of torchrun's
            environment, else 0 of 1.
        commit_hook: A `CommitHook`, or any object with one of its methods.

    Raises:
        WorkerUnavailableError: `$ASYNCCKPT_ENDPOINT` names a worker that cannot be reached.
        ConfigError: An invalid setting.
        UnsupportedPlatformError: This is not Linux.
    """
    fields: dict[str, Any] = {} if rank_info is None else {"rank_info": rank_info}
    return AsyncCheckpointer(config=config, commit_hook=commit_hook, **fields)


def hand_over(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    """Let `process` write what was staged: now, or when the deferred copy has ended. Does not wait.

    Args:
        process: Writes the save.
        handle: Its futures get the outcome, and any error of `process` or of a deferred copy that was started.
        result: The result of a stager.
        arguments: `path`, `step`, `save_id`, `metadata` of the save.
        kw: The extra arguments of `save()`.

    Raises:
        StagingError: The deferred copy could not be started; the caller must roll the save back.
    """
    if not isinstance(result, StagedSnapshot) or result.start_deferred is None:
        _write(process, handle, result, arguments, kw)
        return
    handle.save_id = result.save_id

    def copied(error: AsyncCkptError | None) -> None:
        if error is not None:
            handle.fail(error)
            return
        try:
            _write(process, handle, result, arguments, kw)
        except BaseException as caught:  # in the copier's thread, where no caller could see it
            handle.fail(caught)
            raise

    start_deferred, result.start_deferred = result.start_deferred, None
    try:
        start_deferred(handle.staged, copied)
    except Exception as error:
        raise StagingError(
            f"save of step {result.step} to {result.path}: the copy behind the training did not start: {error!r}",
            save_id=str(result.save_id),
            step=result.step,
            path=result.path,
        ) from error


def _write(
    process: CheckpointProcess, handle: SaveHandle, result: Any, arguments: Mapping[str, Any], kw: Mapping[str, Any]
) -> None:
    if isinstance(result, StagedSnapshot):
        handle.save_id = result.save_id
        report = SaveReport(
            save_id=str(result.save_id), nbytes=result.nbytes, seconds=result.seconds, details=result.details
        )
    else:
        report = SaveReport(save_id=str(handle.save_id), nbytes=0)
    rest = {name: value for name, value in arguments.items() if name != "path"}
    try:
        future: Any = process.write(result, arguments["path"], **rest, **kw)
    except Exception as error:
        handle.fail(error)
        return
    try:
        with contextlib.suppress(InvalidStateError):  # it failed meanwhile, by an interrupt in `save()` or by `close()`
            handle.staged.set_result(report)
    finally:  # also if a callback of `staged` raises SystemExit
        if isinstance(future, Future):
            handle.follow(future)
        else:
            kind = type(future).__name__
            handle.fail(ConfigError(f"write() returned a {kind}, expected a Future", field="checkpoint_process"))


_STAGER_FIELDS = frozenset(
    {"staging", "overlap_check", "layout", "files_per_rank", "max_shard_bytes", "reuse", "fsync", "write_threads"}
)
_KEPT_FIELDS = frozenset({"allow_pickle", "on_error", "worker_shutdown_timeout_s", "rank_info", "storage_options"})
"""Fields that still have an effect with a custom process: those of the checkpointer, its reader and its stager."""


def refuse_misplaced(given: Iterable[str], *, custom_stager: bool, custom_process: bool) -> None:
    """Refuse fields of parts that were replaced: they would have no effect.

    Args:
        given: Names of the fields that the user has given.
        custom_stager, custom_process: Whether the stager, or the process, is custom.

    Raises:
        ConfigError: Naming the first.
    """
    for name in sorted(given):
        if custom_process and name not in _KEPT_FIELDS:
            raise ConfigError(
                f"{name} is about the worker, which checkpoint_process replaces; leave {name} out", field=name
            )
        if custom_stager and name in _STAGER_FIELDS:
            raise ConfigError(
                f"{name} is about the default stager, which checkpoint_stager replaces; leave {name} out", field=name
            )


def reach_worker(
    config: CheckpointerConfig, member: Membership, named: str | None, hooks: HookRunner, *, at_once: bool
) -> tuple[WorkerClient, Coordination]:
    """Return the client of this rank's worker, and the coordination with the other ranks.

    Args:
        config: Settings.
        member: Rank of this process.
        named: The endpoint that the user named. None: this user's worker of this job, which is started if there is
            none.
        hooks: The user's commit hooks.
        at_once: Connect to `named` now, and do not start a worker there; else connect in the background.

    Raises:
        ConfigError: The endpoint is malformed.
        WorkerUnavailableError: `at_once`, and no worker answers at `named`.
    """
    endpoint = named or default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)
    socket_path(endpoint)
    worker, rank = _ClientAccess(), member.rank
    ranks = Coordination(
        rank,
        config,
        lambda: find_exchange(rank) or process.board(),
        package=__version__,
        worker=worker,
    )
    worker.process = process = WorkerClient(
        config, ranks, endpoint=endpoint, named=named is not None, package=__version__, hooks=hooks
    )
    if named is not None and at_once:
        process.connect(start=False)
    else:
        process.connect_soon()
    return process, ranks


class _ClientAccess(WorkerAccess):
    """Reaches the worker by `process`, which is made after this object."""

    process: WorkerClient

    def instance(self) -> str:
        try:
            return self.process.connect().worker.instance
        except WorkerUnavailableError:
            return ""

    def call(self, build: Build, timeout_s: float) -> messages.Message:
        return self.process.call(build, timeout_s)

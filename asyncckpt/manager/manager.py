"""`CheckpointManager`: combines save policies, restore, retention and preemption in one public class."""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import itertools
import logging
import os
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.basics.paths import checkpoint_path
from asyncckpt.basics.process_lifecycle import EXIT_WAIT_S
from asyncckpt.basics.urls import is_object_url
from asyncckpt.checkpointer import Checkpointer, mirror_root
from asyncckpt.config import CheckpointerConfig, check_keywords
from asyncckpt.distributed.meetings import path_digest
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    CheckpointNotFoundError,
    ConfigError,
    DirectoryInUseError,
    ForkedError,
)
from asyncckpt.format.names import SaveId, is_quarantined
from asyncckpt.maintenance.policy import RetentionPolicy, extended_ancestry, manager_metadata
from asyncckpt.maintenance.retention import Score
from asyncckpt.manager.exports import END_S, ManagerExports
from asyncckpt.manager.last_state import LastState
from asyncckpt.manager.master_params import MasterParams
from asyncckpt.manager.preemption import Preemption, is_from_killed_dataloader_workers
from asyncckpt.manager.retention_thread import DirectoryHold, RootRetention
from asyncckpt.manager.root_lock import RootLock, claim
from asyncckpt.manager.save_policy import IntervalAdvisor, LocalClock, SavePolicy, SharedClock, check_seconds
from asyncckpt.manager.step_agreement import StepCoordinator
from asyncckpt.restore import RestoredCheckpoint
from asyncckpt.save_handle import SaveFuture, SaveHandle, SaveReport
from asyncckpt.state_dict.flatten import check_mapping
from asyncckpt.storage.locate import with_storage_options
from asyncckpt.training_step import checked_step


class StepNames:
    """The names of the directories in a root to which checkpoints are saved.

    Args:
        root: Absolute path of the root.
        step_format: A format for `str.format` with one field, `step`.

    Raises:
        ConfigError: The format gives names that no directory can have, or the same name for different steps.
    """

    def __init__(self, root: str, step_format: str) -> None:
        self._root, self._format = root, step_format
        try:
            names = {self.name(step) for step in (0, 7, 12_345_678, 123_456_789_012)}
        except (ValueError, KeyError, IndexError, AttributeError, TypeError) as error:
            raise self._refused(f"{error!r}") from error
        if len(names) < 4:
            raise self._refused("different steps get the same name")
        for name in names:
            is_hidden = name.startswith(".") or is_quarantined(name)
            if not name or is_hidden or os.sep in name or "\0" in name or os.path.basename(name) != name:
                raise self._refused(
                    f"{name!r} cannot be the name of a checkpoint's directory, or is one that restore ignores"
                )

    def _refused(self, detail: str) -> ConfigError:
        return ConfigError(
            f"step_format={self._format!r}: {detail}; expected something like 'step-{{step:08d}}'",
            field="step_format",
            value=repr(self._format)[:80],
        )

    def name(self, step: int) -> str:
        """Return the name of the directory of `step`."""
        return self._format.format(step=step)

    def path(self, step: int) -> str:
        """Return the absolute path of the directory of `step`.

        Raises:
            ConfigError: `step` is not a valid step.
        """
        return checkpoint_path(os.path.join(self._root, self.name(checked_step(step))))


_CHECKPOINTER_KEYWORDS = {field.name for field in dataclasses.fields(CheckpointerConfig)} | {
    name for name, one in inspect.signature(AsyncCheckpointer).parameters.items() if one.kind is one.KEYWORD_ONLY
}
"""Keywords that a manager passes on to the checkpointer that it makes."""

_COUNTS: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""For each root, numbers for its managers with several ranks. All ranks make the same number of managers for a root."""

_log = logging.getLogger("asyncckpt")


class CheckpointManager:
    """Saves a training to directories below a root, resumes from the newest checkpoint, and removes old ones.

    Make one manager for a root, on every rank. A context manager. Not thread-safe: one thread trains and saves.

    Args:
        root: Directory, or URL, of the checkpoints; the first save makes it.
        checkpointer: Checkpointer that saves and loads; the manager does not close it. None: the manager makes an
            `AsyncCheckpointer` with `overwrite=True`, so that a step that is saved again after a rollback replaces the
            old checkpoint of that step. In an object store, which has no locks, such a save fails instead.
        max_to_keep: How many checkpoints stay, the newest and the best among them; None: all. Pinned checkpoints and
            those of `keep_period` come on top. A checkpoint is removed only after a newer one is committed. The one
            that this run has restored from is removed only after a newer one of this run was read back and verified;
            that is done once, in a thread beside the training.
        keep_period: Checkpoints whose step is a multiple of this stay for ever; None: none.
        save_interval_steps: `should_save` is true for multiples of this.
        save_interval_s: `should_save` is true when so many seconds have passed since the last save. On several ranks
            the clock of rank 0 counts, and rank 0 decides some seconds ahead.
        save_on_steps: `should_save` is true for these steps.
        save_when: `should_save` is true for steps for which this function returns true. It must return the same on all
            ranks.
        best_fn: Returns a number for the metrics that a step was saved with; the best checkpoint stays. A checkpoint
            for which it raises has no score. If it raises for all, the checkpoints that earlier runs have saved with
            metrics stay as well.
        best_mode: "min" if the smallest number is the best, or "max".
        step_format: Name of a step's directory.
        preemption_signal: A signal, or several, that ask the training to stop: all ranks stop at the same step. The
            handlers that were there before are called too, and `close` puts them back. `()`: only `preempt()` does.
            None: preemption is off. If the signal kills the workers of a `DataLoader` first, and their error leaves the
            `with` block, the last state is saved and the error is swallowed, provided that all ranks are provably at
            the end of the same step.
        grace_s: Seconds after the signal within which a save must be staged; a later one is logged as an error.
        mtbf_s: Mean seconds between failures of the job. After some saves the optimal save interval is logged. None:
            nothing is logged.
        mirror: Directory or URL to which the worker copies every checkpoint once it is committed in `root`, under the
            same name; see `AsyncCheckpointer.save`. `restore` takes the newest checkpoint of both places.
        mirror_max_to_keep: As `max_to_keep`, for the mirror; `keep_period` and `best_fn` count there too. None: all.
        max_unmirrored: How many checkpoints beyond `max_to_keep` stay in `root` until they are in the mirror; the
            oldest goes first, which is logged. None: all, as long as there is room for two more checkpoints.
        on_unmirrored: What happens at that limit: "remove" the oldest; or "wait": `save` waits before it begins, at
            most `slot_timeout_s`, until the mirror has caught up. After a wait that timed out, the oldest are removed,
            and later saves wait again once the mirror has caught up. Saves after a signal do not wait.
        export_every: Export checkpoints to Hugging Face directories behind the training: the first one at, or after,
            each multiple of so many steps. Rank 0 starts a process for it, which does one export at a time; of several
            that wait, the newest is exported. None: none.
        export_to: Directory of the exports of this root alone, which have the names of the checkpoints; None: `hf` in
            the root.
        export_options: `config`, `generation_config`, `tokenizer`, `key`, `key_map` (a dict), `rules`, `dtype`,
            `max_shard_bytes`, `threads` and `read_back` of `export_hf`. Without `config`, it is taken from the one
            model with a config in the state that is saved; `key` from the one model there.
        quarantine: `restore` renames broken checkpoints, as `restore_latest` does.
        shared: True: other managers may save to the root at the same time, and each removes what others have saved.
            False: a second manager is refused; rank 0 locks the directory (`.asyncckpt.lock`) from its first save until
            the manager is closed or the process ends. A manager that only restores takes no lock. Give the same value
            on all ranks.
        **fields: Fields of `CheckpointerConfig`, and `endpoint`, for the checkpointer that the manager makes.

    Attributes:
        root: Absolute path of the directory.
        checkpointer: Checkpointer that saves and loads.

    Raises:
        ConfigError: An impossible value, `max_to_keep=1` with `best_fn`, or fields beside a given checkpointer.
        SignalHandlerError: `preemption_signal` was given outside of the main thread.
        WorkerUnavailableError, UnsupportedPathError, UnsupportedPlatformError: As `AsyncCheckpointer`.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        checkpointer: Checkpointer | None = None,
        max_to_keep: int | None = None,
        keep_period: int | None = None,
        save_interval_steps: int | None = None,
        save_interval_s: float | None = None,
        save_on_steps: Collection[int] | None = None,
        save_when: Callable[[int], bool] | None = None,
        best_fn: Score | None = None,
        best_mode: str = "min",
        step_format: str = "step-{step:08d}",
        preemption_signal: int | Iterable[int] | None = None,
        grace_s: float = 25.0,
        mtbf_s: float | None = None,
        mirror: str | os.PathLike[str] | None = None,
        mirror_max_to_keep: int | None = None,
        max_unmirrored: int | None = None,
        on_unmirrored: str = "remove",
        export_every: int | None = None,
        export_to: str | os.PathLike[str] | None = None,
        export_options: Mapping[str, Any] | None = None,
        quarantine: bool = False,
        shared: bool = False,
        **fields: Any,
    ) -> None:
        check_keywords(CheckpointManager, fields, _CHECKPOINTER_KEYWORDS)
        self.root = checkpoint_path(root)
        self._names = StepNames(self.root, step_format)
        self._quarantine = quarantine
        self._ancestry: tuple[SaveId, ...] = ()
        self._restores: Counter[SaveId] = Counter()
        self._last_step: int | None = None
        self._has_looked = self._closed = False
        policy = RetentionPolicy(
            max_to_keep=max_to_keep, keep_period=keep_period, best_mode=best_mode, max_unmirrored=max_unmirrored
        )
        mirror_policy = RetentionPolicy(max_to_keep=mirror_max_to_keep, keep_period=keep_period, best_mode=best_mode)
        if mirror is None and not (mirror_max_to_keep is None and max_unmirrored is None):
            raise ConfigError("mirror_max_to_keep and max_unmirrored are about a mirror: give mirror=", field="mirror")
        if on_unmirrored not in ("remove", "wait"):
            text = f"on_unmirrored={on_unmirrored!r}: expected 'remove' or 'wait'"
            raise ConfigError(text, field="on_unmirrored", value=repr(on_unmirrored))
        if on_unmirrored == "wait" and (mirror is None or max_to_keep is None or max_unmirrored is None):
            text = 'on_unmirrored="wait" needs mirror=, max_to_keep= and max_unmirrored=, which say when to wait'
            raise ConfigError(text, field="on_unmirrored", value=on_unmirrored)
        self._mirror = None if mirror is None else mirror_root(mirror, self.root)
        self._mirror_names = None if self._mirror is None else StepNames(self._mirror, step_format)
        if export_every is None and not (export_to is None and export_options is None):
            raise ConfigError(
                "export_to and export_options are about exports: give export_every=", field="export_every"
            )
        if best_fn is not None and not callable(best_fn):
            raise ConfigError(f"best_fn={best_fn!r}: expected a function that takes metrics", field="best_fn")
        if best_fn is not None and max_to_keep == 1:
            raise ConfigError(
                "max_to_keep=1 with best_fn: the newest and the best stay, so it must be 2 at least",
                field="max_to_keep",
            )
        if checkpointer is not None and fields:
            first = min(fields)
            raise ConfigError(f"{first} is a setting of the checkpointer that was given; set it there", field=first)
        if type(shared) is not bool:
            raise ConfigError(f"shared={shared!r}: expected True or False", field="shared", value=repr(shared))
        check_seconds("save_interval_s", save_interval_s)
        SavePolicy(save_interval_steps, save_on_steps, save_when, None)  # checks its arguments before a worker starts
        self._advisor = IntervalAdvisor(mtbf_s)
        self._owns_checkpointer = checkpointer is None
        self.checkpointer = checkpointer or AsyncCheckpointer(**{"overwrite": not is_object_url(self.root), **fields})
        with contextlib.ExitStack() as undo:
            if self._owns_checkpointer:
                undo.callback(self.checkpointer.close)
            rank = self._rank = self.checkpointer.rank_info
            self._rank_changes = self.checkpointer.rank_changes
            here = path_digest(self.root)
            name = f"manager/{here}-{next(_COUNTS[here])}" if rank.world_size > 1 else ""
            self._coordinator = StepCoordinator(rank, self.checkpointer.exchange, name)
            self._preemption = Preemption(preemption_signal, grace_s, rank.world_size, self._coordinator.poll_often)
            undo.callback(self._preemption.close)  # else nobody handles the signal
            self._last_state = LastState(self._preemption.is_on)
            self._asked_step: int | None = None
            self._last_handle: SaveHandle | None = None
            self._is_staged = False
            clock = self._make_clock(save_interval_s)
            self._coordinator.prepare(self._preemption.stopping, clock if isinstance(clock, SharedClock) else None)
            self._interval_clock = clock
            self._policy = SavePolicy(save_interval_steps, save_on_steps, save_when, clock)
            # An object store has no lock that is freed when its holder dies.
            self._shared, self._has_claimed = shared or is_object_url(self.root), False
            self._root_lock = RootLock(self.root) if rank.rank == 0 and not self._shared else None
            config = self.checkpointer.config
            self._exports = None
            if export_every is not None:
                self._exports = ManagerExports(
                    export_every,
                    self.root,
                    export_to,
                    export_options,
                    is_leader=rank.rank == 0,
                    timeout_s=config.commit_timeout_s,
                    storage_options=config.storage_options,
                    mirror=self._mirror,
                )
            with with_storage_options(config.storage_options):
                self._retention = RootRetention(
                    self.root,
                    policy,
                    best_fn,
                    is_leader=rank.rank == 0,
                    lock=self._root_lock,
                    dead_after_s=config.commit_timeout_s,
                    mirror=self._mirror,
                    mirror_policy=mirror_policy,
                    mirror_wait_s=config.slot_timeout_s if on_unmirrored == "wait" else 0.0,
                    exporting=tuple if self._exports is None else self._exports.busy,
                )
            undo.pop_all()

    def _make_clock(self, interval_s: float | None) -> LocalClock | SharedClock | None:
        if interval_s is None:
            return None
        if self._rank.world_size == 1:
            return LocalClock(interval_s)
        ranks = self._coordinator
        is_leader = self._rank.rank == 0
        return SharedClock(interval_s, is_leader=is_leader, poll_now=ranks.poll_now, poll_often=ranks.poll_often)

    # ---- resuming ---------------------------------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[Any, Any] | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
        **options: Any,
    ) -> RestoredCheckpoint | None:
        """Load the newest sound checkpoint into `state`, from memory if possible. All ranks load the same one.

        Broken checkpoints are skipped with a warning, as by `restore_latest`. Checkpoints of a branch that a rollback
        has abandoned are tried last. Full-precision masters that the checkpoint lacks are set from the weights
        (`refresh_master_params`).

        With `step`, only the checkpoint of that step is loaded. The next save then begins a new branch. From its first
        commit on, the newest checkpoint is one of that branch, and what was saved after `step` before is abandoned: it
        stays on disk and is listed, is loaded only by its step or when nothing else is sound, and retention removes it
        first.

        Args:
            state: State to fill in place, as it is given to `save`; None: a new dict is made.
            step: Step to load; None: the newest checkpoint.
            strict: Whether keys that `state` has and the checkpoint lacks are an error; False logs them.
            **options: Further arguments of `restore_latest`.

        Returns:
            What was loaded; None on all ranks if there is no checkpoint yet, neither on disk nor in memory.

        Raises:
            ConfigError: `step` is not a valid step.
            CheckpointNotFoundError: There is no checkpoint of `step`.
            UnsupportedLeafError: `state` is not a mapping.
            ConfigError: The process group was initialized, or initialized again, after the manager was made.
            NoSoundCheckpointError: There are checkpoints, and none verifies.
            MissingKeysError: The checkpoint lacks what `state` has.
            AsyncCkptError, OSError: As `restore_latest`.

        Blocks: as `restore_latest`.
        """
        self._check_usable()
        self._check_ranks()
        self._has_looked = True
        options.setdefault("quarantine", self._quarantine)
        if state is not None:
            check_mapping(state)  # in a first run too, which has nothing to load
        masters = MasterParams(state.values() if state is not None else ())
        path = self.root if step is None else self._names.path(step)
        found = self.checkpointer.restore_first(
            self._retention.candidates, path, state, below=self.root, strict=strict, **options
        )
        if found is None:
            if step is None:
                self._last_state.record_state(state, None)
                return None
            raise CheckpointNotFoundError(
                f"there is no checkpoint of step {step}: none is committed at {path}, nor in memory", path=path
            )
        count = masters.refresh()
        if count:
            _log.info("%d master parameters were not in the checkpoint; they were set from the weights", count)
        untouched = 0 if options.get("keys") is not None else masters.untouched()
        if untouched:
            _log.warning(
                "restore did not change %d of the parameters that the optimizers update: the checkpoint lacks them, "
                "and refresh_master_params does not know them as master parameters. If they are copies of weights, the "
                "next step undoes the restore: save them too, or define master_param_pairs() on the optimizer",
                untouched,
            )
        self._retention.restored(found)
        self._last_state.record_state(state, found.step)
        self._last_handle = None
        if isinstance(self._interval_clock, SharedClock):
            self._interval_clock.restored()
        save_id = SaveId.parse(found.save_id)
        self._restores[save_id] += 1
        self._ancestry = extended_ancestry(save_id, found.metadata, self._restores[save_id])
        self._last_step = found.step
        return found

    def _check_usable(self) -> None:
        if self._retention.is_forked:
            raise ForkedError(
                f"the manager of {self.root} was made by another process; make a new one in a forked child"
            )
        if self._closed:
            raise CheckpointerClosedError(f"the manager of {self.root} is closed")

    def _check_ranks(self) -> None:
        """Raise if this process has become another rank: how the ranks agree was set up when the manager was made."""
        if self.checkpointer.rank_changes != self._rank_changes:
            before, now = self._rank, self.checkpointer.rank_info
            raise ConfigError(
                f"the manager of {self.root} was made for rank {before.rank} of {before.world_size}, and this process "
                f"is now rank {now.rank} of {now.world_size} in another process group; make the manager after "
                "init_process_group(), and make a new one when the process group is initialized again",
                field="rank_info",
                value=repr(before),
            )

    # ---- listing and pins -------------------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint, by lineage; None if there is none. Reads manifests."""
        return self._retention.latest_step()

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending, abandoned ones after a rollback included."""
        return self._retention.all_steps()

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint; None if `best_fn` returns a number for none."""
        return self._retention.best_step()

    def pin(self, step: int) -> None:
        """Keep the committed checkpoint of `step` for ever, over restarts too.

        Raises:
            ConfigError: `step` is not a valid step.
            CheckpointNotFoundError, CheckpointNotCommittedError: There is no committed checkpoint of `step`.
            OSError: The file system failed; the checkpoint may be pinned or not.
        """
        self._retention.pin(self._names.path(step))

    def unpin(self, step: int) -> bool:
        """Remove the pin of `step`. Returns whether there was one.

        Raises:
            ConfigError: `step` is not a valid step.
            OSError: A call failed.
        """
        return self._retention.unpin(self._names.path(step))

    # ---- saving -----------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Return whether to save at `step`: a save is due, or the ranks stop there. Call it on all ranks, at all steps.

        The only system call reads the clock, unless the ranks are deciding where to stop; see `reached_preemption`.
        False for the step that was saved or restored last.

        Raises:
            ConfigError: `step` is not a valid step.
            PlanTimeoutError: As `reached_preemption`.
            CheckpointerClosedError: The manager was closed.
        """
        step = checked_step(step)
        stops = self._stops_at(step)
        due = self._policy.is_due(step)
        return (stops or due) and step != self._last_step

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        metrics: Mapping[str, Any] | None = None,
        *,
        metadata: Mapping[str, Any] | None = None,
        **kw: Any,
    ) -> SaveHandle | None:
        """Save `state` as the checkpoint of `step`, whatever the policies say. All ranks call it.

        After a signal it waits until the snapshot is staged, at most for what is left of `grace_s`.

        Args:
            step: Training step.
            state: Modules, optimizers, schedulers, `RngState`, anything with a `state_dict()`, dicts, tensors, scalars.
            metrics: JSON values for `best_fn`, kept in the manifest. Numbers may be of numpy or torch, and NaN or
                infinite; a checkpoint without a finite score is never the best. On several ranks those of rank 0 count.
            metadata: More JSON for the manifest.
            **kw: Further arguments of the checkpointer's `save`.

        Returns:
            A `SaveHandle`; None with a `SyncCheckpointer`, which has then committed the checkpoint.

        Raises:
            DirectoryInUseError: Another live manager saves to this root; raised on every rank.
            UnsupportedLeafError, ConfigError, ...: As `AsyncCheckpointer.save`, or `SyncCheckpointer.save`.

        Blocks: as these do. The first save of several ranks waits for all of them. With `on_busy="wait"` it also waits,
            at most `slot_timeout_s`, until the checkpoints that retention gives up are removed, so that the disk does
            not fill up; and with `on_unmirrored="wait"` as long before, for the mirror.
        """
        self._check_usable()
        self._check_ranks()
        step = checked_step(step)
        self._claim_root()
        try:
            metadata = {**dict(metadata or {}), **manager_metadata(self._ancestry, metrics)}
        except (TypeError, ValueError, RecursionError) as error:
            raise ConfigError(f"metadata and metrics must be dicts of JSON values: {error}", field="metrics") from error
        if self._mirror_names is not None:
            kw.setdefault("mirror", self._mirror_names.path(step))
        config = self.checkpointer.config
        if not self._has_looked:
            self._has_looked = True
            self._retention.warn_of_others()
        if self._exports is not None:
            self._exports.prepare(state, is_due=self._exports.is_due(step, self._last_step))
        max_wait_s = config.slot_timeout_s if config.on_busy == "wait" else 0.0
        hold, handle = DirectoryHold(self._names.name(step), kw.get("mirror")), None
        try:  # IMPORTANT: an interrupt may come between any two lines, and the directory must not stay busy for ever
            self._retention.save_begins(hold, max_wait_s, lambda: self._preemption.grace_left_s is not None)
            began = time.monotonic()
            with self._preemption.log_if_late(step):
                handle = self.checkpointer.save(state, self._names.path(step), step=step, metadata=metadata, **kw)
            if self._exports is not None and self._exports.is_due(step, self._last_step):
                self._exports.request(hold.name, step, handle if isinstance(handle, SaveHandle) else None)
            self._free_at_the_end(hold, handle)
        except BaseException:
            self._free_at_the_end(hold, handle, is_committed=False)
            raise
        self._advisor.record_cost(time.monotonic() - began)
        self._last_step = step
        self._last_state.record_state(state, step)
        self._last_handle = handle if isinstance(handle, SaveHandle) else None
        if self._interval_clock is not None:
            self._interval_clock.save_begun()
        if not isinstance(handle, SaveHandle):
            self._retention.wait(None)
            return None
        if self._preemption.grace_left_s is not None:
            self._is_staged = self._preemption.await_staged(handle)
        return handle

    def _free_at_the_end(self, hold: DirectoryHold, handle: SaveHandle | None, *, is_committed: bool = True) -> None:
        """Allow retention to remove the directory once the save has ended; without handle it has ended. Idempotent."""
        if not isinstance(handle, SaveHandle):
            return self._retention.save_ended(hold, is_committed=is_committed)
        retention = self._retention
        if handle.mirrored is not None and is_committed:
            retention.follow_copy(handle.mirrored)
            handle.mirrored.add_done_callback(
                lambda done: retention.copied(hold) if _has_succeeded(done) else retention.request_prune()
            )
        return handle.written.add_done_callback(
            lambda done: retention.save_ended(hold, is_committed=_has_succeeded(done))
        )

    def reached_preemption(self, step: int) -> bool:
        """Return whether to save and stop at `step`. All ranks get True at the same step, and at all later ones.

        Call it on every rank at the end of the same steps, in ascending order. Until a rank was asked to stop, a call
        takes 1 µs, or 15 µs where a DataLoader has workers: it then also records the version counters of tensors.

        Raises:
            ConfigError: `step` is not a valid step.
            PlanTimeoutError: A rank was asked to stop, and other ranks did not report their step within `grace_s`.
            CheckpointerClosedError: The manager was closed.

        Blocks: once a rank was asked to stop, until the ranks agree: about 0.5 s, at most `grace_s`.
        """
        return self._stops_at(checked_step(step))

    def _stops_at(self, step: int) -> bool:
        if self._closed:
            raise CheckpointerClosedError(f"the manager of {self.root} is closed")
        self._coordinator.start()
        if self._last_state.is_enabled:
            self._last_state.record_step(step)
        self._asked_step = step
        return self._preemption.stops_at(step)

    def preempt(self) -> None:
        """Ask the training to stop, as the signal does. May be called in any thread, and in a signal handler.

        Raises:
            ConfigError: The manager was made with `preemption_signal=None`.
        """
        self._preemption.request()

    def _claim_root(self) -> None:
        lock = self._root_lock
        if self._shared or (self._has_claimed and lock is None):
            return
        if self._has_claimed and self._rank.world_size > 1:
            return  # RootRetention checks whether the lock was lost; rank 0 alone must not refuse a save of all ranks
        try:
            claim(lock, self.checkpointer._coordination, self.checkpointer.config.plan_timeout_s)
        except DirectoryInUseError:
            raise
        except AsyncCkptError as error:  # the save will fail with the same error
            _log.warning(
                "%s: the ranks could not tell each other whether rank 0 has locked this directory: %s", self.root, error
            )
        self._has_claimed = True

    # ---- the end ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended and the checkpoints that retention gives up are removed.

        Args:
            timeout: Seconds; None: as long as `commit_timeout_s` lets a save live, and a minute for the removals.

        Raises:
            WaitTimeoutError, PendingSavesError: As `AsyncCheckpointer.wait`.
        """
        self._check_usable()
        began = time.monotonic()
        if isinstance(self.checkpointer, AsyncCheckpointer):
            self.checkpointer.wait(timeout)
        self._retention.wait(None if timeout is None else max(0.0, began + timeout - time.monotonic()))

    def wait_exports(self, timeout: float | None = None) -> bool:
        """Wait until all exports that were requested have ended, well or not. Neither `wait` nor `close` does that.

        Failed ones are logged as errors.

        Args:
            timeout: Seconds; None: half an hour.

        Returns:
            Whether they have. True on other ranks than 0, and without `export_every`.

        Blocks: on rank 0, at most `timeout`.
        """
        self._check_usable()
        if self._exports is None:
            return True
        try:
            return self._exports.wait(timeout)
        finally:
            self._retention.request_prune()

    def close(self) -> None:
        """Wait for pending saves, and release all resources. Idempotent; does nothing in a forked child.

        After a preemption signal it waits no longer than what is left of `grace_s`: the worker finishes what is staged.
        """
        self._close(None)

    def _save_after(self, error: BaseException) -> bool:
        """Save the last state, if `error` comes from DataLoader workers that were killed by the preemption signal.

        Nothing is saved, which is logged, unless it can be proven that all ranks are at the end of the same step.

        Returns:
            Whether the state is safe, so that `error` may be swallowed.
        """
        if (
            self._closed
            or self._retention.is_forked
            or self._preemption.grace_left_s is None
            or not is_from_killed_dataloader_workers(error)
        ):
            return False
        step, why = self._asked_step, self._last_state.why_unproven(self._asked_step)
        has_failed = self._last_handle is not None and self._last_handle.phase == "failed"
        is_saved = self._last_step is not None and step in (None, self._last_step) and not has_failed
        if is_saved and not self._last_state.has_trained_since():
            step, why = self._last_step, ""
        others = self._coordinator.why_no_common_end(None if why else step, self._preemption.grace_left_s)
        if why or others:
            _log.error(
                "preemption: the workers of a DataLoader were killed, and nothing was saved: %s. The newest earlier "
                "checkpoint stays. Signal this process alone, or leave the loop at the end of a step",
                why or others,
            )
            return False
        if is_saved:
            if self._last_handle is not None:
                return self._preemption.await_staged(self._last_handle)
            _log.warning("preemption: the workers of a DataLoader were killed; step %s is saved already", step)
            return True
        assert step is not None and self._last_state.state is not None
        self._is_staged = False
        try:
            handle = self.save(step, self._last_state.state)
        except Exception as failure:
            _log.error("preemption: step %d could not be saved; the newest earlier checkpoint stays: %s", step, failure)
            return False
        return handle is None or self._is_staged

    def _close(self, kind: type[BaseException] | None) -> None:
        if self._closed or self._retention.is_forked:
            return
        self._closed = True
        left_s = self._preemption.grace_left_s if kind is None else EXIT_WAIT_S
        try:
            self._coordinator.close()
            if self._owns_checkpointer and isinstance(self.checkpointer, AsyncCheckpointer):
                if kind is not None:
                    self.checkpointer.leave()
                else:
                    self.checkpointer.close(left_s)
            elif self._owns_checkpointer:
                self.checkpointer.close()
        finally:
            self._last_handle = None
            try:  # its wait may be interrupted
                if self._exports is not None:
                    self._exports.close(END_S if kind is None and self._preemption.grace_left_s is None else 0.0)
            finally:
                self._retention.close(self._preemption.grace_left_s if kind is None else EXIT_WAIT_S)
                self._last_state.close()
                self._preemption.close()

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(root={self.root!r}, rank={self._rank.rank}, world_size={self._rank.world_size}, "
            f"last_step={self._last_step}, closed={self._closed})"
        )

    def __enter__(self) -> CheckpointManager:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> bool:
        is_safe = False
        try:
            is_safe = error is not None and self._save_after(error)
        finally:  # a second interrupt, say
            self._close(None if is_safe else kind)
        return is_safe


def _has_succeeded(done: Future[SaveReport]) -> bool:
    """Return whether a save has succeeded.

    Does not mark its error as fetched, because errors that are never fetched are logged.
    """
    return isinstance(done, SaveFuture) and done.peek()[1] is None

"""CheckpointManager: when to save, what to go on from, what to keep. Wiring; the parts decide."""

from __future__ import annotations

import dataclasses
import inspect
import itertools
import logging
import os
import time
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableMapping
from concurrent.futures import Future
from types import TracebackType
from typing import Any

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.basics.paths import absolute_path
from asyncckpt.basics.process_lifecycle import EXIT_WAIT_S
from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import CheckpointerConfig, check_keywords
from asyncckpt.distributed.rendezvous import named_by
from asyncckpt.errors import (
    AsyncCkptError,
    CheckpointerClosedError,
    CheckpointNotFoundError,
    ConfigError,
    DirectoryInUseError,
    ForkedError,
)
from asyncckpt.format.names import SaveId, is_quarantined
from asyncckpt.maintenance.policy import RetentionPolicy, extended, manager_metadata
from asyncckpt.maintenance.retention import Score
from asyncckpt.manager.last_state import LastState
from asyncckpt.manager.master_params import MasterParams
from asyncckpt.manager.preemption import Preemption, is_of_killed_workers
from asyncckpt.manager.retention_thread import Hold, Housekeeping
from asyncckpt.manager.root_lock import RootLock, claim
from asyncckpt.manager.save_policy import Advice, LocalClock, SavePolicy, TimePlan, check_seconds
from asyncckpt.manager.step_agreement import Rendezvous
from asyncckpt.restore import RestoredCheckpoint
from asyncckpt.save_handle import SaveFuture, SaveHandle, SaveReport
from asyncckpt.training_step import checked_step


class StepNames:
    """See the module.

    Args:
        root: Absolute path of the directory that holds them.
        step_format: With one field, `step`, as `str.format` has it.

    Raises:
        ConfigError: It gives no names of directories, or the same one for different steps.
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
                raise self._refused(f"{name!r} is no name of a directory that is looked at")

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
        """Return its absolute path.

        Raises:
            ConfigError: `step` is no step.
        """
        return absolute_path(os.path.join(self._root, self.name(checked_step(step))))


_CHECKPOINTER_KEYWORDS = {field.name for field in dataclasses.fields(CheckpointerConfig)} | {
    name for name, one in inspect.signature(AsyncCheckpointer).parameters.items() if one.kind is one.KEYWORD_ONLY
}
"""What a manager passes on to a checkpointer of its own."""

_COUNTS: defaultdict[str, Iterator[int]] = defaultdict(itertools.count)
"""Of each root, the managers of several ranks in this process: all ranks make as many of it, whatever else they do."""

_log = logging.getLogger("asyncckpt")


class CheckpointManager:
    """Saves a training to the directories of a root, goes on from the newest, and keeps the disk from filling up.

    One manager, on every rank, for a root. It is a context manager. Not thread-safe: one thread trains and saves.

    Args:
        root: The directory of the checkpoints; made by the first save.
        checkpointer: Who saves; the manager does not close it. None: an `AsyncCheckpointer` of its own, made with
            `overwrite=True`, so that a step that is saved again after a rollback takes the old one's place.
        max_to_keep: How many checkpoints stay, the newest and the best among them; None: all. Those of `keep_period`
            and pinned ones come on top. One goes only when a newer one is committed; the one that the run has restored
            from only when a newer one of this run has been read back, too, and verified, behind the training, once.
        keep_period: Each checkpoint whose step is a multiple of it stays for ever.
        save_interval_steps: `should_save` is true for multiples of it.
        save_interval_s: It is true when so many seconds have passed since the last save. On several ranks rank 0's
            clock counts, and is read some seconds ahead.
        save_on_steps: It is true for these steps.
        save_when: It is true where this function of the step is; it must say the same on all ranks.
        best_fn: Makes a number of the metrics that a step was saved with: the best one stays. Where it raises there is
            none; if it does so on all, what earlier runs have saved with metrics stays as well.
        best_mode: "min": the smallest number is the best; or "max".
        step_format: The name of a step's directory.
        preemption_signal: A signal, or several, that ask to stop: all ranks do so at the same step. Handlers that were
            there are called too, and put back by `close`. `()`: no signal, but `preempt()`. None: nobody asks.
            Where it kills the workers of a `DataLoader` first, and the error of that leaves the `with` block, the state
            that was given last is saved and the error swallowed, if all ranks are provably at the end of one step.
        grace_s: How long after the signal a save must be staged; what takes longer is logged as an error.
        mtbf_s: Mean seconds between failures of the job: after some saves, log what interval they make optimal.
        quarantine: `restore` puts broken checkpoints aside, as `restore_latest` does.
        shared: Other managers may save to the root meanwhile, and each remove what the other has saved. Else a second
            one is refused: rank 0 locks the directory (`.asyncckpt.lock`) from its first save until the manager is
            closed or the process ends. A manager that only restores takes no lock. The same on all ranks.
        **fields: Fields of `CheckpointerConfig`, and `endpoint`, for the manager's own checkpointer.

    Attributes:
        root: The absolute path of the directory.
        checkpointer: Who saves and loads.

    Raises:
        ConfigError: A value that makes no sense, `max_to_keep=1` with `best_fn`, or fields for a given checkpointer.
        SignalHandlerError: `preemption_signal`, and this is not the main thread.
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
        quarantine: bool = False,
        shared: bool = False,
        **fields: Any,
    ) -> None:
        check_keywords(CheckpointManager, fields, _CHECKPOINTER_KEYWORDS)
        self.root = absolute_path(root)
        self._names = StepNames(self.root, step_format)
        self._quarantine = quarantine
        self._ancestry: tuple[SaveId, ...] = ()
        self._last_step: int | None = None
        self._has_looked = self._closed = False
        policy = RetentionPolicy(max_to_keep=max_to_keep, keep_period=keep_period, best_mode=best_mode)
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
        SavePolicy(save_interval_steps, save_on_steps, save_when, None)  # refuses before anything is started
        self._advice = Advice(mtbf_s)
        self._owned = checkpointer is None
        self.checkpointer = checkpointer or AsyncCheckpointer(**{"overwrite": True, **fields})
        try:
            rank = self._rank = self.checkpointer.rank_info
            self._rank_changes = self.checkpointer.rank_changes
            here = named_by(self.root)
            name = f"manager/{here}-{next(_COUNTS[here])}" if rank.world_size > 1 else ""
            self._together = Rendezvous(rank, self.checkpointer.exchange, name)
            self._preemption = Preemption(preemption_signal, grace_s, rank.world_size, self._together.hurry)
            self._last = LastState(self._preemption.is_on)
            self._asked: int | None = None
            self._last_handle: SaveHandle | None = None
            self._is_staged = False
            clock = self._clock(save_interval_s)
            self._together.prepare(self._preemption.stopping, clock if isinstance(clock, TimePlan) else None)
            self._times = clock
            self._policy = SavePolicy(save_interval_steps, save_on_steps, save_when, clock)
            self._shared, self._is_claimed = shared, False
            self._root_lock = RootLock(self.root) if rank.rank == 0 and not shared else None
            self._house = Housekeeping(
                self.root,
                policy,
                best_fn,
                is_leader=rank.rank == 0,
                lock=self._root_lock,
                dead_after_s=self.checkpointer.config.commit_timeout_s,
            )
        except BaseException:
            if self._owned:
                self.checkpointer.close()
            raise

    def _clock(self, interval_s: float | None) -> LocalClock | TimePlan | None:
        if interval_s is None:
            return None
        if self._rank.world_size == 1:
            return LocalClock(interval_s)
        together = self._together
        return TimePlan(interval_s, is_leader=self._rank.rank == 0, wake=together.wake, hurry=together.hurry)

    # ---- going on after a restart -----------------------------------------------------------------------------------

    def restore(
        self,
        state: MutableMapping[Any, Any] | None = None,
        step: int | None = None,
        *,
        strict: bool = True,
        **options: Any,
    ) -> RestoredCheckpoint | None:
        """Load the newest checkpoint that verifies, from memory if it is there, into `state`; on all ranks the same.

        What is broken is passed over with a warning, as by `restore_latest`; what a rollback has left behind comes
        last. Full-precision masters that the checkpoint lacks are set from the weights (`refresh_master_params`).

        With `step` that one is loaded and no other. Saving after it begins a new branch: from its first commit on the
        newest checkpoint is of that branch, and what was saved after `step` before is abandoned: still there, listed,
        loaded only by its step or when nothing else is sound, and the first that retention removes.

        Args:
            state: Filled in place: as given to `save`. None: a new dict is made.
            step: Which one; None: the newest.
            strict: Whether keys that `state` has and the checkpoint lacks are an error; False logs them.
            **options: As of `restore_latest`.

        Returns:
            What was loaded; None, on all ranks: there is no checkpoint yet, neither on disk nor in memory.

        Raises:
            ConfigError: `step` is no step.
            CheckpointNotFoundError: There is none of `step`.
            ConfigError: The process group was made, or made anew, after the manager.
            NoSoundCheckpointError: None verifies.
            MissingKeysError: The checkpoint lacks what `state` has.
            AsyncCkptError, OSError: As `restore_latest`.

        Blocks: as `restore_latest`.
        """
        self._check_usable()
        self._check_ranks()
        self._has_looked = True
        options.setdefault("quarantine", self._quarantine)
        masters = MasterParams(state.values() if state is not None else ())
        path = self.root if step is None else self._names.path(step)
        found = self.checkpointer.restore_first(
            self._house.candidates, path, state, below=self.root, strict=strict, **options
        )
        if found is None:
            if step is None:
                self._last.record_state(state, None)
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
                "%d parameters that optimizers of the state step on are as before the restore: the checkpoint does not "
                "hold them, and they are no masters that refresh_master_params knows. If they are copies of weights, "
                "the next step undoes the restore: save them too, or give the optimizer a master_param_pairs()",
                untouched,
            )
        self._house.restored(found)
        self._last.record_state(state, found.step)
        self._last_handle = None
        self._ancestry = extended(SaveId.parse(found.save_id), found.metadata)
        self._last_step = found.step
        return found

    def _check_usable(self) -> None:
        if self._house.is_forked:
            raise ForkedError(
                f"the manager of {self.root} was made by another process; make a new one in a forked child"
            )
        if self._closed:
            raise CheckpointerClosedError("the manager is closed")

    def _check_ranks(self) -> None:
        """Refuse what the ranks do together once this process is another rank: signals and intervals were agreed on."""
        if self.checkpointer.rank_changes != self._rank_changes:
            before, now = self._rank, self.checkpointer.rank_info
            raise ConfigError(
                f"the manager of {self.root} was made for rank {before.rank} of {before.world_size}, and this process "
                f"is rank {now.rank} of {now.world_size} in another process group by now; make the manager after "
                "init_process_group(), and a new one when the process group is made anew",
                field="rank_info",
                value=repr(before),
            )

    # ---- what is there ----------------------------------------------------------------------------------------------

    def latest_step(self) -> int | None:
        """Return the step of the newest committed checkpoint, by lineage; None: there is none. Reads the manifests."""
        return self._house.latest_step()

    def all_steps(self) -> list[int]:
        """Return the steps of all committed checkpoints, ascending; also of those that a rollback has left behind."""
        return self._house.all_steps()

    def best_step(self) -> int | None:
        """Return the step of the best checkpoint; None: none has metrics of which `best_fn` makes a number."""
        return self._house.best_step()

    def pin(self, step: int) -> None:
        """Keep the committed checkpoint of `step` for ever, over restarts too.

        Raises:
            ConfigError: `step` is no step.
            CheckpointNotFoundError, CheckpointNotCommittedError: There is none.
            OSError: It may be pinned or not.
        """
        self._house.pin(self._names.path(step))

    def unpin(self, step: int) -> bool:
        """Take the pin of `step` off. Returns whether there was one.

        Raises:
            ConfigError: `step` is no step.
            OSError: A call failed.
        """
        return self._house.unpin(self._names.path(step))

    # ---- saving -----------------------------------------------------------------------------------------------------

    def should_save(self, step: int) -> bool:
        """Whether to save at `step`: a policy says so, or the ranks stop there. Call it on every rank, at every step.

        No system call but for the clock's, unless ranks are about to agree to stop; see `reached_preemption`. A step
        that was saved or restored last is not saved again.

        Raises:
            ConfigError: `step` is no step.
            PlanTimeoutError: As `reached_preemption`.
            CheckpointerClosedError: The manager was closed.
        """
        step = checked_step(step)
        stops = self._stops_at(step)
        due = self._policy.at(step)
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
            step: The training step.
            state: Modules, optimizers, schedulers, `RngState`, anything with a `state_dict()`, dicts, tensors, scalars.
            metrics: JSON values, kept in the manifest, of which `best_fn` makes a number. A number may be of numpy or
                torch, and NaN or infinite; what has no finite score is never the best. On several ranks rank 0's count.
            metadata: More JSON for the manifest.
            **kw: As of the checkpointer's `save`.

        Returns:
            What the checkpointer returns: a `SaveHandle`; None of a `SyncCheckpointer`, that has committed it.

        Raises:
            DirectoryInUseError: Another manager, which is alive, saves to this root; on every rank.
            UnsupportedLeafError, ConfigError, ...: As `AsyncCheckpointer.save`, or `SyncCheckpointer.save`.

        Blocks: as these do. The first save of several ranks waits for all of them. With `on_busy="wait"` also, at most
            `slot_timeout_s`, for the removal of what earlier commits have made superfluous, so that the disk does not
            fill up.
        """
        self._check_usable()
        self._check_ranks()
        step = checked_step(step)
        self._claim_root()
        more = manager_metadata(self._ancestry, metrics)
        config = self.checkpointer.config
        if not self._has_looked:
            self._has_looked = True
            self._house.warn_of_others()
        patience_s = config.slot_timeout_s if config.on_busy == "wait" else 0.0
        hold, handle = Hold(self._names.name(step)), None
        try:  # IMPORTANT: an interrupt may come between any two lines, and the directory must not stay busy for ever
            self._house.begins(hold, patience_s, lambda: self._preemption.left_s is not None)
            began = time.monotonic()
            with self._preemption.in_time(step):
                handle = self.checkpointer.save(
                    state, self._names.path(step), step=step, metadata={**(metadata or {}), **more}, **kw
                )
            self._free_at_the_end(hold, handle)
        except BaseException:
            self._free_at_the_end(hold, handle, is_committed=False)
            raise
        self._advice.took(time.monotonic() - began)
        self._last_step = step
        self._last.record_state(state, step)
        self._last_handle = handle if isinstance(handle, SaveHandle) else None
        if self._times is not None:
            self._times.saved()
        if not isinstance(handle, SaveHandle):
            self._house.wait(None)
            return None
        if self._preemption.left_s is not None:
            self._is_staged = self._preemption.see_staged(handle)
        return handle

    def _free_at_the_end(self, hold: Hold, handle: SaveHandle | None, *, is_committed: bool = True) -> None:
        """Give the directory free once a save has ended: one without a handle has. Twice is fine."""
        if not isinstance(handle, SaveHandle):
            return self._house.ended(hold, is_committed=is_committed)
        house = self._house
        return handle.written.add_done_callback(lambda done: house.ended(hold, is_committed=_has_succeeded(done)))

    def reached_preemption(self, step: int) -> bool:
        """Whether to save and stop at `step`: True on all ranks at the same one, and at all later ones.

        Ask on every rank, at the same steps, in ascending order, at their ends. Until a rank was told to stop it costs
        a microsecond; some 15 where a DataLoader has workers: counters of tensors say later whether training went on.

        Raises:
            ConfigError: `step` is no step.
            PlanTimeoutError: A rank was told to stop, and others do not say how far they are.
            CheckpointerClosedError: The manager was closed.

        Blocks: then, until the ranks agree: about `watch.POLL_S`, at most `grace_s`.
        """
        return self._stops_at(checked_step(step))

    def _stops_at(self, step: int) -> bool:
        if self._closed:
            raise CheckpointerClosedError("the manager is closed")
        self._together.start()
        if self._last.is_on:
            self._last.record_step(step)
        self._asked = step
        return self._preemption.at(step)

    def preempt(self) -> None:
        """Ask to stop as the signal does. May be called in any thread, or a signal handler.

        Raises:
            ConfigError: The manager was made with `preemption_signal=None`.
        """
        self._preemption.tell()

    def _claim_root(self) -> None:
        lock = self._root_lock
        if self._shared or (self._is_claimed and lock is None):
            return
        if self._is_claimed and self._rank.world_size > 1:
            return  # Housekeeping looks whether it was lost; one rank must not stay away from a save of all
        try:
            claim(lock, self.checkpointer._coordination, self.checkpointer.config.plan_timeout_s)
        except DirectoryInUseError:
            raise
        except AsyncCkptError as error:  # the save will fail for the same reason, and say so
            _log.warning("%s: the ranks could not agree on the lock of this directory: %s", self.root, error)
        self._is_claimed = True

    # ---- the end ----------------------------------------------------------------------------------------------------

    def wait(self, timeout: float | None = None) -> None:
        """Wait until every save has ended and what has to go is gone.

        Args:
            timeout: Seconds; None: as `AsyncCheckpointer.wait`.

        Raises:
            WaitTimeoutError, PendingSavesError: As of `AsyncCheckpointer.wait`.
        """
        self._check_usable()
        began = time.monotonic()
        if isinstance(self.checkpointer, AsyncCheckpointer):
            self.checkpointer.wait(timeout)
        self._house.wait(None if timeout is None else max(0.0, began + timeout - time.monotonic()))

    def close(self) -> None:
        """Wait for pending saves, and free everything. Twice is fine; does nothing in a forked child.

        After a signal it waits no longer than `grace_s` lets it: the worker finishes what is staged.
        """
        self._close(None)

    def _save_after(self, error: BaseException) -> bool:
        """Save the state that was passed last, if `error` is of killed DataLoader workers after a signal.

        Nothing is saved, which is logged, unless it can be proven that all ranks are at the end of the same step.

        Returns:
            Whether the state is safe, so that `error` may be swallowed.
        """
        if self._closed or self._house.is_forked or self._preemption.left_s is None or not is_of_killed_workers(error):
            return False
        step, why = self._asked, self._last.why_unproven(self._asked)
        has_failed = self._last_handle is not None and self._last_handle.phase == "failed"
        is_saved = self._last_step is not None and step in (None, self._last_step) and not has_failed
        if is_saved and not self._last.has_trained_since():
            step, why = self._last_step, ""
        others = self._together.all_end_at(None if why else step, self._preemption.left_s)
        if why or others:
            _log.error(
                "told to stop: the workers of a DataLoader were killed, and nothing was saved: %s. The newest earlier "
                "checkpoint stays. Signal this process alone, or leave the loop at the end of a step",
                why or others,
            )
            return False
        if is_saved:
            if self._last_handle is not None:
                return self._preemption.see_staged(self._last_handle)
            _log.warning("told to stop: the workers of a DataLoader were killed; step %s is saved already", step)
            return True
        assert step is not None and self._last.state is not None
        self._is_staged = False
        try:
            handle = self.save(step, self._last.state)
        except Exception as failure:
            _log.error("told to stop: step %d could not be saved, an earlier one stays: %s", step, failure)
            return False
        return handle is None or self._is_staged

    def _close(self, kind: type[BaseException] | None) -> None:
        if self._closed or self._house.is_forked:
            return
        self._closed = True
        left_s = self._preemption.left_s if kind is None else EXIT_WAIT_S
        try:
            self._together.close()
            if self._owned and isinstance(self.checkpointer, AsyncCheckpointer):
                if kind is not None:
                    self.checkpointer.leave()
                else:
                    self.checkpointer.close(left_s)
            elif self._owned:
                self.checkpointer.close()
        finally:
            self._last_handle = None
            self._house.close(self._preemption.left_s if kind is None else EXIT_WAIT_S)
            self._last.close()
            self._preemption.close()

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
    """Asks without counting as a look at the outcome: an error that nobody has fetched is logged."""
    return isinstance(done, SaveFuture) and done.peek()[1] is None

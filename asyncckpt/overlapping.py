"""What a checkpointer offers to loops that go on while the state is copied."""

from __future__ import annotations

import os
import threading
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.errors import ConfigError, ReentrantCallError
from asyncckpt.parts import CheckpointStager
from asyncckpt.save_events import SaveEvents
from asyncckpt.staging.overlap import Overlap
from asyncckpt.staging.slot_stager import SlotStager


class Overlapping(Checkpointer):
    """The part of `AsyncCheckpointer` that is about copies behind forward and backward."""

    _stager: CheckpointStager
    _saving: threading.Lock
    _events: SaveEvents

    @abstractmethod
    def _refuse_in_callback(self, call: str) -> None:
        """Raise in a thread that completes futures."""

    def attach(self, *optimizers: Any) -> None:
        """Copy what these optimizers own behind forward and backward, from the next save on.

        Owned are an optimizer's parameters and the tensors in its `state`, which change in `step()` only. Their copies
        run in a thread after `save()` has returned; `step()` and `load_state_dict()` of the optimizer wait for them.
        With `staging="blocking"` they are copied before `save()` returns all the same.

        The condition: nothing else changes these tensors before `fence()` or `staged`. A module may be attached too:
        then its `load_state_dict()` waits as well. That of any other module, and every other write, fails the save
        with `SnapshotTornError` as far as a version counter sees it. Not promised: writes that no counter sees
        (`.data`, raw pointers, fused kernels outside `step()`, CUDA graphs) between `save()` and the fence.
        `overlap_check` looks for them, and cannot find all.

        Args:
            *optimizers: `torch.optim.Optimizer` objects, and `torch.nn.Module` objects. Twice is fine. Optimizers are
                not kept alive.

        Raises:
            ConfigError: Something else, or an optimizer whose `step()` calls no hooks because it only wraps another
                one: attach that; or the stager is the user's own.
            CheckpointerClosedError, ForkedError: The checkpointer.
        """
        self._check_usable()
        overlap = self._overlap
        if overlap is None:
            raise ConfigError("attach() is for the default stager and process, which were replaced", field="attach")
        overlap.attach(*optimizers)
        self._events.watch(optimizers)

    def detach(self) -> None:
        """Take back what `attach` did, for all optimizers and modules. Twice is fine.

        Blocks: as `fence()`.

        Raises:
            CheckpointerClosedError, ForkedError, ReentrantCallError: As `fence()`.
        """
        self._check_usable()
        self._events.unwatch()
        if self._overlap is not None:
            self._overlap.detach()

    def fence(self) -> None:
        """Wait until everything that was saved has been copied: for loops that change tensors outside the hooks.

        For tensors on GPUs it is the calling thread's current streams that wait, not the CPU: whoever changes them
        from other streams, or from another thread, waits for `staged`.

        Blocks: for running copies, at most 60 s; what has not been copied then is given up, and its save fails.

        Raises:
            ReentrantCallError: Called by a callback of `staged`, in the thread that copies.
            CheckpointerClosedError, ForkedError: The checkpointer.
        """
        self._check_usable()
        if self._overlap is not None:
            self._overlap.fence.wait()

    def prepare(self, state_dict: Mapping[str, Any]) -> None:
        """Do now what the first save of such a state would do: plan it, get memory, fault its pages in.

        The first save after it is as fast as later ones. Optional; for several structures, call it for each.

        Blocks: for the worker and the memory, 0.3 s and more per GB; with several ranks, it is a collective, up to
        `plan_timeout_s` for the others.

        Args:
            state_dict: As for `save()`; its values do not matter.

        Raises:
            UnsupportedLeafError, DuplicateNameError: It cannot be saved.
            PlanTimeoutError, RanksDisagreeError, SaveFailedError: The other ranks.
            InsufficientMemoryError, WorkerUnavailableError: No memory; no worker.
            SlotTimeoutError, SaveSkippedError, SlotBusyError: Every slot is in use and too small, as `on_busy` says.
            ConfigError: The stager is the user's own.
            CheckpointerClosedError, ForkedError, ReentrantCallError: The checkpointer.
        """
        self._check_usable()
        self._follow_ranks()
        if not isinstance(self._stager, SlotStager):
            raise ConfigError("prepare() is for the default stager and process, which were replaced", field="prepare")
        try:
            self._refuse_in_callback("prepare()")
        except ReentrantCallError:
            self._stager.skip_preparation()  # telling the other ranks would wait for this very thread
            raise
        if not self._saving.acquire(blocking=False):
            refused = ReentrantCallError("prepare() was called while save() runs")
            return self._stager.prepare(state_dict, refused=refused)
        try:
            self._stager.prepare(state_dict)
        finally:
            self._saving.release()

    def load(self, path: str | os.PathLike[str], state_dict: Any = None, **kw: Any) -> Any:
        """As `Checkpointer.load`; into tensors of a `state_dict`, after `fence()`."""
        self._check_usable()
        if state_dict is not None and self._overlap is not None:
            self._overlap.fence.wait(ordered=False)
        return super().load(path, state_dict, **kw)

    @property
    def _overlap(self) -> Overlap | None:
        """None where an own stager copies."""
        return self._stager.overlap if isinstance(self._stager, SlotStager) else None

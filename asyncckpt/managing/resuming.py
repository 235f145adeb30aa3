"""Going on after a restart: what a manager loads, and what it remembers of that for the saves that follow."""

from __future__ import annotations

import logging
import os
from collections.abc import MutableMapping
from typing import Any

from asyncckpt.checkpointer import Checkpointer
from asyncckpt.config import RankInfo
from asyncckpt.errors import CheckpointerClosedError, CheckpointNotFoundError, ConfigError, ForkedError
from asyncckpt.format.names import SaveId
from asyncckpt.handle import SaveHandle
from asyncckpt.maintenance.policy import extended
from asyncckpt.managing.last_state import LastState
from asyncckpt.managing.master_params import MasterParams
from asyncckpt.managing.shelf import Shelf
from asyncckpt.restoring import RestoredCheckpoint

_log = logging.getLogger("asyncckpt")


class Resuming(Shelf):
    """See the module.

    Args:
        root, step_format: As of `Shelf`.
        quarantine: Put broken checkpoints aside.

    Attributes:
        checkpointer: Who saves and loads.

    Raises:
        ConfigError, UnsupportedPathError: As of `Shelf`.
    """

    checkpointer: Checkpointer
    _rank: RankInfo
    _rank_changes: int
    _last: LastState
    _last_handle: SaveHandle | None

    def __init__(self, root: str | os.PathLike[str], step_format: str, *, quarantine: bool) -> None:
        super().__init__(root, step_format)
        self._quarantine = quarantine
        self._ancestry: tuple[SaveId, ...] = ()
        self._last_step: int | None = None
        self._has_looked = False
        self._closed = False

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

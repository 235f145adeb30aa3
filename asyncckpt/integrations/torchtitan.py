"""A checkpoint manager with torchtitan's methods and directory names. Imports no torchtitan.

`step-N` below the folder is in layout "dcp", with the names that torchtitan gives: the parameters at the top level, the
other states below their names. So torchtitan's own manager, and `torch.distributed.checkpoint.load`, can resume from
its checkpoints, and this one from theirs.
"""

from __future__ import annotations

import glob
import os
import re
from collections.abc import MutableMapping, Sequence
from typing import Any, cast

import torch

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.basics.paths import absolute_path
from asyncckpt.errors import CheckpointNotFoundError, ConfigError
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME
from asyncckpt.manager import manager

_STEP = re.compile(r"/step-([0-9]+)\Z")


class CheckpointManager:
    """Saves every `interval` steps, loads the newest checkpoint, and keeps the last few. Use it alike on every rank.

    Args:
        dataloader: Object with `state_dict()` and `load_state_dict()`; None: there is none.
        model_parts: Modules whose parameters are saved.
        optimizers: torchtitan's container of optimizers, or an optimizer.
        lr_schedulers: torchtitan's container of schedulers, or a scheduler; None: there is none.
        states: Further states to save, by name, such as `train_state`.
        folder: Directory of the `step-N` directories.
        interval: Steps between saves.
        keep_latest_k: Number of checkpoints to keep, at least 2; 0: all.
        enable: False: save and load nothing.
        load_only: True: save nothing.
        last_save_model_only: True: the last step's checkpoint has only the parameters.
        enable_first_step_checkpoint: True: save step 1 as well.
        exclude_from_loading: Names of states that are not loaded.
        attach: Optimizers whose parameters and state are copied during forward and backward.
        **fields: Fields of `CheckpointerConfig`, and `endpoint`. The default of `replicated` is "assume", as in
            `torch.distributed.checkpoint`, which would not find values that are stored for each rank.

    Raises:
        ConfigError: `keep_latest_k` is 1, so that no checkpoint would be left during a save, or a number is negative.
        WorkerUnavailableError: The endpoint that was given cannot be reached.
    """

    def __init__(
        self,
        dataloader: Any,
        model_parts: Sequence[torch.nn.Module],
        optimizers: Any,
        lr_schedulers: Any,
        states: MutableMapping[str, Any],
        *,
        folder: str | os.PathLike[str],
        interval: int = 500,
        keep_latest_k: int = 10,
        enable: bool = True,
        load_only: bool = False,
        last_save_model_only: bool = False,
        enable_first_step_checkpoint: bool = False,
        exclude_from_loading: Sequence[str] = (),
        attach: Sequence[torch.optim.Optimizer] = (),
        **fields: Any,
    ) -> None:
        if keep_latest_k == 1 or keep_latest_k < 0 or interval < 1:
            raise ConfigError(
                f"keep_latest_k={keep_latest_k}, interval={interval}: expected keep_latest_k 0 (all) or at least 2, as "
                "the newest checkpoint may still be being written, and an interval of at least 1",
                field="keep_latest_k" if interval >= 1 else "interval",
            )
        self.enable, self.load_only = enable, load_only
        self.folder = absolute_path(folder)
        self._parts = list(model_parts)
        self._last_save_model_only = last_save_model_only
        self._excluded = frozenset(exclude_from_loading)
        self.states = states
        given = {"optimizer": optimizers, "lr_scheduler": lr_schedulers, "dataloader": dataloader}
        self.states.update({name: value for name, value in given.items() if value is not None})
        unknown = self._excluded - set(self.states)
        if unknown:
            raise ConfigError(
                f"exclude_from_loading names unknown states: {sorted(unknown)}", field="exclude_from_loading"
            )
        self._manager: manager.CheckpointManager | None = None
        if enable:
            self._manager = manager.CheckpointManager(
                self.folder,
                max_to_keep=keep_latest_k or None,
                save_interval_steps=interval,
                save_on_steps=[1] if enable_first_step_checkpoint else None,
                step_format="step-{step}",
                **{"replicated": "assume", **fields, "layout": "dcp"},
            )
            self._checkpointer = cast(AsyncCheckpointer, self._manager.checkpointer)
            self._checkpointer.attach(*attach)

    def _model(self) -> dict[str, Any]:
        return {name: value for part in self._parts for name, value in part.state_dict().items()}

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Stage a checkpoint if one is due at this step; return whether it was.

        Raises:
            DirectoryInUseError: Another running training saves to this folder; raised on every rank.
            UnsupportedLeafError, DuplicateNameError, CheckpointerClosedError: See `AsyncCheckpointer.save`.

        Blocks: for memory and the copy, as `AsyncCheckpointer.save`.
        """
        if self._manager is None or self.load_only or not (last_step or self._manager.should_save(curr_step)):
            return False
        state = self._model()
        if not (last_step and self._last_save_model_only):
            state |= self.states
        self._manager.save(curr_step, state)
        return True

    def load(self, step: int = -1) -> bool:
        """Load `step-N`, or for -1 the newest checkpoint that verifies; return False if there is none.

        Waits for saves of a killed run that the worker is still writing. If torchtitan itself has saved since, its
        checkpoint of the highest step is the newest.

        Raises:
            CheckpointNotFoundError: There is no checkpoint of the given step.
            CorruptCheckpointError, MissingKeysError, ShapeMismatchError: See `asyncckpt.load`.

        Blocks: until the checkpoint is read.
        """
        if self._manager is None:
            return False
        model = self._model()
        state = {**model, **{name: value for name, value in self.states.items() if name not in self._excluded}}
        step = self._newest_stock_step() if step < 0 else step
        path = self._path(step)
        if step < 0 or os.path.exists(os.path.join(path, MANIFEST_NAME)):
            if self._manager.restore(state, None if step < 0 else step) is None:
                return False
        elif os.path.exists(os.path.join(path, DCP_METADATA_NAME)):
            self._checkpointer.load(path, state if step else model)  # torchtitan's step-0 has the parameters only
        else:
            raise CheckpointNotFoundError(f"there is no step {step} in {self.folder}", path=path)
        for part in self._parts:
            part.load_state_dict(
                model, strict=False
            )  # needed if a hook creates the tensors of state_dict(); else a no-op
        return True

    def maybe_wait_for_staging(self) -> None:
        """Wait until the saved tensors may be changed; an attached optimizer's `step()` waits by itself."""
        if self._manager is not None:
            self._checkpointer.fence()

    def maybe_wait_for_saving(self) -> None:
        """Wait until every save is committed."""
        if self._manager is not None:
            self._manager.wait()

    def close(self) -> None:
        """Wait for saves and removals, and free everything. Idempotent."""
        if self._manager is not None:
            self._manager.close()

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _newest_stock_step(self) -> int:
        """Return the highest step of torchtitan's own checkpoints that are newer than this package's newest, or -1."""
        ours = self._checkpointer.latest_checkpoint(self.folder)
        since_s = -1.0 if ours is None else os.path.getmtime(os.path.join(ours, DCP_METADATA_NAME))
        steps = [-1]
        for path in glob.glob(os.path.join(glob.escape(self.folder), "step-*", DCP_METADATA_NAME)):
            directory = os.path.dirname(path)
            found = _STEP.search(directory)
            if (
                found
                and not os.path.exists(os.path.join(directory, MANIFEST_NAME))
                and os.path.getmtime(path) > since_s
            ):
                steps.append(int(found[1]))
        return max(steps)

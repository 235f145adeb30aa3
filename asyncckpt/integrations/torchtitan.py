"""A checkpoint manager with torchtitan's methods and directory names. Imports no torchtitan.

`step-N` below the folder is in DCP's layout, with the names that torchtitan gives: the parameters at the top level, the
other states below theirs. So torchtitan's own manager, and stock `dcp.load`, go on from it, and this one from theirs.
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
    """Saves every `interval` steps, loads the newest, keeps the last few. Every rank has one and calls it alike.

    Args:
        dataloader: With `state_dict()` and `load_state_dict()`; None: none.
        model_parts: The modules whose parameters are saved.
        optimizers: With `state_dict()` and `load_state_dict()`: torchtitan's container, or an optimizer.
        lr_schedulers: Likewise; None: none.
        states: What else is saved, by name, such as `train_state`.
        folder: Holds the directories `step-N`.
        interval: Steps between saves.
        keep_latest_k: So many are kept, 2 at least; 0: all.
        enable: False: nothing is saved or loaded.
        load_only: Nothing is saved.
        last_save_model_only: The last step's checkpoint has only the parameters.
        enable_first_step_checkpoint: Step 1 is saved, too.
        exclude_from_loading: Names of states that are not loaded.
        attach: Optimizers whose parameters and state are copied behind forward and backward.
        **fields: Fields of `CheckpointerConfig`, and `endpoint`. `replicated` is "assume", as stock DCP does: what is
            stored for each rank because it differs, or looks as if nothing had been computed yet, stock does not find.

    Raises:
        ConfigError: `keep_latest_k=1`, which would leave nothing while the only one is replaced; a negative number.
        WorkerUnavailableError: A given endpoint cannot be reached.
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
                f"keep_latest_k={keep_latest_k}, interval={interval}: 0 keeps all, else 2 at least are kept, as the "
                "last one may be in the process of being saved; and there is a step between saves at least",
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
            raise ConfigError(f"exclude_from_loading names no state: {sorted(unknown)}", field="exclude_from_loading")
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
        """Stage a checkpoint if this step wants one; whether it did.

        Raises:
            DirectoryInUseError: Another training, which is alive, saves to this folder; on every rank.
            UnsupportedLeafError, DuplicateNameError, CheckpointerClosedError: As `AsyncCheckpointer.save`.
        """
        if self._manager is None or self.load_only or not (last_step or self._manager.should_save(curr_step)):
            return False
        state = self._model()
        if not (last_step and self._last_save_model_only):
            state |= self.states
        self._manager.save(curr_step, state)
        return True

    def load(self, step: int = -1) -> bool:
        """Fill everything from `step-N`, of -1 from the newest that verifies; False where there is none.

        What a run that was killed still has in the worker's hands is waited for. If torchtitan itself has saved since,
        its checkpoint of the highest step is the newest.

        Raises:
            CheckpointNotFoundError: A step that is asked for is not there.
            CorruptCheckpointError, MissingKeysError, ShapeMismatchError: As `asyncckpt.load`.
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
            part.load_state_dict(model, strict=False)  # of hooks that build tensors for state_dict(); others share them
        return True

    def maybe_wait_for_staging(self) -> None:
        """Wait until what was saved may be changed; an attached optimizer's `step()` does that by itself."""
        if self._manager is not None:
            self._checkpointer.fence()

    def maybe_wait_for_saving(self) -> None:
        """Wait until every save is committed."""
        if self._manager is not None:
            self._manager.wait()

    def close(self) -> None:
        """Wait for the saves, keep the last few, and free everything. Twice is fine."""
        if self._manager is not None:
            self._manager.close()

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _newest_stock_step(self) -> int:
        """Return the highest step of torchtitan's own checkpoints that were saved after the newest of ours, or -1."""
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

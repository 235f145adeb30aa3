"""A checkpoint manager with torchtitan's methods and directory names. Imports no torchtitan.

`step-N` below the folder is in DCP's layout, with the names that torchtitan gives: the parameters at the top level, the
other states below theirs. So torchtitan's own manager, and stock `dcp.load`, go on from it, and this one from theirs.
"""

from __future__ import annotations

import logging
import os
import re
import threading
from collections.abc import MutableMapping, Sequence
from typing import Any

import torch
import torch.distributed.checkpoint.state_dict_loader as dcp

from asyncckpt.async_checkpointer import AsyncCheckpointer
from asyncckpt.errors import CheckpointNotFoundError, ConfigError
from asyncckpt.format.names import DCP_METADATA_NAME, MANIFEST_NAME
from asyncckpt.handle import SaveHandle
from asyncckpt.integrations.pending_saves import remove
from asyncckpt.paths import absolute_path
from asyncckpt.process_group import find_rank_info

MODEL, OPTIMIZER, LR_SCHEDULER, DATALOADER = "model", "optimizer", "lr_scheduler", "dataloader"
_STEP = re.compile(r"step-([0-9]+)\Z")

_log = logging.getLogger("asyncckpt.integrations")


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
        self.enable, self.load_only, self.interval, self.keep_latest_k = enable, load_only, interval, keep_latest_k
        self.folder = absolute_path(folder)
        self._parts = list(model_parts)
        self._last_save_model_only = last_save_model_only
        self._first_step, self._excluded = enable_first_step_checkpoint, frozenset(exclude_from_loading)
        self.states = states
        given = {OPTIMIZER: optimizers, LR_SCHEDULER: lr_schedulers, DATALOADER: dataloader}
        self.states.update({name: value for name, value in given.items() if value is not None})
        unknown = self._excluded - set(self.states)
        if unknown:
            raise ConfigError(f"exclude_from_loading names no state: {sorted(unknown)}", field="exclude_from_loading")
        self._pending: list[SaveHandle] = []
        self._removing: list[threading.Thread] = []
        self._checkpointer: AsyncCheckpointer | None = None
        if enable:
            self._checkpointer = AsyncCheckpointer(**{"replicated": "assume", **fields, "layout": "dcp"})
            self._checkpointer.attach(*attach)

    def _model(self) -> dict[str, Any]:
        return {name: value for part in self._parts for name, value in part.state_dict().items()}

    def save(self, curr_step: int, last_step: bool = False) -> bool:
        """Stage a checkpoint if this step wants one; whether it did.

        Raises:
            UnsupportedLeafError, DuplicateNameError, CheckpointerClosedError: As `AsyncCheckpointer.save`.
        """
        if self._checkpointer is None or not self._should_save(curr_step, last_step):
            return False
        self._purge()
        state = self._model()
        if not (last_step and self._last_save_model_only):
            state |= {name: _values(value) for name, value in self.states.items()}
        self._pending.append(self._checkpointer.save(state, self._path(curr_step), step=curr_step))
        return True

    def load(self, step: int = -1) -> bool:
        """Fill everything from `step-N`, of -1 from the newest; False where there is none.

        What a run that was killed still has in the worker's hands is waited for.

        Raises:
            CheckpointNotFoundError: A step that is asked for is not there.
            CorruptCheckpointError, MissingKeysError, ShapeMismatchError: As `asyncckpt.load`.
        """
        if self._checkpointer is None:
            return False
        path = self._newest() if step < 0 else self._path(step)
        if path is None:
            return False
        if step >= 0 and not os.path.isdir(path):
            raise CheckpointNotFoundError(f"there is no step {step} in {self.folder}", path=path)
        state: dict[str, Any] = self._model()
        wanted = {} if _step_of(path) == 0 else {k: v for k, v in self.states.items() if k not in self._excluded}
        if os.path.exists(os.path.join(path, MANIFEST_NAME)):
            self._checkpointer.load(path, {**state, **wanted}, strict=True)
        else:
            dcp.load({**state, **wanted}, checkpoint_id=path)
        for part in self._parts:
            part.load_state_dict(state, strict=False)  # of hooks that build tensors for state_dict(); others share them
        _log.info("loaded %s", path)
        return True

    def maybe_wait_for_staging(self) -> None:
        """Wait until what was saved may be changed; an attached optimizer's `step()` does that by itself."""
        if self._checkpointer is not None:
            self._checkpointer.fence()

    def maybe_wait_for_saving(self) -> None:
        """Wait until every save is committed."""
        if self._checkpointer is not None:
            self._checkpointer.wait()

    def close(self) -> None:
        """Wait for the saves, keep the last few, and free everything. Twice is fine."""
        checkpointer = self._checkpointer
        if checkpointer is None:
            return
        try:
            checkpointer.wait()
            self._purge()
        finally:
            self._checkpointer = None
            for thread in self._removing:
                thread.join()
            checkpointer.close()

    def _should_save(self, step: int, last_step: bool) -> bool:
        if self.load_only:
            return False
        return last_step or step % self.interval == 0 or (step == 1 and self._first_step)

    def _path(self, step: int) -> str:
        return os.path.join(self.folder, f"step-{step}")

    def _newest(self) -> str | None:
        """Return the newest of ours, or, without any, torchtitan's own of the highest step."""
        assert self._checkpointer is not None
        found = self._checkpointer.latest_checkpoint(self.folder)
        if found is not None:
            return found
        steps = [step for step in self._steps() if os.path.exists(os.path.join(self._path(step), DCP_METADATA_NAME))]
        return self._path(max(steps)) if steps else None

    def _steps(self) -> list[int]:
        names = os.listdir(self.folder) if os.path.isdir(self.folder) else []
        return sorted(int(found[1]) for name in names if (found := _STEP.match(name)))

    def _purge(self) -> None:
        """Remove what is too many of the committed ones, in a thread; only after a newer one was committed."""
        ended = [handle for handle in self._pending if handle.written.done()]
        self._pending = [handle for handle in self._pending if not handle.written.done()]
        committed = [handle for handle in ended if handle.phase == "written"]
        if not committed or not self.keep_latest_k or find_rank_info(None).rank != 0:
            return
        newest = os.path.basename(committed[-1].path)
        whole = [s for s in self._steps() if os.path.exists(os.path.join(self._path(s), DCP_METADATA_NAME))]
        stale = [self._path(step) for step in whole[: -self.keep_latest_k] if f"step-{step}" != newest]
        self._removing = [thread for thread in self._removing if thread.is_alive()]
        if stale:
            thread = threading.Thread(target=lambda: list(map(remove, stale)), name="asyncckpt-purge")
            thread.start()
            self._removing.append(thread)


def _values(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def _step_of(path: str) -> int:
    found = _STEP.match(os.path.basename(path))
    return int(found[1]) if found else -1

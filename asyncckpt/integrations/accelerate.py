"""Accelerate: an `Accelerator` whose `save_state` stages in the background.

    accelerator = AsyncAccelerator(project_config=...)

The directory has what the stock `save_state` puts there, so that the stock `load_state` reads it, and appears when it
is complete. FSDP, DeepSpeed and Megatron-LM are saved as stock does it, in the training's time.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from asyncckpt.integrations.pending_saves import remove
from asyncckpt.integrations.recording import recording
from asyncckpt.integrations.stock_saver import StockSaver

_PACKAGES = ("accelerate", "transformers", "safetensors")
_FOREIGN = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_NUMBERED = re.compile(r"checkpoint_([0-9]+)\Z")

_log = logging.getLogger("asyncckpt.integrations")


class AsyncAccelerator(Accelerator):
    """See the module.

    Args:
        *arguments, **keywords: Of `Accelerator`.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`.
    """

    def __init__(self, *arguments: Any, checkpointer_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._options = dict(checkpointer_options or {})
        self._saver: StockSaver | None = None
        self._warned = False

    @property
    def stock_saver(self) -> StockSaver:
        """What saves; made on first use, closed by `end_training()`."""
        if self._saver is None:
            self._saver = StockSaver(**self._options)
        return self._saver

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | str:
        """As stock, but returns when everything is staged. Every rank calls it.

        Returns:
            Where the checkpoint will be.

        Raises:
            ValueError: No `output_dir`, and no automatic naming.
        """
        naming = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not naming:
            raise ValueError("save_state() needs output_dir where automatic_checkpoint_naming is off")
        if self._is_foreign():
            found: Path | str = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
            return found
        number = self.save_iteration
        target = os.path.join(self.project_dir, "checkpoints", f"checkpoint_{number}") if naming else str(output_dir)
        self.rotate()
        self._attach()
        with tempfile.TemporaryDirectory(prefix="asyncckpt-") as scratch:
            with recording(os.path.join(scratch, "state"), modules=_PACKAGES) as recorded:
                self.project_configuration.automatic_checkpoint_naming = False
                try:
                    super().save_state(recorded.directory, safe_serialization, **save_model_func_kwargs)
                finally:
                    self.project_configuration.automatic_checkpoint_naming = naming
            self.stock_saver.save(target, recorded.files, step=number)
        return Path(target)

    def load_state(self, input_dir: Any = None, *arguments: Any, **keywords: Any) -> None:
        """As stock; waits for what is being saved, and publishes what an earlier run had staged. For every rank."""
        naming = self.project_configuration.automatic_checkpoint_naming
        place = os.path.join(self.project_dir, "checkpoints", "any") if naming and input_dir is None else input_dir
        if self._saver is not None:
            self._saver.settle()
        if place is not None and not self._is_foreign():
            self.stock_saver.recover(place)
        if input_dir is None and naming:
            latest = self._numbered()
            if not latest:
                raise ValueError(f"there is no checkpoint in {os.path.dirname(str(place))}")
            input_dir = latest[-1][1]
        super().load_state(input_dir, *arguments, **keywords)

    def rotate(self) -> None:
        """Take note of what was published, and keep `total_limit` of that; `save_state` does it, and `end_training`."""
        if self._saver is None or not self._saver.poll() or not self.is_main_process:
            return
        self._keep_limit()

    def _keep_limit(self) -> None:
        limit = self.project_configuration.total_limit
        if self.project_configuration.automatic_checkpoint_naming and limit is not None:
            for _, path in self._numbered()[: -max(limit, 1)]:
                remove(path)

    def _numbered(self) -> list[tuple[int, str]]:
        """Return (number, path) of the published checkpoints with automatic names, oldest first."""
        root = os.path.join(self.project_dir, "checkpoints")
        names = os.listdir(root) if os.path.isdir(root) else []
        return sorted((int(m[1]), os.path.join(root, name)) for name in names if (m := _NUMBERED.match(name)))

    def end_training(self) -> None:
        """As stock; waits until everything is published."""
        self.close_checkpointer()
        super().end_training()

    def close_checkpointer(self) -> None:
        """Wait until everything is published, and free what saves; the next save makes it anew."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
            if self.is_main_process:
                self._keep_limit()

    def _attach(self) -> None:
        for wrapped in self._optimizers:
            inner = getattr(wrapped, "optimizer", wrapped)
            if isinstance(inner, torch.optim.Optimizer):
                self.stock_saver.checkpointer.attach(inner)

    def _is_foreign(self) -> bool:
        is_foreign = any(word in str(self.distributed_type).rpartition(".")[2] for word in _FOREIGN)
        if is_foreign and not self._warned:
            self._warned = True
            _log.warning("%s is saved by Accelerate itself, in the training's time", self.distributed_type)
        return is_foreign

"""Accelerate: an `Accelerator` whose `save_state` stages in the background.

    accelerator = AsyncAccelerator(project_config=...)

The directory has the files of Accelerate's own `save_state`, so that its `load_state` can read it, and appears when it
is complete. With FSDP, DeepSpeed and Megatron-LM, Accelerate itself saves, while the training waits.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate import Accelerator

from asyncckpt.integrations._background_saver import BackgroundSaver, warn_of_stock_saves
from asyncckpt.integrations._capture import recording
from asyncckpt.integrations._export_queue import remove_target

_SAVED_BY_FRAMEWORK = ("FSDP", "DEEPSPEED", "MEGATRON_LM", "XLA", "TP")
_NUMBERED = re.compile(r"checkpoint_([0-9]+)\Z")


class AsyncAccelerator(Accelerator):
    """An `Accelerator` whose `save_state` stages in the background.

    Args:
        *arguments, **keywords: Arguments of `Accelerator`.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`.

    Attributes:
        background_saver: Saves the files. It starts with the first save, and ends with `end_training()`.
    """

    def __init__(self, *arguments: Any, checkpointer_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.background_saver = BackgroundSaver(**(checkpointer_options or {}))

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **save_model_func_kwargs: Any
    ) -> Path | str:
        """Save as `Accelerator.save_state` does, but return when everything is staged. Every rank calls it.

        Returns:
            Path at which the checkpoint will be.

        Raises:
            ValueError: There is neither an `output_dir` nor automatic naming; or the name is taken, as in Accelerate.
        """
        naming = self.project_configuration.automatic_checkpoint_naming
        if output_dir is None and not naming:
            raise ValueError("save_state() needs output_dir if automatic_checkpoint_naming is off")
        if self._framework_saves():
            found: Path | str = super().save_state(output_dir, safe_serialization, **save_model_func_kwargs)
            return found
        number = self.save_iteration
        target = os.path.join(self._root, f"checkpoint_{number}") if naming else str(output_dir)
        if naming and os.path.exists(target):
            raise ValueError(f"{target} already exists; set project_configuration.iteration to the next number")
        self.rotate()
        self.background_saver.attach(*self._optimizers)
        with recording("state") as recorded:
            self.project_configuration.automatic_checkpoint_naming = False
            try:
                super().save_state(recorded.directory, safe_serialization, **save_model_func_kwargs)
            finally:
                self.project_configuration.automatic_checkpoint_naming = naming
        self.background_saver.save(target, recorded.files, step=number)
        return Path(target)

    def load_state(self, input_dir: Any = None, *arguments: Any, **keywords: Any) -> None:
        """Load as `Accelerator.load_state` does, after pending saves and those of an earlier run are published.

        Every rank calls it.
        """
        naming = self.project_configuration.automatic_checkpoint_naming
        is_newest = input_dir is None and naming
        self.rotate(self.background_saver.wait_all_ranks())
        if (input_dir is not None or is_newest) and not self._framework_saves():
            self.background_saver.recover(self._root if is_newest else Path(input_dir).parent)
        if is_newest:
            numbered = self._numbered()
            if not numbered:
                raise ValueError(f"there is no checkpoint in {self._root}")
            input_dir = numbered[-1][1]
        super().load_state(input_dir, *arguments, **keywords)

    def rotate(self, published: Sequence[str] | None = None) -> None:
        """Remove published checkpoints in excess of `total_limit`. The other methods call it.

        Args:
            published: Targets that were published since the last call; None: determine them.
        """
        limit, naming = self.project_configuration.total_limit, self.project_configuration.automatic_checkpoint_naming
        published = self.background_saver.poll() if published is None else published
        if published and self.is_main_process and naming and limit is not None:
            for _, path in self._numbered()[: -max(limit, 1)]:
                remove_target(path)

    @property
    def _root(self) -> str:
        """Directory of the checkpoints with automatic names."""
        return os.path.join(self.project_dir, "checkpoints")

    def _numbered(self) -> list[tuple[int, str]]:
        """Return (number, path) of the published checkpoints with automatic names, oldest first."""
        names = os.listdir(self._root) if os.path.isdir(self._root) else []
        return sorted((int(m[1]), os.path.join(self._root, name)) for name in names if (m := _NUMBERED.match(name)))

    def end_training(self) -> None:
        """End the training as `Accelerator` does, after all saves are published."""
        self.close_checkpointer()
        super().end_training()

    def close_checkpointer(self) -> None:
        """Wait until all saves are published, and free the checkpointer; the next save makes a new one."""
        self.rotate(self.background_saver.close())

    def _framework_saves(self) -> bool:
        kind = str(self.distributed_type).rpartition(".")[2]
        reasons = [kind] if any(word in kind for word in _SAVED_BY_FRAMEWORK) else []
        reasons += ["save_on_each_node"] if self.project_configuration.save_on_each_node else []
        return warn_of_stock_saves(*reasons)

"""Lightning `Trainer` and `Fabric`: their own checkpoints, staged in the background.

    Trainer(plugins=[WorkerCheckpointIO()], ...)                # one file for each checkpoint: single device, DDP
    Trainer(strategy=WorkerModelParallelStrategy(), ...)        # FSDP2 and tensor parallel: a directory in DCP's layout

What is written is what Lightning writes, so that `ckpt_path=` works without this package, and appears when it is whole.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.io.checkpoint_io import CheckpointIO
from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.strategies import ModelParallelStrategy

from asyncckpt.config import RankInfo
from asyncckpt.integrations.capturing import captured_torch_save
from asyncckpt.integrations.stock_saver import StockSaver
from asyncckpt.managing.rng import RngState

META_NAME = "meta.pt"
"""What Lightning keeps beside the tensors of a sharded checkpoint, and knows such a one by."""


class WorkerCheckpointIO(CheckpointIO):
    """Saves the files that `TorchCheckpointIO` saves. Of several ranks the first uses it, as with any `CheckpointIO`.

    Args:
        **options: Fields of `CheckpointerConfig`, and `endpoint`.
    """

    def __init__(self, **options: Any) -> None:
        self._options = options
        self._saver: StockSaver | None = None
        self._optimizers: list[torch.optim.Optimizer] = []
        self._stock = TorchCheckpointIO()
        self._count = 0

    @property
    def saver(self) -> StockSaver:
        """What saves; made on first use, and again after `teardown()`."""
        if self._saver is None:
            self._saver = StockSaver(rank_info=RankInfo(0, 1), **self._options)
            self._saver.checkpointer.attach(*self._optimizers)
        return self._saver

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let what these own be copied behind forward and backward; their `step()` waits for it."""
        self._optimizers = [*self._optimizers, *optimizers]
        if self._saver is not None:
            self._saver.checkpointer.attach(*optimizers)

    def recover(self, directory: Any) -> list[str]:
        """Publish in `directory` what a run that was killed had staged; before asking what is there. Returns it."""
        return self.saver.recover(Path(directory) / "any")

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Stage `checkpoint`, and return.

        Raises:
            TypeError: `storage_options`, as stock.
            UnsupportedPathError: A URL.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        self._count += 1
        step = checkpoint.get("global_step", self._count)
        step = step if type(step) is int else self._count
        self.saver.save(path, {"file": captured_torch_save(checkpoint)}, step=step, is_directory=False)

    def load_checkpoint(self, path: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """As stock; waits for `path` if it is being saved."""
        if self._saver is not None:
            self._saver.wait(target=path)
        found: dict[str, Any] = self._stock.load_checkpoint(path, *arguments, **keywords)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove it, once what was saved after it is published."""
        self.saver.discard(path)

    def teardown(self) -> None:
        """Wait until everything is published."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()


class AttachOptimizers(Callback):
    """Attaches a Trainer's optimizers to its `WorkerCheckpointIO` or strategy, so that saves copy behind the steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        found = trainer.strategy if hasattr(trainer.strategy, "attach") else trainer.strategy.checkpoint_io
        if hasattr(found, "attach"):
            found.attach(*trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Called by the Trainer: what was published makes room."""
        for owner in (trainer.strategy, trainer.strategy.checkpoint_io):
            saver = getattr(owner, "_saver", None)
            if saver is not None and saver.pending():
                saver.poll()


class RandomStates(Callback):
    """Keeps the random generators in the checkpoints, which Lightning does not: a resumed run draws the same numbers.

    Each rank needs its own; a checkpoint of several ranks holds the first one's, as it does of every callback.
    """

    def __init__(self) -> None:
        self._restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is made."""
        return RngState().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called when one is loaded; takes effect at the first batch, behind all that draws numbers before it."""
        self._restored = dict(state_dict)

    def on_train_batch_start(self, *_: Any) -> None:
        """Called by the Trainer."""
        states, self._restored = self._restored, None
        if states is not None:
            RngState().load_state_dict(states)


class WorkerModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose sharded checkpoints, directories in DCP's layout, are staged in the background.

    Args:
        *arguments, **keywords: Of `ModelParallelStrategy`.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`. `replicated` is "assume", as stock DCP
            does: what is stored for each rank because it differs, stock does not find.
    """

    def __init__(self, *arguments: Any, checkpointer_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._worker_options = {"replicated": "assume", **(checkpointer_options or {}), "layout": "dcp"}
        self._saver: StockSaver | None = None
        self._attached: list[torch.optim.Optimizer] = []

    @property
    def saver(self) -> StockSaver:
        """What saves; made on first use, on all ranks."""
        if self._saver is None:
            self._saver = StockSaver(**self._worker_options)
            self._saver.checkpointer.attach(*self._attached)
        return self._saver

    def attach(self, *optimizers: torch.optim.Optimizer) -> None:
        """Let what these own be copied behind forward and backward; their `step()` waits for it."""
        self._attached = [*self._attached, *optimizers]
        if self._saver is not None:
            self._saver.checkpointer.attach(*optimizers)

    def recover(self, directory: Any) -> list[str]:
        """Publish in `directory` what a run that was killed had staged. Every rank calls it. Returns it."""
        return self.saver.recover(Path(directory) / "any")

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Stage the rank's part of `checkpoint`, and return.

        Raises:
            TypeError: `storage_options`, as stock.
        """
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        for n, optimizer_state in enumerate(checkpoint.pop("optimizer_states", [])):
            state[f"optimizer_{n}"] = optimizer_state
        files = {META_NAME: captured_torch_save(checkpoint)} if self.global_rank == 0 else {}
        self.saver.save_moved(path, state, files, step=int(checkpoint.get("global_step", 0)))

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """As stock; waits for saves under way."""
        if self._saver is not None:
            self._saver.settle()
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *arguments, **keywords)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove it, once what was saved after it is published."""
        if self.global_rank == 0:
            self.saver.discard(filepath)

    def teardown(self) -> None:
        """Wait until everything is published."""
        saver, self._saver = self._saver, None
        if saver is not None:
            saver.close()
        super().teardown()

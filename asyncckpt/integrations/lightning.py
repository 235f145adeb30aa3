"""Lightning `Trainer` and `Fabric`: their own checkpoints, staged in the background.

    Trainer(plugins=[WorkerCheckpointIO()], ...)                # one file for each checkpoint: single device, DDP
    Trainer(strategy=WorkerModelParallelStrategy(), ...)        # FSDP2 and tensor parallel: a directory in layout "dcp"

A checkpoint is what Lightning itself writes, so that `ckpt_path=` works without this package. It appears when it is
complete.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.fabric.plugins.io.torch_io import TorchCheckpointIO
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy

from asyncckpt.config import RankInfo
from asyncckpt.integrations._background_saver import BackgroundSaver
from asyncckpt.integrations._capture import capture_torch_save
from asyncckpt.manager.rng import RngState


class WorkerCheckpointIO(TorchCheckpointIO):
    """Saves the files of `TorchCheckpointIO`. Of several ranks only rank 0 uses it, as any `CheckpointIO`.

    Args:
        **options: Fields of `CheckpointerConfig`, and `endpoint`.

    Attributes:
        saver: Saves the files. It starts with the first save, and ends with `teardown()`.
    """

    def __init__(self, **options: Any) -> None:
        self.saver = BackgroundSaver(rank_info=RankInfo(0, 1), **options)

    def recover(self, directory: Any) -> list[str]:
        """Publish what a killed run has staged for `directory`, and return the targets.

        Call it before looking for checkpoints there.
        """
        return self.saver.recover(directory)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Stage `checkpoint`, and return.

        Raises:
            TypeError: `storage_options` were given, as in Lightning.
            UnsupportedPathError: `path` is a URL.
        """
        if storage_options is not None:
            raise TypeError(f"{type(self).__name__} takes no storage_options")
        step = checkpoint.get("global_step")  # with Fabric it may have any type
        step = step if type(step) is int else 0
        self.saver.save(path, {"file": capture_torch_save(checkpoint)}, step=step, kind="file")

    def load_checkpoint(self, path: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Load as `TorchCheckpointIO` does, after a pending save to `path` is published."""
        self.saver.wait(target=path)
        found: dict[str, Any] = super().load_checkpoint(path, *arguments, **keywords)
        return found

    def remove_checkpoint(self, path: Any) -> None:
        """Remove a checkpoint, once a later save is published."""
        self.saver.discard(path)

    def teardown(self) -> None:
        """Wait until all saves are published."""
        self.saver.close()


class AttachOptimizers(Callback):
    """Attaches a Trainer's optimizers to its `WorkerCheckpointIO` or strategy, so that saves copy during the steps."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Called by the Trainer."""
        for saver in _savers_of(trainer):
            saver.attach(*trainer.optimizers)

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Called by the Trainer: removes checkpoints that later ones have replaced."""
        for saver in _savers_of(trainer):
            saver.poll()


def _savers_of(trainer: Any) -> list[BackgroundSaver]:
    found = [getattr(owner, "saver", None) for owner in (trainer.strategy, trainer.strategy.checkpoint_io)]
    return [saver for saver in found if isinstance(saver, BackgroundSaver)][:1]


def _file_exists(self: Any, filepath: Any, trainer: Any) -> bool:
    """Return whether a file will exist after pending saves and removals, so that names get the same suffixes."""
    savers = _savers_of(trainer)
    if not savers:
        return bool(_stock_file_exists(self, filepath, trainer))
    exists = trainer.is_global_zero and savers[0].will_exist(filepath)
    return bool(trainer.strategy.reduce_boolean_decision(exists, all=False))


_stock_file_exists, ModelCheckpoint.file_exists = ModelCheckpoint.file_exists, _file_exists


class RandomStates(Callback):
    """Saves the states of random number generators in checkpoints, so that a resumed run draws the same numbers.

    A checkpoint of several ranks holds the generators of rank 0 only, as it does for every callback.
    """

    _restored: dict[str, Any] | None = None

    def state_dict(self) -> dict[str, Any]:
        """Called when a checkpoint is made."""
        return RngState().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Called when a checkpoint is loaded. Takes effect at the first batch, after earlier draws."""
        self._restored = dict(state_dict)

    def on_train_batch_start(self, *_: Any) -> None:
        """Called by the Trainer."""
        states, self._restored = self._restored, None
        if states is not None:
            RngState().load_state_dict(states)


class WorkerModelParallelStrategy(ModelParallelStrategy):
    """`ModelParallelStrategy` whose sharded checkpoints, directories in layout "dcp", are staged in the background.

    Args:
        *arguments, **keywords: Arguments of `ModelParallelStrategy`.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`. The default of `replicated` is "assume",
            as in `torch.distributed.checkpoint`, which would not find values that are stored for each rank.

    Attributes:
        saver: Saves the files, on all ranks. It starts with the first save, and ends with `teardown()`.
    """

    def __init__(self, *arguments: Any, checkpointer_options: Mapping[str, Any] | None = None, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self.saver = BackgroundSaver(**{"replicated": "assume", **(checkpointer_options or {}), "layout": "dcp"})

    def recover(self, directory: Any) -> list[str]:
        """Publish what a killed run has staged for `directory`, and return the targets. Every rank calls it."""
        return self.saver.recover(directory)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Stage the rank's part of `checkpoint`, and return.

        Raises:
            TypeError: `storage_options` were given, as in Lightning.
        """
        if storage_options is not None or not self._save_distributed_checkpoint:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        path = Path(self.broadcast(filepath))
        state = {"state_dict": checkpoint.pop("state_dict")}
        state |= {f"optimizer_{n}": found for n, found in enumerate(checkpoint.pop("optimizer_states", []))}
        files = {"meta.pt": capture_torch_save(checkpoint)} if self.global_rank == 0 else {}
        self.saver.save(path, files, step=int(checkpoint.get("global_step", 0)), kind="dcp", state=state)

    def load_checkpoint(self, checkpoint_path: Any, *arguments: Any, **keywords: Any) -> dict[str, Any]:
        """Load as `ModelParallelStrategy` does, after pending saves are published."""
        self.saver.wait_all_ranks()
        found: dict[str, Any] = super().load_checkpoint(checkpoint_path, *arguments, **keywords)
        return found

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint, once a later save is published."""
        if self.global_rank == 0:
            self.saver.discard(filepath)

    def teardown(self) -> None:
        """Wait until all saves are published."""
        self.saver.close()
        super().teardown()

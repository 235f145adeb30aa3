"""Hugging Face `Trainer`: its own checkpoints, staged in the background.

    class MyTrainer(AsyncCheckpointMixin, Trainer): ...        # or AsyncTrainer, which is just that

A `checkpoint-N` has the files of the Trainer's own, so that `resume_from_checkpoint` works without this package. It
appears when it is complete. With FSDP, DeepSpeed, TPUs, SageMaker and `push_to_hub`, the Trainer itself saves, while
the training waits.
"""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from typing import Any

from transformers import Trainer, TrainerCallback

from asyncckpt.integrations._background_saver import BackgroundSaver, warn_of_stock_saves
from asyncckpt.integrations._capture import recording
from asyncckpt.manager.preemption import FrameworkPreemption

_PREFIX = "checkpoint-"
_SAVED_BY_FRAMEWORK = ("is_fsdp_enabled", "is_deepspeed_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_enabled")


class AsyncCheckpointMixin:
    """A mixin for `Trainer` or a subclass, before which it must stand in the list of base classes.

    Args:
        *arguments, **keywords: Arguments of the Trainer.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`.
        preemption_signal: After any rank has received this signal, all ranks save at the same of the next steps, and
            the training ends. None: preemption is off.

    Attributes:
        background_saver: Saves the files. It starts with the first save, and ends when `train()` returns.
    """

    def __init__(
        self,
        *arguments: Any,
        checkpointer_options: Mapping[str, Any] | None = None,
        preemption_signal: signal.Signals | int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self.background_saver = BackgroundSaver(**(checkpointer_options or {}))
        self._asyncckpt_run_dir: str | None = None
        self._asyncckpt_signal = preemption_signal
        self._asyncckpt_stop: FrameworkPreemption | None = None
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    def recover_checkpoints(self) -> list[str]:
        """Publish what a killed run has staged, and return the targets.

        Call it on every rank, before looking for the last checkpoint. `train(resume_from_checkpoint=True)` calls it.

        Raises:
            DirectoryInUseError: Another live training has this `output_dir`.
        """
        if self._asyncckpt_framework_saves():
            return []
        self.background_saver.claim(self.args.output_dir)  # type: ignore[attr-defined]
        return self.background_saver.recover(self.args.output_dir)  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """Train as `Trainer.train` does. To resume, first publish what an earlier run has staged.

        Raises:
            SignalHandlerError: `preemption_signal` was given, and this is not the main thread.
            DirectoryInUseError: Another live training has this directory. Never with `save_strategy="no"`.
            PlanTimeoutError: A rank was asked to stop, and other ranks did not report their step in time.
            Exception: As `Trainer.train`.
        """
        signals = self._asyncckpt_signal
        with contextlib.nullcontext() if signals is None else FrameworkPreemption(signals) as self._asyncckpt_stop:
            try:
                if not self._asyncckpt_framework_saves() and self.args.save_strategy != "no":  # type: ignore[attr-defined]
                    trial = arguments[0] if arguments else keywords.get("trial")
                    self.background_saver.claim(super()._get_output_dir(trial=trial))  # type: ignore[misc]
                if resume_from_checkpoint:
                    self.recover_checkpoints()
                result = super().train(resume_from_checkpoint, *arguments, **keywords)  # type: ignore[misc]
                self._asyncckpt_wait_all_ranks()
            except BaseException:
                self.background_saver.leave()
                raise
            self.background_saver.close()
            return result

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **keywords: Any) -> None:
        if self._asyncckpt_framework_saves():
            super()._save_checkpoint(model, trial, *more, **keywords)  # type: ignore[misc]
            return
        self.background_saver.attach(self.optimizer)  # type: ignore[attr-defined]
        state: Any = self.state  # type: ignore[attr-defined]
        run_dir = super()._get_output_dir(trial=trial)  # type: ignore[misc]
        name = f"{_PREFIX}{state.global_step}"
        with recording(name) as found:
            self._asyncckpt_run_dir = os.path.dirname(found.directory)
            try:
                super()._save_checkpoint(model, trial, *more, **keywords)  # type: ignore[misc]
            finally:
                self._asyncckpt_run_dir = None
            self._asyncckpt_name_best(found.directory, os.path.join(run_dir, name))
        self._asyncckpt_rotate(self.background_saver.poll())
        self.background_saver.save(os.path.join(run_dir, name), found.files, step=state.global_step)

    def _get_output_dir(self, *arguments: Any, **keywords: Any) -> Any:
        """Return the temporary directory while a save is recorded, else the Trainer's."""
        return self._asyncckpt_run_dir or super()._get_output_dir(*arguments, **keywords)  # type: ignore[misc]

    def _asyncckpt_name_best(self, recorded: str, target: str) -> None:
        """Correct the path of the best checkpoint, as the Trainer has seen the temporary directory."""
        state: Any = self.state  # type: ignore[attr-defined]
        best = getattr(state, "best_global_step", None)
        run_dir = os.path.dirname(target)
        if best:
            path = os.path.join(run_dir, f"{_PREFIX}{best}")
            if path == target or os.path.isdir(path) or path in self.background_saver.pending():
                state.best_model_checkpoint = path
        elif state.best_model_checkpoint and os.path.dirname(state.best_model_checkpoint) == os.path.dirname(recorded):
            state.best_model_checkpoint = os.path.join(run_dir, os.path.basename(state.best_model_checkpoint))
        written = os.path.join(recorded, "trainer_state.json")
        if os.path.exists(written):
            state.save_to_json(written)

    def _asyncckpt_framework_saves(self) -> bool:
        reasons = [name for name in _SAVED_BY_FRAMEWORK if getattr(self, name, False)]
        args = self.args  # type: ignore[attr-defined]
        return warn_of_stock_saves(
            *reasons, *(name for name in ("push_to_hub", "save_on_each_node") if getattr(args, name))
        )

    def _asyncckpt_rotate(self, published: list[str]) -> None:
        """Apply `save_total_limit` as the Trainer does, to published checkpoints only."""
        trainer: Any = self
        if not published or not trainer.args.should_save:
            return
        run_dir = os.path.dirname(published[-1])
        if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4
            trainer._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            return
        from transformers.trainer_utils import rotate_checkpoints

        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=trainer.args.save_total_limit,
            best_model_checkpoint=trainer.state.best_model_checkpoint,
            use_mtime=True,
        )

    def _asyncckpt_wait_all_ranks(self) -> None:
        """Wait on all ranks until all saves are published, and apply `save_total_limit`."""
        self._asyncckpt_rotate(self.background_saver.wait_all_ranks())

    def _load_best_model(self) -> None:
        self._asyncckpt_wait_all_ranks()
        super()._load_best_model()  # type: ignore[misc]

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self._asyncckpt_wait_all_ranks()
        return super()._finalize_training(*arguments, **keywords)  # type: ignore[misc]


class AsyncTrainer(AsyncCheckpointMixin, Trainer):
    """`transformers.Trainer` with the mixin."""


class _Steps(TrainerCallback):
    """After every step, applies `save_total_limit`, and ends the training on preemption."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        trainer = self._trainer
        trainer._asyncckpt_rotate(trainer.background_saver.poll())
        if trainer._asyncckpt_stop is not None and trainer._asyncckpt_stop.stops_at(state.global_step):
            control.should_save = control.should_training_stop = True
        return control

"""Hugging Face `Trainer`: its own checkpoints, staged in the background.

    class MyTrainer(AsyncCheckpointMixin, Trainer): ...        # or AsyncTrainer, which is just that

A `checkpoint-N` has what the stock Trainer puts there, so that `resume_from_checkpoint` works without this package. It
appears when it is complete. Saved as stock does it, in the training's time: FSDP, DeepSpeed, TPUs, SageMaker, and
`push_to_hub`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from transformers import Trainer, TrainerCallback

from asyncckpt.integrations.recording import Recording, recording
from asyncckpt.integrations.stock_saver import StockSaver
from asyncckpt.integrations.told_to_stop import ToldToStop

TRAINER_STATE_NAME = "trainer_state.json"
_PREFIX = "checkpoint-"
_PACKAGES = ("transformers", "accelerate", "peft", "safetensors")
_FOREIGN = ("is_fsdp_enabled", "is_deepspeed_enabled", "is_fsdp_xla_v1_enabled", "is_fsdp_xla_enabled")

_log = logging.getLogger("asyncckpt.integrations")


class AsyncCheckpointMixin:
    """Stands before `Trainer`, or a subclass of it, in the list of base classes.

    Args:
        *arguments, **keywords: Of the Trainer.
        checkpointer_options: Fields of `CheckpointerConfig`, and `endpoint`.
        preemption_signal: When it comes to any rank, all save after the same step, one of the next, and training ends;
            None: nobody looks for it.
    """

    def __init__(
        self,
        *arguments: Any,
        checkpointer_options: Mapping[str, Any] | None = None,
        preemption_signal: signal.Signals | int | None = None,
        **keywords: Any,
    ) -> None:
        super().__init__(*arguments, **keywords)
        self._asyncckpt_options = dict(checkpointer_options or {})
        self._asyncckpt_saver: StockSaver | None = None
        self._asyncckpt_run_dir: str | None = None
        self._asyncckpt_warned = False
        self._asyncckpt_signal = preemption_signal
        self._asyncckpt_stop: ToldToStop | None = None
        self.add_callback(_Steps(self))  # type: ignore[attr-defined]

    @property
    def stock_saver(self) -> StockSaver:
        """What saves; made on first use, closed when `train()` returns."""
        if self._asyncckpt_saver is None:
            self._asyncckpt_saver = StockSaver(**self._asyncckpt_options)
        return self._asyncckpt_saver

    def recover_checkpoints(self) -> list[str]:
        """Publish what a run that was killed had staged, and return it; before asking which checkpoint is the last.

        Every rank calls it. `train(resume_from_checkpoint=True)` does it by itself.

        Raises:
            DirectoryInUseError: Another training, which is alive, has this `output_dir`.
        """
        if self._asyncckpt_is_foreign():
            return []
        self.stock_saver.claim(self.args.output_dir)  # type: ignore[attr-defined]
        return self.stock_saver.recover(os.path.join(self.args.output_dir, _PREFIX))  # type: ignore[attr-defined]

    def train(self, resume_from_checkpoint: Any = None, *arguments: Any, **keywords: Any) -> Any:
        """As `Trainer.train`. What an earlier run had staged is published first, then the newest is looked for.

        Raises:
            SignalHandlerError: `preemption_signal` outside of the main thread.
            DirectoryInUseError: Another training, which is alive, has this directory. With `save_strategy="no"` never.
            PlanTimeoutError: A rank was told to stop, and others do not say how far they are.
            Exception: As `Trainer.train`.
        """
        trainer: Any = super()
        with contextlib.ExitStack() as stack:
            if self._asyncckpt_signal is not None:
                self._asyncckpt_stop = stack.enter_context(ToldToStop(self._asyncckpt_signal))
                stack.callback(setattr, self, "_asyncckpt_stop", None)
            try:
                self._asyncckpt_claim(arguments[0] if arguments else keywords.get("trial"))
                if resume_from_checkpoint:
                    self.recover_checkpoints()
                result = trainer.train(resume_from_checkpoint, *arguments, **keywords)
                self._asyncckpt_settle()
            except BaseException:
                saver, self._asyncckpt_saver = self._asyncckpt_saver, None
                if saver is not None:
                    saver.leave()
                raise
            saver, self._asyncckpt_saver = self._asyncckpt_saver, None
            if saver is not None:
                saver.close()
            return result

    def _asyncckpt_claim(self, trial: Any) -> None:
        args = self.args  # type: ignore[attr-defined]
        if not self._asyncckpt_is_foreign() and args.save_strategy != "no":
            trainer: Any = super()
            self.stock_saver.claim(trainer._get_output_dir(trial=trial))

    def _save_checkpoint(self, model: Any, trial: Any, *more: Any, **keywords: Any) -> None:
        trainer: Any = super()
        if self._asyncckpt_is_foreign():
            trainer._save_checkpoint(model, trial, *more, **keywords)
            return
        self._asyncckpt_attach()
        state = self.state  # type: ignore[attr-defined]
        run_dir = trainer._get_output_dir(trial=trial)
        name = f"{_PREFIX}{state.global_step}"
        with tempfile.TemporaryDirectory(prefix="asyncckpt-") as scratch:
            with recording(os.path.join(scratch, name), modules=_PACKAGES) as found:
                self._asyncckpt_run_dir = scratch
                try:
                    trainer._save_checkpoint(model, trial, *more, **keywords)
                finally:
                    self._asyncckpt_run_dir = None
                self._asyncckpt_name_best(found, run_dir, name)
            self._asyncckpt_rotate(self.stock_saver.poll(), run_dir)
            self.stock_saver.save(os.path.join(run_dir, name), found.files, step=state.global_step)

    def _get_output_dir(self, *arguments: Any, **keywords: Any) -> Any:
        """While a save is recorded, the Trainer believes that it saves elsewhere."""
        trainer: Any = super()
        return self._asyncckpt_run_dir or trainer._get_output_dir(*arguments, **keywords)

    def _asyncckpt_name_best(self, found: Recording, run_dir: str, name: str) -> None:
        """Give the best checkpoint the name that it will have; the Trainer has seen another place."""
        state: Any = self.state  # type: ignore[attr-defined]
        best = getattr(state, "best_global_step", None)
        if best:
            path = os.path.join(run_dir, f"{_PREFIX}{best}")
            if os.path.basename(path) == name or os.path.isdir(path) or path in self.stock_saver.pending():
                state.best_model_checkpoint = path
        elif state.best_model_checkpoint and os.path.dirname(state.best_model_checkpoint) == self._asyncckpt_run_dir:
            state.best_model_checkpoint = os.path.join(run_dir, os.path.basename(state.best_model_checkpoint))
        written = os.path.join(found.directory, TRAINER_STATE_NAME)
        if os.path.exists(written):
            state.save_to_json(written)

    def _asyncckpt_is_foreign(self) -> bool:
        reasons = [name for name in _FOREIGN if getattr(self, name, False)]
        if self.args.push_to_hub:  # type: ignore[attr-defined]
            reasons.append("push_to_hub")
        if reasons and not self._asyncckpt_warned:
            self._asyncckpt_warned = True
            _log.warning("checkpoints are saved by the Trainer itself, in the training's time: %s", ", ".join(reasons))
        return bool(reasons)

    def _asyncckpt_attach(self) -> None:
        optimizer = self.optimizer  # type: ignore[attr-defined]
        inner = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
        if isinstance(inner, torch.optim.Optimizer):
            self.stock_saver.checkpointer.attach(inner)

    def _asyncckpt_rotate(self, published: list[str], run_dir: str) -> None:
        """Keep `save_total_limit` as the Trainer does, of what is published: what is being saved is never counted."""
        args, state = self.args, self.state  # type: ignore[attr-defined]
        if not published or not args.should_save:
            return
        trainer: Any = self
        if hasattr(trainer, "_rotate_checkpoints"):  # transformers 4
            trainer._rotate_checkpoints(use_mtime=True, output_dir=run_dir)
            return
        from transformers.trainer_utils import rotate_checkpoints

        rotate_checkpoints(
            output_dir=run_dir,
            save_total_limit=args.save_total_limit,
            best_model_checkpoint=state.best_model_checkpoint,
            use_mtime=True,
        )

    def _asyncckpt_settle(self) -> None:
        """Wait until everything is published, on all ranks, and rotate."""
        if self._asyncckpt_saver is None:
            return
        published = self._asyncckpt_saver.wait()
        if published:
            self._asyncckpt_rotate(published, os.path.dirname(published[-1]))
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    def _load_best_model(self) -> None:
        self._asyncckpt_settle()
        trainer: Any = super()
        trainer._load_best_model()

    def _finalize_training(self, *arguments: Any, **keywords: Any) -> Any:
        self._asyncckpt_settle()
        trainer: Any = super()
        return trainer._finalize_training(*arguments, **keywords)


class AsyncTrainer(AsyncCheckpointMixin, Trainer):
    """`transformers.Trainer` with the mixin."""


class _Steps(TrainerCallback):
    """After every step: what was published makes room, and a preemption ends the training."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **keywords: Any) -> Any:
        trainer = self._trainer
        if trainer._asyncckpt_saver is not None and trainer._asyncckpt_saver.pending():
            published = trainer._asyncckpt_saver.poll()
            if published:
                trainer._asyncckpt_rotate(published, os.path.dirname(published[-1]))
        if trainer._asyncckpt_stop is not None and trainer._asyncckpt_stop.at(state.global_step):
            control.should_save = control.should_training_stop = True
        return control

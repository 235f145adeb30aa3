"""Hugging Face Trainer: killed at any moment, it goes on as if it had never stopped; stock reads what it leaves.

    python -m asyncckpt.examples.hf_trainer --dir runs/hf --steps 20
    python -m asyncckpt.examples.hf_trainer --dir runs/hf --steps 40 --stock
    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.hf_trainer --dir runs/hf2 --steps 20

With --stock the Trainer is Hugging Face's own, which resumes from the same checkpoints. Lines that concern checkpoints
in the background: `# <-`.
"""

from __future__ import annotations

import argparse
import os
import signal
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.transformers import AsyncTrainer  # <-

VOCABULARY, LENGTH, SAMPLES = 64, 16, 256


class ShowSteps(TrainerCallback):
    """Says where the training is."""

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        print(f"step {state.global_step}", flush=True)


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; return the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--every", type=int, default=3)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_layer=2, n_head=2, n_embd=32, vocab_size=VOCABULARY, n_positions=LENGTH))
    tokens = torch.randint(0, VOCABULARY, (SAMPLES, LENGTH), generator=torch.Generator().manual_seed(1))
    settings = TrainingArguments(
        args.dir,
        max_steps=args.steps,
        lr_scheduler_type="constant_with_warmup",
        save_steps=args.every,
        save_total_limit=3,
        per_device_train_batch_size=4,
        learning_rate=1e-2,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        ddp_find_unused_parameters=False,
    )
    options = {"model": model, "args": settings, "train_dataset": [{"input_ids": t, "labels": t} for t in tokens]}
    if args.stock:
        trainer = Trainer(**options)
    else:
        trainer = AsyncTrainer(**options, preemption_signal=signal.SIGTERM)  # <-
        trainer.recover_checkpoints()  # <- what a run that was killed had staged is published before anybody looks
    trainer.add_callback(ShowSteps())
    newest = get_last_checkpoint(args.dir) if os.path.isdir(args.dir) else None
    trainer.train(resume_from_checkpoint=newest)
    digest = digest_of(trainer.model.state_dict())
    print(f"at step {trainer.state.global_step} the weights are {digest}", flush=True)
    return digest


if __name__ == "__main__":
    main()

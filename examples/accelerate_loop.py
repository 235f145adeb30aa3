"""Accelerate: `save_state` in the background; `load_state`, ours or stock, goes on from it.

    python -m asyncckpt.examples.accelerate_loop --dir runs/accelerate --steps 20
    python -m asyncckpt.examples.accelerate_loop --dir runs/accelerate --steps 40 --stock

Lines that concern checkpoints in the background: `# <-`.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import ProjectConfiguration
from torch import nn

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.accelerate import AsyncAccelerator  # <-

WIDTH, BATCH = 16, 8


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; return the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--stock", action="store_true")
    args = parser.parse_args(arguments)

    project = ProjectConfiguration(args.dir, automatic_checkpoint_naming=True, total_limit=2)
    kind = Accelerator if args.stock else AsyncAccelerator  # <-
    accelerator = kind(cpu=True, project_config=project)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    if os.path.isdir(os.path.join(args.dir, "checkpoints")):
        accelerator.load_state()
        accelerator.project_configuration.iteration = progress.saves

    while progress.step < args.steps:
        generator = torch.Generator().manual_seed(progress.step)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss = (model(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        progress.step += 1
        print(f"step {progress.step}", flush=True)
        if progress.step % 3 == 0:
            progress.saves += 1
            accelerator.save_state()
    accelerator.end_training()
    digest = digest_of(accelerator.unwrap_model(model).state_dict())
    print(f"at step {progress.step} the weights are {digest}", flush=True)
    return digest


class Progress:
    """How far the training is, kept in the checkpoints."""

    def __init__(self) -> None:
        self.step = self.saves = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step, "saves": self.saves}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step, self.saves = state["step"], state["saves"]


if __name__ == "__main__":
    main()

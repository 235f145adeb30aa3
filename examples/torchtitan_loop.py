"""A loop with torchtitan's checkpoint manager: its methods, its `step-N`, in DCP's layout.

    python -m asyncckpt.examples.torchtitan_loop --dir runs/titan --steps 10
    python -m asyncckpt.examples.torchtitan_loop --dir runs/titan --steps 20

The second run goes on at step 10. Lines that concern checkpoints: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from asyncckpt.examples.digests import digest_of
from asyncckpt.integrations.torchtitan import CheckpointManager  # <-

WIDTH, BATCH = 16, 8


class TrainState:
    """What torchtitan's trainer keeps beside the model."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        return {"step": torch.tensor(self.step, dtype=torch.int32)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step = int(state["step"])


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; return the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    state = TrainState()
    checkpointer = CheckpointManager(  # <-
        None,
        [model],
        optimizer,
        scheduler,
        {"train_state": state},
        folder=args.dir,
        interval=3,
        keep_latest_k=2,
    )
    checkpointer.load(step=-1)  # <-
    while state.step < args.steps:
        generator = torch.Generator().manual_seed(state.step)
        batch = torch.randn(BATCH, WIDTH, generator=generator)
        loss = (model(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
        loss.backward()
        checkpointer.maybe_wait_for_staging()  # <-
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        state.step += 1
        print(f"step {state.step}", flush=True)
        checkpointer.save(state.step, last_step=state.step == args.steps)  # <-
    checkpointer.close()  # <-
    digest = digest_of(model.state_dict())
    print(f"at step {state.step} the weights are {digest}", flush=True)
    return digest


if __name__ == "__main__":
    main()

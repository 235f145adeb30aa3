"""Pipeline stages, each with keys of its own: save from some number of stages, go on with any other.

    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.pipeline_stages --dir runs/stages --steps 4
    torchrun --standalone --nproc-per-node 3 -m asyncckpt.examples.pipeline_stages --dir runs/stages --steps 8

A rank saves the layers that it has, under the names that they have in the whole model. So must the optimizer's state
be: numbered parameters would mean other ones on each stage. Lines that concern checkpoints: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import asyncckpt  # <-

BATCH, WIDTH, LAYERS = 12, 17, 6
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)  # <-


class Stage(nn.Module):
    """The layers of one rank, and the way through them and its neighbours."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.last = dist.get_rank(), dist.get_world_size() - 1
        mine = torch.arange(LAYERS).tensor_split(dist.get_world_size())[self.rank].tolist()
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]  # all ranks draw the same numbers
        self.layers = nn.ModuleDict({str(n): layers[n] for n in mine})

    def train_on(self, batch: torch.Tensor) -> torch.Tensor:
        """Run forward and backward through all stages; return the loss, which every stage gets."""
        x = batch
        if self.rank > 0:
            dist.recv(x := torch.empty_like(batch), self.rank - 1)
            x.requires_grad_()
        y = x
        for layer in self.layers.values():
            y = torch.tanh(layer(y))
        loss = torch.zeros(())
        if self.rank < self.last:
            dist.send(y.detach(), self.rank + 1)
            dist.recv(gradient := torch.empty_like(y), self.rank + 1)
            y.backward(gradient)
        else:
            loss = (y - batch_target(batch.shape)).square().mean()
            loss.backward()
        if self.rank > 0:
            assert x.grad is not None
            dist.send(x.grad, self.rank - 1)
        loss = loss.detach()
        dist.broadcast(loss, self.last)
        return loss


def batch_target(shape: torch.Size) -> torch.Tensor:
    """Return what the last stage is to predict."""
    return torch.linspace(-0.5, 0.5, shape.numel()).view(shape)


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train under torchrun; return the losses of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    stage = Stage()
    optimizer = torch.optim.AdamW(stage.parameters(), lr=0.01)

    losses = []
    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <-
        first = 0
        if checkpointer.latest_checkpoint(args.dir) is not None:  # <- on disk or in memory, the same on all ranks
            state = state_of(stage, optimizer, 0)  # <- gives a new optimizer a state, which a fresh start must not have
            checkpointer.restore_latest(args.dir, state)  # <-
            set_optimizer_state_dict(stage, optimizer, state["optim"], options=BY_NAME)  # <-
            first = state["step"]
        for step in range(first, args.steps):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            losses.append(float(stage.train_on(batch)))
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 2 == 0:
                checkpointer.save(state_of(stage, optimizer, step + 1), f"{args.dir}/step-{step + 1}")  # <-
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} stages, steps {first} to {args.steps}: {losses}")
    dist.destroy_process_group()
    return losses


def state_of(stage: Stage, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:  # <-
    """Return what is saved, and what is filled."""
    optim = get_optimizer_state_dict(stage, optimizer, options=BY_NAME)
    return {"model": stage, "optim": optim, "step": step}


if __name__ == "__main__":
    main()

"""Tensor parallelism written by hand, with plain tensors: `ShardedSlice` says what part of the whole each of them is.

    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.hand_written_tp --dir runs/tp --steps 4
    torchrun --standalone --nproc-per-node 3 -m asyncckpt.examples.hand_written_tp --dir runs/tp --steps 8

The second run goes on at step 4, with other slices, of uneven sizes. Where all sizes divide evenly,
`asyncckpt.describe_tp` finds the slices by itself. Lines that concern checkpoints: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

import asyncckpt  # <-

BATCH, WIDTH, HIDDEN = 12, 7, 10


class Layer:
    """Two linear maps, the first cut by its rows and the second by its columns: each rank has some hidden units."""

    def __init__(self) -> None:
        units = torch.arange(HIDDEN).tensor_split(dist.get_world_size())[dist.get_rank()]
        self.first = int(units[0])
        up, down = torch.randn(HIDDEN, WIDTH), torch.randn(WIDTH, HIDDEN)  # all ranks draw the same numbers
        self.up = up[units].requires_grad_()
        self.down = down[:, units].clone().requires_grad_()
        self.bias = torch.zeros(WIDTH, requires_grad=True)  # the same on all ranks
        self.parameters = [self.up, self.down, self.bias]

    def train_on(self, batch: torch.Tensor) -> float:
        """Run forward and backward; return the loss."""
        mine = torch.tanh(batch @ self.up.T) @ self.down.T
        total = mine.detach().clone()
        dist.all_reduce(total)
        whole = (total + self.bias).detach().requires_grad_()
        loss = (whole - batch.sin()).square().mean()
        loss.backward()
        assert whole.grad is not None
        mine.backward(whole.grad)
        self.bias.grad = whole.grad.sum(0)
        return float(loss.detach())

    def described(self, up: torch.Tensor, down: torch.Tensor, bias: torch.Tensor) -> dict[str, Any]:  # <-
        """Say which slices three tensors are, that lie as the parameters do."""
        return {
            "up": asyncckpt.ShardedSlice(up, (HIDDEN, WIDTH), (self.first, 0)),
            "down": asyncckpt.ShardedSlice(down, (WIDTH, HIDDEN), (0, self.first)),
            "bias": bias,
        }


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train under torchrun; return the losses of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layer = Layer()
    optimizer = torch.optim.SGD(layer.parameters, lr=0.05, momentum=0.9)
    for parameter in layer.parameters:  # made here rather than by the first step, so that they can be filled
        optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)

    momenta = [optimizer.state[parameter]["momentum_buffer"] for parameter in layer.parameters]
    state = {  # <-
        "model": layer.described(*(parameter.detach() for parameter in layer.parameters)),  # <-
        "momentum": layer.described(*momenta),  # <-
        "step": 0,  # <-
    }
    asyncckpt.restore_latest(args.dir, state)  # <- in place; None, and nothing changes, before the first save

    losses = []
    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <-
        for step in range(state["step"], args.steps):
            batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
            losses.append(layer.train_on(batch))
            optimizer.step()
            optimizer.zero_grad()
            if (step + 1) % 2 == 0:
                state["step"] = step + 1  # <-
                checkpointer.save(state, f"{args.dir}/step-{step + 1}")  # <-
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, steps {args.steps - len(losses)} to {args.steps}: {losses}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()

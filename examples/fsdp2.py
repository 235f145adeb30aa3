"""FSDP2: save on some number of ranks, go on with any other.

    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.fsdp2 --dir runs/fsdp2 --steps 4
    torchrun --standalone --nproc-per-node 3 -m asyncckpt.examples.fsdp2 --dir runs/fsdp2 --steps 8

The second run goes on at step 4. Each rank writes its own shards, and reads what its new shards need of them, the
optimizer's state included, although that optimizer has none yet. Lines that concern checkpoints: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import asyncckpt  # <-

BATCH, WIDTH, HIDDEN = 12, 16, 33


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train under torchrun; return the losses of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, 1)
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in model:
        if isinstance(layer, nn.Linear):
            fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    state = {"model": model, "optim": optimizer, "step": 0}  # <-
    asyncckpt.restore_latest(args.dir, state)  # <- in place; None, and nothing changes, before the first save

    losses = []
    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <-
        for step in range(state["step"], args.steps):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(BATCH, WIDTH, generator=generator)[dist.get_rank() :: dist.get_world_size()]
            loss = (model(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total := loss.detach().clone())
            losses.append(float(total) / dist.get_world_size())
            if (step + 1) % 2 == 0:
                state["step"] = step + 1  # <-
                checkpointer.save(state, f"{args.dir}/step-{step + 1}")  # <-
    if dist.get_rank() == 0:
        print(f"{dist.get_world_size()} ranks, steps {args.steps - len(losses)} to {args.steps}: {losses}")
    dist.destroy_process_group()
    return losses


if __name__ == "__main__":
    main()

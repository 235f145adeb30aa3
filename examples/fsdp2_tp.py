"""FSDP2 and tensor parallelism on a mesh of two dimensions: save on one mesh, go on with another.

    torchrun --standalone --nproc-per-node 4 -m asyncckpt.examples.fsdp2_tp --dir runs/mesh --tp 2 --steps 4
    torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.fsdp2_tp --dir runs/mesh --tp 1 --steps 8

The optimizer's state is saved under the names of its parameters, as torch's `get_optimizer_state_dict` gives it: that
also makes the state of a new optimizer, which `load` then fills. Lines that concern checkpoints: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import asyncckpt  # <-

BATCH, WIDTH, HIDDEN = 12, 15, 32


def main(arguments: Sequence[str] | None = None) -> list[float]:
    """Train under torchrun; return the losses of this run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--tp", type=int, default=2, help="ranks that share one layer")
    args = parser.parse_args(arguments)

    dist.init_process_group("gloo")
    mesh = init_device_mesh("cpu", (dist.get_world_size() // args.tp, args.tp), mesh_dim_names=("dp", "tp"))
    data = mesh["dp"]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, WIDTH), nn.LayerNorm(WIDTH))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=data)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    losses = []
    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <-
        first = 0
        if checkpointer.latest_checkpoint(args.dir) is not None:  # <- on disk or in memory, the same on all ranks
            state = state_of(model, optimizer, 0)  # <- gives a new optimizer a state, which a fresh start must not have
            checkpointer.restore_latest(args.dir, state)  # <-
            set_optimizer_state_dict(model, optimizer, state["optim"])  # <-
            first = state["step"]
        for step in range(first, args.steps):
            generator = torch.Generator().manual_seed(step)
            batch = torch.randn(BATCH, WIDTH, generator=generator)[data.get_local_rank() :: data.size()]
            loss = (model(batch) - batch.sin()).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            dist.all_reduce(total := loss.detach().clone())
            losses.append(float(total) / dist.get_world_size())
            if (step + 1) % 2 == 0:
                checkpointer.save(state_of(model, optimizer, step + 1), f"{args.dir}/step-{step + 1}")  # <-
    if dist.get_rank() == 0:
        print(f"{data.size()} x {args.tp} ranks, steps {first} to {args.steps}: {losses}")
    dist.destroy_process_group()
    return losses


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> dict[str, Any]:  # <-
    """Return what is saved, and what is filled."""
    return {"model": model, "optim": get_optimizer_state_dict(model, optimizer), "step": step}


if __name__ == "__main__":
    main()

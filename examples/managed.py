"""A training that looks after itself: saves when it should, keeps what it should, and goes on after anything.

    python -m asyncckpt.examples.managed --dir /tmp/managed --steps 200
    asyncckpt run -- torchrun --standalone --nproc-per-node 2 -m asyncckpt.examples.managed --dir /tmp/managed

Ctrl-C, SIGTERM (what a scheduler sends before it takes the machine away) or kill -9 it and run it again: it goes on
where it was, and ends with the same weights, bit for bit. Lines that concern checkpoints are marked with `# <-`.
"""

from __future__ import annotations

import argparse
import signal
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import asyncckpt  # <-


def main(arguments: Sequence[str] | None = None) -> float:
    """Train to the end, or until told to stop; return the last loss."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20)
    args = parser.parse_args(arguments)

    if dist.is_torchelastic_launched() and not dist.is_initialized():
        dist.init_process_group("gloo")
    rank = dist.get_rank() if dist.is_initialized() else 0
    torch.manual_seed(0)
    model: nn.Module = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 1))
    network = DistributedDataParallel(model) if dist.is_initialized() else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
    torch.manual_seed(1 + rank)

    state = {  # <-
        "model": network,  # <-
        "optim": optimizer,  # <-
        "schedule": schedule,  # <-
        "rng": asyncckpt.PerRank(asyncckpt.RngState()),  # <- Python's, numpy's, torch's, of each rank its own
        "step": 0,  # <-
    }
    loss = torch.tensor(float("nan"))
    with asyncckpt.CheckpointManager(  # <-
        args.dir,  # <-
        save_interval_steps=args.every,  # <-
        max_to_keep=3,  # <- the newest ones, and among them
        best_fn=lambda metrics: metrics["loss"],  # <- the best one
        preemption_signal=(signal.SIGTERM, signal.SIGINT),  # <-
    ) as manager:  # <-
        manager.restore(state)  # <- the newest that verifies, the same on all ranks; None when there is none
        while state["step"] < args.steps:
            inputs = torch.randn(8, 16)
            loss = (network(inputs).squeeze(1) - inputs.sum(1)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            schedule.step()
            state["step"] += 1
            if manager.should_save(state["step"]):  # <- also when told to stop
                manager.save(state["step"], state, {"loss": loss.item()})  # <-
            if manager.reached_preemption(state["step"]):  # <- at the same step on all ranks
                print(f"rank {rank}: told to stop at step {state['step']}", flush=True)
                break
    if dist.is_initialized():
        dist.destroy_process_group()
    if rank == 0:
        print(f"step {state['step']}, loss {loss.item():.6f}", flush=True)
    return loss.item()


if __name__ == "__main__":
    main()

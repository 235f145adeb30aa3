"""A loop that saves with stock `torch.distributed.checkpoint`, and keeps its calls: only the storage is another.

    python -m asyncckpt.examples.stock_dcp --dir runs/dcp --steps 10
    python -m asyncckpt.examples.stock_dcp --dir runs/dcp --steps 20

The second run goes on at step 10. Lines that differ from stock: `# <-`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import asyncckpt  # <-
from asyncckpt.dcp import StorageReader, StorageWriter  # <-
from asyncckpt.examples.digests import digest_of

WIDTH, BATCH = 16, 8


def main(arguments: Sequence[str] | None = None) -> str:
    """Train; return the digest of the weights."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True)
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args(arguments)

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, 64), nn.GELU(), nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    step = 0

    def state() -> dict[str, Any]:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        return {"model": model_state, "optimizer": optimizer_state, "step": step}

    newest = asyncckpt.latest_checkpoint(args.dir)  # <- committed, or it is not listed
    if newest is not None:
        found = state()
        dcp.load(found, storage_reader=StorageReader(newest))  # <-
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        step = found["step"]
    writer = StorageWriter(args.dir, thread_count=2)  # <- one for all saves: it keeps the worker's memory
    while step < args.steps:
        batch = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(step))
        loss = (model(batch).squeeze(1) - batch.sin().sum(1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        print(f"step {step}", flush=True)
        if step % 5 == 0:
            dcp.save(state(), storage_writer=writer, checkpoint_id=f"{args.dir}/step-{step}")  # <-
    writer.close()  # <-
    digest = digest_of(model.state_dict())
    print(f"at step {step} the weights are {digest}", flush=True)
    return digest


if __name__ == "__main__":
    main()

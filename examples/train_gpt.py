"""Train a small transformer on the standard library's own sources, and go on where it stopped after any crash.

    python -m asyncckpt.examples.train_gpt --dir /tmp/gpt --steps 100
    TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 asyncckpt run -- torchrun --standalone --nproc-per-node 2 --max-restarts 3 \\
        -m asyncckpt.examples.train_gpt --dir /tmp/gpt --steps 100

Run it again after a Ctrl-C or a kill -9, or let torchrun restart it: all ranks go on from the newest committed
checkpoint, each with its own place in the data and its own random numbers. (The variable spares restarted ranks the
addresses of those before them: pytorch issue 135712.) Lines that concern checkpoints are marked with `# <-`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sysconfig
import time
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import asyncckpt  # <-

CONTEXT, BATCH, WIDTH, LAYERS, HEADS = 64, 8, 256, 4, 8


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, time, width) to the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class ByteGPT(nn.Module):
    """Predicts the next byte."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        self.head.weight = self.token.weight  # tied: stored once, comes back as one tensor

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, time) bytes to (batch, time, 256) logits."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        x = functional.dropout(x, 0.1, self.training)  # draws random numbers, which a resumed run must draw alike
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def corpus(nbytes: int = 1_000_000) -> torch.Tensor:
    """Return the first `nbytes` of the standard library's sources."""
    text = b""
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= nbytes:
            break
    return torch.frombuffer(bytearray(text[:nbytes]), dtype=torch.uint8).long()


def say(text: str) -> None:
    """Print a line in one piece: several ranks share the output."""
    print(f"{text}\n", end="", flush=True)


def sha256(model: nn.Module) -> str:
    """Return a fingerprint of all weights, bit for bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def train(args: argparse.Namespace, checkpointer: asyncckpt.AsyncCheckpointer) -> None:
    """Train to `args.steps`, from the newest checkpoint below `args.dir`."""
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    torch.manual_seed(0)
    data, model = corpus(), ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    torch.manual_seed(1 + rank)
    step, position = 0, len(data) // world_size * rank

    restored = checkpointer.restore_latest(args.dir, {"model": model, "optim": optimizer})  # <- the same on all ranks
    if restored is not None:  # <-
        step = restored.step  # <-
        if asyncckpt.open_checkpoint(restored.path).world_size == world_size:  # <- else all start their data anew
            own = asyncckpt.load(restored.path, keys=["position", "rng"])  # <-
            position = own["position"]  # <-
            torch.set_rng_state(own["rng"])  # <-
        say(f"rank {rank}: resumed from {restored.path} at step {step}")

    network = DistributedDataParallel(model) if dist.is_initialized() else model
    while step < args.steps:
        span = data[position : position + BATCH * CONTEXT + 1]
        inputs, targets = span[:-1].view(BATCH, CONTEXT), span[1:].view(BATCH, CONTEXT)
        loss = functional.cross_entropy(network(inputs).flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step, position = step + 1, (position + BATCH * CONTEXT) % (len(data) - BATCH * CONTEXT - 1)

        if step % args.every == 0:
            began = time.perf_counter()
            state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}  # <-
            state["position"] = asyncckpt.PerRank(position)  # <- of each rank its own
            state["rng"] = asyncckpt.PerRank(torch.get_rng_state())  # <-
            checkpointer.save(state, f"{args.dir}/step-{step:06d}")  # <-
            stall_ms = 1e3 * (time.perf_counter() - began)
            if rank == 0:
                say(f"step {step:4d}  loss {loss.item():.3f}  save() took {stall_ms:.0f} ms")
    say(f"rank {rank}: weights sha256 {sha256(model)}")


def arguments(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="save every so many steps")
    return parser.parse_args(words)


def main() -> None:
    """Train, alone or as one of torchrun's ranks."""
    args = arguments()
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <- finds the worker, or starts it
        train(args, checkpointer)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small transformer on the standard library's own sources, and go on where it stopped after any crash.

    python -m asyncckpt.examples.train_gpt --dir /tmp/gpt --steps 100

Run it again after a Ctrl-C or a kill -9: it resumes from the newest committed checkpoint, data position included.
The lines that concern checkpoints are marked with `# <-`.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

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
        return self.head(self.norm(self.blocks(x)))  # type: ignore[no-any-return]


def corpus(nbytes: int = 1_000_000) -> torch.Tensor:
    """Return the first `nbytes` of the standard library's sources."""
    text = b""
    for source in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        text += source.read_bytes()
        if len(text) >= nbytes:
            break
    return torch.frombuffer(bytearray(text[:nbytes]), dtype=torch.uint8).long()


def sha256(model: nn.Module) -> str:
    """Return a fingerprint of all weights, bit for bit."""
    digest = hashlib.sha256()
    for tensor in model.state_dict().values():
        digest.update(bytes(tensor.contiguous().flatten().view(torch.uint8).tolist()))
    return digest.hexdigest()


def main() -> None:
    """Train."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", required=True, help="where the checkpoints go")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--every", type=int, default=10, help="save every so many steps")
    parser.add_argument(
        "--crash-at", type=int, default=-1, help="SIGKILL this process right after the save of this step"
    )
    args = parser.parse_args()

    torch.manual_seed(0)
    data, model = corpus(), ByteGPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step, position = 0, 0

    newest = asyncckpt.latest_checkpoint(args.dir)  # <-
    if newest is not None:  # <-
        state = asyncckpt.load(newest)  # <-
        model.load_state_dict(state["model"])  # <-
        optimizer.load_state_dict(state["optim"])  # <-
        step, position = state["step"], state["position"]  # <-
        torch.set_rng_state(state["rng"])  # <-
        print(f"resumed from {newest} at step {step}", flush=True)

    with asyncckpt.AsyncCheckpointer() as checkpointer:  # <- finds the worker, or starts it
        while step < args.steps:
            span = data[position : position + BATCH * CONTEXT + 1]
            inputs, targets = span[:-1].view(BATCH, CONTEXT), span[1:].view(BATCH, CONTEXT)
            loss = functional.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step, position = step + 1, (position + BATCH * CONTEXT) % (len(data) - BATCH * CONTEXT - 1)

            if step % args.every == 0:
                began = time.perf_counter()
                state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "step": step}  # <-
                state |= {"position": position, "rng": torch.get_rng_state()}  # <-
                staged, written = checkpointer.save(state, f"{args.dir}/step-{step:06d}")  # <-
                stall = time.perf_counter() - began
                if step == args.crash_at:
                    print(f"crash at step {step}: staged={staged.done()} written={written.done()}", flush=True)
                    os.kill(os.getpid(), signal.SIGKILL)
                print(f"step {step:4d}  loss {loss.item():.3f}  save() took {stall * 1e3:.0f} ms", flush=True)
    print(f"weights sha256 {sha256(model)}", flush=True)


if __name__ == "__main__":
    main()

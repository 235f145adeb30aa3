"""What saving costs a training loop that goes on: stall, lost time and step time, copies behind it and in front of it.

    python -m benchmarks.overlap [--rounds 5] [--dir D] [--behind threads=1,piece_nbytes=1048576,nice=10,batch=1]

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state. In each round, steps without a save, then saves of
either kind, one at a time, with steps until each is written. Nothing else should run.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import asyncckpt
from asyncckpt.staging import deferred
from asyncckpt.staging.moving import Pace
from benchmarks import machine, states

SAVES_PER_ROUND = 6
QUIET_STEPS = 8
KINDS = ("overlap", "blocking")
RESULTS = Path(__file__).parent / "results"
TARGETS = {"stall, overlap, ms": 10.0}
VOCABULARY, WIDTH, LAYERS, HEADS, CONTEXT, BATCH = 50304, 768, 12, 12, 1024, 2
LENGTH = 64
"""Tokens of a sequence: short, so that a step takes about as long as a save on few cores."""


class Block(nn.Module):
    """One pre-norm transformer layer."""

    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention, self.projection = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, length, width) to the same shape."""
        batch, length, _ = x.shape
        q, k, v = self.attention(self.ln_1(x)).view(batch, length, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(mixed.transpose(1, 2).reshape(batch, length, WIDTH))
        return x + self.mlp(self.ln_2(x))  # type: ignore[no-any-return]


class GPT(nn.Module):
    """A GPT-2 without dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks, self.norm = nn.Sequential(*(Block() for _ in range(LAYERS))), nn.LayerNorm(WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting each next token."""
        x = self.token(tokens) + self.position(torch.arange(tokens.shape[1]))
        logits = self.norm(self.blocks(x)) @ self.token.weight.t()
        return functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


class Loop:
    """A training loop that knows how long its steps take, and how long each waits for copies.

    Args:
        checkpointer: What its optimizer is attached to.
    """

    def __init__(self, checkpointer: asyncckpt.AsyncCheckpointer) -> None:
        self.model = GPT()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(0, VOCABULARY, (BATCH, LENGTH))
        self.waited_s = 0.0
        self.optimizer.register_step_pre_hook(lambda *_: self._note(-time.perf_counter()))
        checkpointer.attach(self.optimizer)
        self.optimizer.register_step_pre_hook(lambda *_: self._note(time.perf_counter()))
        self.step()

    def _note(self, seconds: float) -> None:
        self.waited_s += seconds

    def step(self) -> float:
        """Make one step; returns how long it took."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        self.model(self.tokens).backward()
        self.optimizer.step()
        return time.perf_counter() - began

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict(), "rng": torch.get_rng_state()}


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--behind", type=_pace, help="how copies behind the training work: fields of `Pace`")
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap-gpt.json", help="the result file")
    args = parser.parse_args()
    if args.behind is not None:
        deferred.BEHIND = args.behind
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        result = {"benchmark": "overlap", "state": "gpt", "machine": machine.describe(directory)}
        result["behind"] = deferred.BEHIND._asdict()
        result |= measure(directory, args.rounds)
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def _pace(text: str) -> Pace:
    return Pace(**{name: int(value) for name, value in (part.split("=") for part in text.split(","))})  # type: ignore[arg-type]


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Return every round's figures."""
    with asyncckpt.AsyncCheckpointer() as overlap, asyncckpt.AsyncCheckpointer(staging="blocking") as blocking:
        loop = Loop(overlap)
        checkpointers = {"overlap": overlap, "blocking": blocking}
        began = time.perf_counter()
        for checkpointer in checkpointers.values():
            checkpointer.prepare(loop.state())
        prepared = time.perf_counter() - began
        first = {kind: _save(loop, checkpointers[kind], directory / f"first-{kind}") for kind in KINDS}
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            row: dict[str, Any] = {"quiet_step_s": [loop.step() for _ in range(QUIET_STEPS)]}
            for turn in range(SAVES_PER_ROUND):
                for kind in KINDS:
                    row.setdefault(kind, []).append(_save(loop, checkpointers[kind], directory / f"{number}-{turn}"))
            row["quiet_step_s"] += [loop.step() for _ in range(QUIET_STEPS)]
            found.append(row)
        nbytes = states.nbytes(loop.state())
    return {"nbytes": nbytes, "prepare_both_s": prepared, "first_save": first, "rounds": found}


def _save(loop: Loop, checkpointer: asyncckpt.AsyncCheckpointer, path: Path) -> dict[str, Any]:
    state = loop.state()
    loop.waited_s, steps = 0.0, []
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    returned = time.perf_counter()
    while not handle.written.done():
        steps.append(loop.step())
    ended = time.perf_counter()
    report = handle.written.result()
    shutil.rmtree(path)
    return {
        "save_s": returned - began,
        "wait_s": loop.waited_s,
        "steps_s": steps,
        "until_written_s": ended - began,
        "phases_s": report.seconds,
    }


def lost_s(save: dict[str, Any], quiet_s: float) -> float:
    """Return how much later the loop is for a save: until it was written, less the steps as they would have been."""
    return float(save["until_written_s"]) - len(save["steps_s"]) * quiet_s


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return medians over all rounds; lost time against the same round's quiet steps."""
    rounds = result["rounds"]
    found = {"quiet step, ms": 1e3 * statistics.median(s for r in rounds for s in r["quiet_step_s"])}
    for kind in KINDS:
        saves = [s for r in rounds for s in r[kind]]
        lost = [lost_s(s, statistics.median(r["quiet_step_s"])) for r in rounds for s in r[kind]]
        found |= {
            f"stall, {kind}, ms": 1e3 * statistics.median(s["save_s"] + s["wait_s"] for s in saves),
            f"of it in save(), {kind}, ms": 1e3 * statistics.median(s["save_s"] for s in saves),
            f"worst stall, {kind}, ms": 1e3 * max(s["save_s"] + s["wait_s"] for s in saves),
            f"step while saving, {kind}, ms": 1e3 * statistics.median(t for s in saves for t in s["steps_s"]),
            f"lost, {kind}, ms": 1e3 * statistics.median(lost),
            f"written, {kind}, ms": 1e3 * statistics.median(s["phases_s"]["total"] for s in saves),
            f"first save after prepare(), {kind}, ms": 1e3 * result["first_save"][kind]["save_s"],
        }
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    print(f"{result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds of {SAVES_PER_ROUND} saves of either kind")
    for name, value in summary(result).items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:42s} {value:9.1f}{verdict}")


if __name__ == "__main__":
    main()

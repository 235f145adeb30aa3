"""What saving costs a training on a GPU: stall, step time while a save is under way, and how fast the copy is.

    python -m benchmarks.gpu [--rounds 5] [--name NAME] [--dir D]

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state. Compared, in the same run and in turn: copies behind
the training, copies in front of it, and `torch.distributed.checkpoint.async_save` with pinned memory. The limit of the
copy is one `Tensor.copy_` into memory of torch's own pinned allocator. Without a GPU nothing is measured: exit code 1.
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
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.staging import BlockingAsyncStager
from torch.distributed.checkpoint.state_dict_saver import async_save

import asyncckpt
from benchmarks import machine, states, training

RESULTS = Path(__file__).parent / "results"
QUIET_STEPS = 20
SAVES_PER_ROUND = 3
BATCH, LENGTH = 8, 512
KINDS = ("overlap", "device", "blocking", "dcp")
DEADLINE_S = 600.0


class Loop:
    """A training loop on the GPU; a step ends when the CPU is done with it, not the GPU."""

    def __init__(self) -> None:
        with torch.device("cuda"):
            self.model: nn.Module = training.GPT()
            self.tokens = torch.randint(0, training.VOCABULARY, (BATCH, LENGTH))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.step()
        torch.cuda.synchronize()

    def step(self) -> None:
        """Make one step."""
        self.optimizer.zero_grad()
        with torch.autocast("cuda", torch.bfloat16), torch.device("cuda"):
            loss = self.model(self.tokens)
        loss.backward()
        self.optimizer.step()

    def timed(self, n_steps: int) -> float:
        """Make steps; returns seconds for each, until the GPU is done with the last."""
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(n_steps):
            self.step()
        torch.cuda.synchronize()
        return (time.perf_counter() - began) / n_steps

    def state(self) -> dict[str, Any]:
        """Return what is saved."""
        return {"model": self.model.state_dict(), "optim": self.optimizer.state_dict()}


def main() -> int:
    """Measure, print, and keep the result file; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--name", help="of the result file (default: the GPU's)")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    args = parser.parse_args()
    if not torch.cuda.is_available():
        print("torch finds no GPU here, so nothing was measured.", file=sys.stderr)
        return 1
    gpu = torch.cuda.get_device_name()
    name = args.name or "-".join(gpu.lower().split())
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        result = {"benchmark": "gpu", "state": "gpt", "gpu": gpu, "machine": machine.describe(directory)}
        result |= measure(directory, args.rounds)
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / f"gpu-{name}.json").write_text(json.dumps(result, indent=1) + "\n")
    report(result)
    return 0


def measure(directory: Path, rounds: int) -> dict[str, Any]:
    """Return every round's figures."""
    loop = Loop()
    nbytes = states.nbytes(loop.state())
    limit = [_pinned_copy_s(nbytes) for _ in range(5)]
    with (
        asyncckpt.AsyncCheckpointer() as behind,
        asyncckpt.AsyncCheckpointer(staging="device") as apart,
        asyncckpt.AsyncCheckpointer(staging="blocking") as before,
    ):
        behind.attach(loop.optimizer)
        for checkpointer in (behind, apart, before):
            checkpointer.prepare(loop.state())
        saves: dict[str, Callable[[Path], Callable[[], Any]]] = {
            "overlap": lambda path: _ours(behind, loop, path),
            "device": lambda path: _ours(apart, loop, path),
            "blocking": lambda path: _ours(before, loop, path),
            "dcp": lambda path: _dcp(loop, path),
        }
        first = {kind: _save(loop, saves[kind], directory / f"first-{kind}") for kind in KINDS}
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            row: dict[str, Any] = {"quiet_step_s": loop.timed(QUIET_STEPS)}
            for turn in range(SAVES_PER_ROUND):
                for kind in KINDS:
                    row.setdefault(kind, []).append(_save(loop, saves[kind], directory / f"{number}-{turn}"))
            found.append(row)
    return {"nbytes": nbytes, "pinned_copy_s": limit, "first_save": first, "rounds": found}


def _pinned_copy_s(nbytes: int) -> float:
    source = torch.empty(nbytes, dtype=torch.uint8, device="cuda")
    target = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    target.copy_(source)
    torch.cuda.synchronize()
    began = time.perf_counter()
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    return time.perf_counter() - began


def _ours(checkpointer: asyncckpt.AsyncCheckpointer, loop: Loop, path: Path) -> Callable[[], Any]:
    handle = checkpointer.save(loop.state(), path)
    return lambda: handle.written.result(DEADLINE_S).seconds


_STAGER: list[Any] = []


def _dcp(loop: Loop, path: Path) -> Callable[[], Any]:
    if not _STAGER:
        _STAGER.append(BlockingAsyncStager(cache_staged_state_dict=True))  # with pinned memory, kept between saves
    future: Any = async_save(loop.state(), checkpoint_id=path, async_stager=_STAGER[0], no_dist=True)

    def wait() -> None:
        future.result(DEADLINE_S)

    return wait


def _save(loop: Loop, save: Callable[[Path], Callable[[], Any]], path: Path) -> dict[str, Any]:
    """Save behind a running step, and go on for as many steps as a quiet stretch has; then wait for the writing."""
    torch.cuda.synchronize()
    loop.step()
    began = time.perf_counter()
    wait = save(path)
    returned = time.perf_counter()
    for _ in range(QUIET_STEPS):
        loop.step()
    torch.cuda.synchronize()
    stepped = time.perf_counter()
    phases = wait()
    ended = time.perf_counter()
    shutil.rmtree(path)
    return {
        "save_s": returned - began,
        "save_and_steps_s": stepped - began,
        "until_written_s": ended - began,
        "phases_s": phases,
    }


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return medians over all rounds; lost time is against the same round's quiet steps."""
    rounds, nbytes = result["rounds"], result["nbytes"]
    found = {
        "quiet step, ms": 1e3 * statistics.median(r["quiet_step_s"] for r in rounds),
        "copy to pinned memory, limit, GB/s": nbytes / min(result["pinned_copy_s"]) / 1e9,
    }
    for kind in KINDS:
        saves = [(s, r["quiet_step_s"]) for r in rounds for s in r[kind]]
        lost = [s["save_and_steps_s"] - (QUIET_STEPS + 1) * quiet for s, quiet in saves]
        found |= {
            f"stall in save(), {kind}, ms": 1e3 * statistics.median(s["save_s"] for s, _ in saves),
            f"worst stall in save(), {kind}, ms": 1e3 * max(s["save_s"] for s, _ in saves),
            f"lost over {QUIET_STEPS} steps, {kind}, ms": 1e3 * statistics.median(lost),
            f"written, {kind}, ms": 1e3 * statistics.median(s["until_written_s"] for s, _ in saves),
        }
        copies = [s["phases_s"]["copy"] for s, _ in saves if s["phases_s"]]
        if copies:
            found[f"copy, behind the running step, {kind}, GB/s"] = nbytes / statistics.median(copies) / 1e9
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"{result['gpu']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds")
    for name, value in summary(result).items():
        print(f"  {name:48s} {value:9.1f}")


if __name__ == "__main__":
    sys.exit(main())

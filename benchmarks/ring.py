"""What a save takes that goes through a ring of segments, beside one of the same state through a whole slot.

    python -m benchmarks.ring [--state gpt|large|tiny] [--rounds 5] [--saves 6] [--budget-s 900] [--dir D] [--out FILE]

Three checkpointers take turns: one without a limit of memory, one with `arena_limit_bytes` at a quarter of the state,
and one with half of the largest tensor. The write limit of the machine is measured in each round. Nothing trains, so
that `save()` of a ring returns when nearly all is written: the stall is told beside it. Nothing else should run.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import asyncckpt
from benchmarks import kept, machine, quiet, sources, states
from benchmarks.limits import Limits
from benchmarks.spread import text_of

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 600.0
WHOLE, QUARTER, TENSOR = "whole", "a quarter of the state", "half of the largest tensor"
STATES: dict[str, Callable[[], dict[str, Any]]] = {
    "gpt": states.gpt,
    "large": states.large,
    "tiny": partial(states.gpt, width=64, layers=2, vocabulary=20_000),
}
"""`tiny`, of 16 MB, only shows that everything runs."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6, help="of each kind in a round")
    parser.add_argument("--budget-s", type=float, default=900.0, help="no round is begun that would not end within it")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "ring.json", help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    head = {"benchmark": "ring", "state": args.state, "machine": machine.describe(directory)}
    head |= {"code": sources.code_of("ring"), "saves": args.saves}
    head |= {"rounds_asked": args.rounds, "budget_s": args.budget_s}
    file = kept.Kept(args.out, head)
    try:
        file.end(measure(STATES[args.state](), directory, file, kept.Budget(args.budget_s)))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    report(file.result)


def arena_limits(state: Any) -> dict[str, int | None]:
    """Return `arena_limit_bytes` of every kind, by its name."""
    largest = max(tensor.numel() * tensor.element_size() for tensor in states.tensors(state))
    return {WHOLE: None, QUARTER: states.nbytes(state) // 4, TENSOR: largest // 2}


def measure(state: dict[str, Any], directory: Path, file: kept.Kept, budget: kept.Budget) -> str:
    """Put every round into the result file; returns why no more are made."""
    asked = arena_limits(state)
    nbytes = states.nbytes(state)
    with ExitStack() as ended:
        limits = Limits(directory, nbytes)
        ended.callback(limits.close)
        ways = {
            name: ended.enter_context(asyncckpt.AsyncCheckpointer(arena_limit_bytes=limit))
            for name, limit in asked.items()
        }
        for checkpointer in ways.values():
            checkpointer.prepare(state)
        first = {name: _save(way, state, directory / "first") for name, way in ways.items()}
        file.result |= {"nbytes": nbytes, "arena_limits": asked, "best": limits.best, "first_save": first}

        def make() -> dict[str, Any]:
            row: dict[str, Any] = {"limits": limits.measure(), "saves": {name: [] for name in ways}}
            for turn in range(file.result["saves"]):
                for name in _turned(list(ways), turn + len(file.rounds)):
                    row["saves"][name].append(_save(ways[name], state, directory / f"{len(file.rounds)}-{turn}"))
            return row

        return file.grow(budget, make)


def _turned(names: list[str], number: int) -> list[str]:
    first = number % len(names)
    return names[first:] + names[:first]


def _save(checkpointer: asyncckpt.AsyncCheckpointer, state: dict[str, Any], path: Path) -> dict[str, Any]:
    began = time.perf_counter()
    handle = checkpointer.save(state, path)
    stall_s = time.perf_counter() - began
    report = handle.written.result(DEADLINE_S)
    written_s = time.perf_counter() - began
    ring_nbytes = handle.staged.result(DEADLINE_S).details.get("ring_nbytes")
    shutil.rmtree(path)
    quiet.until_discarded(path.parent)
    return {"stall_s": stall_s, "written_s": written_s, "phases_s": report.seconds, "ring_nbytes": ring_nbytes}


def ratios(result: dict[str, Any], name: str) -> dict[str, list[float]]:
    """Return the figures of every save of a kind.

    "over whole" and "over the write limit" are ratios of `written`, to the median of the same round's whole slots and
    to its limit; "stall" are seconds.
    """
    found: dict[str, list[float]] = {"over whole": [], "over the write limit": [], "stall": []}
    for row in result["rounds"]:
        whole_s = statistics.median(save["written_s"] for save in row["saves"][WHOLE])
        for save in row["saves"][name]:
            found["over whole"].append(save["written_s"] / whole_s)
            found["over the write limit"].append(save["written_s"] / row["limits"]["write_s"])
            found["stall"].append(save["stall_s"])
    return found


def report(result: dict[str, Any]) -> None:
    """Print medians and quartiles of every kind."""
    print(f"{result['state']}: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds")
    for name, limit in result["arena_limits"].items():
        told = "" if limit is None else f", {limit / 1e6:.0f} MB"
        print(f"  {name}{told}")
        for figure, values in ratios(result, name).items():
            print(f"    {figure:22s} {text_of(values, 3)}{' s' if figure == 'stall' else ' x'}")


if __name__ == "__main__":
    main()

"""What is learnt of a device, against the fixed default: loads from the disk, and saves through a worker.

    python -m benchmarks.pace [--rounds 10] [--budget-s 300] [--dir D] [--out FILE]

Each round loads once at the default's pace and once at what was learnt so far, and saves once each by a checkpointer
that asks for the default and one that leaves it to the worker; which comes first alternates. Learning begins with
nothing, so the rounds in which others are tried are among them.
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
from pathlib import Path
from typing import Any

import asyncckpt
from asyncckpt.loading.fetching import read_paces
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from benchmarks import kept, machine, quiet, sources, states

RESULTS = Path(__file__).parent / "results"
DEADLINE_S = 300.0
"""Of a save."""


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--budget-s", type=float, default=300.0, help="no round is begun that would not end within it")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, default=RESULTS / "pace.json", help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    head = {"benchmark": "pace", "machine": machine.describe(directory), "code": sources.code_of("pace")}
    file = kept.Kept(args.out, head | {"rounds_asked": args.rounds, "budget_s": args.budget_s})
    with tempfile.TemporaryDirectory(prefix="ackpt-") as runtime:
        os.environ["XDG_RUNTIME_DIR"] = runtime  # nothing is known of any device there
        os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
        try:
            file.end(measure(states.gpt(), directory, file, kept.Budget(args.budget_s)))
        finally:
            subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
            shutil.rmtree(directory)
    report(file.result)


def measure(state: dict[str, Any], directory: Path, file: kept.Kept, budget: kept.Budget) -> str:
    """Put every round into the result file; returns why no more are made."""
    file.result["nbytes"] = states.nbytes(state)
    with asyncckpt.AsyncCheckpointer(write_threads=DEFAULT_THREADS) as fixed, asyncckpt.AsyncCheckpointer() as learning:
        for checkpointer in (fixed, learning):
            checkpointer.save(state, directory / "first").written.result(DEADLINE_S)
            _remove(directory / "first")

        def make() -> dict[str, Any]:
            row: dict[str, Any] = {}
            for name, checkpointer in _turns(len(file.rounds), {"fixed": fixed, "learnt": learning}):
                row[f"save {name}"] = _save(checkpointer, state, directory / name)
            for name, threads in _turns(len(file.rounds), {"fixed": DEFAULT_THREADS, "learnt": None}):
                row["read pace"] = list(read_paces().choose(str(directory)))
                row[f"load {name}"] = _load(directory / "fixed", state, threads)
            for name in ("fixed", "learnt"):
                _remove(directory / name)
            return row

        return file.grow(budget, make)


def _remove(path: Path) -> None:
    shutil.rmtree(path)
    quiet.until_discarded(path.parent)


def _turns(number: int, ways: dict[str, Any]) -> list[tuple[str, Any]]:
    return list(ways.items())[:: 1 if number % 2 else -1]


def _save(checkpointer: asyncckpt.AsyncCheckpointer, state: dict[str, Any], path: Path) -> float:
    return float(checkpointer.save(state, path).written.result(DEADLINE_S).seconds["write"])


def _load(path: Path, state: dict[str, Any], threads: int | None) -> float:
    for file in path.iterdir():
        with file.open("rb") as opened:
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.perf_counter()
    asyncckpt.load(path, state, strict=True, source="disk", threads=threads)
    return time.perf_counter() - began


def summary(result: dict[str, Any]) -> dict[str, float]:
    """Return the median seconds of both, and the median of the ratios within a round."""
    rounds = result["rounds"]
    found: dict[str, float] = {}
    for what in ("save", "load"):
        for name in ("fixed", "learnt"):
            found[f"{what} {name} s"] = statistics.median(r[f"{what} {name}"] for r in rounds)
        found[f"{what} learnt / fixed"] = statistics.median(r[f"{what} learnt"] / r[f"{what} fixed"] for r in rounds)
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary."""
    print(f"gpt: {result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds")
    for name, value in summary(result).items():
        print(f"  {name:24s} {value:8.3f}")
    print(f"  read pace in the end: {result['rounds'][-1]['read pace']}")


if __name__ == "__main__":
    main()

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

import asyncckpt
from asyncckpt.staging import deferred
from asyncckpt.staging.moving import Pace
from benchmarks import machine, states, training
from benchmarks.training import Loop

SAVES_PER_ROUND = 6
QUIET_STEPS = 8
KINDS = ("overlap", "blocking")
RESULTS = Path(__file__).parent / "results"
TARGETS = {"stall, overlap, ms": 10.0}


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
        loop = training.make("gpt")
        loop.attach(overlap.attach)
        loop.step()
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

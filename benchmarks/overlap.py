"""What saving costs a training loop that goes on: stall, lost time and step time, copies behind it and in front of it.

    python -m benchmarks.overlap [--rounds 5] [--saves 6] [--dir D] [--out FILE]
                                 [--also threads=1 --also nice=10,batch=1 --also worker=idle ...]

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state. In each round, steps without a save, then saves of
every kind, one at a time, with steps until each is written. Nothing else should run.

`--also` adds a kind: copies behind the training with other fields of `Pace`, or with the worker at another priority
(`worker=nice0`, `nice10`, `nice19`, `batch`, `idle`), or both; to raise a priority again takes root.
"""

from __future__ import annotations

import argparse
import contextlib
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
from typing import Any, NamedTuple

import asyncckpt
from asyncckpt.staging import deferred
from asyncckpt.staging.moving import Pace
from benchmarks import cpu, machine, states, training
from benchmarks.training import Loop

SAVES_PER_ROUND = 6
QUIET_STEPS = 8
KINDS = ("overlap", "blocking")
RESULTS = Path(__file__).parent / "results"
TARGETS = {"stall, overlap, ms": 5.0, "lost, overlap, ms": 150.0, "lost, blocking, ms": 150.0}
POLICIES = {"batch": os.SCHED_BATCH, "idle": os.SCHED_IDLE}
WORKER_NICENESS = 5
"""As the worker sets it itself."""


class Kind(NamedTuple):
    """One way to save: blocking or not, how copies behind the training work, and the worker's priority."""

    staging: str = "overlap"
    pace: Pace = deferred.BEHIND
    worker: str = f"nice{WORKER_NICENESS}"


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--saves", type=int, default=SAVES_PER_ROUND, help="of each kind in a round")
    parser.add_argument("--also", action="append", default=[], metavar="FIELD=VALUE,...", help="another kind")
    parser.add_argument("--out", type=Path, default=RESULTS / "overlap-gpt.json", help="the result file")
    args = parser.parse_args()
    kinds = {"overlap": Kind(), "blocking": Kind("blocking"), **{text: _kind(text) for text in args.also}}
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        result = {"benchmark": "overlap", "state": "gpt", "machine": machine.describe(directory)}
        result["behind"] = deferred.BEHIND._asdict()
        result |= {"kinds": list(kinds), "saves": args.saves} | measure(directory, args.rounds, args.saves, kinds)
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    args.out.parent.mkdir(exist_ok=True)
    args.out.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def _kind(text: str) -> Kind:
    fields = dict(part.split("=") for part in text.split(","))
    worker = fields.pop("worker", Kind().worker)
    pace: dict[str, Any] = {name: int(value) for name, value in fields.items()}
    return Kind(pace=deferred.BEHIND._replace(**pace), worker=worker)


def _prioritise(pid: int, how: str) -> None:
    """Give every thread of a process a niceness or a scheduling policy."""
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(ProcessLookupError):
            os.sched_setscheduler(int(task.name), POLICIES.get(how, os.SCHED_OTHER), os.sched_param(0))
            os.setpriority(os.PRIO_PROCESS, int(task.name), int(how.removeprefix("nice") if how[-1].isdigit() else 5))


def measure(directory: Path, rounds: int, saves: int, kinds: dict[str, Kind]) -> dict[str, Any]:
    """Return every round's figures."""
    with (
        asyncckpt.AsyncCheckpointer(staging="overlap") as overlap,
        asyncckpt.AsyncCheckpointer(staging="blocking") as blocking,
    ):
        loop = training.make("gpt")
        loop.attach(overlap.attach)
        loop.step()
        checkpointers = {"overlap": overlap, "blocking": blocking}
        began = time.perf_counter()
        for checkpointer in checkpointers.values():
            checkpointer.prepare(loop.state())
        prepared = time.perf_counter() - began
        first = {kind: _save(loop, checkpointers[kind], directory / f"first-{kind}") for kind in KINDS}
        worker = cpu.worker_pid() if len(kinds) > len(KINDS) else 0
        found: list[dict[str, Any]] = []
        for number in range(rounds):
            row: dict[str, Any] = {"quiet_step_s": [loop.step() for _ in range(QUIET_STEPS)]}
            for turn in range(saves):
                for name, kind in kinds.items():
                    if worker:
                        _prioritise(worker, kind.worker)
                    deferred.BEHIND = kind.pace
                    saved = _save(loop, checkpointers[kind.staging], directory / f"{number}-{turn}")
                    row.setdefault(name, []).append(saved)
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
    for kind in result.get("kinds", KINDS):
        saves = [s for r in rounds for s in r[kind]]
        lost = [lost_s(s, statistics.median(r["quiet_step_s"])) for r in rounds for s in r[kind]]
        found |= {
            f"stall, {kind}, ms": 1e3 * statistics.median(s["save_s"] + s["wait_s"] for s in saves),
            f"of it in save(), {kind}, ms": 1e3 * statistics.median(s["save_s"] for s in saves),
            f"worst stall, {kind}, ms": 1e3 * max(s["save_s"] + s["wait_s"] for s in saves),
            f"step while saving, {kind}, ms": 1e3 * statistics.median(t for s in saves for t in s["steps_s"]),
            f"lost, {kind}, ms": 1e3 * statistics.median(lost),
            f"written, {kind}, ms": 1e3 * statistics.median(s["phases_s"]["total"] for s in saves),
        }
        if kind in result["first_save"]:
            found[f"first save after prepare(), {kind}, ms"] = 1e3 * result["first_save"][kind]["save_s"]
    return found


def report(result: dict[str, Any]) -> None:
    """Print the summary, and each target as reached or missed."""
    saves = result.get("saves", SAVES_PER_ROUND)
    print(f"{result['nbytes'] / 1e9:.2f} GB, {len(result['rounds'])} rounds of {saves} saves of every kind")
    for name, value in summary(result).items():
        target = TARGETS.get(name)
        verdict = "" if target is None else f"   target {target}: {'reached' if value <= target else 'MISSED'}"
        print(f"  {name:42s} {value:9.1f}{verdict}")


if __name__ == "__main__":
    main()

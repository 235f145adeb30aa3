"""What the adapters for training frameworks add to a step, and what a save costs: beside the framework's own saving.

    make .venv-frameworks/.stamp && .venv-frameworks/bin/python -m benchmarks.adapters [--dir D] [--budget-s S]

The same model is trained twice in one process, by the framework alone and with our adapter, in two threads that take
turns: one does a step, then the other. What the machine does besides falls on both steps of such a pair alike, so the
differences of pairs tell, even on a busy machine, what none of the times does. Steady state is the second half of the
steps between two saves: the checkpoint before is mostly published then. CPU seconds are those of the training thread;
what our other threads and the worker's end of the session take in this process is counted apart, per step. What a save
costs is what its step takes longer; copies behind the training go on in the other one's step.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import secrets
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import machine, quiet, sources
from benchmarks.framework_trainings import EVERY, LAYERS, STEPS, TRAININGS, WIDTH
from benchmarks.in_turn import Spent, Training, together
from benchmarks.spread import quartiles

RESULTS = Path(__file__).parent / "results"
SAMPLES = 1000
"""Of the pairs, for the interval within which the median lies (bootstrap). Chosen."""


def _is_steady(step: int) -> bool:
    return (step - 1) % EVERY >= EVERY // 2 and step % EVERY != 0


def measure(training: Training, directory: Path, budget_s: float) -> dict[str, Any]:
    """Train in rounds for `budget_s`, three at least; return medians, and what the pairs of steps say."""
    deadline = time.monotonic() + budget_s
    pairs: list[tuple[Spent, Spent]] = []
    saves: list[tuple[Spent, Spent]] = []
    rounds, took_s = 0, 0.0
    while rounds < 3 or time.monotonic() + took_s < deadline:
        began = time.monotonic()
        ours, stock = together(training, directory, ours_first=bool(rounds % 2))
        took_s = time.monotonic() - began
        if rounds:  # the first one starts the worker, and imports
            both = list(enumerate(zip(ours, stock, strict=True), 1))
            pairs += [pair for step, pair in both if _is_steady(step)]
            saves += [pair for step, pair in both if step % EVERY == 0]
        rounds += 1
    result: dict[str, Any] = {"rounds": rounds - 1, "pairs": len(pairs)}
    for unit in ("wall", "cpu"):
        stock_s = statistics.median(getattr(b, unit) for _, b in pairs)
        added = sorted((getattr(a, unit) - getattr(b, unit)) / stock_s for a, b in pairs)
        result[f"stock step {unit} s"] = stock_s
        result[f"added {unit}"] = statistics.median(added)
        result[f"added {unit}, 95 %"] = _interval(added)
        low, _, high = quartiles(added)
        result[f"added {unit}, quartiles"] = [low, high]
    behind = [statistics.median(s.process - s.cpu for s in side) for side in zip(*pairs, strict=True)]
    result["behind s"], result["behind stock s"] = behind
    for label, side in zip(("ours", "stock"), zip(*saves, strict=True), strict=True):
        result[f"{label} save s"] = statistics.median(s.wall for s in side) - result["stock step wall s"]
    return result


def _without_ours(training: Training) -> Training:
    return lambda directory, ours, clock: training(directory, False, clock)


def _interval(values: list[float]) -> list[float]:
    """Return where the median of such values lies, with 95 % confidence."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(SAMPLES))
    return [medians[SAMPLES // 40], medians[-1 - SAMPLES // 40]]


def hook_seconds() -> float:
    """Return what the adapter itself does in a step that saves nothing: the question whether anything is pending."""
    from asyncckpt.integrations.exporter_process import ExporterProcess
    from asyncckpt.integrations.pending_saves import PendingSaves

    pending = PendingSaves(ExporterProcess(timeout_s=1.0))
    began = time.perf_counter()
    for _ in range(10_000):
        pending.poll()
    return (time.perf_counter() - began) / 10_000


def main() -> None:
    """Measure, print, and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument(
        "--budget-s", type=float, default=240.0, help="for all frameworks; each is trained thrice at least"
    )
    parser.add_argument("--only", choices=sorted(TRAININGS), help="one of the frameworks")
    parser.add_argument("--result", type=Path, default=RESULTS / "adapters.json")
    parser.add_argument(
        "--control", action="store_true", help="both by the framework alone: what is found then is error"
    )
    args = parser.parse_args()
    of: Callable[[Training], Training] = _without_ours if args.control else lambda training: training
    warnings.simplefilter("ignore")
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    os.environ["HF_HUB_OFFLINE"] = "1"
    result: dict[str, Any] = {"benchmark": "adapters", "machine": machine.describe(directory)}
    result |= {"code": sources.code_of("adapters"), **quiet.until_idle(), "steps": STEPS, "every": EVERY}
    result |= {"layers": LAYERS, "width": WIDTH, "hook s": hook_seconds(), "frameworks": {}}
    try:
        chosen = {name: known for name, known in TRAININGS.items() if args.only in (None, name)}
        for name, (package, training) in chosen.items():
            if importlib.util.find_spec(package) is None:
                print(f"{name}: {package} is not installed")
                continue
            place = directory / name.replace(" ", "-")
            place.mkdir()
            found = result["frameworks"][name] = measure(of(training), place, args.budget_s / len(chosen))
            low, high = (100 * end for end in found["added cpu, 95 %"])
            print(
                f"{name:11s} step {found['stock step wall s'] * 1e3:6.1f} ms; ours adds "
                f"{100 * found['added cpu']:+.2f} % CPU ({low:+.2f} to {high:+.2f}), "
                f"{100 * found['added wall']:+.2f} % wall, of {found['pairs']} pairs; "
                f"other threads {(found['behind s'] - found['behind stock s']) * 1e6:+.0f} us a step; "
                f"a save's step takes {found['stock save s'] * 1e3:.1f} ms longer, ours "
                f"{found['ours save s'] * 1e3:.1f} ms",
                flush=True,
            )
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    args.result.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Ours and the peers, side by side: what a save costs a training, how soon it is on the disk, memory, and loads.

    python -m benchmarks.compare [--state gpt|small|large] [--rounds 5] [--saves 6] [--only NAME ...] [--minutes 60]

In each round every contender runs once, in a process of its own and in another order; the machine's limits are measured
beside every round. The first save of a process is `cold` (it takes fresh pages from the kernel), the later ones `warm`.
What does not fsync gets an fsync from us, and is marked. A peer that fails is shown with its error. Peers are installed
by the extra `peers`. Nothing else should run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks import machine
from benchmarks.contenders import CONTENDERS

RESULTS = Path(__file__).parent / "results"
RUN_S = 600.0
"""One contender, one round."""

NBYTES = {"gpt": 1_493_716_496, "small": 327_685_056, "large": 4_295_610_896}

MEASURES = ("stall", "lost cold", "lost warm", "durable cold", "durable warm", "memory", "load cold", "load warm")


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=NBYTES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--minutes", type=float, default=60.0, help="no round is begun after this time")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        result = {"benchmark": "compare", "state": args.state, "machine": machine.describe(directory)}
        result["rounds"] = measure(args.state, args.rounds, args.saves, args.only, directory, 60 * args.minutes)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    target = args.out or RESULTS / f"compare-{args.state}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


def measure(state: str, rounds: int, saves: int, names: list[str], directory: Path, seconds: float) -> list[Any]:
    """Return what every contender measured in every round, and the limits beside it."""
    ends = time.monotonic() + seconds
    found: list[Any] = []
    for number in range(rounds):
        if time.monotonic() > ends:
            print(f"time is up after {number} rounds", file=sys.stderr)
            break
        row: dict[str, Any] = {"limits": _limits(state, directory), "contenders": {}}
        shift = number * len(names) // rounds
        for name in (*names[shift:], *names[:shift]):
            failed = [r["contenders"][name] for r in found if "error" in r["contenders"].get(name, {})]
            row["contenders"][name] = failed[0] if failed else _contest(name, state, saves, directory)
            print(f"round {number + 1}: {name}", file=sys.stderr)
        found.append(row)
    return found


def _limits(state: str, directory: Path) -> dict[str, float]:
    """Return the machine's limits, measured in a process that gives its memory back."""
    code = (
        "import json, pathlib, sys; from benchmarks.limits import Limits;"
        "found = Limits(pathlib.Path(sys.argv[1]), int(sys.argv[2])); print(json.dumps(found.measure())); found.close()"
    )
    command = [sys.executable, "-c", code, str(directory), str(NBYTES[state])]
    return dict(json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=RUN_S).stdout))


def _contest(name: str, state: str, saves: int, directory: Path) -> dict[str, Any]:
    """Run one contender in its own process group; whatever it leaves behind is ended."""
    place = directory / "run"
    place.mkdir()
    command = [sys.executable, "-W", "ignore", "-m", "benchmarks.contest", name]
    command += ["--state", state, "--saves", str(saves), "--dir", str(place)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=RUN_S)
        lines = [line for line in output.splitlines() if line.startswith("{")]
        return dict(json.loads(lines[-1])) if lines else {"error": f"it ended with {process.returncode}"}
    except subprocess.TimeoutExpired:
        return {"error": f"it took longer than {RUN_S:.0f} s"}
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(place, ignore_errors=True)


def values(result: dict[str, Any], name: str) -> dict[str, list[float]] | str:
    """Return every value of each of `MEASURES` for one contender, or its error."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for row in result["rounds"]:
        one = row["contenders"][name]
        if "error" in one:
            return str(one["error"])
        cold, warm = one["cold"], one["warm"]
        found["stall"] += [save["stall_s"] for save in warm]
        found["lost cold"].append(cold["lost_s"])
        found["lost warm"] += [save["lost_s"] for save in warm]
        found["durable cold"].append(cold["durable_s"])
        found["durable warm"] += [save["durable_s"] for save in warm]
        found["memory"].append(one["memory_over_state"])
        found["load cold"].append(one["load_cold_s"])
        found["load warm"].append(one["load_warm_s"])
    return found


def interval(numbers: list[float]) -> tuple[float, float]:
    """Return the quartiles."""
    if len(numbers) < 3:
        return min(numbers), max(numbers)
    low, _, high = statistics.quantiles(numbers, n=4)
    return low, high


def limits(result: dict[str, Any]) -> dict[str, float]:
    """Return the medians of the machine's limits: `write_s`, `read_s`, `copy_s`."""
    rounds = result["rounds"]
    return {key: statistics.median(r["limits"][key] for r in rounds) for key in rounds[0]["limits"]}


def names(result: dict[str, Any]) -> list[str]:
    """Return the contenders, ours first."""
    there = result["rounds"][0]["contenders"]
    return [name for name in CONTENDERS if name in there]


def report(result: dict[str, Any]) -> None:
    """Print the medians."""
    print(f"{result['state']}: {len(result['rounds'])} rounds; limits {limits(result)}")
    print(f"{'':26s}" + "".join(f"{measure:>14s}" for measure in MEASURES))
    for name in names(result):
        found = values(result, name)
        if isinstance(found, str):
            print(f"{name:26s} {found}")
        else:
            print(f"{name:26s}" + "".join(f"{statistics.median(found[m]):14.3f}" for m in MEASURES))


if __name__ == "__main__":
    main()

"""Ours and the peers, side by side: what a save costs a training, how soon it is on the disk, memory, and loads.

    python -m benchmarks.compare [--state gpt|small|large|tiny] [--rounds 5] [--saves 6] [--only NAME ...]
                                 [--budget-s S] [--deadline-s S] [--dir D] [--out FILE]

In each round every contender runs once, in a process of its own and in another order; the machine's limits are measured
beside every round. The first save of a process is `cold` (it takes fresh pages from the kernel), the later ones `warm`.
What does not fsync gets an fsync from us, and is marked. A contender that fails, or has not ended by the deadline, is
shown with its error and not run again. No round is begun that would not end within the budget; the result says how many
were left out. Peers are installed by the extra `peers`. Nothing else should run. `tiny` shows that all of it works.
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
DEADLINES_S = {"gpt": 90.0, "small": 60.0, "large": 180.0, "tiny": 60.0}
"""One contender, one round: three times what the slowest takes on two cores."""

BUDGETS_S = {"gpt": 1200.0, "small": 600.0, "large": 1200.0, "tiny": 300.0}
"""Five rounds of six saves of `gpt` and `small` on two quiet cores, as far as estimated; `large` gets fewer rounds."""

NBYTES = {"gpt": 1_493_716_496, "small": 327_685_056, "large": 4_295_610_896, "tiny": 9_899_840}
STATES = tuple(NBYTES)
LEFT_ROOM_S = 10.0
"""For ending what has not ended, and for removing its files."""

MEASURES = ("stall", "lost cold", "lost warm", "durable cold", "durable warm", "memory", "load cold", "load warm")


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--budget-s", type=float, help="for all rounds (default: by state)")
    parser.add_argument("--deadline-s", type=float, help="for one contender in one round (default: by state)")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    run = Run(
        args.state,
        args.saves,
        directory,
        args.deadline_s or DEADLINES_S[args.state],
        args.budget_s or BUDGETS_S[args.state],
    )
    try:
        result = {"benchmark": "compare", "state": args.state, "machine": machine.describe(directory)}
        result |= {"saves": args.saves, "rounds_asked": args.rounds, "budget_s": run.budget_s}
        result["deadline_s"] = run.deadline_s
        result["rounds"] = run.rounds(args.rounds, args.only)
        result["took_s"] = run.elapsed_s()
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    target = args.out or RESULTS / f"compare-{args.state}.json"
    target.parent.mkdir(exist_ok=True)
    target.write_text(json.dumps(result, indent=1) + "\n")
    report(result)


class Run:
    """One run of the benchmark.

    Args:
        state: What is saved.
        saves: Of a contender in a round.
        directory: Where to write.
        deadline_s: For a contender in a round.
        budget_s: For all rounds.
    """

    def __init__(self, state: str, saves: int, directory: Path, deadline_s: float, budget_s: float) -> None:
        self._state, self._saves, self._directory = state, saves, directory
        self.deadline_s, self.budget_s = deadline_s, budget_s
        self._began = time.monotonic()
        self._best: dict[str, Any] = {}

    def elapsed_s(self) -> float:
        """Return how long it runs."""
        return time.monotonic() - self._began

    def rounds(self, asked: int, names: list[str]) -> list[Any]:
        """Return what every contender measured in every round, and the limits beside it."""
        found: list[Any] = []
        longest_s = 0.0
        for number in range(asked):
            if found and self.elapsed_s() + longest_s > self.budget_s:
                print(f"the budget ends after {number} of {asked} rounds", file=sys.stderr)
                break
            began_s = self.elapsed_s()
            shift = number * len(names) // asked
            row = self._round([*names[shift:], *names[:shift]], found)
            if row is None:
                print(f"the budget ends within round {number + 1} of {asked}, which is left out", file=sys.stderr)
                break
            longest_s = max(longest_s, self.elapsed_s() - began_s)
            found.append(row)
        return found

    def _round(self, names: list[str], before: list[Any]) -> dict[str, Any] | None:
        """Return one round; None for one that the budget ends, unless it is the first."""
        row: dict[str, Any] = {"limits": self.limits(), "contenders": {}}
        for name in names:
            failed = [r["contenders"][name] for r in before if "error" in r["contenders"][name]]
            left_s = self.budget_s - self.elapsed_s() - LEFT_ROOM_S
            if failed:
                row["contenders"][name] = failed[0]
            elif left_s > 0 or not before:
                deadline_s = min(self.deadline_s, left_s) if before else self.deadline_s
                row["contenders"][name] = found = self._contest(name, deadline_s)
                if before and "error" in found and deadline_s < self.deadline_s:
                    return None  # the budget's fault, not the contender's
                print(f"{self.elapsed_s():6.0f} s, round {len(before) + 1}: {name}", file=sys.stderr)
            else:
                return None
        return row

    def limits(self) -> dict[str, float]:
        """Return the machine's limits, measured in a process that gives its memory back."""
        code = (
            "import json, pathlib, sys; from benchmarks.limits import Limits;"
            "found = Limits(pathlib.Path(sys.argv[1]), int(sys.argv[2]), json.loads(sys.argv[3]));"
            "print(json.dumps([found.measure(), found.best])); found.close()"
        )
        nbytes = str(max(NBYTES[self._state], 1 << 20))
        command = [sys.executable, "-c", code, str(self._directory), nbytes, json.dumps(self._best)]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=self.deadline_s, check=False)
        if ended.returncode:
            raise RuntimeError(f"the limits cannot be measured: {ended.stderr[-500:]}")
        limits, self._best = json.loads(ended.stdout)
        return dict(limits)

    def _contest(self, name: str, deadline_s: float) -> dict[str, Any]:
        """Run one contender in its own process group; whatever it leaves behind is ended."""
        place = self._directory / "run"
        place.mkdir()
        command = [sys.executable, "-W", "ignore", "-m", "benchmarks.contest", name, "--state", self._state]
        command += ["--saves", str(self._saves), "--dir", str(place)]
        log = self._directory / "stderr"
        with log.open("wb") as stderr:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=stderr, start_new_session=True)
        late = False
        try:
            try:
                output, _ = process.communicate(timeout=deadline_s)
            except subprocess.TimeoutExpired:
                late = True
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if late:
                output, _ = process.communicate(timeout=LEFT_ROOM_S)
            return outcome(output.decode(errors="replace"), log, process.returncode, deadline_s if late else None)
        except subprocess.TimeoutExpired:
            return {"error": f"not ended after {deadline_s:.0f} s, and cannot be killed"}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if name.startswith("asyncckpt"):
                command = [sys.executable, "-m", "asyncckpt", "worker", "stop"]
                subprocess.run(command, capture_output=True, check=False, timeout=self.deadline_s)
            shutil.rmtree(place, ignore_errors=True)


def outcome(output: str, log: Path, code: int, late_s: float | None) -> dict[str, Any]:
    """Return what a contender's process has measured, or why it has not.

    Args:
        output: What it printed: where it was, line by line, and in the end its figures.
        log: What it wrote to stderr.
        code: It ended with.
        late_s: The deadline at which it was killed.
    """
    lines = output.splitlines()
    figures = [line for line in lines if line.startswith("{")]
    if figures:
        return dict(json.loads(figures[-1]))
    where = f" ({lines[-1]})" if lines else ""
    if late_s is not None:
        return {"error": f"not ended after {late_s:.0f} s{where}"}
    said = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return {"error": f"ended with {code}{where}{': ' + said[-1][:200] if said else ''}"}


def values(result: dict[str, Any], name: str) -> dict[str, list[float]] | str:
    """Return every value of each of `MEASURES` for one contender, or its error."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for row in result["rounds"]:
        one = row["contenders"][name]
        if "error" in one:
            return str(one["error"]).splitlines()[0]
        cold, warm = one["cold"], one["warm"]
        found["stall"] += [save["stall_s"] for save in warm]
        found["lost cold"].append(cold["lost_s"])
        found["lost warm"] += [save["lost_s"] for save in warm]
        found["durable cold"].append(cold["durable_s"])
        found["durable warm"] += [save["durable_s"] for save in warm]
        found["memory"].append(one["memory_over_state"])
        found["load cold"].append(one["load_cold_s"])
        found["load warm"].append(one["load_warm_s"])
        for other, seconds in one.get("other_loads", {}).items():
            for measure in ("cold", "warm"):
                found.setdefault(f"load {measure}, {other}", []).append(seconds[f"{measure}_s"])
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


def saves_of(result: dict[str, Any]) -> int:
    """Return how many saves a contender made in a round."""
    return int(result["saves"])


def gigabytes(result: dict[str, Any]) -> str:
    """Return the state's size as text."""
    return f"{NBYTES[result['state']] / 1e9:.2f} GB"


def left_out(result: dict[str, Any]) -> str:
    """Return the sentence on rounds that the budget did not leave time for; empty if it left enough."""
    asked, made = result["rounds_asked"], len(result["rounds"])
    return (
        "" if made == asked else f"{asked - made} of {asked} rounds were left out: {result['budget_s']:.0f} s were up."
    )


def report(result: dict[str, Any]) -> None:
    """Print the medians."""
    print(f"{result['state']}: {len(result['rounds'])} rounds in {result['took_s']:.0f} s; limits {limits(result)}")
    print(left_out(result), end="\n" if left_out(result) else "")
    print(f"{'':26s}" + "".join(f"{measure:>14s}" for measure in MEASURES))
    for name in names(result):
        found = values(result, name)
        if isinstance(found, str):
            print(f"{name:26s} {found}")
            continue
        print(f"{name:26s}" + "".join(f"{statistics.median(found[m]):14.3f}" for m in MEASURES))
        for more in [key for key in found if key not in MEASURES]:
            print(f"{'':26s}  {more}: {statistics.median(found[more]):.3f}")


if __name__ == "__main__":
    main()

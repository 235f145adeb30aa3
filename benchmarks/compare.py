"""Ours and the peers, side by side: what a save costs a training, how soon it is on the disk, memory, and loads.

    python -m benchmarks.compare [--state gpt|small|large|tiny] [--rounds 5] [--saves 6] [--only NAME ...|best]
                                 [--resume] [--budget-s S] [--deadline-s S] [--peer-saves-s S] [--dir D] [--out FILE]

In each round every contender runs once, in a process of its own and in another order; the machine's limits are measured
beside every round. The first save of a process is `cold` (it takes fresh pages from the kernel), the later ones `warm`.
What does not fsync gets an fsync from us, and is marked. A contender that fails, or has not ended by the deadline, is
shown with its error and not run again. A load is its call, and what the first write to what it loaded takes longer than
a later one: who maps a file leaves reading it to the training. Memory and loads of the peers are measured in the first
two rounds, ours in all; with `--peer-saves-s` a slow peer makes fewer saves in a round, at least three. No round is
begun that would not end within the budget; the result says how many were left out. The file is written after every
round; with `--resume` a later run adds rounds until there are as many as asked, if machine, versions, code and options
are the same. Peers are installed by the extra `peers`. Nothing else should run. `tiny` shows that all of it works.
"""

from __future__ import annotations

import argparse
import os
import secrets
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import kept, machine
from benchmarks.contenders import CONTENDERS
from benchmarks.rounds import NBYTES, ROUNDS_OF_LOADS, Rounds, Setting

RESULTS = Path(__file__).parent / "results"
DEADLINES_S = {"gpt": 90.0, "small": 120.0, "large": 180.0, "tiny": 60.0}
"""One contender, one round: three times what the slowest takes on two cores, and for `small` half as much again."""

BUDGETS_S = {"gpt": 1200.0, "small": 900.0, "large": 1500.0, "tiny": 300.0}
"""Five rounds of six saves on two quiet cores, as far as estimated; of `large` with those of `BEST` only."""

PEER_SAVES_S = {"small": 15.0}
"""Three saves of 20,000 files or so take longer; six would take most of the time."""

STATES = tuple(NBYTES)
OURS = ("asyncckpt", "asyncckpt, prepared", "asyncckpt, overlap")
BEST = (*OURS, "safetensors", "dcp.async_save, thread", "torch _experimental")
"""`--only best`: ours and the peers that are best at something; for `large`, whose rounds take long."""

FROM_DISK = "disk"
"""Of our loads; without it they come from the worker's memory."""

MEASURES = (
    "stall cold",
    "stall",
    "lost cold",
    "lost warm",
    "durable cold",
    "durable warm",
    "memory",
    "load cold",
    "load warm",
)


def main() -> None:
    """Measure, print, and keep the result file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, default="gpt")
    parser.add_argument("--rounds", type=int, default=5, help="in all, those of a file that is resumed included")
    parser.add_argument("--saves", type=int, default=6)
    parser.add_argument("--only", nargs="+", choices=(*CONTENDERS, "best"), default=list(CONTENDERS))
    parser.add_argument("--resume", action="store_true", help="add rounds to the result file, if it is there")
    parser.add_argument("--budget-s", type=float, help="for all rounds of this run (default: by state)")
    parser.add_argument("--deadline-s", type=float, help="for one contender in one round (default: by state)")
    parser.add_argument("--peer-saves-s", type=float, help="for a peer's saves in a round (default: by state)")
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    parser.add_argument("--out", type=Path, help="the result file")
    args = parser.parse_args()
    names = [name for name in CONTENDERS if name in (BEST if "best" in args.only else args.only)]
    setting = Setting(
        args.state,
        args.saves,
        args.deadline_s or DEADLINES_S[args.state],
        args.peer_saves_s or PEER_SAVES_S.get(args.state),
    )
    budget = kept.Budget(args.budget_s or BUDGETS_S[args.state])
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=args.dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        head: dict[str, Any] = {"benchmark": "compare", "state": args.state, "machine": machine.describe(directory)}
        head |= {"code": kept.code(), "contenders": names, "saves": args.saves, "peer_saves_s": setting.peer_saves_s}
        head |= {"deadline_s": setting.deadline_s, "rounds_asked": args.rounds, "budget_s": budget.budget_s}
        file = kept.Kept(args.out or RESULTS / f"compare-{args.state}.json", head)
        if args.resume:
            file.resume()
        rounds = Rounds(setting, directory, budget, file.result.get("best"))

        def make() -> dict[str, Any] | None:
            row = rounds.make(names, file.rounds, args.rounds)
            file.result["best"] = rounds.best
            return row

        file.end(file.grow(budget, make))
        rounds.settle()
    except kept.NotTheSameError as error:
        sys.exit(str(error))
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    report(file.result)


def values(result: dict[str, Any], name: str) -> dict[str, list[float]] | str:
    """Return every value of each of `MEASURES` for one contender, or its error; loads of other kinds by their names."""
    found: dict[str, list[float]] = {measure: [] for measure in MEASURES}
    for row in result["rounds"]:
        one = row["contenders"][name]
        if "error" in one:
            return str(one["error"]).splitlines()[0]
        for heat, saves in (("cold", [one["cold"]]), ("warm", one["warm"])):
            found["stall" if heat == "warm" else "stall cold"] += [save["stall_s"] for save in saves]
            found[f"lost {heat}"] += [save["lost_s"] for save in saves]
            found[f"durable {heat}"] += [save["durable_s"] for save in saves]
        if "load_cold_s" not in one:
            continue
        found["memory"].append(one["memory_over_state"])
        for heat in ("cold", "warm"):
            found[f"load {heat}"].append(load_s(one, f"load_{heat}"))
            for other, seconds in one.get("other_loads", {}).items():
                found.setdefault(f"load {heat}, {other}", []).append(load_s(seconds, heat))
    return found


def load_s(seconds: dict[str, Any], heat: str) -> float:
    """Return what a load costs: the call, and what it left to the training; older results have the call alone."""
    return float(seconds[f"{heat}_s"]) + float(seconds.get(f"{heat}_late_s", 0.0))


def of_files(found: dict[str, list[float]], measure: str) -> list[float]:
    """Return the values of a measure; of loads those from the disk, where others come from the worker's memory."""
    return found.get(f"{measure}, {FROM_DISK}", found[measure])


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


def fewer_saves(result: dict[str, Any]) -> dict[str, int]:
    """Return who made fewer saves in a round, and the fewest that it made in one."""
    found = {}
    for name in names(result):
        made = [1 + len(r["contenders"][name]["warm"]) for r in result["rounds"] if "warm" in r["contenders"][name]]
        if made and min(made) < saves_of(result):
            found[name] = min(made)
    return found


def prepare_s(result: dict[str, Any]) -> list[float]:
    """Return what every `prepare()` took, before the first save."""
    every = [one.get("prepare_s") for row in result["rounds"] for one in row["contenders"].values()]
    return [one for one in every if one is not None]


def notes(result: dict[str, Any]) -> list[str]:
    """Return sentences on what was measured otherwise than the rest."""
    found = []
    prepared, fewer = prepare_s(result), fewer_saves(result)
    if prepared:
        found.append(f"`prepare()` took {statistics.median(prepared):.2f} s, before the training.")
    if any(len(values(result, name)) > len(MEASURES) for name in names(result) if name in OURS):
        found.append("Our loads: from the worker's memory, in brackets from the disk.")
    if any("load_warm_late_s" in one for row in result["rounds"] for one in row["contenders"].values()):
        found.append("Loads: until the state can be changed as before; mapped files are read when it is.")
    if fewer:
        text = ", ".join(f"{name} {count}" for name, count in fewer.items())
        found.append(f"Fewer saves in a round, since they take long: {text}.")
    if len(result["rounds"]) > ROUNDS_OF_LOADS and "peer_saves_s" in result:
        found.append(f"Memory and loads of the others are of {ROUNDS_OF_LOADS} rounds.")
    return [*found, *filter(None, [left_out(result)])]


def gigabytes(result: dict[str, Any]) -> str:
    """Return the state's size as text."""
    return f"{NBYTES[result['state']] / 1e9:.2f} GB"


def left_out(result: dict[str, Any]) -> str:
    """Return the sentence on rounds that were asked for and not made; empty if there are none."""
    asked, made = result["rounds_asked"], len(result["rounds"])
    if made >= asked:
        return ""
    interrupted = result.get("ended") == "not"
    why = "the run was interrupted" if interrupted else f"{result['budget_s']:.0f} s were up"
    return f"{asked - made} of {asked} rounds were left out: {why}."


def report(result: dict[str, Any]) -> None:
    """Print the medians."""
    print(f"{result['state']}: {len(result['rounds'])} rounds in {result['took_s']:.0f} s; limits {limits(result)}")
    print("\n".join(notes(result)))
    print(f"{'':26s}" + "".join(f"{measure:>14s}" for measure in MEASURES))
    for name in names(result):
        found = values(result, name)
        if isinstance(found, str):
            print(f"{name:26s} {found}")
            continue
        print(f"{name:26s}" + "".join(f"{statistics.median(found[m]):14.3f}" for m in MEASURES))
        for more in [key for key in found if key not in MEASURES]:
            print(f"{'':26s}  {more}: {statistics.median(found[more]):.3f}")
    print(
        "seconds of the last round:",
        {n: round(c.get("took_s", 0)) for n, c in result["rounds"][-1]["contenders"].items()},
    )


if __name__ == "__main__":
    main()

"""What results of `benchmarks.compare` say: values, medians, limits, notes."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

from benchmarks.contenders import CONTENDERS
from benchmarks.rounds import NBYTES, ROUNDS_OF_LOADS
from benchmarks.spread import quartiles

RESULTS = Path(__file__).parent / "results"
OURS = ("asyncckpt", "asyncckpt, prepared", "asyncckpt, overlap")
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


def load_parts(result: dict[str, Any], name: str, heat: str) -> dict[str, tuple[list[float], list[float]]]:
    """Return every load's call, and what it left to the training where that was measured, by way to load."""
    found: dict[str, tuple[list[float], list[float]]] = {}
    for row in result["rounds"]:
        one = row["contenders"][name]
        own = {key.removeprefix("load_"): value for key, value in one.items() if key.startswith("load_")}
        for way, seconds in ({"": own} | one.get("other_loads", {})).items() if own else ():
            call, late = found.setdefault(way, ([], []))
            call.append(float(seconds[f"{heat}_s"]))
            late += [float(seconds[key]) for key in (f"{heat}_late_s",) if key in seconds]
    return found


def of_files(found: dict[str, list[float]], measure: str) -> list[float]:
    """Return the values of a measure; of loads those from the disk, where others come from the worker's memory."""
    return found.get(f"{measure}, {FROM_DISK}", found[measure])


def interval(numbers: list[float]) -> tuple[float, float]:
    """Return the quartiles; of one value there are none, and it stands for both."""
    low, _, high = quartiles(numbers)
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
        found.append("Our loads: from the disk, in brackets from the worker's memory.")
    if any("load_warm_late_s" in one for row in result["rounds"] for one in row["contenders"].values()):
        found.append(
            "Loads: the call, and what it leaves to the training, which reads a mapped file when it changes it."
        )
    if any("fresh_load" in one for row in result["rounds"] for one in row["contenders"].values()):
        found.append("Cold loads are of files that were never read; those in brackets come after them.")
    noise = [one["memory_noise"] for r in result["rounds"] for one in r["contenders"].values() if "memory_noise" in one]
    if noise:
        found.append(f"Memory: the most of up to three saves, which differ by up to {max(noise):.2f}.")
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
    others = {"not": "the run was interrupted", "limits": "the machine's limits could not be measured"}
    why = others.get(result.get("ended", ""), f"{result['budget_s']:.0f} s were up")
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

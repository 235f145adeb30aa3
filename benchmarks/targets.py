"""Every target beside what was measured: reached, missed, or not measured, from the result files alone.

A target counts as missed only if the interval (the quartiles) excludes it. A single value has none; the table says so.
Of a figure with `*`, the match with the greatest median counts (`benchmarks.figures`).
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from benchmarks import RESULTS, figures
from benchmarks.figures import Row

SCALES = {"ms": 1e3, "MB": 1e-6}
"""Unit -> what a figure in seconds or bytes is multiplied by."""


class Target(NamedTuple):
    """One figure that has to be at most so much.

    Attributes:
        name: What it is.
        limits: Result file, without its suffix -> at most this; "gpu" is the newest one of any GPU.
        figure: The figure (see `benchmarks.figures`), or what finds its values in the result.
        unit: Of the limits; "x" for a ratio.
        most: The greatest value has to be within the limit, not the median.
    """

    name: str
    limits: Mapping[str, float]
    figure: str | Callable[[Row], list[float]]
    unit: str = "x"
    most: bool = False


def over_peers(figure: str, name: str = "asyncckpt", peer: str = "") -> Callable[[Row], list[float]]:
    """Return what finds our values of a figure over the median of the best other library, or of one."""

    def found(result: Row) -> list[float]:
        every = figures.matches(result, f"contenders/*/{figure}")
        others = {one: v for one, v in every.items() if not one.startswith("asyncckpt") and peer in ("", one)}
        least = min(map(statistics.median, others.values()), default=None)
        return [] if least is None else [value / least for value in every.get(name, [])]

    return found


def of(question: str, **limits: float) -> dict[str, float]:
    """Return the limits of a question by its result files, from those by state."""
    return {f"{question}-{state}": limit for state, limit in limits.items()}


OURS, OVERLAP = "contenders/asyncckpt", "contenders/asyncckpt, overlap"
PREPARED = "contenders/asyncckpt, prepared"
FIRST, UNPREPARED = "first save after `prepare()`", "first save without `prepare()`"
ON_DISK, SCALE = "warm/durable_s / limits/write_s", "4096 ranks, 1000 tensors"
LOST, BEST = of("compare", gpt=0.15, small=0.12, large=0.4), of("compare", gpt=1 / 9, large=1 / 9)
COPY, DISK = {"gpt": 1.2, "small": 4, "large": 1.2}, of("compare", gpt=1.9, small=2.5, large=1.5)
COLD, WARM = {"gpt": 1.1, "small": 1.5, "large": 1.1}, {"gpt": 1.3, "small": 1.0, "large": 1.3}
RANKS, RESHARD, TOUCHED = {"ranks-gpt": 0.15}, {"reshard": 1.1}, "verified/*/read_over_touched"
BESIDE, RECALL = "the same, beside the other libraries", "loads/memory_s / loads/copy_before_memory_s"

TARGETS = (
    Target("stall, copies behind the training", {"overlap-gpt": 5}, "overlap/stall_s", "ms"),
    Target("stall, copies behind the training", of("compare", small=60, large=5), f"{OVERLAP}/warm/stall_s", "ms"),
    Target(f"the same, {FIRST}", of("overlap", gpt=5, large=5), "first_save/overlap/stall_s", "ms"),
    Target("stall, blocking, over a warm copy", of("save_load", **COPY), "saves/stall_s / saves/copy_s"),
    Target(f"the same, {FIRST}, training on", of("compare", **COPY), f"{PREPARED}/cold/stall_s / limits/copy_s"),
    Target("lost per save", LOST, f"{OURS}/warm/lost_s", "s"),
    Target(f"lost, {FIRST}", LOST, f"{PREPARED}/cold/lost_s", "s"),
    Target(f"lost, {UNPREPARED}", LOST, f"{OURS}/cold/lost_s", "s"),
    Target("lost, over the best other library", of("compare", gpt=1 / 4, large=1 / 4), over_peers("warm/lost_s")),
    Target(f"the same, {FIRST}", BEST, over_peers("cold/lost_s", "asyncckpt, prepared")),
    Target(f"the same, {UNPREPARED}", BEST, over_peers("cold/lost_s")),
    Target("lost per save, two ranks, replicated", RANKS, "ddp/asyncckpt/warm/lost_s", "s"),
    Target("the same, sharded", RANKS, "fsdp2/asyncckpt/warm/lost_s", "s"),
    Target("on disk over the write limit, training on", DISK, f"{OURS}/{ON_DISK}"),
    Target("the same, the goal", of("compare", gpt=1.4, large=1.3), f"{OURS}/{ON_DISK}"),
    Target(f"the same, {FIRST}", {"compare-gpt": 1.9}, f"{PREPARED}/cold/durable_s / limits/write_s"),
    Target("the same, two ranks, replicated", {"ranks-gpt": 1.9}, f"ddp/asyncckpt/{ON_DISK}"),
    Target("the same, two ranks, sharded", {"ranks-gpt": 1.9}, f"fsdp2/asyncckpt/{ON_DISK}"),
    Target("the same, nothing else running", of("save_load", gpt=1.15, large=1.15), "saves/written_s / limits/write_s"),
    Target("memory over the state", of("compare", gpt=1.02, small=1.1, large=1.02), f"{OURS}/memory_over_state"),
    Target("worker without slots", {"save_load-gpt": 40}, "worker/rss_nbytes", "MB", True),
    Target("worker ready, the slowest start", {"save_load-gpt": 0.3}, "worker/ready_max_s", "s", True),
    Target("load, cold, verified, over the read limit", of("load", **COLD), "cold fresh/s / read limit fresh/s"),
    Target("the same, of files that were read before", of("load", **COLD), "cold/s / read limit/s"),
    Target(BESIDE, of("compare", **COLD), f"{OURS}/loads/disk/cold_s / limits/read_fresh_s"),
    Target("load, warm, verified, over safetensors", of("load", **WARM), "warm/s / safetensors warm/s"),
    Target(
        "the same, beside the other libraries",
        of("compare", **WARM),
        over_peers("loads/disk/warm_s", peer="safetensors"),
    ),
    Target("load from the worker's memory over a warm copy", {"recall-gpt": 1.5}, RECALL),
    Target("resharded, verified: bytes read over those of the blocks", RESHARD, TOUCHED, most=True),
    Target("resharded, not verified: bytes read over those needed", RESHARD, f"not {TOUCHED}", most=True),
    Target("resharded, verified: time over a plain load", {"reshard": 1.5}, "verified/*/extra_time"),
    Target("resharded, not verified: time over a plain load", {"reshard": 1.5}, "not verified/*/extra_time"),
    Target("fds added, per rank", {"ranks-gpt": 16}, "*/asyncckpt/added_fds", "fds", True),
    Target("fds added, one rank", of("compare", gpt=16, small=16), "contenders/asyncckpt*/added_fds", "fds", True),
    Target("fds of the worker with two ranks", {"ranks-gpt": 24}, "*/asyncckpt/worker_fds", "fds", True),
    Target("trainer's CPU beyond the copy, `gpt`", {"cpu": 20}, "gpt/*/beyond_s", "ms"),
    Target("the same, `small`", {"cpu": 60}, "small/*/beyond_s", "ms"),
    Target("the same, 100,000 tensors", {"cpu": 300}, "many/*/beyond_s", "ms"),
    Target("plan of 4,096 ranks x 1,000 tensors", {"scale": 5}, f"planning/*, {SCALE}/plan_s", "s", True),
    Target("a known plan, per tensor", {"scale": 3}, "cached/*", "us", True),
    Target("growth of planning time over growth of chunks", {"scale": 1.0}, "growth", most=True),
    Target("commit of 4,096 ranks x 1,000 tensors", {"scale": 3}, f"commit/*, {SCALE}/first_commit_s", "s", True),
    Target("frozen: bytes written over those of a full save", {"frozen": 0.1}, "written_nbytes / nbytes"),
    Target("GPU: stall, behind the training", {"gpu": 5}, "overlap/stall_s", "ms"),
    Target("the same, copied on the GPU first", {"gpu": 5}, "device/stall_s", "ms"),
    Target("GPU: time to the host over a pinned copy", {"gpu": 1 / 0.9}, "alone/copy_s / alone/pinned_s"),
    Target("GPU: a step while a save is in flight, over a quiet one", {"gpu": 1.03}, "overlap/step_ratio"),
)


def rows(results: Path = RESULTS, only: str = "", result: Row | None = None) -> list[list[str]]:
    """Return name, limit, what was measured, its spread, the verdict and the result file of every target.

    Args:
        results: Where the result files are.
        only: Targets of this file alone.
        result: Stands for that file.
    """
    found = []
    for target in TARGETS:
        for name, limit in target.limits.items():
            of_gpus = results.glob("gpu-*.json") if name == "gpu" else ()
            file = max(of_gpus, key=_date, default=results / f"{name}.json")
            if only not in ("", file.stem):
                continue
            data = result or (json.loads(file.read_text()) if file.exists() else {"rounds": []})
            state = name.partition("-")[2].replace("gpt", "")
            head = [target.name + (f", `{state}`" if state else ""), _text(limit, target.unit)]
            found.append([*head, *_measured(target, limit, values_of(target, data)), file.name])
    return found


def _date(file: Path) -> str:
    return str(json.loads(file.read_text())["machine"]["date"])


def values_of(target: Target, result: Row) -> list[float]:
    """Return the values of a target's figure, in its unit."""
    if callable(target.figure):
        found = target.figure(result)
    elif target.most:
        found = [value for values in figures.matches(result, target.figure).values() for value in values]
    else:
        found = figures.values(result, target.figure)
    return [value * SCALES.get(target.unit, 1.0) for value in found]


def _measured(target: Target, limit: float, values: list[float]) -> list[str]:
    if not values:
        return ["", "", "not measured"]
    low, value, high = figures.quartiles(values)
    spread = f"{_text(low, target.unit)} to {_text(high, target.unit)}"
    if target.most:
        value, spread = max(values), f"the greatest of {len(values)}"
    return [_text(value, target.unit), spread if len(values) > 1 else "", verdict(values, limit, target.most)]


def verdict(values: list[float], limit: float, most: bool) -> str:
    """Return "reached", "missed" or "within the spread"; of a single value says so."""
    low, median, _ = figures.quartiles(values)
    said = "reached" if (max(values) if most else median) <= limit else "missed"
    if most:
        return said
    if len(values) == 1:
        return f"one value: {said}"
    return "within the spread" if said == "missed" and low <= limit else said


def _text(value: float, unit: str) -> str:
    digits = 3 if unit == "s" and value < 0.1 else 2 if value < 10 and unit != "fds" else 0
    return f"{value:.{digits}f} {unit}"

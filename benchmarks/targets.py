"""Every target beside what was measured: reached, missed, or not measured, from the result files alone.

    python -m benchmarks.targets

A target counts as missed only if the interval (the quartiles) excludes it. Figures with `lost` and `on disk` are those
of `asyncckpt` as it comes, beside a training; ratios are against limits of the same round. Of several pairs of meshes,
ways to stage or layouts the worst counts.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import contest_results, cpu, ranks, sources
from benchmarks.save_load import RESULTS

OURS, PREPARED, OVERLAP = "asyncckpt", "asyncckpt, prepared", "asyncckpt, overlap"
Values = Callable[[dict[str, Any]], Sequence[float]]


class Target(NamedTuple):
    """One figure that has to be at most so much.

    Attributes:
        name: What it is.
        file: The result file, without its suffix.
        limit: At most this.
        values: Finds every measured value in the result.
        unit: Of limit and values; "x" for a ratio.
    """

    name: str
    file: str
    limit: float
    values: Values
    unit: str = "x"


def _contest(measure: str, name: str = OURS, per: str | None = None) -> Values:
    """Return what finds a measure in a result of `benchmarks.compare`, or its ratio to a limit of the machine."""

    def found(result: dict[str, Any]) -> list[float]:
        ratios = list[float]()
        for row in result["rounds"]:
            if name not in row["contenders"]:
                return []
            values = contest_results.values(result | {"rounds": [row]}, name)
            if isinstance(values, str):
                return []
            ratios += [value / (row["limits"][per] if per else 1.0) for value in values.get(measure, ())]
        return ratios

    return found


def _beside(measure: str, name: str = OURS, peer: str | None = None) -> Values:
    """Return what finds our values of a measure over the median of the best peer, or of one; loads from the disk."""

    def found(result: dict[str, Any]) -> list[float]:
        there = contest_results.names(result)
        others = [one for one in there if one not in contest_results.OURS and peer in (None, one)]
        every = [contest_results.values(result, other) for other in others]
        medians = [statistics.median(values[measure]) for values in every if not isinstance(values, str)]
        ours = contest_results.values(result, name) if name in there else ""
        if isinstance(ours, str) or not medians:
            return []
        return [value / min(medians) for value in ours.get(f"{measure}, {contest_results.FROM_DISK}", ours[measure])]

    return found


def _save_load(measure: str, per: str) -> Values:
    """Return what finds a measure in a result of `benchmarks.save_load`, over a limit of the moment or the round."""

    def found(result: dict[str, Any]) -> list[float]:
        return [save[measure] / save.get(per, row["limits"][per]) for row in result["rounds"] for save in row["saves"]]

    return found


def _cold(result: dict[str, Any]) -> list[float]:
    return [row["load_cold_s"] / row["limits"]["read_s"] for row in result["rounds"]]


def _ratio(over: str, under: str) -> Values:
    return lambda result: [row[over] / row[under] for row in result["rounds"]]


def _loaded(ours: str, other: str) -> Values:
    return lambda result: [row[ours][0] / row[other][0] for row in result["rounds"]]


def _resharded(verify: bool) -> Values:
    """Return what finds the bytes that were read over those that had to be, of the worst pair of meshes."""
    return lambda result: [
        max(row["read_nbytes"] / row["touched_nbytes"] for row in result["pairs"] if row["verify"] == verify)
    ]


def _reshard_extra(verify: bool) -> Values:
    """Return what finds the extra times of the worst pair of meshes, as `benchmarks.reshard` reports them."""

    def extra(result: dict[str, Any], row: dict[str, Any]) -> list[float]:
        share = result["nbytes"] / row["touched_nbytes"]
        return [share * r / p for r, p in zip(row["reshard_s"], row["plain_s"], strict=True)]

    return lambda result: max(
        (extra(result, row) for row in result["pairs"] if row["verify"] == verify), key=statistics.median
    )


def _cpu(state: str) -> Values:
    return lambda result: [max(cpu.summary(result, state, staging)["beyond"] for staging in cpu.STAGINGS)]


def _scale(part: str, figure: str) -> Values:
    return lambda result: [max(r[figure] for r in result[part] if (r["ranks"], r["tensors"]) == (4096, 1000))]


def _behind(figure: Callable[[dict[str, Any]], float]) -> Values:
    return lambda result: [figure(save) for row in result["rounds"] for save in row["overlap"]]


def _stall_ms(save: dict[str, Any]) -> float:
    return 1e3 * (float(save["save_s"]) + float(save["wait_s"]))


TARGETS = (
    Target("stall, copies behind the training", "overlap-gpt", 5, _behind(_stall_ms), "ms"),
    Target(
        "stall of the first save after `prepare()`, behind",
        "overlap-gpt",
        5,
        lambda result: [1e3 * result["first_save"]["overlap"]["save_s"]],
        "ms",
    ),
    Target("stall, behind, `small`", "compare-small", 0.06, _contest("stall", OVERLAP), "s"),
    Target("stall, behind, `large`", "compare-large", 0.005, _contest("stall", OVERLAP), "s"),
    Target("stall, blocking, over a warm copy", "save_load-gpt", 1.2, _save_load("stall_s", "copy_s")),
    Target("the same, `small`", "save_load-small", 4, _save_load("stall_s", "copy_s")),
    Target(
        "the same, first save after `prepare()`, training on",
        "compare-gpt",
        1.2,
        _contest("stall cold", PREPARED, per="copy_s"),
    ),
    Target("lost per save", "compare-gpt", 0.15, _contest("lost warm"), "s"),
    Target("lost, first save after `prepare()`", "compare-gpt", 0.15, _contest("lost cold", PREPARED), "s"),
    Target("lost, first save without it", "compare-gpt", 0.15, _contest("lost cold"), "s"),
    Target("lost, over the best peer", "compare-gpt", 0.25, _beside("lost warm")),
    Target(
        "lost, first save after `prepare()`, over the best peer", "compare-gpt", 1 / 9, _beside("lost cold", PREPARED)
    ),
    Target("lost, first save without it, over the best peer", "compare-gpt", 1 / 9, _beside("lost cold")),
    Target("lost per save, `small`", "compare-small", 0.12, _contest("lost warm"), "s"),
    Target("the same, first save after `prepare()`", "compare-small", 0.12, _contest("lost cold", PREPARED), "s"),
    Target("the same, first save without it", "compare-small", 0.12, _contest("lost cold"), "s"),
    Target("lost per save, `large`", "compare-large", 0.4, _contest("lost warm"), "s"),
    Target("the same, first save after `prepare()`", "compare-large", 0.4, _contest("lost cold", PREPARED), "s"),
    Target("the same, first save without it", "compare-large", 0.4, _contest("lost cold"), "s"),
    Target("on disk over the write limit, training on", "compare-gpt", 1.9, _contest("durable warm", per="write_s")),
    Target(
        "the same, first save after `prepare()`",
        "compare-gpt",
        1.9,
        _contest("durable cold", PREPARED, per="write_s"),
    ),
    Target("the same, `small`", "compare-small", 2.5, _contest("durable warm", per="write_s")),
    Target("the same, `large`", "compare-large", 1.5, _contest("durable warm", per="write_s")),
    Target(
        "on disk over the write limit, nothing else running", "save_load-gpt", 1.15, _save_load("written_s", "write_s")
    ),
    Target("memory over the state", "compare-gpt", 1.02, _contest("memory")),
    Target("the same, `small`", "compare-small", 1.1, _contest("memory")),
    Target("the same, `large`", "compare-large", 1.02, _contest("memory")),
    Target("worker without slots", "save_load-gpt", 40, lambda r: [r["worker"]["rss_nbytes"] / 1e6], "MB"),
    Target("worker ready", "save_load-gpt", 0.3, lambda r: [r["worker"]["ready_s"]], "s"),
    Target("load, cold, verified, over the read limit", "save_load-gpt", 1.1, _cold),
    Target("the same, of files that the host keeps in its memory", "load-gpt", 1.1, _loaded("cold", "read limit")),
    Target("the same, `small`", "load-small", 1.5, _loaded("cold", "read limit")),
    Target("the same, `large`", "load-large", 1.1, _loaded("cold", "read limit")),
    Target("the same, beside the other libraries", "compare-gpt", 1.1, _contest("load cold, disk", per="read_s")),
    Target(
        "the same, beside the other libraries, `small`", "compare-small", 1.5, _contest("load cold, disk", per="read_s")
    ),
    Target(
        "the same, beside the other libraries, `large`", "compare-large", 1.1, _contest("load cold, disk", per="read_s")
    ),
    Target("load, warm, verified, over safetensors", "load-gpt", 1.3, _loaded("warm", "safetensors warm")),
    Target("the same, `small`", "load-small", 1.0, _loaded("warm", "safetensors warm")),
    Target("the same, beside the other libraries", "compare-gpt", 1.3, _beside("load warm", peer="safetensors")),
    Target(
        "the same, beside the other libraries, `small`", "compare-small", 1.0, _beside("load warm", peer="safetensors")
    ),
    Target("load from the worker's memory over a warm copy", "recall", 1.5, _ratio("memory_s", "copy_before_memory_s")),
    Target("resharded, verified: bytes read over those of the blocks", "reshard", 1.1, _resharded(True)),
    Target("resharded, not verified: bytes read over those needed", "reshard", 1.1, _resharded(False)),
    Target("resharded, verified: time over a plain load", "reshard", 1.5, _reshard_extra(True)),
    Target("resharded, not verified: time over a plain load", "reshard", 1.5, _reshard_extra(False)),
    Target("fds added, per rank", "ranks", 16, lambda r: [ranks.fds(r)["fds added, per rank"]], "fds"),
    Target("fds of the worker with two ranks", "ranks", 24, lambda r: [ranks.fds(r)["fds of the worker"]], "fds"),
    Target("trainer's CPU beyond the copy", "cpu", 20, _cpu("gpt"), "ms"),
    Target("the same, `small`", "cpu", 60, _cpu("small"), "ms"),
    Target("the same, 100,000 tensors", "cpu", 300, _cpu("many"), "ms"),
    Target("plan of 4,096 ranks x 1,000 tensors", "scale", 5, _scale("planning", "plan_s"), "s"),
    Target("commit of 4,096 ranks x 1,000 tensors", "scale", 3, _scale("commit", "first_commit_s"), "s"),
)


def rows(results: Path = RESULTS) -> list[tuple[Target, list[float]]]:
    """Return every target with its values, in order; with none where nothing was measured."""
    found = []
    for target in TARGETS:
        file = results / f"{target.file}.json"
        found.append((target, sorted(target.values(json.loads(file.read_text()))) if file.exists() else []))
    return found


def verdict(target: Target, values: list[float]) -> str:
    """Return "reached", "missed", "within the spread" or "not measured"."""
    if not values:
        return "not measured"
    if statistics.median(values) <= target.limit:
        return "reached"
    return "missed" if contest_results.interval(values)[0] > target.limit else "within the spread"


def table(results: Path = RESULTS) -> str:
    """Return all targets as Markdown."""
    lines = ["| | target, at most | measured | quartiles | |", "|---|---|---|---|---|"]
    for target, values in rows(results):
        measured = spread = ""
        if values:
            measured = _text(statistics.median(values), target.unit)
            low, high = contest_results.interval(values)
            spread = "" if len(values) == 1 else f"{_text(low, '')} to {_text(high, target.unit)}"
        result = f"[{verdict(target, values)}](../benchmarks/results/{target.file}.json)" if values else "not measured"
        lines.append(f"| {target.name} | {_text(target.limit, target.unit)} | {measured} | {spread} | {result} |")
    return "\n".join([*lines, "", ""])


def _text(value: float, unit: str) -> str:
    number = (
        f"{value:.3f}"
        if unit == "s" and value < 0.1
        else f"{value:.2f}"
        if value < 10 and unit != "fds"
        else f"{value:.0f}"
    )
    return f"{number} {unit}".strip()


def main() -> None:
    """Print every target."""
    for target, values in rows():
        measured = _text(statistics.median(values), target.unit) if values else ""
        print(f"{target.name:56s} {_text(target.limit, target.unit):>9s} {measured:>9s}   {verdict(target, values)}")
    print("\n".join(["", *sources.footer(RESULTS)]))


if __name__ == "__main__":
    main()

"""Every target beside what was measured: reached, missed, or not measured, from the result files alone.

    python -m benchmarks.targets

A target counts as missed only if the interval (the quartiles) excludes it. Of a single value there is none: the table
says that it was one. Of some figures the most counts, whatever the others are. Figures with `lost` and `on disk` are
those of `asyncckpt` as it comes, beside a training; ratios are against limits of the same round. Of several ways to
stage or meshes of a resharded load's time the worst counts. In the end: the results that were made with other code.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import figures as of
from benchmarks import sources
from benchmarks.contest_results import RESULTS, interval
from benchmarks.figures import OVERLAP, PREPARED, Values


class Target(NamedTuple):
    """One figure that has to be at most so much.

    Attributes:
        name: What it is.
        file: The result file, without its suffix; "gpu" is the newest one of any GPU.
        limit: At most this.
        values: Finds every measured value in the result.
        unit: Of limit and values; "x" for a ratio.
        most: The most of the values has to be within it, not their median.
    """

    name: str
    file: str
    limit: float
    values: Values
    unit: str = "x"
    most: bool = False


DESIGN: dict[str, tuple[Target, ...]] = {
    "stall, steady, overlap mode: gpt at most 5 ms; small at most 60 ms; large independent of the bytes (book-keeping "
    "only); first save after `prepare()`: as steady": (
        Target("stall, copies behind the training", "overlap-gpt", 5, of.behind(of.stall_ms), "ms"),
        Target("the same, first save after `prepare()`", "overlap-gpt", 5, of.first_behind, "ms"),
        Target("stall, behind, `small`", "compare-small", 0.06, of.contest("stall", OVERLAP), "s"),
        Target("stall, behind, `large`", "compare-large", 0.005, of.contest("stall", OVERLAP), "s"),
        Target("the same, first save after `prepare()`", "overlap-large", 5, of.first_behind, "ms"),
    ),
    "stall, steady, blocking mode: gpt at most 1.2 x warm copy; small at most 4 x; first save after `prepare()`: as "
    "steady": (
        Target("stall, blocking, over a warm copy", "save_load-gpt", 1.2, of.save_load("stall_s", "copy_s")),
        Target("the same, `small`", "save_load-small", 4, of.save_load("stall_s", "copy_s")),
        Target("the same, `large`", "save_load-large", 1.2, of.save_load("stall_s", "copy_s")),
        Target(
            "first save after `prepare()`, training on, over a warm copy",
            *("compare-gpt", 1.2, of.contest("stall cold", PREPARED, per="copy_s")),
        ),
        Target("the same, `small`", "compare-small", 4, of.contest("stall cold", PREPARED, per="copy_s")),
        Target("the same, `large`", "compare-large", 1.2, of.contest("stall cold", PREPARED, per="copy_s")),
    ),
    "lost per save: gpt at most 0.15 s, cold and warm; a quarter of the best peer warm, a ninth cold; small at most "
    "0.12 s; large at most 0.4 s": (
        Target("lost per save", "compare-gpt", 0.15, of.contest("lost warm"), "s"),
        Target("the same, first save after `prepare()`", "compare-gpt", 0.15, of.contest("lost cold", PREPARED), "s"),
        Target("the same, first save without it", "compare-gpt", 0.15, of.contest("lost cold"), "s"),
        Target("lost, over the best peer", "compare-gpt", 1 / 4, of.beside("lost warm")),
        Target("the same, first save after `prepare()`", "compare-gpt", 1 / 9, of.beside("lost cold", PREPARED)),
        Target("the same, first save without it", "compare-gpt", 1 / 9, of.beside("lost cold")),
        Target("lost per save, `small`", "compare-small", 0.12, of.contest("lost warm"), "s"),
        Target("the same, first save after `prepare()`", "compare-small", 0.12, of.contest("lost cold", PREPARED), "s"),
        Target("the same, first save without it", "compare-small", 0.12, of.contest("lost cold"), "s"),
        Target("lost per save, `large`", "compare-large", 0.4, of.contest("lost warm"), "s"),
        Target("the same, first save after `prepare()`", "compare-large", 0.4, of.contest("lost cold", PREPARED), "s"),
        Target("the same, first save without it", "compare-large", 0.4, of.contest("lost cold"), "s"),
        Target("lost, over the best peer, `large`", "compare-large", 1 / 4, of.beside("lost warm")),
        Target("the same, first save after `prepare()`", "compare-large", 1 / 9, of.beside("lost cold", PREPARED)),
        Target("the same, first save without it", "compare-large", 1 / 9, of.beside("lost cold")),
        Target("lost per save, two ranks, replicated", "ranks", 0.15, of.on_ranks("lost warm", "ddp"), "s"),
        Target("the same, sharded", "ranks", 0.15, of.on_ranks("lost warm", "fsdp2"), "s"),
    ),
    "durable, training on: gpt at most 1.9 x write limit, goal 1.4 x; small at most 2.5 x; large at most 1.5 x, goal "
    "1.3 x; nothing else running: 1.15 x": (
        Target(
            "on disk over the write limit, training on", "compare-gpt", 1.9, of.contest("durable warm", per="write_s")
        ),
        Target("the same, the goal", "compare-gpt", 1.4, of.contest("durable warm", per="write_s")),
        Target(
            "the same, first save after `prepare()`",
            *("compare-gpt", 1.9, of.contest("durable cold", PREPARED, per="write_s")),
        ),
        Target("the same, `small`", "compare-small", 2.5, of.contest("durable warm", per="write_s")),
        Target("the same, `large`", "compare-large", 1.5, of.contest("durable warm", per="write_s")),
        Target("the same, `large`, the goal", "compare-large", 1.3, of.contest("durable warm", per="write_s")),
        Target("the same, two ranks, replicated", "ranks", 1.9, of.on_ranks("durable warm", "ddp", per="write_s")),
        Target("the same, two ranks, sharded", "ranks", 1.9, of.on_ranks("durable warm", "fsdp2", per="write_s")),
        Target(
            "on disk over the write limit, nothing else running",
            *("save_load-gpt", 1.15, of.save_load("written_s", "write_s")),
        ),
        Target("the same, `large`", "save_load-large", 1.15, of.save_load("written_s", "write_s")),
    ),
    "memory over the state: gpt at most 1.02 x with one slot in use; small 1.1 x; worker without slots: at most 40 MB, "
    "ready in 0.3 s": (
        Target("memory over the state", "compare-gpt", 1.02, of.contest("memory")),
        Target("the same, `small`", "compare-small", 1.1, of.contest("memory")),
        Target("the same, `large`", "compare-large", 1.02, of.contest("memory")),
        Target("worker without slots", "save_load-gpt", 40, lambda r: [r["worker"]["rss_nbytes"] / 1e6], "MB", True),
        Target(
            "worker ready, the slowest start", "save_load-gpt", 0.3, lambda r: [r["worker"]["ready_max_s"]], "s", True
        ),
    ),
    "load cold, verified: gpt at most 1.1 x read limit; small at most 1.5 x; large 1.1 x": (
        Target("load, cold, verified, over the read limit", "save_load-gpt", 1.1, of.cold),
        Target("the same, `small`", "save_load-small", 1.5, of.cold),
        Target("the same, `large`", "save_load-large", 1.1, of.cold),
        Target("the same, by who only loads", "load-gpt", 1.1, of.loaded("cold fresh", "read limit fresh")),
        Target("the same, `small`, by who only loads", "load-small", 1.5, of.loaded("cold fresh", "read limit fresh")),
        Target("the same, `large`, by who only loads", "load-large", 1.1, of.loaded("cold fresh", "read limit fresh")),
        Target("the same, of files that were read before", "load-gpt", 1.1, of.cold_again),
        Target("the same, `small`, of files that were read before", "load-small", 1.5, of.cold_again),
        Target("the same, `large`, of files that were read before", "load-large", 1.1, of.cold_again),
        Target(
            "the same, beside the other libraries",
            *("compare-gpt", 1.1, of.contest("load cold, disk", per="read_fresh_s")),
        ),
        Target(
            "the same, `small`, beside the other libraries",
            *("compare-small", 1.5, of.contest("load cold, disk", per="read_fresh_s")),
        ),
        Target(
            "the same, `large`, beside the other libraries",
            *("compare-large", 1.1, of.contest("load cold, disk", per="read_fresh_s")),
        ),
    ),
    "load warm (page cache), verified: gpt at most 1.3 x of safetensors; small faster than safetensors; from the "
    "worker's memory: at most 1.5 x warm copy": (
        Target("load, warm, verified, over safetensors", "load-gpt", 1.3, of.loaded("warm", "safetensors warm")),
        Target("the same, `small`", "load-small", 1.0, of.loaded("warm", "safetensors warm")),
        Target("the same, `large`", "load-large", 1.3, of.loaded("warm", "safetensors warm")),
        Target("the same, beside the other libraries", "compare-gpt", 1.3, of.beside("load warm", peer="safetensors")),
        Target(
            "the same, `small`, beside the other libraries",
            *("compare-small", 1.0, of.beside("load warm", peer="safetensors")),
        ),
        Target(
            "the same, `large`, beside the other libraries",
            *("compare-large", 1.3, of.beside("load warm", peer="safetensors")),
        ),
        Target(
            "load from the worker's memory over a warm copy",
            *("recall", 1.5, of.ratio("memory_s", "copy_before_memory_s")),
        ),
    ),
    "reshard: bytes read at most 1.1 x the bytes of the blocks touched when verifying, 1.1 x the needed bytes with "
    "`verify=False`; 2-D meshes too; extra time over a plain load at most 1.5 x": (
        Target(
            "resharded, verified: bytes read over those of the blocks", "reshard", 1.1, of.resharded(True), most=True
        ),
        Target("resharded, not verified: bytes read over those needed", "reshard", 1.1, of.resharded(False), most=True),
        Target("resharded, verified: time over a plain load", "reshard", 1.5, of.reshard_extra(True)),
        Target("resharded, not verified: time over a plain load", "reshard", 1.5, of.reshard_extra(False)),
    ),
    "fds that we add per rank: gpt at most 16; small at most 16; worker: 16 + 4 per rank + open files": (
        Target("fds added, per rank", "ranks", 16, of.fds("fds added, per rank"), "fds", True),
        Target("the same, one rank", "compare-gpt", 16, of.contest_fds, "fds", True),
        Target("the same, one rank, `small`", "compare-small", 16, of.contest_fds, "fds", True),
        Target("fds of the worker with two ranks", "ranks", 24, of.fds("fds of the worker"), "fds", True),
    ),
    "trainer CPU per save beyond the copy: gpt at most 20 ms; small at most 60 ms; 3 microseconds a tensor; 100,000 "
    "tensors work": (
        Target("trainer's CPU beyond the copy", "cpu", 20, of.cpu_beyond("gpt"), "ms"),
        Target("the same, `small`", "cpu", 60, of.cpu_beyond("small"), "ms"),
        Target("the same, 100,000 tensors", "cpu", 300, of.cpu_beyond("many"), "ms"),
    ),
    "scale (simulated ranks, no trainers): plan for 4,096 ranks x 1,000 tensors in 5 s, cached after; commit of 4,096 "
    "reports in 3 s; planning grows no faster than linearly in chunks": (
        Target("plan of 4,096 ranks x 1,000 tensors", "scale", 5, of.scale("planning", "plan_s"), "s", True),
        Target(
            "the same, found again, by tensor",
            *("scale", 3, lambda r: [r["cached"]["dtensor_us_per_tensor"], r["cached"]["plain_us_per_tensor"]]),
            *("us", True),
        ),
        Target("growth of planning over that of the chunks", "scale", 1.0, of.growth, most=True),
        Target("commit of 4,096 ranks x 1,000 tensors", "scale", 3, of.scale("commit", "first_commit_s"), "s", True),
    ),
    "frozen (a later issue): at most 0.1 x the bytes of a full save written": (
        Target("frozen: bytes written over those of a full save", "frozen", 0.1, of.ratio("written_nbytes", "nbytes")),
    ),
    "GPU (H200): stall at most 5 ms for any size in overlap and device mode; D2H at 90 % of pinned PCIe bandwidth; "
    "step time within 3 % while a save is in flight": (
        Target("GPU: stall, behind the training", "gpu", 5, of.gpu("stall_overlap_s", 1e3), "ms"),
        Target("the same, copied on the GPU first", "gpu", 5, of.gpu("stall_device_s", 1e3), "ms"),
        Target("GPU: time to the host over a pinned copy", "gpu", 1 / 0.9, of.gpu("d2h_over_pinned", inverse=True)),
        Target("GPU: a step while a save is in flight, over a quiet one", "gpu", 1.03, of.gpu("step_ratio")),
    ),
}
"""What the design asks for, in its words -> the figures that say whether it is so."""

TARGETS = tuple(target for targets in DESIGN.values() for target in targets)


def rows(results: Path = RESULTS) -> list[tuple[Target, list[float]]]:
    """Return every target with its values, in order; with none where nothing was measured."""
    found = []
    for target in TARGETS:
        file = file_of(target, results)
        found.append((target, sorted(target.values(json.loads(file.read_text()))) if file.exists() else []))
    return found


def file_of(target: Target, results: Path = RESULTS) -> Path:
    """Return the result file of a target, which need not be there."""
    of_gpus: list[Path] = sorted(results.glob("gpu-*.json"), key=_date) if target.file == "gpu" else []
    return of_gpus[-1] if of_gpus else results / f"{target.file}.json"


def _date(file: Path) -> str:
    result: dict[str, Any] = json.loads(file.read_text())
    return str(result["machine"]["date"])


def measured(target: Target, values: list[float]) -> float:
    """Return the figure that counts."""
    return max(values) if target.most else statistics.median(values)


def verdict(target: Target, values: list[float]) -> str:
    """Return "reached", "missed" or "within the spread", of a single value as such, or "not measured"."""
    if not values:
        return "not measured"
    said = "reached" if measured(target, values) <= target.limit else "missed"
    if target.most:
        return said
    if len(values) == 1:
        return f"one value: {said}"
    return "within the spread" if said == "missed" and interval(values)[0] <= target.limit else said


def table(results: Path = RESULTS) -> str:
    """Return all targets as Markdown."""
    lines = ["| | target, at most | measured | quartiles | |", "|---|---|---|---|---|"]
    for target, values in rows(results):
        figure = spread = ""
        if values:
            figure = _text(measured(target, values), target.unit)
            low, high = interval(values)
            spread = "" if len(values) == 1 else f"{_text(low, target.unit, '')} to {_text(high, target.unit)}"
            spread = f"the most of {len(values)}" if target.most and len(values) > 1 else spread
        name = file_of(target, results).name
        result = f"[{verdict(target, values)}](../benchmarks/results/{name})" if values else "not measured"
        lines.append(f"| {target.name} | {_text(target.limit, target.unit)} | {figure} | {spread} | {result} |")
    return "\n".join([*lines, "", ""])


def _text(value: float, unit: str, shown: str | None = None) -> str:
    """Return a value with as many digits as its unit wants, and the unit, or what is shown in its place."""
    number = (
        f"{value:.3f}"
        if unit == "s" and value < 0.1
        else f"{value:.2f}"
        if value < 10 and unit != "fds"
        else f"{value:.0f}"
    )
    return f"{number} {unit if shown is None else shown}".strip()


def main() -> None:
    """Print every target."""
    for target, values in rows():
        figure = _text(measured(target, values), target.unit) if values else ""
        print(f"{target.name:60s} {_text(target.limit, target.unit):>9s} {figure:>9s}   {verdict(target, values)}")
    print("\n".join(["", *sources.footer(RESULTS)]))


if __name__ == "__main__":
    main()

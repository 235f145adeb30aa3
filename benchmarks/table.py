"""Makes the tables and pictures of README.md and docs/performance.md from the result files.

python -m benchmarks.table           rewrite tables and pictures
python -m benchmarks.table --check   say whether the tables are up to date

Either says which result files were made with other code than this checkout's: information, and no failure.
What has not been measured, because its result file is not there, stays as it is.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import chart, cpu, overlap, quiet, sources, targets, trace
from benchmarks.contest_tables import front_table, ranks_table, where, with_picture
from benchmarks.save_load import RESULTS, SAVES_PER_ROUND, TARGETS, summary

ROOT = Path(__file__).parents[1]
DOCUMENTS = (ROOT / "README.md", ROOT / "docs" / "performance.md")
END = "<!-- end -->"


def save_load_table(result: dict[str, Any]) -> str:
    """Return the figures of `benchmarks.save_load` as Markdown."""
    found, rounds, machine = summary(result), result["rounds"], result["machine"]

    def spread(values: list[float]) -> str:
        return f"{min(values):.2f} to {max(values):.2f}"

    cold = [r["load_cold_s"] for r in rounds]
    saves = [s for r in rounds for s in r["saves"]]
    rows = [
        ("`save()` returns (stall)", "stall s", [s["stall_s"] for s in saves], "stall / warm copy", "warm copy"),
        ("on disk, committed", "written s", [s["written_s"] for s in saves], "written / write limit", "O_DIRECT write"),
        ("load, cold, verified", "load cold s", cold, "load cold / read limit", "O_DIRECT read"),
    ]
    limits = {"stall s": "warm copy s", "written s": "write limit s", "load cold s": "read limit s"}
    lines = ["| | median, s | spread, s | limit, s | ratio | target |", "|---|---|---|---|---|---|"]
    for name, key, values, ratio, limit in rows:
        lines.append(
            f"| {name} | {found[key]:.3f} | {spread(values)} | {found[limits[key]]:.3f} ({limit}) | "
            f"{found[ratio]:.2f} | {TARGETS[ratio]} |"
        )
    memory, warm = found["memory over the state"], spread([r["load_warm_s"] for r in rounds])
    lines += [
        f"| load, page cache warm, verified | {found['load warm s']:.3f} | {warm} | | | |",
        "",
        f"Host memory: {memory:.3f} times the state (target {TARGETS['memory over the state']}). Worker: ready in "
        f"{found['worker ready s']:.2f} s, {found['worker rss MB']:.0f} MB without slots.",
        f"First save of the run: `save()` took {found['first save stall s']:.2f} s.",
        "",
        *where(result, f"{len(rounds)} rounds of {result.get('saves', SAVES_PER_ROUND)} saves", machine),
    ]
    return "\n".join(lines)


def overlap_table(result: dict[str, Any]) -> str:
    """Return the figures of `benchmarks.overlap` as Markdown."""
    found, rounds = overlap.summary(result), result["rounds"]
    rows: list[tuple[str, str, Callable[[dict[str, Any], float], float]]] = [
        ("stall of a save, and of the step that waits", "stall, {}, ms", lambda s, _: s["save_s"] + s["wait_s"]),
        ("time lost until it is written", "lost, {}, ms", overlap.lost_s),
        ("a step meanwhile", "step while saving, {}, ms", lambda s, _: statistics.median(s["steps_s"])),
        ("on disk, committed", "written, {}, ms", lambda s, _: s["phases_s"]["total"]),
    ]
    lines = ["| ms | behind the training | spread | in front of it | spread |", "|---|---|---|---|---|"]
    for name, key, value in rows:
        cells = []
        for kind in overlap.KINDS:
            values = [1e3 * value(save, statistics.median(row["quiet_step_s"])) for row in rounds for save in row[kind]]
            cells += [f"{found[key.format(kind)]:.0f}", f"{min(values):.0f} to {max(values):.0f}"]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += [
        "",
        f"A step without a save: {found['quiet step, ms']:.0f} ms. First `save()` after `prepare()`: "
        f"{found['first save after prepare(), overlap, ms']:.0f} ms behind the training.",
        "",
        *where(result, f"{len(rounds)} rounds of {result.get('saves', 6)} saves of either kind", result["machine"]),
    ]
    return "\n".join(lines)


def cpu_table(result: dict[str, Any]) -> str:
    """Return the figures of `benchmarks.cpu` as Markdown."""
    lines = [
        "| CPU, ms a save | `staging` | in `save()` | copying | trainer, beyond the copy | target | worker |",
        "|---|---|---|---|---|---|---|",
    ]
    for state, measured in result["states"].items():
        for staging in cpu.STAGINGS:
            found = cpu.summary(result, state, staging)
            name = f"{state}: {measured['tensors']:,} tensors, {measured['nbytes'] / 1e9:.2f} GB"
            figures = (
                f"{found['save()']:.0f} | {found['copy']:.0f} | {found['beyond']:.0f} | {cpu.TARGETS_MS[state]:.0f}"
            )
            lines.append(f"| {name} | {staging} | {figures} | {found['worker']:.0f} |")
    machine = result["machine"]
    lines += [
        "",
        f"Medians. {machine['cpu']}, {machine['cores']} cores, {quiet.said(result)}, {machine['date'][:10]}.",
        "",
    ]
    return "\n".join(lines)


TABLES: dict[str, tuple[str, Callable[[dict[str, Any]], str]]] = {
    "front": ("compare-gpt.json", front_table),
    "save_load": ("save_load-gpt.json", save_load_table),
    "overlap": ("overlap-gpt.json", overlap_table),
    "cpu": ("cpu.json", cpu_table),
    "ranks": ("ranks.json", ranks_table),
    "compare": ("compare-gpt.json", with_picture),
    "compare-small": ("compare-small.json", with_picture),
    "compare-large": ("compare-large.json", with_picture),
}
"""Marker in a document -> result file, and what makes a table of it."""


def rendered(text: str, results: Path = RESULTS) -> str:
    """Return a document with its tables made anew."""
    for name, (file, table) in TABLES.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        if not begin or not (results / file).exists():
            continue
        _, _, tail = rest.partition(END)
        text = head + begin + table(json.loads((results / file).read_text())) + END + tail
    head, begin, rest = text.partition("<!-- targets -->\n")
    return head + begin + targets.table(results) + END + rest.partition(END)[2] if begin else text


def draw(results: Path = RESULTS, images: Path = chart.IMAGES) -> None:
    """Make every picture whose result file is there."""
    images.mkdir(parents=True, exist_ok=True)
    for maker, prefix in ((chart.draw, "compare-"), (trace.draw, "trace-")):
        for file in sorted(results.glob(f"{prefix}*.json")):
            (images / f"{file.stem}.svg").write_text(maker(json.loads(file.read_text())))


def main() -> int:
    """Rewrite or check; returns the exit code."""
    print("\n".join(sources.footer(RESULTS)), file=sys.stderr)
    if "--check" in sys.argv[1:]:
        return int(any(path.read_text() != rendered(path.read_text()) for path in DOCUMENTS))
    draw()
    for path in DOCUMENTS:
        path.write_text(rendered(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

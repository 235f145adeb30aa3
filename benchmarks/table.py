"""Writes the README's tables of figures from the result files.

python -m benchmarks.table           rewrite README.md
python -m benchmarks.table --check   say whether it is up to date
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks import compare, overlap
from benchmarks.save_load import RESULTS, SAVES_PER_ROUND, TARGETS, summary

README = Path(__file__).parents[1] / "README.md"
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
        *_where(result, f"{len(rounds)} interleaved rounds of {SAVES_PER_ROUND} saves", machine),
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
        *_where(result, f"{len(rounds)} rounds of {result.get('saves', 6)} saves of either kind", result["machine"]),
    ]
    return "\n".join(lines)


COLUMNS = {
    "stall": "stall",
    "lost cold": "lost, first save",
    "lost warm": "lost",
    "durable cold": "on disk, first save",
    "durable warm": "on disk",
    "memory": "memory x state",
    "load cold": "load, cold",
    "load warm": "load, warm",
}


def compare_table(result: dict[str, Any]) -> str:
    """Return the medians of `benchmarks.compare` as Markdown, with the quartiles of the two that matter most."""
    lines = ["| seconds | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    unsafe: set[str] = set()
    for name in compare.names(result):
        found = compare.values(result, name)
        if isinstance(found, str):
            lines.append(f"| {name} | fails: {found.splitlines()[0][:80]} |" + " |" * (len(COLUMNS) - 1))
            continue
        fsyncs = next(r["contenders"][name]["fsyncs"] for r in result["rounds"])
        mark = "" if fsyncs else "*"
        unsafe.update(mark)
        cells = []
        for measure in COLUMNS:
            median = statistics.median(found[measure])
            low, high = compare.interval(found[measure])
            spread = f" ({low:.2f} to {high:.2f})" if measure in ("lost warm", "durable warm") else ""
            cells.append(f"{median:.2f}{mark if measure.startswith('durable') else ''}{spread}")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    limits = compare.limits(result)
    nbytes = compare.NBYTES[result["state"]]
    saves = 1 + max(len(one["warm"]) for row in result["rounds"] for one in row["contenders"].values() if "warm" in one)
    lines += [
        "",
        *(["`*`: it does not fsync; the benchmark did.", ""] if unsafe else []),
        f"The machine's limits in the same rounds: O_DIRECT write {limits['write_s']:.2f} s, read "
        f"{limits['read_s']:.2f} s, copy into warm shared memory {limits['copy_s']:.2f} s. In brackets: quartiles.",
        "",
        *_where(
            result | {"nbytes": nbytes}, f"{len(result['rounds'])} rounds of {saves} saves each", result["machine"]
        ),
    ]
    return "\n".join(lines)


def _where(result: dict[str, Any], rounds: str, machine: dict[str, Any]) -> list[str]:
    ram = f"{machine['memory_nbytes'] / 2**30:.0f} GiB"
    return [
        f"{result['nbytes'] / 1e9:.2f} GB, {rounds}, nothing else running;",
        f"{machine['cpu']}, {machine['cores']} cores, {ram}, {machine['file_system']}, Linux {machine['kernel']},",
        f"torch {machine['versions']['torch']}, {machine['date'][:10]}.",
        "",
    ]


TABLES = {
    "save_load": ("save_load-gpt.json", save_load_table),
    "overlap": ("overlap-gpt.json", overlap_table),
    "compare": ("compare-gpt.json", compare_table),
}
"""Marker in the README -> result file, and what makes a table of it."""


def rendered(text: str) -> str:
    """Return the README with its tables made anew."""
    for name, (file, table) in TABLES.items():
        head, begin, rest = text.partition(f"<!-- {name} -->\n")
        if not begin:
            continue
        _, _, tail = rest.partition(END)
        text = head + begin + table(json.loads((RESULTS / file).read_text())) + END + tail
    return text


def main() -> int:
    """Rewrite or check; returns the exit code."""
    text = README.read_text()
    wanted = rendered(text)
    if "--check" in sys.argv[1:]:
        return int(text != wanted)
    README.write_text(wanted)
    return 0


if __name__ == "__main__":
    sys.exit(main())

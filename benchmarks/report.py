"""Makes the tables and pictures of README.md and docs/performance.md from the result files.

    python -m benchmarks.report           rewrite tables and pictures
    python -m benchmarks.report --check   exit with 1 if a table is not up to date

What has no result file stays as it is. Pictures need matplotlib (extra `report`).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import CHECKOUT, RESULTS, figures, machine, targets
from benchmarks.figures import Row

DOCUMENTS = (CHECKOUT / "README.md", CHECKOUT / "docs" / "performance.md")
IMAGES = CHECKOUT / "docs" / "images"
END = "<!-- end -->"

# ---- tables ----------------------------------------------------------------------------------------------------------

SPREAD = ("lost", "on disk")
"""Columns that show quartiles beside the median."""


class Table(NamedTuple):
    """A table of a result file: a row for each match of `*`, or for each figure.

    Attributes:
        file: The result file, without its suffix.
        columns: Head -> figure (see `benchmarks.figures`), in seconds. Without `*`, each figure is a row.
        corner: The head of the first column; begins with "ms" if the table is in milliseconds.
        only: The matches that are rows; empty: all.
    """

    file: str
    columns: Mapping[str, str]
    corner: str = "seconds"
    only: Sequence[str] = ()


def _of(path: str, columns: Mapping[str, str]) -> dict[str, str]:
    return {head: f"{path}/{figure}" for head, figure in columns.items()}


LATER = {"stall": "warm/stall_s", "lost": "warm/lost_s", "on disk": "warm/durable_s"}
SAVES = {**LATER, "lost, first save": "cold/lost_s", "on disk, first save": "cold/durable_s"}
COLD = {"load, cold": "loads/disk/cold_s"}
LOADS = {**COLD, "load, warm": "loads/disk/warm_s", "from memory": "loads/memory/warm_s"}
FRONT = ("asyncckpt", "asyncckpt, overlap", "dcp.save", "dcp.async_save, thread", "torch_checkpointing")
COMPARED = _of("contenders/*", {**SAVES, "memory x state": "memory_over_state", **LOADS})
LIMITS = {
    "O_DIRECT write": "limits/write_s",
    "first read": "limits/read_fresh_s",
    "later read": "limits/read_again_s",
    "warm copy": "limits/copy_s",
}
OWN = {
    "`save()` returns (stall)": "saves/stall_s",
    "a copy of as many bytes into warm shared memory": "saves/copy_s",
    "`save()` returns, first save": "first_save/stall_s",
    "on disk, committed": "saves/written_s",
    "an O_DIRECT write of as many bytes": "limits/write_s",
    "a worker is ready": "worker/ready_s",
}
BEHIND = {
    "stall of a save, and of the step that waits": "*/stall_s",
    "lost": "*/lost_s",
    "a step meanwhile": "*/steps_s",
    "on disk": "*/phases_s/total",
}
PHASES = ("plan", "acquire", "copy", "seal", "write", "fsync", "index", "commit", "total")
CPU = {"in `save()`": "save_s", "copy": "copy_s", "beyond it": "beyond_s", "worker": "worker_s"}
TABLES = {
    "front": Table("compare-gpt", _of("contenders/*", {**LATER, **COLD}), only=FRONT),
    "save_load": Table("save_load-gpt", OWN),
    "overlap": Table("overlap-gpt", BEHIND, "ms, `staging`"),
    "phases": Table("overlap-gpt", {phase: f"*/phases_s/{phase}" for phase in PHASES}, "ms, `staging`"),
    "cpu": Table(
        "cpu", {f"{s}: {head}": f"*/{s}/{CPU[head]}" for s in ("overlap", "blocking") for head in CPU}, "ms of CPU"
    ),
    "ddp": Table("ranks-gpt", _of("ddp/*", SAVES), "seconds, replicated"),
    "fsdp2": Table("ranks-gpt", _of("fsdp2/*", SAVES), "seconds, sharded"),
    **{f"compare-{state}": Table(f"compare-{state}", COMPARED) for state in ("gpt", "small", "large")},
}
"""Marker in a document -> table."""


def lines_of(table: Table, result: Row) -> list[str]:
    """Return a table of medians, and where they are from."""
    if not any("*" in figure for figure in table.columns.values()):
        rows = [[name, _cell(figures.values(result, figure), True)] for name, figure in table.columns.items()]
        return [*_markdown([table.corner, "median (quartiles)"], rows), *_where(result)]
    found = {head: figures.matches(result, figure) for head, figure in table.columns.items()}
    names = table.only or list(dict.fromkeys(name for cells in found.values() for name in cells))
    scale = 1e3 if table.corner.startswith("ms") else 1.0
    rows = [
        [name, *(_cell([scale * v for v in cells.get(name, ())], head in SPREAD) for head, cells in found.items())]
        for name in names
    ]
    return [*_markdown([table.corner, *table.columns], rows), *_failed(result), *_where(result, brief=bool(table.only))]


def _cell(values: Sequence[float], spread: bool) -> str:
    if not values:
        return ""
    low, middle, high = (
        f"{v:.0f}" if v >= 10 else f"{v:.2f}" if v >= 0.1 else f"{v:.3f}" for v in figures.quartiles(values)
    )
    return f"{middle} ({low} to {high})" if spread and len(values) > 1 else middle


def _markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _failed(result: Row) -> list[str]:
    """Return a line for each contender that failed."""
    errors: dict[str, str] = {}
    for row in result["rounds"]:
        for name, one in row.get("contenders", {}).items():
            if "error" in one:
                errors[name] = str(one["error"]).splitlines()[0].translate(str.maketrans("<>*|", "()' "))
    return ["", *(f"{name} fails: {error[:120]}." for name, error in errors.items())] if errors else []


def _targets(results: Path) -> list[str]:
    head = ["", "target, at most", "measured", "quartiles", ""]
    found = [
        [*cells, said if said == "not measured" else f"[{said}](../benchmarks/results/{file})"]
        for *cells, said, file in targets.rows(results)
    ]
    return [*_markdown(head, found), ""]


def _where(result: Row, *, brief: bool = False) -> list[str]:
    """Return lines on size, rounds, machine and versions, and on how quiet the machine was."""
    about, rounds = result["machine"], len(result["rounds"])
    made = f"{result['nbytes'] / 1e9:.2f} GB, " if "nbytes" in result else ""
    made += f"medians of {rounds} round{'s' * (rounds > 1)}" + (
        f" of {result['saves']} saves each" if "saves" in result else ""
    )
    if (missing := result.get("rounds_asked", rounds) - rounds) > 0:
        made += f" ({missing} were left out: {result['ended']})"
    if brief:
        return ["", f"{made} beside a training; {about['cores']} cores, {about['file_system']}, {about['date'][:10]}."]
    limits = ", ".join(
        f"{name} {figures.median(result, figure):.2f} s"
        for name, figure in LIMITS.items()
        if figures.values(result, figure)
    )
    return [
        "",
        *([f"The machine's limits in the same rounds: {limits}."] if limits else []),
        f"{made}; {machine.how_busy(result)};",
        f"{about['cpu']}, {about['cores']} cores, {about['memory_nbytes'] / 2**30:.0f} GiB, {about['file_system']}, "
        f"Linux {about['kernel']}, torch {about['versions']['torch']}, {about['date'][:10]}.",
    ]


def rendered(text: str, results: Path = RESULTS) -> str:
    """Return a document with its tables made anew."""
    for marker in (*TABLES, "targets"):
        head, begin, rest = text.partition(f"<!-- {marker} -->\n")
        if not begin:
            continue
        if marker == "targets":
            table = "\n".join([*_targets(results), ""])
        elif (file := results / f"{TABLES[marker].file}.json").exists():
            table = "\n".join([*lines_of(TABLES[marker], json.loads(file.read_text())), ""])
        else:
            continue
        text = head + begin + table + END + rest.partition(END)[2]
    return text


# ---- pictures --------------------------------------------------------------------------------------------------------

PANELS = (
    ("warm/lost_s", "training lost by a save, s", ""),
    ("warm/durable_s", "save until on disk, s", "limits/write_s"),
    ("loads/disk/cold_s", "load from the disk, nothing cached, s", "limits/read_fresh_s"),
)
GREY = "#768390"
"""Legible on a light page and on a dark one."""

STYLE: dict[str, Any] = {
    "svg.hashsalt": "asyncckpt",
    "svg.fonttype": "none",
    "font.size": 9.0,
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), GREY),
}


def draw_compare(result: Row, path: Path) -> None:
    """Draw bars of medians with quartiles for each contender, and the machine's limit as a line."""
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams.update(STYLE)  # type: ignore[arg-type]
    from matplotlib import pyplot

    names = list(result["rounds"][0]["contenders"])
    colors = ["#2ea583" if name.startswith("asyncckpt") else "#9aa5b1" for name in names]
    size = (11.0, 1.1 + 0.22 * len(names))
    figure, axes = pyplot.subplots(1, len(PANELS), figsize=size, layout="constrained", sharey=True)
    for axis, (measure, title, limit) in zip(axes, PANELS, strict=True):
        found = [figures.values(result, f"contenders/{name}/{measure}") for name in names]
        spread = [figures.quartiles(values or [0.0]) for values in found]
        sides = [[middle - low for low, middle, _ in spread], [high - middle for _, middle, high in spread]]
        bars = axis.barh(names, [middle for _, middle, _ in spread], 0.6, xerr=sides, color=colors, ecolor=GREY)
        labels = [f" {middle:.2f}" if values else "" for values, (_, middle, _) in zip(found, spread, strict=True)]
        axis.bar_label(bars, labels, fontsize=8)
        axis.spines[["top", "right"]].set_visible(False)
        at = figures.median(result, limit) if limit else 0.0
        axis.set_title(f"{title} (limit {at:.2f})" if limit else title, fontsize=9, loc="left")
        if limit:
            axis.axvline(at, color="#c8553d", linestyle="--", linewidth=1)
    axes[0].invert_yaxis()
    made = f"medians of {len(result['rounds'])} rounds of {result['saves']} saves; lines: quartiles"
    figure.supxlabel(f"{result['nbytes'] / 1e9:.2f} GB, {made}. {result['machine']['date'][:10]}", fontsize=8)
    title = f"{result['state']}: ours beside other checkpointers"
    figure.savefig(path, transparent=True, metadata={"Date": None, "Title": title})
    pyplot.close(figure)


def main() -> int:
    """Rewrite or check; return the exit code."""
    if "--check" in sys.argv[1:]:
        return int(any(path.read_text() != rendered(path.read_text()) for path in DOCUMENTS))
    IMAGES.mkdir(parents=True, exist_ok=True)
    for file in sorted(RESULTS.glob("compare-*.json")):
        draw_compare(json.loads(file.read_text()), IMAGES / f"{file.stem}.svg")
    for path in DOCUMENTS:
        path.write_text(rendered(path.read_text()))
    return 0


if __name__ == "__main__":
    sys.exit(main())

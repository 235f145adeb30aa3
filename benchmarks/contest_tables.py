"""Tables of contenders: of `benchmarks.compare` and `benchmarks.ranks`, as Markdown."""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks import contest_results, quiet, ranks
from benchmarks.contest_results import OURS
from benchmarks.on_rank import ARRANGEMENTS
from benchmarks.rounds import NBYTES

COLUMNS = {
    "stall": "stall",
    "lost cold": "lost, first save",
    "lost warm": "lost",
    "durable cold": "on disk, first save",
    "durable warm": "on disk",
    "memory": "memory x state",
    "load cold": "load, cold",
    "load warm": "load, warm",
    "verifies": "load verified",
    "outlives": "outlives the trainer",
}
"""What is measured or known of a contender -> the head of its column."""


def compare_table(result: dict[str, Any]) -> str:
    """Return the medians of `benchmarks.compare` as Markdown, with the quartiles of the two that matter most."""
    lines = ["| seconds | " + " | ".join(COLUMNS.values()) + " |", "|---" * (len(COLUMNS) + 1) + "|"]
    unsafe: set[str] = set()
    for name in contest_results.names(result):
        found = contest_results.values(result, name)
        if isinstance(found, str):
            lines.append(f"| {name} | *fails: {_cell(found)}* |" + " |" * (len(COLUMNS) - 1))
            continue
        mark = "" if result["rounds"][0]["contenders"][name]["fsyncs"] else "*"
        unsafe.update(mark)
        cells = [_contest_cell(result, name, found, measure, mark) for measure in COLUMNS]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    limits = contest_results.limits(result)
    rounds = f"{len(result['rounds'])} rounds of {contest_results.saves_of(result)} saves each"
    lines += [
        "",
        *(["`*`: it does not fsync; the benchmark did.", ""] if unsafe else []),
        f"The machine's limits in the same rounds: O_DIRECT write {limits['write_s']:.2f} s, {_reads(limits)}, "
        f"copy into warm shared memory {limits['copy_s']:.2f} s. In brackets: quartiles.",
        *contest_results.notes(result),
        "",
        *where(result | {"nbytes": NBYTES[result["state"]]}, rounds, result["machine"]),
    ]
    return "\n".join(lines)


FRONT_NAMES = ("asyncckpt", "asyncckpt, overlap", "dcp.save", "dcp.async_save, thread", "torch_checkpointing")
FRONT_COLUMNS = ("stall", "lost warm", "durable warm", "load cold", "verifies", "outlives")


def front_table(result: dict[str, Any]) -> str:
    """Return five rows of `benchmarks.compare` for README: medians only, each load from the disk."""
    lines = ["| seconds | " + " | ".join(COLUMNS[measure] for measure in FRONT_COLUMNS) + " |"]
    lines.append("|---" * (len(FRONT_COLUMNS) + 1) + "|")
    for name in FRONT_NAMES:
        found = contest_results.values(result, name)
        assert not isinstance(found, str), f"{name}: {found}"
        cells = []
        for measure in FRONT_COLUMNS:
            mark = "" if result["rounds"][0]["contenders"][name]["fsyncs"] else "*"
            cells.append(_contest_cell(result, name, found, measure, mark).partition(" ")[0])
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = result["machine"]
    lines += [
        "",
        f"{NBYTES[result['state']] / 1e9:.1f} GB, medians of {len(result['rounds'])} rounds beside a training; `*`: "
        f"flushed by the benchmark; {machine['cores']} cores, {machine['file_system']}, {machine['date'][:10]}.",
        "",
    ]
    return "\n".join(lines)


def ranks_table(result: dict[str, Any]) -> str:
    """Return the medians of `benchmarks.ranks` as Markdown."""
    columns = ("stall", "lost cold", "lost warm", "durable cold", "durable warm")
    lines = ["| seconds, two ranks | " + " | ".join(COLUMNS[measure] for measure in columns) + " |"]
    lines.append("|---" * (len(columns) + 1) + "|")
    for arrangement in ARRANGEMENTS:
        for name in result["rounds"][0][arrangement]:
            found = ranks.values(result, arrangement, name)
            if isinstance(found, str):
                lines.append(f"| {arrangement}: {name} | *fails: {_cell(found)}* |" + " |" * (len(columns) - 1))
                continue
            cells = " | ".join(_compare_cell(found, measure, "") for measure in columns)
            lines.append(f"| {arrangement}: {name} | {cells} |")
    limits = contest_results.limits(result)
    rounds = f"{len(result['rounds'])} rounds of {result['saves']} saves each"
    nbytes = ranks.written_nbytes(result, "ddp")
    lines += [
        "",
        f"The slower rank counts. The machine's O_DIRECT write limit in the same rounds: {limits['write_s']:.2f} s. "
        "In brackets: quartiles.",
        "",
        *where(result | {"nbytes": nbytes}, rounds, result["machine"]),
    ]
    return "\n".join(lines)


def with_picture(result: dict[str, Any]) -> str:
    """Return the table behind its picture, which `draw` makes, for a document in docs/."""
    name = f"images/compare-{result['state']}.svg"
    return f"![{result['state']}: ours beside other checkpointers]({name})\n\n{compare_table(result)}"


def _reads(limits: dict[str, float]) -> str:
    if "read_s" in limits:
        return f"read {limits['read_s']:.2f} s"
    return f"first read {limits['read_fresh_s']:.2f} s, later ones {limits['read_again_s']:.2f} s"


def _contest_cell(result: dict[str, Any], name: str, found: dict[str, list[float]], measure: str, mark: str) -> str:
    if measure in ("verifies", "outlives"):
        told = [row["contenders"][name].get(measure) for row in result["rounds"]]
        return {True: "yes", False: "no", None: ""}[told[-1]]
    if measure.startswith("load "):
        return _load_cell(result, name, measure.removeprefix("load "))
    return _compare_cell(found, measure, mark)


def _load_cell(result: dict[str, Any], name: str, heat: str) -> str:
    """Return the call of a load and what it left to the training; ours from the disk, as others' loads are."""
    ways = contest_results.load_parts(result, name, heat)
    main = contest_results.FROM_DISK if contest_results.FROM_DISK in ways else ""
    others = [(way or "memory", ways[way]) for way in ways if way != main]
    text = _parts(ways[main])
    if name in OURS and not main:
        return f"memory {text}"  # older results have no others
    return text + (f" ({', '.join(f'{way} {_parts(parts)}' for way, parts in others)})" if others else "")


def _parts(parts: tuple[list[float], list[float]]) -> str:
    """Return `call + left to the training`, in medians; what was not measured or is nothing is left out."""
    call, late = parts
    text = f"{statistics.median(call):.2f}"
    return f"{text} + {statistics.median(late):.2f}" if late and statistics.median(late) >= 0.005 else text


def _compare_cell(found: dict[str, list[float]], measure: str, mark: str) -> str:
    median = statistics.median(found[measure])
    text = f"{median:.3f}" if measure == "stall" and median < 0.1 else f"{median:.2f}"
    text += mark if measure.startswith("durable") else ""
    if measure in ("lost warm", "durable warm") and len(found[measure]) > 1:
        low, high = contest_results.interval(found[measure])
        text += f" ({low:.2f} to {high:.2f})"
    return text


def _cell(error: str) -> str:
    """Return an error as it may stand in a table."""
    return error[:160].replace("|", "/").replace("*", "").replace("<", "(").replace(">", ")")


def where(result: dict[str, Any], rounds: str, machine: dict[str, Any]) -> list[str]:
    """Return lines on size, rounds, machine and versions, and on how quiet the machine was."""
    ram = f"{machine['memory_nbytes'] / 2**30:.0f} GiB"
    return [
        f"{result['nbytes'] / 1e9:.2f} GB, {rounds}; {quiet.said(result)};",
        f"{machine['cpu']}, {machine['cores']} cores, {ram}, {machine['file_system']}, Linux {machine['kernel']},",
        f"torch {machine['versions']['torch']}, {machine['date'][:10]}.",
        "",
    ]

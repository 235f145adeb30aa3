"""Writes the README's table of figures from the result file.

python -m benchmarks.table           rewrite README.md
python -m benchmarks.table --check   say whether it is up to date
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.save_load import RESULTS, SAVES_PER_ROUND, TARGETS, summary

README = Path(__file__).parents[1] / "README.md"
BEGIN, END = "<!-- save_load -->\n", "<!-- end -->"


def table(result: dict[str, Any]) -> str:
    """Return the Markdown between the README's markers."""
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
    size, ram = f"{result['nbytes'] / 1e9:.2f} GB", f"{machine['memory_nbytes'] / 2**30:.0f} GiB"
    lines += [
        f"| load, page cache warm, verified | {found['load warm s']:.3f} | {warm} | | | |",
        "",
        f"Host memory: {memory:.3f} times the state (target {TARGETS['memory over the state']}). Worker: ready in "
        f"{found['worker ready s']:.2f} s, {found['worker rss MB']:.0f} MB without slots.",
        f"First save of the run: `save()` took {found['first save stall s']:.2f} s.",
        "",
        f"{size}, {len(rounds)} interleaved rounds of {SAVES_PER_ROUND} saves, nothing else running;",
        f"{machine['cpu']}, {machine['cores']} cores, {ram}, {machine['file_system']}, Linux {machine['kernel']},",
        f"torch {machine['versions']['torch']}, {machine['date'][:10]}.",
        "",
    ]
    return "\n".join(lines)


def rendered(text: str) -> str:
    """Return the README with its table made anew."""
    result = json.loads((RESULTS / "save_load-gpt.json").read_text())
    head, _, rest = text.partition(BEGIN)
    _, _, tail = rest.partition(END)
    return head + BEGIN + table(result) + END + tail


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

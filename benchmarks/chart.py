"""Draws results of `benchmarks.compare`: bars of medians with quartiles, the machine's limit as a line.

    python -m benchmarks.chart [--state gpt] [--results DIR] [--images DIR]

Writes docs/images/compare-STATE.svg of each state that has a result file. The same file always gives the same picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import contest_results
from benchmarks.limits import fresh_s
from benchmarks.rounds import STATES
from benchmarks.svg import Picture

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PANELS = (
    ("lost warm", "training lost by a save, s", None),
    ("durable warm", "save until on disk, s", "write_s"),
    ("load cold", "load from the disk, nothing cached, s", "read_fresh_s"),
)
NAMES, PANEL, BAR, ROW, TOP = 190, 250, 180, 22, 52


def main() -> None:
    """Draw one state, or all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=STATES, help="default: every one that was measured")
    parser.add_argument("--results", type=Path, default=contest_results.RESULTS)
    parser.add_argument("--images", type=Path, default=IMAGES)
    args = parser.parse_args()
    args.images.mkdir(parents=True, exist_ok=True)
    for state in STATES if args.state is None else (args.state,):
        file = args.results / f"compare-{state}.json"
        if args.state is not None or file.exists():
            (args.images / f"compare-{state}.svg").write_text(draw(json.loads(file.read_text())))


def draw(result: dict[str, Any]) -> str:
    """Return the picture of a result. A contender that failed has its row, and says so."""
    every = {name: contest_results.values(result, name) for name in contest_results.names(result)}
    height = TOP + ROW * len(every) + 34
    picture = Picture(NAMES + PANEL * len(PANELS), height, f"{result['state']}: ours beside other checkpointers")
    limits = contest_results.limits(result)
    limits["read_fresh_s"] = fresh_s(limits)
    for row, (name, found) in enumerate(every.items()):
        y = TOP + ROW * row
        picture.text(NAMES - 10, y + 13, name, anchor="end")
        if isinstance(found, str):
            picture.text(NAMES, y + 13, f"fails: {found[:90]}", kind="note")
    for number, (measure, title, limit) in enumerate(PANELS):
        x = NAMES + PANEL * number
        picture.text(x, 20, title, kind="title")
        there = {n: contest_results.of_files(v, measure) for n, v in every.items() if not isinstance(v, str)}
        medians = {n: statistics.median(v) for n, v in there.items()}
        spans = {n: contest_results.interval(v) for n, v in there.items()}
        highest = max([1e-9, *medians.values(), *(high for _, high in spans.values())])
        for row, name in enumerate(every):
            if name in medians:
                hint = f"{name}: {medians[name]:.3f} s, quartiles {spans[name][0]:.3f} to {spans[name][1]:.3f}"
                _bar(picture, x, TOP + ROW * row, medians[name], spans[name], BAR / highest, hint)
        bottom = TOP + ROW * len(every)
        picture.line(x, TOP - 6, x, bottom, "grid")
        if limit is not None:
            at = x + limits[limit] * BAR / highest
            picture.line(at, TOP - 6, at, bottom, "limit")
            picture.text(at + 3, TOP - 10, f"the disk's limit {limits[limit]:.2f}", kind="note")
    saves = contest_results.saves_of(result)
    text = f"{contest_results.gigabytes(result)}, medians of {len(result['rounds'])} rounds of {saves} saves; "
    picture.text(10, height - 12, f"{text}lines: quartiles. {result['machine']['date'][:10]}", kind="note")
    return picture.rendered()


def _bar(
    picture: Picture, x: float, y: float, median: float, span: tuple[float, float], scale: float, hint: str
) -> None:
    kind = "a" if hint.startswith("asyncckpt") else "b"
    shown = max(0.0, median) * scale
    picture.box(x, y + 3, shown, ROW - 8, kind, hint)
    low, high = (x + max(0.0, one) * scale for one in span)
    picture.line(low, y + ROW / 2 - 1, high, y + ROW / 2 - 1)
    picture.text(max(x + shown, high) + 4, y + 14, f"{median:.2f}", kind="note")


if __name__ == "__main__":
    main()

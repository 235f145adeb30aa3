"""Draws a result of `benchmarks.compare`: bars of medians with quartiles, the machine's limit as a line.

    python -m benchmarks.chart [--state gpt]

Writes docs/images/compare-STATE.svg. The same file always gives the same picture.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

from benchmarks import compare

IMAGES = Path(__file__).parents[1] / "docs" / "images"
PANELS = (
    ("lost warm", "training lost by a save, s", None),
    ("durable warm", "until it is on the disk, s", "write_s"),
    ("load cold", "load, nothing cached, s", "read_s"),
)
OURS, OTHERS, LIMIT = "#0b6e4f", "#9aa5b1", "#c8553d"


def main() -> None:
    """Draw one state."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--state", choices=compare.NBYTES, default="gpt")
    state = parser.parse_args().state
    result = json.loads((compare.RESULTS / f"compare-{state}.json").read_text())
    IMAGES.mkdir(exist_ok=True)
    draw(result, IMAGES / f"compare-{state}.svg")


def draw(result: dict[str, Any], path: Path) -> None:
    """Write the picture of a result."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "asyncckpt"  # no random ids
    import matplotlib.pyplot as plt

    every = {name: compare.values(result, name) for name in compare.names(result)}
    shown = {name: found for name, found in every.items() if not isinstance(found, str)}
    figure, axes = plt.subplots(1, len(PANELS), figsize=(12, 0.34 * len(shown) + 1.3), sharey=True)
    positions = range(len(shown))
    for axis, (measure, title, limit) in zip(axes, PANELS, strict=True):
        medians = [statistics.median(found[measure]) for found in shown.values()]
        spans = [compare.interval(found[measure]) for found in shown.values()]
        errors = [
            [max(0.0, m - low) for m, (low, _) in zip(medians, spans, strict=True)],
            [max(0.0, high - m) for m, (_, high) in zip(medians, spans, strict=True)],
        ]
        colours = [OURS if name.startswith("asyncckpt") else OTHERS for name in shown]
        axis.barh(positions, medians, xerr=errors, color=colours, height=0.7, error_kw={"lw": 1, "ecolor": "#333"})
        if limit is not None:
            axis.axvline(compare.limits(result)[limit], color=LIMIT, lw=1, ls="--", label="limit of the machine")
            axis.legend(loc="lower right", fontsize=8, frameon=False)
        for at, value in zip(positions, medians, strict=True):
            axis.text(max(value, 0) + 0.02 * max(medians), at - 0.42, f"{value:.2f}", fontsize=7, color="#333")
        axis.set_title(title, fontsize=10)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=min(0.0, *medians))
    axes[0].set_yticks(positions, list(shown), fontsize=9)
    axes[0].invert_yaxis()
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


if __name__ == "__main__":
    main()

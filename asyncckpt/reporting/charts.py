"""The charts of a report, drawn with matplotlib (extra `report`) as SVG that uses the colours of the page's style."""

from __future__ import annotations

import importlib
import io
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from html import escape
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from asyncckpt.basics.quantities import human
from asyncckpt.reporting.history import History, SaveRecord, recovery_ages

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Draw = Callable[["Axes", History], bool]
"""Draws a chart; returns whether there is data for it."""

MAX_BARS = 160
MAX_LANE_SAVES = 12
MAX_LANES = 16
"""Maximum number of ranks that are shown. Of more ranks, those with the longest writes, since the others wait for
them."""

FIRST, SECOND, THIRD, BAD, QUIET, RULE = "#2a6fc9", "#d98a1f", "#9aa0a6", "#c93a3a", "#63615c", "#dddbd5"
VARIABLES = {FIRST: "first", SECOND: "second", THIRD: "third", BAD: "bad", QUIET: "quiet", RULE: "rule"}
"""Each colour, and the variable of the page's style that replaces it, for light and dark pages."""

_STYLE: Any = {
    "date.converter": "concise",
    "svg.fonttype": "none",  # text, not outlines
    "svg.hashsalt": "asyncckpt",
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 9.0,
    "axes.edgecolor": QUIET,
    "axes.labelcolor": QUIET,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "axes.axisbelow": True,
    "axes.spines.left": False,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "grid.color": RULE,
    "xtick.color": QUIET,
    "ytick.color": QUIET,
    "ytick.left": False,
}
_TITLE = "title: "


def can_draw() -> bool:
    """Return whether matplotlib is installed, and can be imported."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError:
        return False
    return True


def svg(label: str, draw: Draw, history: History) -> str | None:
    """Return a chart as an SVG element; None: there is no data for it. Needs matplotlib.

    Args:
        label: Description for screen readers.
        draw: A drawing function of this module.
        history: Data to draw.
    """
    from matplotlib import style
    from matplotlib.figure import Figure

    file = io.StringIO()
    with style.context(["default", _STYLE]):
        figure = Figure(figsize=(9.2, 2.6), layout="constrained")
        if not draw(figure.add_subplot(), history):
            return None
        figure.savefig(
            file, format="svg", transparent=True, metadata=dict.fromkeys(("Creator", "Date", "Format", "Type"))
        )
    text = re.sub(r' id="[\w.]*_\d+"', "", file.getvalue())  # IDs of groups, which are equal in all charts of the page
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var(--{variable})")
    text = re.sub(f'<g id="{_TITLE}([^"]*)">', r"<g><title>\1</title>", text)
    return f'<svg role="img" aria-label="{escape(label, quote=True)}"' + text[text.index("<svg") + len("<svg") :]


def step_times(axes: Axes, history: History) -> bool:
    """Draw the mean and the longest duration of a step between two saves."""
    spans = history.spans
    longest = [(s.step, s.longest_s * 1e3) for s in spans if s.longest_s is not None]
    if longest:
        axes.plot(*zip(*longest, strict=True), "--", color=SECOND)
    axes.plot(
        [s.step for s in spans],
        [s.mean_s * 1e3 for s in spans],
        color=FIRST,
        marker="." if len(spans) < MAX_BARS else "",
    )
    _label(axes, "step", "ms")
    return bool(spans)


def stalls(axes: Axes, history: History) -> bool:
    """Draw how long each save stalled the training: in `save()`, and while a step waited for the copy (the fence)."""
    waits = {span.step: span.waited_s for span in history.spans}
    known = [s for s in history.saves if s.stall_s is not None]
    waited = {a.save_id: waits.get(b.step, 0.0) * 1e3 for a, b in pairwise(known)}
    bars = [(s, (s.stall_s or 0.0) * 1e3, waited.get(s.save_id, 0.0)) for s in known[-MAX_BARS:]]
    steps, calls = [save.step for save, *_ in bars], [call for _, call, _ in bars]
    _bars(axes, steps, calls, FIRST, (f"step {save.step}: save() took {call:.1f} ms" for save, call, _ in bars))
    after = (f"step {save.step}: waited {wait:.1f} ms" for save, _, wait in bars)
    _bars(axes, steps, [wait for *_, wait in bars], SECOND, after, above=calls)
    _label(axes, "step", "ms")
    return bool(bars)


def lanes(axes: Axes, history: History) -> bool:
    """Draw a lane for each rank: staging, writing, waiting for the commit."""
    saves = [s for s in history.saves if s.begun is not None][-MAX_LANE_SAVES:]
    writing: dict[int, float] = {}
    for rank, times in ((rank, times) for save in saves for rank, times in save.ranks.items()):
        writing[rank] = max(writing.get(rank, 0.0), (times.durable or 0.0) - (times.sealed or 0.0))
    ranks = sorted(sorted(writing, key=lambda rank: -writing[rank])[:MAX_LANES])
    for row, rank in enumerate(ranks):
        for number, save in enumerate(saves):  # alternately above and below the middle, since saves may overlap
            at = row + 0.4 * (number % 2 - 0.5)
            for colour, what, begin, end in _stages(save, rank):
                (bar,) = axes.barh(at, _date(end) - _date(begin), 0.36, _date(begin), color=colour)
                bar.set_gid(f"{_TITLE}step {save.step}, rank {rank}: {what}")
    axes.set_yticks(range(len(ranks)), [f"rank {rank}" for rank in ranks])
    axes.grid(False)
    _label(axes, "", "")
    axes.set_ylim(max(len(ranks), 1) - 0.5, -0.5)
    axes.figure.set_figheight(max(1.2, 0.6 + 0.28 * len(ranks)))  # type: ignore[union-attr]
    return bool(saves)


def _stages(save: SaveRecord, rank: int) -> Iterable[tuple[str, str, float, float]]:
    """Yield (colour, text, begin, end) for each stage of a save on one rank."""
    times = save.ranks.get(rank)
    if times is None:
        return
    committed = save.ended if save.outcome == "committed" else None
    for colour, what, begin, end in (
        (SECOND, "staging", times.begun, times.sealed),
        (FIRST, f"writing {human(times.nbytes)}", times.sealed, times.durable),
        (THIRD, "waiting for the commit", times.durable, committed),
    ):
        if begin is not None and end is not None and end >= begin:
            yield colour, f"{what}, {end - begin:.3f} s", begin, end
    reached = [t for t in (times.begun, times.sealed, times.durable) if t is not None]
    if save.outcome not in ("committed", "open") and reached and save.ended is not None:
        yield BAD, f"{save.outcome}: {save.error}", max(reached), max(save.ended, *reached)


def recovery(axes: Axes, history: History) -> bool:
    """Draw how much training a crash would have lost, at every moment."""
    disk, memory = (recovery_ages(history.saves, memory=memory) for memory in (False, True))
    for line, colour, style in ((disk, FIRST, "-"), (memory if memory != disk else [], SECOND, "--")):
        axes.plot([_date(t) for t, _ in line], [age for _, age in line], style, color=colour)
    _label(axes, "", "seconds")
    return bool(disk)


def speeds(axes: Axes, history: History) -> bool:
    """Draw the write speed of each save, in bytes per second of all ranks."""
    known = [(s, s.nbytes, s.write_s) for s in history.committed if s.write_s and s.nbytes][-MAX_BARS:]
    rates = [nbytes / seconds / 1e9 for _, nbytes, seconds in known]
    titles = (f"step {s.step}: {human(nbytes)} in {seconds:.3f} s" for s, nbytes, seconds in known)
    _bars(axes, [save.step for save, *_ in known], rates, FIRST, titles)
    _label(axes, "step", "GB/s")
    return bool(known)


def _bars(
    axes: Axes, at: list[int], heights: list[float], colour: str, titles: Iterable[str], above: Sequence[float] = ()
) -> None:
    width = 0.7 * max((max(at) - min(at)) / len(at), 1.0) if at else 1.0
    for bar, title in zip(axes.bar(at, heights, width, above or 0.0, color=colour), titles, strict=True):
        bar.set_gid(_TITLE + title)


def _label(axes: Axes, x: str, y: str) -> None:
    axes.set_xlabel(x, loc="right")
    axes.set_ylabel(y)
    top = axes.get_ylim()[1]
    axes.set_ylim(0.0, top if top > 0 else 1.0)


def _date(seconds: float) -> Any:
    """Return the local time, for which matplotlib chooses labels. `Any`, since its annotations allow floats only."""
    return datetime.fromtimestamp(seconds).astimezone()

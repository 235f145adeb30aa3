"""A report as one HTML file, without scripts or external resources; light or dark, as the system is set."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from html import escape

from asyncckpt.basics.quantities import human, human_s
from asyncckpt.format.names import SaveId
from asyncckpt.reporting import charts
from asyncckpt.reporting.history import BAD_ENDS, History, SaveRecord, recovery_ages

MAX_ROWS = 200
NO_CHARTS = "Charts are missing, since matplotlib is not installed: pip install 'asyncckpt[report]'"

_STYLE = """
:root { color-scheme: light dark; --surface: #ffffff; --raised: #f5f5f3; --ink: #1c1b19; --quiet: #63615c;
  --rule: #dddbd5; --first: #2a6fc9; --second: #d98a1f; --third: #9aa0a6; --bad: #c93a3a; }
@media (prefers-color-scheme: dark) { :root { --surface: #191918; --raised: #242422; --ink: #eceae4; --quiet: #a5a29a;
  --rule: #3a3936; --first: #5b9df0; --second: #e3a44a; --third: #7d8288; --bad: #ea6a6a; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--surface); color: var(--ink); font: 15px/1.5 system-ui, sans-serif; }
main { max-width: 960px; margin: 0 auto; padding: 28px 20px 60px; }
h1 { font-size: 22px; margin: 0; overflow-wrap: anywhere; }
h2 { font-size: 16px; margin: 36px 0 2px; }
p { margin: 2px 0 10px; color: var(--quiet); max-width: 75ch; }
.tiles { display: grid; gap: 10px; margin: 20px 0 0; }
.tiles { grid-template-columns: repeat(auto-fit, minmax(min(200px, 38vw), 1fr)); }
.tile { background: var(--raised); border-radius: 8px; padding: 10px 14px; }
.tile b { display: block; font-size: 20px; font-weight: 600; }
.tile span { color: var(--quiet); font-size: 13px; }
svg { width: 100%; height: auto; display: block; }
ul.legend { list-style: none; display: flex; flex-wrap: wrap; gap: 4px 18px; padding: 0; margin: 0 0 6px; }
ul.legend { color: var(--quiet); font-size: 13px; }
ul.legend i { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin-right: 6px; }
ul.legend i { vertical-align: -1px; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: 13px; font-variant-numeric: tabular-nums; min-width: 100%; }
th, td { text-align: right; padding: 4px 10px; border-bottom: 1px solid var(--rule); white-space: nowrap; }
th { color: var(--quiet); font-weight: 500; }
th:nth-child(2), td:nth-child(2), th:last-child, td:last-child { text-align: left; }
td:last-child { white-space: normal; min-width: 16em; }
td.bad { color: var(--bad); font-weight: 600; }
summary { cursor: pointer; margin-top: 36px; font-weight: 600; font-size: 16px; }
footer { margin-top: 40px; color: var(--quiet); font-size: 13px; }
"""

Section = tuple[str, str, tuple[tuple[str, str], ...], charts.Draw, str]
_SECTIONS: tuple[Section, ...] = (
    (
        "Step times between saves",
        "Duration of the training steps, without the saves. If the longest step is far above the mean, that step was "
        "delayed: it waited for the copy of a snapshot, or another process used the machine.",
        (("first", "mean step"), ("second", "longest step")),
        charts.step_times,
        "This needs checkpointers with events=True.",
    ),
    (
        "Stall of each save",
        "How long the training loop waited for each save: in the call of save(), and in a later step that had to wait "
        "until the snapshot was copied before it could change the tensors.",
        (("first", "call of save()"), ("second", "step that waited for the copy")),
        charts.stalls,
        "This needs checkpointers with events=True.",
    ),
    (
        "Stages of the saves on each rank",
        f"The last {charts.MAX_LANE_SAVES} saves. Staging copies the state into the worker's memory; then the worker "
        "writes it to disk. A save is committed when all ranks are written, so all wait for the longest blue bar.",
        (("second", "staging"), ("first", "writing"), ("third", "waiting for the commit"), ("bad", "failed")),
        charts.lanes,
        "This needs workers that are started with --events.",
    ),
    (
        "Recovery point",
        "How much training a crash would have lost at each moment: the age of the snapshot that a restart would resume "
        "from, in training time (0 between two runs). If only the training processes are killed, a restart can use a "
        "snapshot in the worker's memory, as soon as all ranks have staged it. If the machine is lost, it needs a "
        "committed checkpoint on disk.",
        (("first", "machine lost: resume from disk"), ("second", "training killed: resume from the worker's memory")),
        charts.recovery,
        "No save was committed.",
    ),
    (
        "Speed of writing",
        "Bytes of all ranks per second, from the end of staging on the first rank to the end of writing on the last.",
        (),
        charts.speeds,
        "This needs workers that are started with --events.",
    ),
)


def page(title: str, history: History, *, now: float, package: str) -> str:
    """Return the page.

    Args:
        title: Title of the page: the directory.
        history: Data to show.
        now: Current time, in seconds since 1970.
        package: asyncckpt's version.
    """
    body = [f"<h1>{escape(title)}</h1>", f"<p>{escape(_summary(history))}</p>", _tiles(history)]
    if not charts.can_draw():
        body.append(f"<p><em>{escape(NO_CHARTS)}</em></p>")
    for name, text, legend, draw, missing in _SECTIONS if charts.can_draw() else ():
        picture = charts.svg(name, draw, history)
        shown = picture if picture is not None else f"<p><em>No data. {escape(missing)}</em></p>"
        body.append(f"<section><h2>{escape(name)}</h2><p>{escape(text)}</p>")
        body.append((_legend(legend) if legend and picture is not None else "") + f"{shown}</section>")
    body.append(_table(history.saves))
    made = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(now))
    body.append(
        f"<footer>Made {escape(made)} by asyncckpt {escape(package)}, from {history.n_events:,} events.</footer>"
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}: asyncckpt report</title><style>{_STYLE}</style></head>"
        f"<body><main>{''.join(body)}</main></body></html>\n"
    )


def _summary(history: History) -> str:
    times = [t for s in history.saves for t in (s.begun, s.ended) if t is not None]
    if not times:
        return "no saves"
    span = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(min(times)))
    runs = len({SaveId.parse(s.save_id).run_id for s in history.saves})
    return f"{len(history.saves)} saves, runs: {runs}, since {span}, over {human_s(max(times) - min(times))}"


def _tiles(history: History) -> str:
    committed = history.committed
    stalls = sorted(s.stall_s for s in history.saves if s.stall_s is not None)
    ages = [age for _, age in recovery_ages(history.saves, memory=False)[1:-1]]
    writes = [s.write_s for s in committed if s.write_s]
    bad = sum(s.outcome in BAD_ENDS for s in history.saves)
    newest = max(committed, key=lambda s: s.ended or 0.0, default=None)
    tiles = [
        (str(len(committed)), "committed"),
        (str(bad), "failed"),
        (human_s(statistics.median(stalls)) if stalls else "-", "median stall of a save"),
        (human_s(stalls[-1]) if stalls else "-", "longest stall"),
        (human_s(statistics.median(writes)) if writes else "-", "median time of writing"),
        (human(newest.nbytes) if newest else "-", "newest checkpoint"),
        (human_s(max(ages)) if ages else "-", "oldest recovery point"),
    ]
    waiting = [s for s in history.saves if s.is_unmirrored]
    if waiting:
        tiles.append((f"{len(waiting)}: {human(sum(s.nbytes for s in waiting))}", "not in the mirror yet"))
    return (
        '<div class="tiles">'
        + "".join(f'<div class="tile"><b>{escape(v)}</b><span>{escape(n)}</span></div>' for v, n in tiles)
        + "</div>"
    )


def _legend(entries: Sequence[tuple[str, str]]) -> str:
    items = (f'<li><i style="background: var(--{colour})"></i>{escape(text)}</li>' for colour, text in entries)
    return f'<ul class="legend">{"".join(items)}</ul>'


def _table(saves: Sequence[SaveRecord]) -> str:
    shown = list(saves[-MAX_ROWS:])[::-1]
    header = ("Step", "State", "Ended", "Size", "Stall", "Staging", "Writing", "Name")
    head = "".join(f"<th>{name}</th>" for name in header)
    rows = "".join(_row(save) for save in shown)
    more = f", the last {MAX_ROWS} of {len(saves):,}" if len(saves) > MAX_ROWS else ""
    return (
        f"<details open><summary>Saves, newest first{more}</summary>"
        f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></details>'
    )


def _row(save: SaveRecord) -> str:
    ended = time.strftime("%m-%d %H:%M:%S", time.localtime(save.ended)) if save.ended is not None else "-"
    staging = save.sealed - save.begun if save.sealed is not None and save.begun is not None else None
    bad = ' class="bad"' if save.outcome in BAD_ENDS else ""
    notes = (
        " (unchanged)" * save.unchanged
        + " (not in its mirror yet)" * save.is_unmirrored
        + (f": {save.error}" if save.error else "")
    )
    cells = (
        ended,
        human(save.nbytes),
        "-" if save.stall_s is None else human_s(save.stall_s),
        "-" if staging is None else human_s(staging),
        "-" if save.write_s is None else human_s(save.write_s),
        save.name + notes,
    )
    inside = "".join(f"<td>{escape(cell)}</td>" for cell in cells)
    return f"<tr><td>{save.step}</td><td{bad}>{escape(save.outcome)}</td>{inside}</tr>"

"""The pictures of a report: steps and stalls, lanes of writing, recovery point over time, speed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

from asyncckpt.reporting.history import History, SaveStory, recovery_ages
from asyncckpt.reporting.svg import LEFT, RIGHT, WIDTH, Picture, thinned, ticks
from asyncckpt.sizes import human

MAX_POINTS = 600
MAX_LANE_SAVES = 12
MAX_LANES = 16
"""Ranks that have a lane; of more those that were durable last, which the others waited for."""

MAX_TRACKS = 3
"""Saves of one rank that are drawn one below the other where they overlap."""

MAX_BARS = 160


def step_times(history: History) -> str | None:
    """Mean and longest step between two saves."""
    spans = history.spans
    if not spans:
        return None
    mean = thinned([(s.step, s.mean_s * 1e3) for s in spans], MAX_POINTS)
    longest = thinned([(s.step, s.longest_s * 1e3) for s in spans if s.longest_s is not None], MAX_POINTS)
    top = max(y for _, y in mean + longest)
    picture = Picture(_range([x for x, _ in mean]), (0, top * 1.1), x_label="step", y_label="ms")
    if longest:
        picture.line(longest, "second", dashed=True)
    picture.line(mean, "first")
    for x, y in mean if len(mean) <= MAX_BARS else ():
        picture.dot(x, y, "first", f"up to step {x:g}: {y:.1f} ms a step")
    return picture.svg("Time of a step, between saves")


def stalls(history: History) -> str | None:
    """What each save held the training up: `save()` itself, and waits at the fence before the next one."""
    waits = {span.step: span.waited_s for span in history.spans}
    known = [s for s in history.saves if s.stall_s is not None]
    following = {a.save_id: waits.get(b.step, 0.0) for a, b in pairwise(known)}
    shown = known[-MAX_BARS:]
    if not shown:
        return None
    highest = max((s.stall_s or 0.0) + following.get(s.save_id, 0.0) for s in shown) * 1e3
    picture = Picture(_range([s.step for s in shown]), (0, highest * 1.1), x_label="step", y_label="ms")
    width = max(2.0, min(18.0, 0.7 * (WIDTH - LEFT - RIGHT) / (len(shown) + 1)))
    for save in shown:
        stall, waited = (save.stall_s or 0.0) * 1e3, following.get(save.save_id, 0.0) * 1e3
        picture.bar(save.step, 0, stall, "first", f"step {save.step}: save() took {stall:.1f} ms", width=width)
        if waited:
            picture.bar(
                save.step, stall, stall + waited, "second", f"step {save.step}: waited {waited:.1f} ms", width=width
            )
    return picture.svg("How long each save held the training up")


def lanes(history: History) -> str | None:
    """One lane a rank: staging, writing, waiting for the commit."""
    saves = [s for s in history.saves if s.begun is not None][-MAX_LANE_SAVES:]
    if not saves:
        return None
    last: dict[int, float] = {}
    for save in saves:
        for rank, times in save.ranks.items():
            last[rank] = max(last.get(rank, 0.0), (times.durable or 0.0) - (times.sealed or 0.0))
    ranks = sorted(sorted(last, key=lambda rank: -last[rank])[:MAX_LANES])
    tracks = _tracks(saves)
    depth = max(tracks) + 1
    ends = [t for s in saves for r in s.ranks.values() for t in (r.begun, r.sealed, r.durable) if t is not None]
    ends += [s.ended for s in saves if s.ended is not None]
    picture = Picture(
        (min(ends), max(ends)),
        (0, 1),
        height=max(60, 26 * len(ranks), 12 * depth * len(ranks)),
        x_labels=clock(min(ends), max(ends)),
        x_label="time of day",
        grid=False,
    )
    for row, rank in enumerate(ranks):
        picture.lane_name(row, len(ranks), f"rank {rank}")
        for save, track in zip(saves, tracks, strict=True):
            _lane(picture, save, rank, row * depth + track, len(ranks) * depth)
    return picture.svg("What each rank's part in each save was doing")


def _tracks(saves: Sequence[SaveStory]) -> list[int]:
    """Return a number for each save, so that those that overlap have different ones as far as there are any."""
    ends: list[float] = []
    found = []
    for save in saves:
        begin = save.begun or 0.0
        end = max([begin, save.ended or 0.0, *(r.durable or 0.0 for r in save.ranks.values())])
        track = next((n for n, until in enumerate(ends) if until <= begin), None)
        if track is None and len(ends) < MAX_TRACKS:
            track = len(ends)
            ends.append(end)
        track = ends.index(min(ends)) if track is None else track
        ends[track] = max(ends[track], end)
        found.append(track)
    return found


def _lane(picture: Picture, save: SaveStory, rank: int, row: int, rows: int) -> None:
    times = save.ranks.get(rank)
    if times is None:
        return
    stages = [
        ("second", "staging", times.begun, times.sealed),
        ("first", f"writing {human(times.nbytes)}", times.sealed, times.durable),
        ("third", "waiting for the commit", times.durable, save.ended if save.outcome == "committed" else None),
    ]
    for colour, what, begin, end in stages:
        if begin is not None and end is not None and end >= begin:
            picture.lane(begin, end, row, rows, colour, f"step {save.step}, rank {rank}: {what}, {end - begin:.3f} s")
    reached = max((t for t in (times.begun, times.sealed, times.durable) if t is not None), default=None)
    if save.outcome not in ("committed", "open") and reached is not None and save.ended is not None:
        title = f"step {save.step}, rank {rank}: {save.outcome}: {save.error}"
        picture.lane(reached, max(save.ended, reached), row, rows, "bad", title)


def recovery(history: History) -> str | None:
    """How much training a crash would have cost, at every moment."""
    curves = [recovery_ages(history.saves, memory=memory) for memory in (False, True)]
    if not curves[0]:
        return None
    moments = [t for s in history.saves for t in (s.begun, s.ended) if t is not None]
    begin, end = min(moments), max(moments)
    highest = max(y for curve in curves for _, y in curve)
    picture = Picture(
        (begin, end), (0, highest * 1.1), x_labels=clock(begin, end), x_label="time of day", y_label="seconds"
    )
    picture.line(thinned(curves[0], MAX_POINTS), "first")
    if curves[1] != curves[0]:
        picture.line(thinned(curves[1], MAX_POINTS), "second", dashed=True)
    return picture.svg("Age of the recovery point over time")


def speeds(history: History) -> str | None:
    """Bytes a second of each save, all ranks together."""
    known = [(s, s.nbytes / s.write_s / 1e9) for s in history.committed if s.write_s and s.nbytes][-MAX_BARS:]
    if not known:
        return None
    highest = max(speed for _, speed in known)
    picture = Picture(
        _range([s.step for s, _ in known]), (0, highest * 1.1), x_label="step", y_label="GB/s", height=120
    )
    width = max(2.0, min(18.0, 0.7 * (WIDTH - LEFT - RIGHT) / (len(known) + 1)))
    for save, speed in known:
        title = f"step {save.step}: {human(save.nbytes)} in {save.write_s:.3f} s, {speed:.2f} GB/s"
        picture.bar(save.step, 0, speed, "first", title, width=width)
    return picture.svg("How fast each save was written")


def clock(begin: float, end: float) -> list[tuple[float, str]]:
    """Return ticks of local time."""
    form = "%H:%M:%S" if end - begin < 7200 else "%H:%M" if end - begin < 86400 else "%m-%d %H:%M"
    if end <= begin:
        return [(begin, time.strftime(form, time.localtime(begin)))]
    return [(begin + t, time.strftime(form, time.localtime(begin + t))) for t in ticks(0.0, end - begin)]


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    margin = (high - low) * 0.03 or 0.5
    return low - margin, high + margin

"""What is known of a directory's saves, from `events.jsonl` and the manifests, put together by save."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from itertools import pairwise
from typing import Any

from asyncckpt.format.manifest import Manifest
from asyncckpt.format.names import SaveId

BAD_ENDS = ("failed", "abandoned", "unknown")
ENDS = ("committed", *BAD_ENDS)
OPEN = "open"
MAX_SECONDS, MAX_WHOLE = 1e11, 10**17
"""Beyond any time, step and size: what is larger cannot be drawn."""


@dataclass(slots=True)
class RankTimes:
    """When one rank's part came how far, seconds since 1970; None: not known."""

    begun: float | None = None
    sealed: float | None = None
    durable: float | None = None
    nbytes: int = 0


@dataclass(slots=True)
class SaveStory:
    """One save. `outcome`: one of `ENDS`, "skipped", or `OPEN`; times in seconds since 1970."""

    save_id: str
    step: int = 0
    name: str = ""
    outcome: str = OPEN
    ranks: dict[int, RankTimes] = field(default_factory=dict)
    ended: float | None = None
    nbytes: int = 0
    stall_s: float | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    error: str = ""
    unchanged: bool = False

    @property
    def begun(self) -> float | None:
        """When the first rank began: from then on nothing that changes is in the snapshot."""
        return min((r.begun for r in self.ranks.values() if r.begun is not None), default=None)

    @property
    def sealed(self) -> float | None:
        """When the last rank had staged it, if all were seen to: from then on it outlives the trainers."""
        times = [r.sealed for r in self.ranks.values()]
        return max((t for t in times if t is not None), default=None) if None not in times else None

    @property
    def write_s(self) -> float | None:
        """From the first seal until the last rank was durable."""
        sealed = [r.sealed for r in self.ranks.values() if r.sealed is not None]
        durable = [r.durable for r in self.ranks.values() if r.durable is not None]
        return max(durable) - min(sealed) if sealed and durable and max(durable) > min(sealed) else None


@dataclass(frozen=True, slots=True)
class Span:
    """The steps between two saves of rank 0: their mean, the longest one if it was measured, waits at the fence."""

    at: float
    step: int
    mean_s: float
    longest_s: float | None
    waited_s: float


@dataclass(slots=True)
class History:
    """All of it, in the order of time."""

    saves: list[SaveStory]
    spans: list[Span]
    n_events: int

    @property
    def committed(self) -> list[SaveStory]:
        """The saves that were."""
        return [save for save in self.saves if save.outcome == "committed"]


def history_of(events: Iterable[Mapping[str, Any]], manifests: Iterable[tuple[str, Manifest]] = ()) -> History:
    """Put events and manifests together; what makes no sense is passed over.

    Args:
        events: As `read_events` yields them.
        manifests: (directory name, manifest) of committed checkpoints, for what no event tells of.
    """
    saves: dict[str, SaveStory] = {}
    spans: list[Span] = []
    count = 0
    for event in events:
        count += 1
        try:
            if event["event"] == "steps":
                spans.append(_span(event))
            elif isinstance(event.get("save_id"), str):
                SaveId.parse(event["save_id"])
                _apply(saves.setdefault(event["save_id"], SaveStory(event["save_id"])), event)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue
    for name, manifest in manifests:
        _apply_manifest(saves.setdefault(str(manifest.save_id), SaveStory(str(manifest.save_id))), name, manifest)
    ordered = sorted(saves.values(), key=_when)
    return History(saves=ordered, spans=sorted(spans, key=lambda span: span.at), n_events=count)


def _when(save: SaveStory) -> float:
    return save.begun or save.ended or 0.0


def _span(event: Mapping[str, Any]) -> Span:
    steps = _whole(event["steps"]) if "steps" in event else _whole(event["step"]) - _whole(event["from_step"])
    longest = event.get("longest_s")
    if steps < 1:
        raise ValueError("no step between two saves")
    return Span(
        at=_seconds(event["t"]),
        step=_whole(event["step"]),
        mean_s=_seconds(event["seconds"]) / steps,
        longest_s=None if longest is None else _seconds(longest),
        waited_s=_seconds(event.get("waited_s", 0.0)),
    )


def _apply(save: SaveStory, event: Mapping[str, Any]) -> None:
    name, at = event["event"], _seconds(event["t"])
    save.step, save.name = _whole(event.get("step", save.step)), str(event.get("name", save.name))
    if name in ("begun", "sealed", "durable"):
        nbytes = _whole(event.get("nbytes", 0))
        times = save.ranks.setdefault(_whole(event["rank"]), RankTimes())
        setattr(times, name, at)
        times.nbytes = nbytes
        save.nbytes = sum(r.nbytes for r in save.ranks.values())
        if name == "sealed" and times.begun is None and "seconds_before" in event:
            times.begun = at - _seconds(event["seconds_before"])
    elif name in ENDS:
        save.outcome, save.ended = name, at
        save.error = str(event.get("error", ""))
        save.seconds.update(_phases(event))
    elif name == "save":
        save.stall_s = _seconds(event["stall_s"])
        save.seconds.update(_phases(event))
        save.unchanged = bool(event.get("unchanged"))
        if save.outcome == OPEN and event.get("outcome") in ("skipped", "failed"):
            save.outcome, save.ended, save.error = event["outcome"], at, str(event.get("error", ""))


def _phases(event: Mapping[str, Any]) -> dict[str, float]:
    return {str(name): _seconds(value) for name, value in dict(event.get("seconds") or {}).items()}


def _seconds(value: Any) -> float:
    if type(value) not in (int, float) or not 0 <= value < MAX_SECONDS:
        raise ValueError(f"{value!r} is no time")
    return float(value)


def _whole(value: Any) -> int:
    if type(value) is not int or abs(value) > MAX_WHOLE:
        raise ValueError(f"{value!r} is no number of anything")
    return value


def _apply_manifest(save: SaveStory, name: str, manifest: Manifest) -> None:
    if save.outcome == OPEN:
        save.outcome, save.error = "committed", ""
    save.step, save.name, save.nbytes = manifest.step, name, manifest.nbytes
    if save.ended is None:
        try:
            save.ended = datetime.fromisoformat(manifest.created.replace("Z", "+00:00")).timestamp()
        except ValueError:
            save.ended = None
    for phase, seconds in manifest.timings.items():
        save.seconds.setdefault(phase, seconds)


def recovery_points(saves: Iterable[SaveStory], *, memory: bool) -> list[tuple[float, float]]:
    """Return (from when on, when the snapshot was taken) of what a restart would go on from; both only grow.

    Args:
        saves: Of one directory.
        memory: What a restart beside a worker that lives on gets: whatever all ranks have staged. Else what is
            committed.
    """
    points = []
    for save in [s for s in saves if s.outcome not in ("abandoned", "skipped")]:
        since = save.sealed if memory else None
        if since is None and save.outcome == "committed":
            since = save.ended
        taken = save.begun if save.begun is not None else save.ended
        if since is not None and taken is not None:
            points.append((since, taken))
    grown: list[tuple[float, float]] = []
    for since, taken in sorted(points):
        if not grown or taken > grown[-1][1]:
            grown.append((since, taken))
    return grown


def recovery_ages(saves: Sequence[SaveStory], *, memory: bool) -> list[tuple[float, float]]:
    """Return a line of (time, seconds of training that a crash would have cost then).

    Only time in which a training ran counts. Where the next run, which goes on from the last recovery point, begins
    later than saves are apart as a rule, nothing is lost meanwhile: it is taken to have begun so long before its first
    save.

    Args:
        saves: Of one directory.
        memory: As `recovery_points` has it.
    """
    points, line = recovery_points(saves, memory=memory), list[tuple[float, float]]()
    stretches = _stretches(saves)
    for number, (begin, end) in enumerate(stretches):
        after = stretches[number + 1][0] if number + 1 < len(stretches) else math.inf
        taken = begin if number and line else None
        if taken is not None:
            line.append((begin, 0.0))
        for since, snapshot in [p for p in points if (begin if number else -math.inf) <= p[0] < after]:
            if taken is not None:
                line.append((since, since - taken))
            taken = snapshot if taken is None else max(taken, snapshot)
            line.append((since, since - taken))
            end = max(end, since)
        if taken is not None:
            line.append((end, end - taken))
            line += [(end, 0.0)] if after != math.inf else []
    return line


def _stretches(saves: Sequence[SaveStory]) -> list[tuple[float, float]]:
    """Return when a training ran: the runs, joined where no more time lies between them than saves are apart."""
    runs: dict[str, list[float]] = {}
    for save in saves:
        times = [t for r in save.ranks.values() for t in (r.begun, r.sealed, r.durable)]
        runs.setdefault(SaveId.parse(save.save_id).run_id, []).extend(t for t in (*times, save.ended) if t is not None)
    begun = sorted(_when(save) for save in saves if _when(save))
    apart = statistics.median(later - earlier for earlier, later in pairwise(begun)) if len(begun) > 1 else 0.0
    found: list[tuple[float, float]] = []
    for begin, end in sorted((min(times), max(times)) for times in runs.values() if times):
        if found and begin - found[-1][1] <= apart:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin - apart if found else begin, end))
    return found

"""The history of the saves in a directory: `events.jsonl` and the manifests, joined by save ID."""

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
MAX_SECONDS, MAX_INTEGER = 1e11, 10**17
"""Maximum of times, and of steps and sizes: larger values cannot be drawn."""


@dataclass(slots=True)
class RankTimes:
    """Times at which one rank reached the phases of a save, in seconds since 1970; None: not known."""

    begun: float | None = None
    sealed: float | None = None
    durable: float | None = None
    nbytes: int = 0


@dataclass(slots=True)
class SaveRecord:
    """The known facts of one save. `outcome`: one of `ENDS`, "skipped" or `OPEN`; times in seconds since 1970."""

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
    is_unmirrored: bool = False

    @property
    def begun(self) -> float | None:
        """Time at which the first rank began to stage, which is the time of the snapshot's state."""
        return min((r.begun for r in self.ranks.values() if r.begun is not None), default=None)

    @property
    def sealed(self) -> float | None:
        """Time at which the last rank had staged it, if known for all ranks. From then on it survives the trainers."""
        times = [r.sealed for r in self.ranks.values()]
        return max((t for t in times if t is not None), default=None) if None not in times else None

    @property
    def write_s(self) -> float | None:
        """Seconds from the first seal until the last rank was durable; None: not known."""
        sealed = [r.sealed for r in self.ranks.values() if r.sealed is not None]
        durable = [r.durable for r in self.ranks.values() if r.durable is not None]
        return max(durable) - min(sealed) if sealed and durable and max(durable) > min(sealed) else None


@dataclass(frozen=True, slots=True)
class StepSpan:
    """The steps of rank 0 between two saves: mean and longest duration, and waits at the fence, in seconds."""

    at: float
    step: int
    mean_s: float
    longest_s: float | None
    waited_s: float


@dataclass(slots=True)
class History:
    """Saves and steps in order of time."""

    saves: list[SaveRecord]
    spans: list[StepSpan]
    n_events: int

    @property
    def committed(self) -> list[SaveRecord]:
        """The committed saves."""
        return [save for save in self.saves if save.outcome == "committed"]


def history_of(events: Iterable[Mapping[str, Any]], manifests: Iterable[tuple[str, Manifest]] = ()) -> History:
    """Join events and manifests; malformed events are skipped.

    Args:
        events: Events, as `read_events` yields them.
        manifests: (directory name, manifest) of committed checkpoints, for saves without events.
    """
    saves: dict[str, SaveRecord] = {}
    spans: list[StepSpan] = []
    count = 0
    for event in events:
        count += 1
        try:
            if event["event"] == "steps":
                spans.append(_step_span(event))
            elif isinstance(event.get("save_id"), str):
                SaveId.parse(event["save_id"])
                _apply(saves.setdefault(event["save_id"], SaveRecord(event["save_id"])), event)
        except (KeyError, TypeError, ValueError, ZeroDivisionError):
            continue
    for name, manifest in manifests:
        _apply_manifest(saves.setdefault(str(manifest.save_id), SaveRecord(str(manifest.save_id))), name, manifest)
    ordered = sorted(saves.values(), key=_when)
    return History(saves=ordered, spans=sorted(spans, key=lambda span: span.at), n_events=count)


def _when(save: SaveRecord) -> float:
    return save.begun or save.ended or 0.0


def _step_span(event: Mapping[str, Any]) -> StepSpan:
    steps = _integer(event["steps"]) if "steps" in event else _integer(event["step"]) - _integer(event["from_step"])
    longest = event.get("longest_s")
    if steps < 1:
        raise ValueError("no step between two saves")
    return StepSpan(
        at=_seconds(event["t"]),
        step=_integer(event["step"]),
        mean_s=_seconds(event["seconds"]) / steps,
        longest_s=None if longest is None else _seconds(longest),
        waited_s=_seconds(event.get("waited_s", 0.0)),
    )


def _apply(save: SaveRecord, event: Mapping[str, Any]) -> None:
    name, at = event["event"], _seconds(event["t"])
    save.step, save.name = _integer(event.get("step", save.step)), str(event.get("name", save.name))
    if name in ("begun", "sealed", "durable"):
        nbytes = _integer(event.get("nbytes", 0))
        times = save.ranks.setdefault(_integer(event["rank"]), RankTimes())
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
        raise ValueError(f"{value!r} is not a time")
    return float(value)


def _integer(value: Any) -> int:
    if type(value) is not int or abs(value) > MAX_INTEGER:
        raise ValueError(f"{value!r} is not an integer, or too large")
    return value


def _apply_manifest(save: SaveRecord, name: str, manifest: Manifest) -> None:
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


def recovery_points(saves: Iterable[SaveRecord], *, memory: bool) -> list[tuple[float, float]]:
    """Return the recovery points as (time from which on a restart can use it, time of the snapshot), both ascending.

    Args:
        saves: Saves of one directory.
        memory: True: for a restart with a live worker, which can use snapshots that all ranks have staged. False: for a
            restart from disk, which can use committed checkpoints.
    """
    points = []
    for save in [s for s in saves if s.outcome not in ("abandoned", "skipped")]:
        since = save.sealed if memory else None
        if since is None and save.outcome == "committed":
            since = save.ended
        taken = save.begun if save.begun is not None else save.ended
        if since is not None and taken is not None:
            points.append((since, taken))
    ascending: list[tuple[float, float]] = []
    for since, taken in sorted(points):
        if not ascending or taken > ascending[-1][1]:
            ascending.append((since, taken))
    return ascending


def recovery_ages(saves: Sequence[SaveRecord], *, memory: bool) -> list[tuple[float, float]]:
    """Return points (time, seconds of training that a crash at that time would have lost).

    Only the time during which a training ran counts. If the first save of the next run comes later than the median time
    between two saves, the run is assumed to have begun that time before its first save, and nothing is lost in between.

    Args:
        saves: Saves of one directory.
        memory: As for `recovery_points`.
    """
    points, line = recovery_points(saves, memory=memory), list[tuple[float, float]]()
    periods = _training_periods(saves)
    for number, (begin, end) in enumerate(periods):
        after = periods[number + 1][0] if number + 1 < len(periods) else math.inf
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


def _training_periods(saves: Sequence[SaveRecord]) -> list[tuple[float, float]]:
    """Return (begin, end) of the periods in which a training ran. Runs less than a save interval apart are joined."""
    runs: dict[str, list[float]] = {}
    for save in saves:
        times = [t for r in save.ranks.values() for t in (r.begun, r.sealed, r.durable)]
        runs.setdefault(SaveId.parse(save.save_id).run_id, []).extend(t for t in (*times, save.ended) if t is not None)
    begun = sorted(_when(save) for save in saves if _when(save))
    interval_s = statistics.median(later - earlier for earlier, later in pairwise(begun)) if len(begun) > 1 else 0.0
    found: list[tuple[float, float]] = []
    for begin, end in sorted((min(times), max(times)) for times in runs.values() if times):
        if found and begin - found[-1][1] <= interval_s:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin - interval_s if found else begin, end))
    return found

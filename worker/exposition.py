"""The worker's figures as Prometheus reads them: text exposition format 0.0.4 (prometheus.io, "Exposition formats").

No label holds a path: whoever can reach the port is told figures, not names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
PREFIX = "asyncckpt_"
MAX_RUNS_SHOWN = 20
BUCKETS_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 60.0, 120.0, 300.0, 600.0)
"""Of the histograms, seconds. Chosen: from a small model on one disk to terabytes on a busy file system."""

OUTCOMES = ("committed", "failed", "abandoned", "unknown")
PHASES = ("begun", "submitted", "writing", "durable")


class Histogram:
    """Counts of seconds by bucket. Used from one thread."""

    def __init__(self) -> None:
        self.counts = [0] * len(BUCKETS_S)
        self.total, self.sum_s = 0, 0.0

    def add(self, seconds: float) -> None:
        """Count one."""
        self.total += 1
        self.sum_s += seconds
        for n, bound in enumerate(BUCKETS_S):
            if seconds <= bound:
                self.counts[n] += 1
                break

    def samples(self, name: str) -> list[tuple[str, Mapping[str, str], float]]:
        """Return its lines, of which each bucket holds those below it too."""
        found: list[tuple[str, Mapping[str, str], float]] = []
        below = 0
        for bound, count in zip(BUCKETS_S, self.counts, strict=True):
            below += count
            found.append((f"{name}_bucket", {"le": f"{bound:g}"}, below))
        found.append((f"{name}_bucket", {"le": "+Inf"}, self.total))
        return [*found, (f"{name}_sum", {}, self.sum_s), (f"{name}_count", {}, self.total)]


Sample = tuple[str, Mapping[str, str], float]


def page(report: Mapping[str, Any], histograms: Mapping[str, Histogram], now: float) -> str:
    """Return the page.

    Args:
        report: The status report.
        histograms: By name, without prefix and unit.
        now: Seconds since 1970.
    """
    lines: list[str] = []
    for name, kind, text, samples in _families(report, now):
        _put(lines, PREFIX + name if not name.startswith("process_") else name, kind, text, samples)
    for name, histogram in histograms.items():
        whole = f"{PREFIX}{name}_seconds"
        _put(lines, whole, "histogram", _HISTOGRAMS[name], histogram.samples(whole))
    return "".join(f"{line}\n" for line in lines)


_HISTOGRAMS = {
    "save": "From the first rank's begin to the commit, of committed saves.",
    "stage": "From a rank's begin to its seal: as long as the copy takes.",
    "write": "From a rank's seal until its files are durable.",
    "commit": "Putting the manifest.",
}

Family = tuple[str, str, str, Sequence[tuple[Mapping[str, str], float]]]


def _families(report: Mapping[str, Any], now: float) -> Iterable[Family]:
    counters, process = report.get("counters") or {}, report.get("process") or {}
    yield "info", "gauge", "The worker; always 1.", [({"version": str(report.get("package", ""))}, 1)]
    yield "uptime_seconds", "gauge", "Since its start.", [({}, report.get("uptime_s", 0.0))]
    yield "draining", "gauge", "1 while it takes no new sessions.", [({}, float(bool(report.get("draining"))))]
    yield (
        "saves_total",
        "counter",
        "Saves that have ended, by outcome.",
        [({"outcome": name}, counters.get(f"saves_{name}", 0)) for name in OUTCOMES],
    )
    failures = report.get("failures") or {}
    yield (
        "save_failures_total",
        "counter",
        "Saves that were not committed, by the kind of error.",
        [({"kind": str(kind)}, count) for kind, count in failures.items()],
    )
    yield (
        "unchanged_saves_total",
        "counter",
        "Saves bit for bit like the one before.",
        _one(counters, "saves_unchanged"),
    )
    yield "written_bytes_total", "counter", "Bytes of files that were made durable.", _one(counters, "written_nbytes")
    yield "sessions", "gauge", "Trainers that are connected.", [({}, len(report.get("sessions") or ()))]
    yield "sessions_died_total", "counter", "Trainers that ended without a goodbye.", _one(counters, "sessions_died")
    yield "internal_errors_total", "counter", "Bugs of the worker's own.", _one(counters, "internal_errors")
    yield "events_dropped_total", "counter", "Lines that events.jsonl lacks.", _one(counters, "events_dropped")
    ranks = report.get("ranks") or ()
    yield (
        "ranks",
        "gauge",
        "Ranks that have a save under way here, by its phase.",
        [({"phase": name}, sum(row["phase"] == name for row in ranks)) for name in PHASES],
    )
    slots, kept = report.get("slots") or (), report.get("kept") or ()
    yield (
        "slot_bytes",
        "gauge",
        "Memory of slots: lent to trainers, or kept for those that come back.",
        [({"state": "lent"}, sum(s["nbytes"] for s in slots)), ({"state": "kept"}, sum(s["nbytes"] for s in kept))],
    )
    yield "slots", "gauge", "Slots.", [({"state": "lent"}, len(slots)), ({"state": "kept"}, len(kept))]
    yield from _of_runs([run for run in report.get("runs") or () if run["committed_step"] is not None], now)
    yield from _of_the_process(process)


def _of_runs(runs: Sequence[Mapping[str, Any]], now: float) -> Iterable[Family]:
    shown = runs[-MAX_RUNS_SHOWN:]
    yield (
        "last_committed_step",
        "gauge",
        "Step of the run's newest checkpoint.",
        [({"run": str(run["run"])}, run["committed_step"]) for run in shown],
    )
    yield (
        "last_committed_timestamp_seconds",
        "gauge",
        "When that was committed, since 1970.",
        [({"run": str(run["run"])}, round(now - run["committed_age_s"], 3)) for run in shown],
    )
    yield (
        "saves_in_flight",
        "gauge",
        "Saves of the run that have not ended.",
        [({"run": str(run["run"])}, run["in_flight"]) for run in shown],
    )


def _of_the_process(process: Mapping[str, Any]) -> Iterable[Family]:
    for name, kind, text, key in (
        ("process_resident_memory_bytes", "gauge", "Resident memory, slots included.", "rss_nbytes"),
        ("private_memory_bytes", "gauge", "Resident memory without slots.", "private_nbytes"),
        ("process_cpu_seconds_total", "counter", "User and system CPU time.", "cpu_seconds"),
        ("process_open_fds", "gauge", "Open file descriptors.", "fds"),
        (
            "storage_written_bytes_total",
            "counter",
            "Bytes that the process gave to storage, as /proc counts.",
            "write_nbytes",
        ),
    ):
        if key in process:
            yield name, kind, text, [({}, process[key])]


def _one(counters: Mapping[str, Any], name: str) -> list[tuple[Mapping[str, str], float]]:
    return [({}, counters.get(name, 0))]


def _put(lines: list[str], name: str, kind: str, text: str, samples: Iterable[Any]) -> None:
    rows = [(name, *sample) if len(sample) == 2 else sample for sample in samples]
    lines += [f"# HELP {name} {_escaped(text)}", f"# TYPE {name} {kind}"]
    for whole, labels, value in rows:
        inside = ",".join(f'{key}="{_escaped(str(label), quotes=True)}"' for key, label in labels.items())
        lines.append(f"{whole}{{{inside}}} {_number(value)}" if inside else f"{whole} {_number(value)}")


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else repr(float(value))


def _escaped(text: str, *, quotes: bool = False) -> str:
    text = text.replace("\\", "\\\\").replace("\n", "\\n")
    return text.replace('"', '\\"') if quotes else text

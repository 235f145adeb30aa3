"""`asyncckpt top`: what the worker is doing, rank by rank, drawn anew every second."""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import Mapping
from typing import Any

from asyncckpt.cli.output import EXIT_OK, columns, shown
from asyncckpt.cli.worker import default_of_this_user, status_of
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.lifecycle import WRITING
from asyncckpt.sizes import human

HELP = "show what the worker is doing, rank by rank, live"
DESCRIPTION = (
    "Show what the worker is doing, drawn anew every second: of each rank the step that it saves or saved last, how "
    "far that is, how much of it is staged (all of it: safe from the trainer's end) and written, how fast, its slots, "
    "and how old its last durable step is. Above them each run's newest checkpoint: what a restart would go on from. "
    "It waits for a worker that is not there yet, and continues with the next one; the last answer of a worker that "
    "hangs or has ended is marked STALE within 3 s. Ctrl-C ends it. Into a pipe it prints one table after the other; "
    "--json one object a line."
)
EXAMPLES = (
    "asyncckpt top",
    "asyncckpt top --once",
    "asyncckpt top --json --interval 10 >> top.jsonl",
    "asyncckpt top --endpoint ipc:///run/user/1000/asyncckpt/job7.sock",
)
MIN_INTERVAL_S, MAX_INTERVAL_S = 0.1, 86400.0
ASK_EVERY_S, ANSWER_WITHIN_S = 1.0, 1.5
"""Together less than the 3 s within which a worker that hangs or has gone is shown as such."""

ANSWERS, STALE, WAITING = "answers", "stale", "waiting"

_CLEAR, _BELOW = "\x1b[H\x1b[2J", "\x1b[H\x1b[J"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--endpoint", help="ipc://... (default: $ASYNCCKPT_ENDPOINT, else this user's default)")
    parser.add_argument("--interval", type=_seconds, default=1.0, metavar="S", help="seconds (default: %(default)s)")
    parser.add_argument("--once", action="store_true", help="print one table and end")
    parser.add_argument("--json", action="store_true", help="print JSON, one object a line")


def _seconds(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = -1.0
    if not 0 <= found <= MAX_INTERVAL_S:
        raise argparse.ArgumentTypeError(f"{text!r}: expected seconds, up to {MAX_INTERVAL_S:g}")
    return max(MIN_INTERVAL_S, found)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 5 when no worker answers and only one table is wanted."""
    endpoint = args.endpoint or endpoint_from_environment() or default_of_this_user()
    if args.once:
        _show(watched(endpoint, status_of(endpoint), None), live=False, as_json=args.json)
        return EXIT_OK
    with contextlib.suppress(KeyboardInterrupt):
        _watch(endpoint, args.interval, live=sys.stdout.isatty() and not args.json, as_json=args.json)
    return EXIT_OK


def _watch(endpoint: str, interval_s: float, *, live: bool, as_json: bool) -> None:
    """Show what the worker says, whichever is there, until Ctrl-C."""
    answered: dict[str, Any] | None = None
    shown_state, shown_at = "", -math.inf
    if live:
        sys.stdout.write(_CLEAR)
    while True:
        began = time.monotonic()
        report = _asked(endpoint)
        state = ANSWERS if report is not None else STALE if answered is not None else WAITING
        # Also between two tables, the worker is asked: what it does not answer any more is said at once.
        if state != shown_state or began - shown_at >= interval_s:
            if report is not None:
                seen = answered = watched(endpoint, report, answered)
            elif answered is not None:
                seen = {**answered, "state": STALE, "silent_s": time.time() - answered["time"]}
            else:
                seen = {**watched(endpoint, {}, None), "state": WAITING}
            if state != WAITING or state != shown_state or live or as_json:
                _show(seen, live=live, as_json=as_json)
            shown_state, shown_at = state, began
        time.sleep(max(0.0, began + min(interval_s, ASK_EVERY_S) - time.monotonic()))


def _asked(endpoint: str) -> dict[str, Any] | None:
    try:
        return status_of(endpoint, ANSWER_WITHIN_S)
    except WorkerUnavailableError:
        return None


def watched(endpoint: str, report: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return what is shown, as plain values.

    Args:
        endpoint: Of the worker.
        report: Its status report.
        before: What this returned last; None: nothing yet.
    """
    process, now = report.get("process") or {}, time.time()
    rate = None
    if before is not None and before["pid"] == report.get("pid") and before["storage_written_nbytes"] is not None:
        passed = now - before["time"]
        written = process.get("write_nbytes", 0) - before["storage_written_nbytes"]
        rate = max(0.0, written / passed) if passed > 0 else None
    counters = report.get("counters") or {}
    return {
        "time": now,
        "state": ANSWERS,
        "silent_s": None,
        "endpoint": endpoint,
        "pid": report.get("pid"),
        "uptime_s": report.get("uptime_s"),
        "draining": bool(report.get("draining")),
        "write_bytes_per_s": rate,
        "storage_written_nbytes": process.get("write_nbytes"),
        "rss_nbytes": process.get("rss_nbytes"),
        "private_nbytes": process.get("private_nbytes"),
        "cpu_percent": process.get("cpu_percent"),
        "committed": counters.get("saves_committed", 0),
        "failed": sum(counters.get(f"saves_{name}", 0) for name in ("failed", "abandoned", "unknown")),
        "kept_slots": len(report.get("kept") or ()),
        "runs": [dict(row) for row in report.get("runs") or ()],
        "ranks": [{**row, "write_bytes_per_s": _rate(row)} for row in report.get("ranks") or ()],
    }


def _rate(row: Mapping[str, Any]) -> float | None:
    """Return the speed of what is being written now, since its writing began."""
    written, seconds = row.get("written_nbytes"), row.get("phase_s")
    return written / seconds if row.get("phase") == WRITING and written and seconds else None


def _show(seen: Mapping[str, Any], *, live: bool, as_json: bool) -> None:
    if as_json:
        print(json.dumps(seen), flush=True)
        return
    lines = frame(seen)
    if live:
        size = shutil.get_terminal_size()
        lines = [line[: size.columns - 1] for line in lines[: max(2, size.lines - 1)]]
    sys.stdout.write((_BELOW if live else "") + "".join(f"{shown(line)}\n" for line in lines))
    sys.stdout.flush()


def frame(seen: Mapping[str, Any]) -> list[str]:
    """Return the lines of one table."""
    if seen["state"] == WAITING:
        return [f"no worker at {seen['endpoint']} yet; waiting for one"]
    if seen["state"] == STALE:
        silent = f"STALE: the worker has not answered for {_age(seen['silent_s'])}"
        return [f"{silent}; it hangs, has ended, or was replaced. Its last answer:", *frame({**seen, "state": ANSWERS})]
    memory = f"{_size(seen['private_nbytes'])} + slots" if seen["private_nbytes"] is not None else "-"
    draining = ", DRAINING" if seen["draining"] else ""
    lines = [
        f"worker {seen['pid']}, up {_age(seen['uptime_s'])}{draining}  {seen['endpoint']}",
        f"saves: {seen['committed']} committed, {seen['failed']} failed; writing {_speed(seen['write_bytes_per_s'])}; "
        f"memory {memory}; CPU {seen['cpu_percent'] or 0:.0f} %; kept slots {seen['kept_slots']}",
    ]
    for run in seen["runs"]:
        newest = f"step {run['committed_step']}, {_age(run['committed_age_s'])} ago, {run['committed_path']}"
        gone = f", {run['gone']} gone" if run["gone"] else ""
        lines.append(
            f"run {run['run']}: {run['ranks']} of {run['world_size']} ranks{gone}, {run['in_flight']} in flight; "
            + "newest "
            + (newest if run["committed_step"] is not None else "none yet")
        )
    if not seen["ranks"]:
        return [*lines, "no trainer is connected"]
    header = ("RANK", "STEP", "PHASE", "SINCE", "STAGED", "WRITTEN", "GB/S", "SLOTS", "MEMORY", "DURABLE", "AGE")
    return [*lines, "", *columns(header, [_cells(row) for row in seen["ranks"]])]


def _cells(row: Mapping[str, Any]) -> list[str]:
    written, nbytes, rate = row.get("written_nbytes"), row.get("nbytes"), row["write_bytes_per_s"]
    return [
        f"{row['rank']}/{row['world_size']}",
        _text(row["step"]),
        str(row["phase"]),
        _age(row["phase_s"]),
        _percent(row["staged"]),
        _percent(min(1.0, written / nbytes) if nbytes and written is not None else None),
        "-" if rate is None else f"{rate / 1e9:.2f}",
        str(row["slots"]),
        _size(row["slots_nbytes"]),
        _text(row["durable_step"]),
        _age(row["durable_age_s"]),
    ]


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _size(nbytes: float | None) -> str:
    return "-" if nbytes is None else human(nbytes)


def _speed(rate: float | None) -> str:
    return "-" if rate is None else f"{rate / 1e9:.2f} GB/s"


def _percent(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _age(seconds: float | None) -> str:
    if seconds is None:
        return "-"
    if seconds < 100:
        return f"{seconds:.1f}s" if seconds < 10 else f"{seconds:.0f}s"
    minutes, hours = seconds / 60, seconds / 3600
    return f"{minutes:.0f}m" if minutes < 100 else f"{hours:.0f}h" if hours < 72 else f"{hours / 24:.0f}d"

"""Show what the worker is doing, updated every second. For each rank: the step of its current or last save and the
phase of that save, how much is staged (copied to the worker's memory; at 100% the save survives the training process)
and written to disk, the speed, the slots (buffers for snapshots), and the age of the last step on disk. Above the
table: each run's newest checkpoint, from which a restart would resume. If no worker is running, wait for one; if it is
replaced, continue with the new one. The last answer of a worker that hangs or has ended is marked STALE within 3 s. End
it with Ctrl-C. Into a pipe, tables are printed one after the other; with --json, one JSON object per line.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import math
import queue
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from asyncckpt.basics.quantities import human, human_s, parse_seconds
from asyncckpt.basics.urls import parent_of
from asyncckpt.cli.output import EXIT_OK, can_redraw, columns, print_json, printable, say
from asyncckpt.cli.worker_requests import add_endpoint, status_of
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.fields import FAILED
from asyncckpt.protocol.save_phases import WRITING
from asyncckpt.recall.snapshots import endpoint_of

EXAMPLES = (
    "asyncckpt top",
    "asyncckpt top --once",
    "asyncckpt top --json --interval 10 >> top.jsonl",
    "asyncckpt top --endpoint ipc:///run/user/1000/asyncckpt/job7.sock",
)
MIN_INTERVAL_S = 0.1
ASK_EVERY_S, ANSWER_WITHIN_S = 1.0, 1.5
"""Their sum is below the 3 s within which a worker that hangs or has ended is marked STALE."""

ANSWERS, STALE, WAITING = "answers", "stale", "waiting"


def configure(parser: argparse.ArgumentParser) -> None:
    add_endpoint(parser)
    parser.add_argument(
        "--interval",
        type=parse_seconds,
        default=1.0,
        metavar="S",
        help="seconds between updates (default: %(default)s)",
    )
    parser.add_argument("--once", action="store_true", help="print one table and exit")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 5 with --once if no worker answers."""
    endpoint = endpoint_of(args.endpoint)
    if args.once:
        _plain(watched(endpoint, status_of(endpoint), None), as_json=args.json)
        return EXIT_OK
    interrupts: queue.SimpleQueue[None] = queue.SimpleQueue()
    # IMPORTANT: no KeyboardInterrupt, which is swallowed if it is raised inside a destructor or a callback. And no
    # threading.Event: a handler that runs while this thread holds the event's lock would wait for it forever.
    before = signal.getsignal(signal.SIGINT)
    if before is not signal.SIG_IGN:  # shells ignore it in background processes
        signal.signal(signal.SIGINT, lambda *_: interrupts.put(None))
    try:
        with _screen(args) as show:
            _watch(endpoint, max(MIN_INTERVAL_S, args.interval), interrupts, show, says_waiting_again=args.json)
    finally:
        signal.signal(signal.SIGINT, before)
    return EXIT_OK


@contextlib.contextmanager
def _screen(args: argparse.Namespace) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Yield a function that shows a table: on a terminal in place of the table before, else below it."""
    if args.json or not can_redraw(sys.stdout):
        yield functools.partial(_plain, as_json=args.json)
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    with Live(
        console=Console(file=sys.stdout),
        auto_refresh=False,
        vertical_overflow="crop",
        redirect_stdout=False,
        redirect_stderr=False,
    ) as screen:
        yield lambda seen: screen.update(
            Text("\n".join(map(printable, frame(seen))), no_wrap=True, overflow="crop"), refresh=True
        )


def _watch(
    endpoint: str,
    interval_s: float,
    interrupts: queue.SimpleQueue[None],
    show: Callable[[Mapping[str, Any]], None],
    *,
    says_waiting_again: bool,
) -> None:
    """Show the answers of the worker at `endpoint` until there is an item in `interrupts`."""
    answered: dict[str, Any] | None = None
    shown_state, shown_at = "", -math.inf
    while interrupts.empty():
        began = time.monotonic()
        report = _asked(endpoint)
        state = ANSWERS if report is not None else STALE if answered is not None else WAITING
        # Ask the worker also between two tables, so that a change of its state is shown immediately.
        if state != shown_state or began - shown_at >= interval_s:
            if report is not None:
                answered = watched(endpoint, report, answered)
            if answered is not None:
                silent_s = None if report is not None else time.time() - answered["time"]
                show({**answered, "state": state, "silent_s": silent_s})
            elif state != shown_state or says_waiting_again:
                show({**watched(endpoint, {}, None), "state": WAITING})
            shown_state, shown_at = state, began
        with contextlib.suppress(queue.Empty):
            return interrupts.get(timeout=max(0.0, began + min(interval_s, ASK_EVERY_S) - time.monotonic()))


def _asked(endpoint: str) -> dict[str, Any] | None:
    try:
        return status_of(endpoint, ANSWER_WITHIN_S)
    except WorkerUnavailableError:
        return None


def watched(endpoint: str, report: Mapping[str, Any], before: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the values that are shown.

    Args:
        endpoint: Endpoint of the worker.
        report: Status report of the worker.
        before: The last return value of this function; None: this is the first call.
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
        "mirrors": [dict(row) for row in report.get("mirrors") or ()],
        "ranks": [{**row, "write_bytes_per_s": _rate(row)} for row in report.get("ranks") or ()],
    }


def _rate(row: Mapping[str, Any]) -> float | None:
    """Return the average speed of the save that is being written, in bytes per second; None: none is."""
    written, seconds = row.get("written_nbytes"), row.get("phase_s")
    return written / seconds if row.get("phase") == WRITING and written and seconds else None


def _plain(seen: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(seen, indent=None)
    else:
        say("\n".join(frame(seen)))
        sys.stdout.flush()


def frame(seen: Mapping[str, Any]) -> list[str]:
    """Return the lines of one table."""
    if seen["state"] == WAITING:
        return [f"no worker at {seen['endpoint']} yet; waiting for one"]
    if seen["state"] == STALE:
        silent = f"STALE: the worker has not answered for {human_s(seen['silent_s'])}"
        return [f"{silent}: it hangs, has ended, or was replaced. Its last answer:", *frame({**seen, "state": ANSWERS})]
    up, memory = _known(human_s, seen["uptime_s"]), _known(human, seen["private_nbytes"])
    lines = [
        f"worker {seen['pid']}, up {up}{', DRAINING' * seen['draining']}  {seen['endpoint']}",
        f"saves: {seen['committed']} committed, {seen['failed']} failed; writing "
        f"{_known(_per_s, seen['write_bytes_per_s'])}; memory {memory} + slots; "
        f"CPU {seen['cpu_percent'] or 0:.0f} %; kept slots {seen['kept_slots']}",
        *map(_run_line, seen["runs"]),
        *_mirror_lines(seen["mirrors"]),
    ]
    if not seen["ranks"]:
        return [*lines, "no training process is connected"]
    header = ("RANK", "STEP", "PHASE", "SINCE", "STAGED", "WRITTEN", "RATE", "SLOTS", "MEMORY", "DURABLE", "AGE")
    return [*lines, "", *columns(header, map(_cells, seen["ranks"]))]


def _run_line(run: Mapping[str, Any]) -> str:
    gone = f", {run['gone']} gone" if run["gone"] else ""
    newest = "none yet"
    if run["committed_step"] is not None:
        age = _known(human_s, run["committed_age_s"])
        newest = f"step {run['committed_step']}, {age} ago, {run['committed_path']}"
    ranks = f"{run['ranks']} of {run['world_size']} ranks{gone}, {run['in_flight']} in flight"
    return f"run {run['run']}: {ranks}; newest {newest}"


def _mirror_lines(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line for each directory of mirrors: what is still to be copied there."""
    behind: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["phase"] != FAILED:
            behind.setdefault(parent_of(row["mirror"]), []).append(row)
    lines = []
    for place, waiting in behind.items():
        oldest, copied = waiting[0], sum(row.get("copied_nbytes") or 0 for row in waiting)
        left = human(max(0, sum(row["nbytes"] or 0 for row in waiting) - copied))
        trouble = f"; try {oldest['tries']}: {oldest['error']}" if oldest["error"] else ""
        since = _known(human_s, oldest["age_s"])
        lines.append(f"mirror {place}: {len(waiting)} behind, {left}; oldest step {oldest['step']}, {since}{trouble}")
    failed = sum(row["phase"] == FAILED for row in rows)
    return [*lines, f"mirrors: {failed} copies failed, see `asyncckpt worker status`"] if failed else lines


def _cells(row: Mapping[str, Any]) -> list[Any]:
    written, nbytes = row.get("written_nbytes"), row.get("nbytes")
    share = min(1.0, written / nbytes) if nbytes and written is not None else None
    return [
        f"{row['rank']}/{row['world_size']}",
        row["step"],
        row["phase"],
        _known(human_s, row["phase_s"]),
        _known("{:.0%}".format, row["staged"]),
        _known("{:.0%}".format, share),
        _known(_per_s, row["write_bytes_per_s"]),
        row["slots"],
        human(row["slots_nbytes"]),
        row["durable_step"],
        _known(human_s, row["durable_age_s"]),
    ]


def _per_s(rate: float) -> str:
    return f"{human(rate)}/s"


def _known(form: Callable[[float], str], value: float | None) -> str:
    return "-" if value is None else form(value)

"""Start a worker, show its status, drain it or stop it."""

from __future__ import annotations

import argparse
import os
import sys
import time
from typing import Any

from asyncckpt.basics.quantities import human, parse_seconds
from asyncckpt.cli import add_json, describe
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, print_table, say
from asyncckpt.cli.worker_requests import add_endpoint, status_of, tell_to_drain
from asyncckpt.client import launcher
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.endpoint import socket_path
from asyncckpt.protocol.identity import has_exited, start_ticks
from asyncckpt.protocol.options import DRAIN_TIMEOUT_S, add_options, to_arguments
from asyncckpt.recall.snapshots import endpoint_of

EXIT_MARGIN_S = 30.0
"""How much longer than a worker drains by default the command waits for its exit. Chosen, not measured."""

EXAMPLES = (
    "asyncckpt worker start --root /checkpoints --idle-exit-s 0",
    "asyncckpt worker status --json",
    "asyncckpt worker drain --timeout-s 300",
)
_START_EXAMPLES = (
    "asyncckpt worker start --root /checkpoints --idle-exit-s 0 --metrics 127.0.0.1:9555",
    "asyncckpt worker start --advertise $(hostname) --port 7400 --events",
)
_ACTIONS = (
    (
        "status",
        "show the worker's state: sessions, ranks, slots, saves",
        ("asyncckpt worker status", "asyncckpt worker status --json"),
    ),
    ("drain", "stop the worker after it has finished the submitted saves", ("asyncckpt worker drain --timeout-s 300",)),
    ("stop", "stop the worker without finishing the submitted saves", ("asyncckpt worker stop",)),
)
_TABLES = ("sessions", "ranks", "runs", "slots", "kept", "saves", "mirrors")


def configure(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser("start", help="run a worker in the foreground (the same as asyncckpt-worker)")
    text = "Run a worker in the foreground, for systemd, SLURM and Kubernetes (docs/deployment)."
    describe(start, text, _START_EXAMPLES)
    add_options(start)
    for name, text, lines in _ACTIONS:
        action = actions.add_parser(name, help=text)
        describe(action, f"{text[0].upper()}{text[1:]}.", lines)
        add_endpoint(action)
        add_json(action)
        if name != "status":
            action.add_argument(
                "--timeout-s",
                type=parse_seconds,
                default=DRAIN_TIMEOUT_S + EXIT_MARGIN_S,
                metavar="S",
                help="seconds to wait until it has exited (default: %(default)s)",
            )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 5 no worker answers, 1 it has not exited in time."""
    if args.action == "start":
        os.execv(sys.executable, [*launcher.python_command(launcher.WORKER_MODULE), *to_arguments(args)])
    endpoint = endpoint_of(args.endpoint)
    try:
        report = status_of(endpoint)
    except WorkerUnavailableError as error:
        if args.endpoint or endpoint_from_environment():
            raise
        raise WorkerUnavailableError(
            f"{error}. The default endpoint depends on the job (ASYNCCKPT_JOB, else torchrun's ID, else SLURM's) and "
            f"on the Python environment; pass --endpoint{_others(endpoint)}",
            endpoint=endpoint,
        ) from error
    if args.action == "status":
        print_json({"endpoint": endpoint, **report}) if args.json else _print_status({"endpoint": endpoint, **report})
        return EXIT_OK
    tell_to_drain(endpoint, now=args.action == "stop")
    gone = _wait_for_exit(int(report["pid"]), args.timeout_s)
    if args.json:
        print_json({"endpoint": endpoint, "pid": report["pid"], "exited": gone})
    else:
        say(f"worker {report['pid']} " + ("has exited" if gone else f"still runs after {args.timeout_s:g} s"))
    return EXIT_OK if gone else EXIT_FAILED


def _others(endpoint: str) -> str:
    """Return a hint that names the sockets of other workers in the directory of `endpoint`."""
    directory = os.path.dirname(socket_path(endpoint))
    found = sorted(name for name in os.listdir(directory) if name.endswith(".sock")) if os.path.isdir(directory) else []
    return f"; sockets in {directory}: {', '.join(found[:8])}" if found else ""


def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    started, deadline = start_ticks(pid), time.monotonic() + timeout_s
    while started is not None and not has_exited(pid, started):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _print_status(report: dict[str, Any]) -> None:
    tables = {name: [dict(row) for row in report.get(name) or ()] for name in _TABLES}
    for name, value in report.items():
        if name == "roots":
            say("roots: " + (", ".join(value) or "any"))
        elif isinstance(value, dict):
            say(f"{name}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
        elif not isinstance(value, (list, tuple)):
            size = human(value) if name.endswith("bytes") and value is not None else value
            say(f"{name}: {value:.1f}" if isinstance(value, float) else f"{name}: {size}")
    for name, rows in tables.items():
        say(f"\n{name}: {len(rows)}")
        if rows:
            header = list(dict.fromkeys(name for row in rows for name in row))
            print_table([h.upper() for h in header], [[_plain(row.get(h)) for h in header] for row in rows])


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return " ".join(f"{name}:{one}" for name, one in value.items())
    return " ".join(map(str, value)) or "-" if isinstance(value, (list, tuple)) else value

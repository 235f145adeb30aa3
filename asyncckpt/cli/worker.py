"""`asyncckpt worker start|status|drain|stop`: the writer daemon, from outside."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from asyncckpt import __version__
from asyncckpt.cli.help_text import ExampleFormatter, examples
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, print_table
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import WorkerUnavailableError, from_wire
from asyncckpt.protocol import codec, messages
from asyncckpt.protocol.dealer import Dealer
from asyncckpt.protocol.endpoint import check_directory, default_endpoint, socket_path
from asyncckpt.protocol.identity import is_gone, start_ticks
from asyncckpt.protocol.options import add_options, to_arguments
from asyncckpt.sizes import human

HELP = "start the worker, ask for its status, drain it or stop it"
EXAMPLES = (
    "asyncckpt worker start --root /checkpoints --idle-exit-s 0",
    "asyncckpt worker status --json",
    "asyncckpt worker drain --timeout-s 300",
)
_START_EXAMPLES = (
    "asyncckpt worker start --root /checkpoints --idle-exit-s 0 --metrics 127.0.0.1:9555",
    "asyncckpt worker start --advertise $(hostname) --port 7400 --events",
)
ANSWER_TIMEOUT_S = 5.0
RESEND_S = 0.5


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    start = actions.add_parser(
        "start",
        help="run the worker in the foreground (the same as asyncckpt-worker)",
        description="Run the worker in the foreground, as systemd, SLURM and Kubernetes want it (docs/deployment).",
        epilog=examples(_START_EXAMPLES),
        formatter_class=ExampleFormatter,
    )
    add_options(start)
    for name, text, lines in (
        ("status", "print what the worker is doing", ("asyncckpt worker status", "asyncckpt worker status --json")),
        ("drain", "let it finish what was submitted, then exit", ("asyncckpt worker drain --timeout-s 300",)),
        ("stop", "let it exit without finishing what was submitted", ("asyncckpt worker stop",)),
    ):
        description = f"{text[0].upper()}{text[1:]}."
        action = actions.add_parser(
            name, help=text, description=description, epilog=examples(lines), formatter_class=ExampleFormatter
        )
        action.add_argument("--endpoint", help="ipc://... (default: $ASYNCCKPT_ENDPOINT, else this user's default)")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name != "status":
            action.add_argument("--timeout-s", type=float, default=150.0, help="how long to wait for its exit")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 5 when no worker answers."""
    if args.action == "start":
        os.execv(sys.executable, [sys.executable, "-m", "asyncckpt_worker", *to_arguments(args)])
    named = args.endpoint or endpoint_from_environment()
    endpoint = named or default_of_this_user()
    try:
        report = status_of(endpoint)
    except WorkerUnavailableError as error:
        if named:
            raise
        raise WorkerUnavailableError(
            f"{error}. The endpoint depends on the job (ASYNCCKPT_JOB, else torchrun's, else SLURM's) and the Python "
            f"environment; name it by --endpoint{_others(endpoint)}",
            endpoint=endpoint,
        ) from error
    if args.action == "status":
        print_json({"endpoint": endpoint, **report}) if args.json else _print_status(endpoint, report)
        return EXIT_OK
    ask(endpoint, lambda n: messages.Drain(id=n, now=args.action == "stop"))
    gone = _wait_for_exit(int(report["pid"]), args.timeout_s)
    if args.json:
        print_json({"endpoint": endpoint, "pid": report["pid"], "exited": gone})
    else:
        print(f"worker {report['pid']} " + ("has exited" if gone else f"still runs after {args.timeout_s:g} s"))
    return EXIT_OK if gone else EXIT_FAILED


def default_of_this_user() -> str:
    """Return the endpoint at which trainer, worker and commands meet when none is named."""
    return default_endpoint(os.environ, uid=os.geteuid(), package=__version__, interpreter=sys.prefix)


def _others(endpoint: str) -> str:
    """Say which workers' sockets lie where `endpoint` would."""
    directory = os.path.dirname(socket_path(endpoint))
    found = sorted(name for name in os.listdir(directory) if name.endswith(".sock")) if os.path.isdir(directory) else []
    return f"; in {directory} are {', '.join(found[:8])}" if found else ""


def status_of(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Return the report of the worker at `endpoint`.

    Raises:
        WorkerUnavailableError: Nobody answers within `timeout_s`.
        AsyncCkptError: The worker refused.
    """
    status = ask(endpoint, lambda n: messages.Status(id=n), timeout_s)
    assert isinstance(status, messages.StatusReport)
    return dict(status.report)


def ask(
    endpoint: str, build: Callable[[int], messages.Message], timeout_s: float = ANSWER_TIMEOUT_S
) -> messages.Message:
    """Send one request and return its reply.

    Raises:
        WorkerUnavailableError: Nobody answers within `timeout_s`.
        EndpointError: Somebody else may be listening there.
        AsyncCkptError: The worker refused.
    """
    check_directory(endpoint)
    path, unreachable = socket_path(endpoint), f"no worker answers at {endpoint}"
    if not os.path.exists(path):
        raise WorkerUnavailableError(unreachable, endpoint=endpoint, detail="no socket")
    deadline = time.monotonic() + timeout_s
    with contextlib.closing(Dealer(endpoint)) as dealer:
        while time.monotonic() < deadline:
            dealer.send(codec.encode(build(1)))
            while (frames := dealer.receive(min(RESEND_S, timeout_s))) is not None:
                reply = codec.decode(frames, messages.REPLIES)
                if isinstance(reply, messages.Refused):
                    raise from_wire(reply.error)
                if getattr(reply, "id", 0) == 1:
                    return reply
    raise WorkerUnavailableError(unreachable, endpoint=endpoint, detail="no answer")


def _wait_for_exit(pid: int, timeout_s: float) -> bool:
    started, deadline = start_ticks(pid), time.monotonic() + timeout_s
    while started is not None and not is_gone(pid, started):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def _print_status(endpoint: str, report: dict[str, Any]) -> None:
    for name, value in {"endpoint": endpoint, **report}.items():
        if name == "roots":
            print("roots: " + (", ".join(value) or "any"))
        elif isinstance(value, float):
            print(f"{name}: {value:.1f}")
        elif not isinstance(value, (list, tuple, dict)):
            print(f"{name}: {human(value) if name.endswith('bytes') else value}")
        elif isinstance(value, dict):
            print(f"{name}: " + ", ".join(f"{k} {v}" for k, v in value.items()))
    for name in ("sessions", "ranks", "runs", "slots", "kept", "saves"):
        rows = [dict(row) for row in report.get(name) or ()]
        print(f"\n{name}: {len(rows)}")
        if rows:
            header = list(dict.fromkeys(name for row in rows for name in row))
            print_table([h.upper() for h in header], [[_plain(row.get(h, "-")) for h in header] for row in rows])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return " ".join(f"{name}:{one}" for name, one in value.items())
    if isinstance(value, (list, tuple)):
        return " ".join(map(str, value)) or "-"
    return "-" if value is None else str(value)

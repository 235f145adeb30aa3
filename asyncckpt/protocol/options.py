"""The options of the command `asyncckpt-worker`: for the command itself, and for commands that start it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from typing import Any

from asyncckpt.basics.quantities import count, parse_nbytes, parse_seconds
from asyncckpt.basics.urls import is_object_url
from asyncckpt.protocol.fields import MAX_PORT

IDLE_EXIT_S = 600.0
KEEP_SNAPSHOTS_S = 600.0
DRAIN_TIMEOUT_S = 120.0
LOG_FORMATS = ("human", "json")
LOOPBACK = "127.0.0.1"
ADVERTISE_VARIABLE = "ASYNCCKPT_ADVERTISE"


def add_options(parser: argparse.ArgumentParser, helps: Mapping[str, str] | None = None) -> None:
    """Add the options.

    Args:
        parser: Parser to extend.
        helps: Option -> help text that replaces the default one.
    """
    helps = helps or {}
    for name, settings in _OPTIONS.items():
        parser.add_argument(name, **{**settings, "help": helps.get(name, settings["help"])})


MIN_BANDWIDTH = 1 << 20
"""Minimum of `--max-write-bandwidth` and `--max-mirror-bandwidth`, in bytes per second."""

MAX_PID = (1 << 31) - 1
MAX_THREADS = 256


def bandwidth(text: str) -> int:
    """Return bytes per second.

    Raises:
        argparse.ArgumentTypeError: It is not a size, or less than `MIN_BANDWIDTH`.
    """
    rate = parse_nbytes(text)
    if rate < MIN_BANDWIDTH:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least 1 MiB per second, such as 800M or 2.5GiB")
    return rate


_OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "--endpoint": {
        "help": "address of the socket, ipc:///absolute/path (default: $ASYNCCKPT_ENDPOINT, else one per user and job)"
    },
    "--when-free": {
        "action": "store_true",
        "help": "if another worker serves the endpoint (a training may have started it), wait until that has exited "
        "instead of failing; for systemd and sidecars",
    },
    "--root": {
        "action": "append",
        "default": [],
        "metavar": "DIR",
        "help": "write only below DIR; repeat for more (default: anywhere)",
    },
    "--idle-exit-s": {
        "type": parse_seconds,
        "default": IDLE_EXIT_S,
        "metavar": "S",
        "help": "exit after S seconds without connected trainings and saves; 0: never (default: %(default)s)",
    },
    "--while-pid": {
        "type": count(0, MAX_PID),
        "default": 0,
        "metavar": "PID",
        "help": "do not exit when idle while this process exists; the idle time begins when it ends",
    },
    "--keep-snapshots-s": {
        "type": parse_seconds,
        "default": KEEP_SNAPSHOTS_S,
        "metavar": "S",
        "help": "when training processes have ended, keep their last snapshot in memory for S seconds, so that "
        "restarted ones can load it; 0: free it immediately (default: %(default)s)",
    },
    "--drain-timeout-s": {
        "type": parse_seconds,
        "default": DRAIN_TIMEOUT_S,
        "metavar": "S",
        "help": "on exit, wait at most S seconds for saves that are not finished (default: %(default)s)",
    },
    "--threads": {
        "type": count(0, MAX_THREADS),
        "default": 0,
        "metavar": "N",
        "help": "writing threads for each save, at least 2 (default: 4; a training can set another number)",
    },
    "--max-write-bandwidth": {
        "type": bandwidth,
        "default": 0,
        "metavar": "RATE",
        "help": "maximum bytes per second that all saves together write: 800M, 2.5GiB (default: no limit)",
    },
    "--mirror": {
        "action": "append",
        "default": [],
        "metavar": "ROOT",
        "help": "copy the checkpoints in ROOT that an earlier worker has not copied to their mirrors; repeat for more",
    },
    "--max-mirror-bandwidth": {
        "type": bandwidth,
        "default": 0,
        "metavar": "RATE",
        "help": "maximum bytes per second that all copies to mirrors together send (default: no limit)",
    },
    "--advertise": {
        "metavar": "HOST",
        "help": f"with several nodes: host name or address at which workers on other nodes reach this worker "
        f"(default: ${ADVERTISE_VARIABLE}, else {LOOPBACK}); no port is opened before it is needed",
    },
    "--port": {
        "type": count(0, MAX_PORT),
        "default": 0,
        "metavar": "P",
        "help": "with several nodes: TCP port for the other workers; 0: any free port (default: %(default)s)",
    },
    "--events": {
        "action": "store_true",
        "help": "log the events of saves to events.jsonl in the directory that contains the checkpoints, for "
        "`asyncckpt report`; at most 64 MB and one older file are kept",
    },
    "--metrics": {
        "metavar": "HOST:PORT",
        "help": "serve metrics for Prometheus at this address, such as 127.0.0.1:9555; loopback addresses only "
        "(default: no metrics)",
    },
    "--log-format": {
        "choices": LOG_FORMATS,
        "default": LOG_FORMATS[0],
        "help": "format of the log (default: %(default)s)",
    },
    "--log-file": {
        "metavar": "FILE",
        "help": "append the log to FILE (default: stderr; with --detach: a file beside the socket); with --detach or "
        "--while-pid, at most 1 MiB and one older file are kept",
    },
    "--detach": {
        "action": "store_true",
        "help": "run in the background, in a new session, and return immediately",
    },
}


_PATHS = ("--root", "--mirror", "--log-file")


def to_arguments(options: argparse.Namespace) -> list[str]:
    """Return the arguments for `options`, with absolute paths, since a started worker has another directory."""
    arguments = []
    for name, settings in _OPTIONS.items():
        given = getattr(options, name[2:].replace("-", "_"))
        for value in given if isinstance(given, list) else [given]:
            if value is True:
                arguments.append(name)
            elif isinstance(given, list) or (value is not False and value not in ("", settings.get("default"))):
                # IMPORTANT: an empty root stays one, which the worker refuses; a variable may be unset.
                arguments.append(f"{name}={_absolute(value) if value and name in _PATHS else value}")
    return arguments


def _absolute(path: str) -> str:
    return path if is_object_url(path) else os.path.abspath(os.path.expanduser(path))

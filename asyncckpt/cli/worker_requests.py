"""Requests of the commands to a worker that runs already: its status, which paths it writes to, drain."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import messages
from asyncckpt.protocol.save_phases import ENDED
from asyncckpt.recall.session import RequestChannel
from asyncckpt.recall.snapshots import endpoint_of

ANSWER_TIMEOUT_S = 5.0


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Add --endpoint, of commands that ask a worker."""
    parser.add_argument(
        "--endpoint", help="the worker's, ipc://... (default: $ASYNCCKPT_ENDPOINT, else this user's default)"
    )


def status_of(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Return the report of the worker at `endpoint`.

    Raises:
        WorkerUnavailableError: Nobody answers within `timeout_s`.
        AsyncCkptError: The worker refused, or somebody else may be listening there.
    """
    with contextlib.closing(RequestChannel(endpoint, timeout_s)) as channel:
        return dict(channel.call(lambda n: messages.Status(id=n), messages.StatusReport).report)


def tell_to_drain(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S, *, now: bool) -> None:
    """Let the worker at `endpoint` finish what was submitted, then exit; `now`: exit without.

    Raises:
        AsyncCkptError: As `status_of`.
    """
    with contextlib.closing(RequestChannel(endpoint, timeout_s)) as channel:
        channel.call(lambda n: messages.Drain(id=n, now=now), messages.Ok)


def busy_paths(args: argparse.Namespace) -> tuple[list[str], str]:
    """Return the real paths that the worker writes to, and which worker was asked; "" when none answers.

    Raises:
        WorkerUnavailableError: One that was named by --endpoint does not answer.
    """
    asked = endpoint_of(args.endpoint)
    try:
        rows = status_of(asked).get("saves") or ()
    except WorkerUnavailableError:
        if args.endpoint:
            raise
        return [], ""
    return [os.path.realpath(str(row["path"])) for row in rows if row.get("phase") not in ENDED], asked

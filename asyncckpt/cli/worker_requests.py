"""Requests of the commands to a running worker: status, the paths that it writes to, drain."""

from __future__ import annotations

import argparse
import contextlib
import os
from typing import Any

from asyncckpt.basics.urls import is_object_url
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol import messages
from asyncckpt.protocol.fields import FAILED
from asyncckpt.protocol.save_phases import ENDED
from asyncckpt.recall.session import RequestChannel
from asyncckpt.recall.snapshots import endpoint_of

ANSWER_TIMEOUT_S = 5.0


def add_endpoint(parser: argparse.ArgumentParser) -> None:
    """Add --endpoint, for commands that send requests to a worker."""
    parser.add_argument(
        "--endpoint",
        help="address of the worker's socket, ipc://... (default: $ASYNCCKPT_ENDPOINT, else this user's default)",
    )


def status_of(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S) -> dict[str, Any]:
    """Return the status report of the worker at `endpoint`.

    Raises:
        WorkerUnavailableError: No worker answers within `timeout_s`.
        AsyncCkptError: The worker refused the request, or another user may own the socket.

    Blocks: for the answer, at most `timeout_s`.
    """
    with contextlib.closing(RequestChannel(endpoint, timeout_s)) as channel:
        return dict(channel.call(lambda n: messages.Status(id=n), messages.StatusReport).report)


def tell_to_drain(endpoint: str, timeout_s: float = ANSWER_TIMEOUT_S, *, now: bool) -> None:
    """Tell the worker at `endpoint` to finish the submitted saves and exit; with `now`, to exit without finishing them.

    Raises:
        AsyncCkptError: The same as from `status_of`.

    Blocks: for the answer, at most `timeout_s`.
    """
    with contextlib.closing(RequestChannel(endpoint, timeout_s)) as channel:
        channel.call(lambda n: messages.Drain(id=n, now=now), messages.Ok)


def busy_paths(args: argparse.Namespace) -> tuple[list[str], str]:
    """Return the real paths and URLs that the worker writes to, and its endpoint; "" if no worker answers.

    Includes the targets of mirror copies that run or wait.

    Raises:
        WorkerUnavailableError: The worker that was given with --endpoint does not answer.
    """
    asked = endpoint_of(args.endpoint)
    try:
        status = status_of(asked)
    except WorkerUnavailableError:
        if args.endpoint:
            raise
        return [], ""
    written = [str(row["path"]) for row in status.get("saves") or () if row.get("phase") not in ENDED]
    written += [str(row["mirror"]) for row in status.get("mirrors") or () if row.get("phase") != FAILED]
    return [path if is_object_url(path) else os.path.realpath(path) for path in written], asked

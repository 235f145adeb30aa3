"""Which saves a worker has under way, for commands that remove things."""

from __future__ import annotations

import os

from asyncckpt.cli.worker import default_of_this_user, status_of
from asyncckpt.config import endpoint_from_environment
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.lifecycle import ENDED


def busy_paths(endpoint: str | None) -> tuple[list[str], str]:
    """Return the real paths that a worker writes to, and which worker was asked; "" when none answers.

    Args:
        endpoint: Of the worker; None: $ASYNCCKPT_ENDPOINT, else this user's default, which need not be there.

    Raises:
        WorkerUnavailableError: One that was named does not answer.
    """
    asked = endpoint or endpoint_from_environment() or default_of_this_user()
    try:
        rows = status_of(asked).get("saves") or ()
    except WorkerUnavailableError:
        if endpoint:
            raise
        return [], ""
    return [os.path.realpath(str(row["path"])) for row in rows if row.get("phase") not in ENDED], asked


def asked_whom(worker: str) -> str:
    """Say in words who was asked."""
    return f"the worker at {worker} was asked what is under way" if worker else "no worker answers here"

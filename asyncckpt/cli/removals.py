"""What `gc` and `prune` share: the worker is asked what is under way; with --delete, what is listed is removed."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import Any

from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, noted, print_rows, say
from asyncckpt.cli.worker import add_endpoint, status_of
from asyncckpt.errors import WorkerUnavailableError
from asyncckpt.protocol.save_phases import ENDED
from asyncckpt.quantities import human
from asyncckpt.recall.snapshots import endpoint_of


def add_removal(parser: argparse.ArgumentParser) -> None:
    """Add --delete and --endpoint."""
    parser.add_argument("--delete", action="store_true", help="remove it; without this nothing is changed")
    add_endpoint(parser)


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


def action_of(args: argparse.Namespace, *, stays: bool, failed: bool) -> str:
    """Return in a word what became of something that was found."""
    return "failed" if failed else "kept" if stays else "removed" if args.delete else "would go"


def print_removals(
    args: argparse.Namespace,
    facts: dict[str, Any],
    columns: Sequence[tuple[str, Sequence[Any]]],
    summary: str,
    nothing: str,
) -> int:
    """Print what was found, and return the exit code: 1 when something could not be removed.

    Args:
        args: Of the command.
        facts: What --json prints; `found` has a row for each, with `path`, `action`, `why`, `error` and `nbytes`.
        columns: Heading and cells of what the table has between action and path.
        summary: Printed below it.
        nothing: Printed instead where nothing was found.
    """
    rows = facts["found"]
    cells = [
        [row["action"], *between, noted(row["path"], row["error"] or row["why"] or _origin(row))]
        for row, *between in zip(rows, *(column for _, column in columns), strict=True)
    ]
    print_rows(args, facts, ("ACTION", *(heading for heading, _ in columns), "PATH"), cells, nothing)
    if rows and not args.json:
        worker = facts["worker"]
        asked = f"the worker at {worker} was asked what is under way" if worker else "no worker answers here"
        say(f"{asked}; {summary}")
        if would := sum(row["nbytes"] for row in rows if row["action"] == "would go"):
            say(f"nothing was changed: --delete removes {human(would)}")
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_OK


def _origin(row: dict[str, Any]) -> str:
    return "left behind by a rollback" if row.get("abandoned_branch") else ""

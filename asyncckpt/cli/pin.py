"""`asyncckpt pin`: checkpoints that retention must not remove."""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.cli.output import EXIT_OK, print_json, print_table, say
from asyncckpt.errors import AsyncCkptError, CheckpointNotFoundError, ConfigError
from asyncckpt.retention.pins import pin, pinned_in, unpin
from asyncckpt.staging.umask import current_umask
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.files import Files

HELP = "pin checkpoints, so that retention never removes them"
DESCRIPTION = (
    "Pin checkpoints: neither a CheckpointManager nor `asyncckpt prune` removes them, until --remove. A pin is a file "
    "in .pins beside the checkpoint, flushed when this command ends. It protects from retention, not from rm."
)
EXAMPLES = (
    "asyncckpt pin runs/a/step-300",
    "asyncckpt pin --remove runs/a/step-300",
    "asyncckpt pin --list runs/a",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument(
        "paths", metavar="PATH", nargs="+", help="checkpoints; with --list the directory that holds them"
    )
    parser.add_argument("--remove", action="store_true", help="take the pins off; the checkpoints need not be there")
    parser.add_argument("--list", action="store_true", help="print what is pinned in the directory PATH")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 4 when there is no such checkpoint or pin, 3 when it is not committed."""
    files = Files()
    if args.list and args.remove:
        raise ConfigError("--list and --remove: which of the two?", field="list")
    rows: list[dict[str, Any]] = []
    if args.list:
        rows = [row for path in args.paths for row in _listed(os.path.abspath(path), files)]
    for path in [] if args.list else map(os.path.abspath, args.paths):
        if args.remove and not unpin(path, files):
            raise CheckpointNotFoundError(f"{path} is not pinned", path=path)
        if not args.remove:
            pin(path, files, umask=current_umask())
        rows.append({"path": path, "pinned": not args.remove})
        if not args.json:
            say(f"{path}: {'not pinned any more' if args.remove else 'pinned'}")
    if args.json:
        print_json(rows)
    elif args.list and rows:
        print_table(("STEP", "PATH"), [["-" if r["step"] is None else str(r["step"]), r["path"]] for r in rows])
    elif args.list:
        say("nothing is pinned")
    return EXIT_OK


def _listed(root: str, files: Files) -> list[dict[str, Any]]:
    if not os.path.isdir(root):
        raise CheckpointNotFoundError(f"{root} is no directory", path=root)
    return [
        {"path": path, "pinned": True, "step": _step(path, files)}
        for path in (os.path.join(root, name) for name in sorted(pinned_in(root, files)))
    ]


def _step(path: str, files: Files) -> int | None:
    """None for a pin whose checkpoint is gone."""
    try:
        return read_manifest(path, files).step
    except (AsyncCkptError, OSError):
        return None

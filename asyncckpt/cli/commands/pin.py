"""Pin checkpoints, so that neither a CheckpointManager nor `asyncckpt prune` removes them. --remove unpins them.

A pin is a file in the directory .pins beside the checkpoint. It does not protect against rm.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.urls import is_object_url
from asyncckpt.cli.output import (
    EXIT_OK,
    add_storage_options,
    existing_directory,
    given_path,
    path_argument,
    print_json,
    print_rows,
    say,
)
from asyncckpt.errors import AsyncCkptError, CheckpointNotFoundError, ConfigError, UnsupportedPathError
from asyncckpt.maintenance.pins import pin, pinned_in, unpin
from asyncckpt.storage.catalog import read_manifest
from asyncckpt.storage.locate import store_at

EXAMPLES = (
    "asyncckpt pin runs/a/step-300",
    "asyncckpt pin --remove runs/a/step-300",
    "asyncckpt pin --list runs/a",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "paths",
        metavar="PATH",
        nargs="+",
        type=path_argument,
        help="checkpoints; with --list, directories that contain checkpoints",
    )
    parser.add_argument("--remove", action="store_true", help="unpin; the checkpoints need not exist")
    parser.add_argument("--list", action="store_true", help="list the pinned checkpoints in the directories PATH")
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 4 there is no such checkpoint or pin, 3 it is not committed."""
    if args.list and args.remove:
        raise ConfigError("--list and --remove cannot be used together", field="list")
    if args.list:
        return _list(args)
    paths = [given_path(path) for path in args.paths]
    for path in paths:
        if is_object_url(path):
            raise UnsupportedPathError(
                f"{path}: pins are made under locks, which object stores do not have; keep it by "
                "CheckpointManager(keep_period=), or copy it to a place that is never pruned",
                path=path,
            )
        store = store_at(path, umask=current_umask())
        if args.remove and not unpin(path, store):
            raise CheckpointNotFoundError(f"{path} is not pinned", path=path)
        if not args.remove:
            pin(path, store)
        if not args.json:
            say(f"{path}: {'unpinned' if args.remove else 'pinned'}")
    if args.json:
        print_json([{"path": path, "pinned": not args.remove} for path in paths])
    return EXIT_OK


def _list(args: argparse.Namespace) -> int:
    roots = [existing_directory(path)[0] for path in args.paths]
    paths = [os.path.join(root, name) for root in roots for name in sorted(pinned_in(root, store_at(root)))]
    rows: list[dict[str, Any]] = [{"path": path, "pinned": True, "step": _step(path)} for path in paths]
    print_rows(args, rows, ("STEP", "PATH"), [[row["step"], row["path"]] for row in rows], "nothing is pinned")
    return EXIT_OK


def _step(path: str) -> int | None:
    """Return the step of a pinned checkpoint; None if the checkpoint does not exist."""
    try:
        return read_manifest(path, store_at(path)).step
    except (AsyncCkptError, OSError):
        return None

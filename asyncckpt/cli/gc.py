"""`asyncckpt gc`: what saves that came to nothing left behind; says what would go, and removes it when asked to."""

from __future__ import annotations

import argparse
import os
import re
import time
from typing import Any

from asyncckpt import __version__
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, print_table, say
from asyncckpt.cli.under_way import asked_whom, busy_paths
from asyncckpt.conversion.leftovers import CONVERSIONS
from asyncckpt.doctor.leftovers import PROBES
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.sizes import human
from asyncckpt.staging.umask import current_umask
from asyncckpt.storage.collecting import Collected, collect
from asyncckpt.storage.files import Files
from asyncckpt.storage.garbage import Garbage, Rules, garbage_in
from asyncckpt.storage.temporaries import remove_temporary, temporaries_in

HELP = "list what unfinished saves left behind, and remove it with --delete"
DESCRIPTION = (
    "List what saves that were never committed, or were replaced, left below a directory; with --delete, remove it. A "
    "save that may be under way is left alone: one that the worker knows, or of which a file was changed within "
    "--older-than. A save that is removed can never be committed afterwards: a tombstone takes its manifest's place, "
    "which the next save to that path replaces. Only files whose names carry a save id go, and what `convert` and "
    "`doctor` left under their temporary names; committed checkpoints and foreign files stay."
)
EXAMPLES = (
    "asyncckpt gc runs/a",
    "asyncckpt gc runs/a --older-than 12h --delete",
)
DEFAULT_AGE = "24h"
"""Longer than any save takes, retries of the storage included. Chosen, not measured."""

_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_AGE = re.compile(r"([0-9]+(?:\.[0-9]+)?)([smhd]?)\Z")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("root", metavar="ROOT", help="directory that holds checkpoints, or a checkpoint itself")
    parser.add_argument("--delete", action="store_true", help="remove it; without this nothing is changed")
    parser.add_argument(
        "--older-than",
        type=_seconds,
        default=_seconds(DEFAULT_AGE),
        metavar="AGE",
        help=f"leave alone what was changed later: 90s, 30m, 12h, 2d (default: {DEFAULT_AGE})",
    )
    parser.add_argument("-r", "--recursive", action="store_true", help="look at any depth")
    parser.add_argument("--tombstones", action="store_true", help="also directories in which only a tombstone is left")
    parser.add_argument("--locks", action="store_true", help="also lock files and temporary names beside checkpoints")
    parser.add_argument(
        "--broken", action="store_true", help="also *.broken-N, which restore_latest(quarantine=True) put aside"
    )
    parser.add_argument(
        "--endpoint", help="of the worker that is asked (default: $ASYNCCKPT_ENDPOINT, else the user's)"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")


def _seconds(text: str) -> float:
    found = _AGE.match(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no age: 90s, 30m, 12h, 2d")
    return float(found[1]) * _UNITS[found[2] or "s"]


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 1 when something could not be removed, 4 when there is no such directory."""
    files, root = Files(), os.path.abspath(args.root)
    try:
        files.listdir(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointNotFoundError(f"{args.root} is no directory", path=root) from error
    busy, worker = busy_paths(args.endpoint)
    rules = Rules(
        now=time.time(),
        older_than_s=args.older_than,
        busy=busy,
        tombstones=args.tombstones,
        locks=args.locks,
        broken=args.broken,
    )
    rows = []
    for garbage in garbage_in(root, files, rules, recursive=args.recursive):
        done = None
        if args.delete and not garbage.kept:
            done = collect(garbage.path, files, rules, umask=current_umask(), package=__version__)
        rows.append(_row(garbage, done, deleted=args.delete))
    for garbage in temporaries_in(root, files, rules, (CONVERSIONS, PROBES), recursive=args.recursive):
        done = _removed(garbage, files) if args.delete and not garbage.kept else None
        rows.append(_row(garbage, done, deleted=args.delete))
    if args.json:
        print_json({"root": root, "worker": worker, "found": rows})
    else:
        _print(args, rows, worker)
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_OK


def _removed(garbage: Garbage, files: Files) -> Collected:
    try:
        return Collected(garbage=garbage, removed=tuple(remove_temporary(garbage, files)))
    except OSError as error:
        return Collected(garbage=garbage, error=error)


def _row(garbage: Garbage, done: Collected | None, *, deleted: bool) -> dict[str, Any]:
    found = done.garbage if done is not None else garbage
    if found.kept:
        action = "kept"
    elif deleted:
        action = "failed" if done is not None and done.error else "removed"
    else:
        action = "would go"
    return {
        "path": found.path,
        "kind": found.kind,
        "action": action,
        "why": found.kept,
        "save_ids": [str(save_id) for save_id in found.save_ids],
        "files": list(found.names),
        "nbytes": found.nbytes,
        "age_s": round(found.age_s, 1),
        "removed": list(done.removed) if done is not None else [],
        "error": str(done.error) if done is not None and done.error else None,
    }


def _print(args: argparse.Namespace, rows: list[dict[str, Any]], worker: str) -> None:
    if not rows:
        say(f"nothing to remove in {args.root}" + ("" if args.recursive else "; -r looks further down"))
        return
    print_table(
        ("ACTION", "KIND", "FILES", "SIZE", "AGE", "PATH"),
        [[r["action"], r["kind"], str(len(r["files"])), human(r["nbytes"]), _age(r["age_s"]), _where(r)] for r in rows],
    )
    would = sum(row["nbytes"] for row in rows if row["action"] == "would go")
    say(f"{asked_whom(worker)}; --older-than {args.older_than:g} s")
    if would:
        say(f"nothing was changed: --delete removes {human(would)}")


def _where(row: dict[str, Any]) -> str:
    reason = row["error"] or row["why"]
    return f"{row['path']} ({reason})" if reason else str(row["path"])


def _age(seconds: float) -> str:
    for unit, length in (("d", 86400.0), ("h", 3600.0), ("m", 60.0)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f}{unit}"
    return f"{seconds:.0f}s"

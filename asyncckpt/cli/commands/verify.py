"""Check all checksums and sizes of checkpoints, and that every element of every tensor is stored once. For each fault,
name the file, the tensor and the byte range.

With --newest, check the checkpoints in a directory, from the newest to the first without faults, which
asyncckpt.restore_latest would load.
"""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from asyncckpt.basics.quantities import count, human
from asyncckpt.cli.output import (
    EXIT_CORRUPT,
    EXIT_FAILED,
    EXIT_NOT_FOUND,
    EXIT_OK,
    add_storage_options,
    existing_directory,
    given_path,
    path_argument,
    print_json,
    say,
)
from asyncckpt.cli.progress import recorded_nbytes, show_reads
from asyncckpt.errors import AsyncCkptError, CheckpointNotFoundError, ConfigError
from asyncckpt.interop.sources.unread_leaves import unread_leaves
from asyncckpt.interop.sources.verify import verify_any
from asyncckpt.storage.catalog import UNREADABLE, UNSUPPORTED, candidates_in, is_broken
from asyncckpt.storage.contents import NATIVE, Contents
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import files_at
from asyncckpt.storage.reader import DEFAULT_THREADS
from asyncckpt.storage.verification import ABSENT, OK, Verdict, leftovers

EXAMPLES = (
    "asyncckpt verify runs/a/step-300",
    "asyncckpt verify --newest runs/a",
    "asyncckpt verify --fast runs/a/step-*",
)
MAX_SHOWN = 20
MAX_THREADS = 256
_CODES = {OK: EXIT_OK, ABSENT: EXIT_NOT_FOUND, UNSUPPORTED: EXIT_FAILED, UNREADABLE: EXIT_FAILED}
_WORST_FIRST = (EXIT_CORRUPT, EXIT_FAILED, EXIT_NOT_FOUND, EXIT_OK)


def configure(parser: argparse.ArgumentParser) -> None:
    text = "checkpoints of any format; with --newest, one directory that contains checkpoints"
    parser.add_argument("paths", metavar="PATH", nargs="+", type=path_argument, help=text)
    parser.add_argument(
        "--newest",
        action="store_true",
        help="PATH is a directory: check its checkpoints from the newest to the first without faults, which "
        "asyncckpt.restore_latest would load; exit code 3 if a newer one has faults",
    )
    parser.add_argument(
        "--fast", action="store_true", help="check manifest, indexes, file sizes and coverage, not the data"
    )
    parser.add_argument(
        "--threads",
        type=count(1, MAX_THREADS),
        default=DEFAULT_THREADS,
        help="reading threads (default: %(default)s)",
    )
    add_storage_options(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command.

    Returns:
        The worst code of all paths: 3 damaged or incomplete; then 1 unreadable, or of a newer version; then 4 not
        found.
    """
    codes: set[int] = set()
    rows = []
    used: str | None = None
    for path in _newest_first(args) if args.newest else map(given_path, args.paths):
        files = files_at(path)
        with show_reads(files, partial(recorded_nbytes, path, files), quiet=args.json or args.fast) as shown:
            verdict = verify_any(path, shown, fast=args.fast, threads=args.threads)
        rows.append(_row(verdict, files))
        codes.add(_CODES.get(verdict.state, EXIT_CORRUPT))
        if not args.json:
            _print(rows[-1], args.fast)
        if args.newest and not all(map(is_broken, verdict.faults)):
            break  # an error that is not the checkpoint's: restore_latest would raise it
        if args.newest and verdict.state == OK:
            used = verdict.path
            break
    if args.json:
        print_json({"used": used, "tried": rows} if args.newest else rows)
    elif args.newest:
        say(f"restore_latest would load {used}" if used else f"restore_latest would load none of {args.paths[0]}")
    return next(code for code in _WORST_FIRST if code in codes)


def _newest_first(args: argparse.Namespace) -> list[str]:
    """Return the checkpoints below the one directory, the newest first.

    Raises:
        ConfigError: Several directories.
        CheckpointNotFoundError: There are none.
    """
    if len(args.paths) > 1:
        raise ConfigError("--newest takes one directory", field="paths", value=len(args.paths))
    root, files = existing_directory(args.paths[0])
    found = [candidate.path for candidate in candidates_in(root, store_over(files))]
    if not found:
        raise CheckpointNotFoundError(f"no checkpoint has been committed in {args.paths[0]}", path=root)
    return found


def _row(verdict: Verdict, files: Files) -> dict[str, Any]:
    contents = verdict.contents
    return {
        "path": verdict.path,
        "kind": contents.kind if contents else None,
        "state": verdict.state,
        "step": contents.manifest.step if contents else None,
        "save_id": str(contents.manifest.save_id) if contents else None,
        "tensors": len(contents.tensors) if contents else None,
        "read_nbytes": verdict.read_nbytes,
        "reused_nbytes": contents.reused_nbytes if contents else None,
        "unchecked": verdict.unchecked,
        "unread": {fqn: found.described() for fqn, found in unread_leaves(contents).items()} if contents else {},
        "faults": [_fault(f) for f in verdict.faults],
        "other_files": _other_files(verdict.path, files, contents) if contents else [],
    }


def _other_files(path: str, files: Files, contents: Contents) -> list[str] | None:
    """Return names of files that are not part of the checkpoint; None if the directory cannot be listed."""
    try:
        return leftovers(path, files, contents)
    except OSError:
        return None


def _fault(fault: AsyncCkptError | OSError) -> dict[str, Any]:
    facts = {name: getattr(fault, name, None) for name in ("file", "fqn", "offset", "nbytes")}
    return {**facts, "message": str(fault)}


def _print(row: dict[str, Any], fast: bool) -> None:
    if row["state"] == OK:
        checked = f"{human(row['read_nbytes'])} checked"
        if row["kind"] == NATIVE:
            what, depth = f"step {row['step']}", "sizes and indexes checked" if fast else checked
        else:
            what, depth = row["kind"], row["unchecked"] or f"{checked} by CRC-32"
        reused = f", {human(row['reused_nbytes'])} in files of earlier saves" if row["reused_nbytes"] else ""
        say(f"{row['path']}: ok, {what}, {row['tensors']} tensors, {depth}{reused}")
        for fqn, described in row["unread"].items():
            say(f"  {fqn}: {described}")
        return
    say(f"{row['path']}: {row['state'].upper()}")
    for fault in row["faults"][:MAX_SHOWN]:
        say(f"  {fault['message']}")
    if len(row["faults"]) > MAX_SHOWN:
        say(f"  and {len(row['faults']) - MAX_SHOWN} more")

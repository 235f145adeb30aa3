"""List the files of saves that were never committed, or were replaced by another save, in a directory. With --delete,
remove them.

Saves that may be in progress are kept: those that the worker reports, and those of which a file was changed within
--older-than. A removed save can never be committed: a tombstone file replaces its manifest until the next save to that
path. Only files with a save ID in their names are removed, and temporary files that a killed `convert` or `doctor` has
left. In S3, incomplete multipart uploads of such files are aborted too, if boto3 is installed. Committed checkpoints
and all other files are kept.
"""

from __future__ import annotations

import argparse
import time
from typing import Any

from asyncckpt import __version__
from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.quantities import human, human_s, parse_seconds
from asyncckpt.basics.urls import is_object_url
from asyncckpt.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    action_of,
    add_delete,
    add_root,
    existing_directory,
    nothing_found,
    print_removals,
    say,
)
from asyncckpt.cli.worker_requests import add_endpoint, busy_paths
from asyncckpt.doctor.directory import PROBES
from asyncckpt.errors import CheckpointNotFoundError
from asyncckpt.interop.publish import CONVERSIONS
from asyncckpt.maintenance.gc import (
    CollectionResult,
    Garbage,
    GarbageRules,
    collect,
    garbage_in,
    remove_temporary,
    temporaries_in,
)
from asyncckpt.maintenance.uploads import uploads_in
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import files_at
from asyncckpt.storage.store import IncompleteUpload, Store, UnsupportedByStoreError

EXAMPLES = (
    "asyncckpt gc runs/a",
    "asyncckpt gc runs/a --older-than 12h --delete",
)
DEFAULT_AGE = "24h"
"""Longer than any save, including retries of the storage. Chosen, not measured."""


def configure(parser: argparse.ArgumentParser) -> None:
    add_root(parser)
    add_delete(parser)
    add_endpoint(parser)
    parser.add_argument(
        "--older-than",
        type=parse_seconds,
        default=parse_seconds(DEFAULT_AGE),
        metavar="AGE",
        help=f"keep saves of which a file was changed within AGE: 90s, 30m, 12h, 2d (default: {DEFAULT_AGE})",
    )
    parser.add_argument(
        "--tombstones", action="store_true", help="also remove directories that contain only a tombstone"
    )
    parser.add_argument(
        "--locks", action="store_true", help="also remove lock files and temporary files beside checkpoints"
    )
    parser.add_argument(
        "--broken",
        action="store_true",
        help="also remove *.broken-N, damaged checkpoints that restore_latest(quarantine=True) has renamed",
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 1 something could not be listed or removed, 4 there is no such directory."""
    not_found: CheckpointNotFoundError | None = None
    try:
        root, files = existing_directory(args.root)
    except CheckpointNotFoundError as error:
        if error.path is None or not is_object_url(error.path):
            raise
        root, files, not_found = error.path, files_at(error.path), error  # an incomplete upload creates no object
    busy, worker = busy_paths(args)
    rules = GarbageRules(
        now=time.time(),
        older_than_s=args.older_than,
        busy=busy,
        tombstones=args.tombstones,
        locks=args.locks,
        broken=args.broken,
    )
    store = store_over(files, umask=current_umask())
    rows = [] if not_found else _remove_files(args, root, store, rules)
    not_listed: OSError | None = None
    try:
        for garbage, upload in uploads_in(root, store, rules, recursive=args.recursive):
            done = _aborted(garbage, upload, store) if args.delete and not garbage.kept else None
            rows.append(_row(args, garbage, done))
    except OSError as error:
        not_listed = error
    has_failed = not_listed is not None and not isinstance(not_listed, UnsupportedByStoreError)
    if not_found and not rows:
        raise not_listed if not_listed is not None and has_failed else not_found
    why = None if not_listed is None else str(not_listed.strerror)
    code = print_removals(
        args,
        {"root": root, "worker": worker, "found": rows, "uploads_error": why},
        [
            ("KIND", [row["kind"] for row in rows]),
            ("FILES", [len(row["files"]) for row in rows]),
            ("SIZE", [human(row["nbytes"]) for row in rows]),
            ("AGE", [human_s(row["age_s"]) for row in rows]),
        ],
        f"saves changed within {args.older_than:g} s (--older-than) are kept",
        nothing_found(args, "nothing to remove"),
    )
    if why and not args.json:
        say(f"incomplete uploads are not listed: {why}")
    return code or (EXIT_FAILED if has_failed else EXIT_OK)


def _remove_files(args: argparse.Namespace, root: str, store: Store, rules: GarbageRules) -> list[dict[str, Any]]:
    """Remove the files that are garbage, if the arguments say so, and return the rows of all of them."""
    rows = []
    for garbage in garbage_in(root, store, rules, recursive=args.recursive):
        done = None
        if args.delete and not garbage.kept:
            done = collect(garbage.path, store, rules, package=__version__)
        rows.append(_row(args, garbage, done))
    for garbage in temporaries_in(root, store, rules, (CONVERSIONS, PROBES), recursive=args.recursive):
        done = _removed(garbage, store) if args.delete and not garbage.kept else None
        rows.append(_row(args, garbage, done))
    return rows


def _removed(garbage: Garbage, store: Store) -> CollectionResult:
    try:
        return CollectionResult(garbage=garbage, removed=tuple(remove_temporary(garbage, store)))
    except OSError as error:
        return CollectionResult(garbage=garbage, error=error)


def _aborted(garbage: Garbage, upload: IncompleteUpload, store: Store) -> CollectionResult:
    try:
        store.abort_upload(upload)
    except OSError as error:
        return CollectionResult(garbage=garbage, error=error)
    return CollectionResult(garbage=garbage, removed=garbage.names)


def _row(args: argparse.Namespace, garbage: Garbage, done: CollectionResult | None) -> dict[str, Any]:
    found = done.garbage if done is not None else garbage
    error = done.error if done is not None else None
    return {
        "path": found.path,
        "kind": found.kind,
        "action": action_of(args, stays=bool(found.kept), failed=error is not None),
        "why": found.kept,
        "save_ids": [str(save_id) for save_id in found.save_ids],
        "files": list(found.names),
        "nbytes": found.nbytes,
        "age_s": round(found.age_s, 1),
        "removed": list(done.removed) if done is not None else [],
        "error": str(error) if error else None,
    }

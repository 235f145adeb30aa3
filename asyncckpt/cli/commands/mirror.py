"""Copy the committed checkpoints in ROOT that are still to be copied to their mirrors, the oldest first.

A checkpoint that was saved with mirror=PLACE is copied there by the worker. This command does the same in the
foreground, for what a worker has left when it ended. Copies that were cut off go on where they stopped. Without --copy,
the checkpoints are only listed.
"""

from __future__ import annotations

import argparse
from typing import Any

from asyncckpt.basics.paths import current_umask
from asyncckpt.basics.quantities import human
from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, existing_directory, path_argument, print_rows, say
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.local import store_over
from asyncckpt.storage.locate import store_at
from asyncckpt.storage.mirroring import Unmirrored, copy_to_mirror, umask_of, unmirrored_in
from asyncckpt.storage.store import Store

EXAMPLES = (
    "asyncckpt mirror runs/a",
    "asyncckpt mirror runs/a --copy",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("root", metavar="ROOT", type=path_argument, help="directory that contains checkpoints")
    parser.add_argument("--copy", action="store_true", help="copy what is listed; without it nothing is changed")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 1 a copy failed, 4 there is no such directory."""
    root, files = existing_directory(args.root)
    store = store_over(files, umask=current_umask())
    found = unmirrored_in(root, store)
    rows: list[dict[str, Any]] = []
    failed = False
    for one in found:
        row = {"step": one.step, "nbytes": one.nbytes, "path": one.path, "mirror": one.mirror, "is_copied": False}
        if args.copy:
            row |= _copied(one, store)
            failed = failed or "error" in row
        rows.append(row)
    cells = [[row["step"], human(row["nbytes"]), row["path"], row["mirror"], _state(row)] for row in rows]
    print_rows(args, rows, ("STEP", "SIZE", "PATH", "MIRROR", "STATE"), cells, "everything is in its mirror")
    if rows and not args.copy and not args.json:
        say("copy them with --copy, or let the worker of the next training do it")
    return EXIT_FAILED if failed else EXIT_OK


def _state(row: dict[str, Any]) -> str:
    return str(row.get("error") or ("copied" if row["is_copied"] else "not copied yet"))


def _copied(one: Unmirrored, store: Store) -> dict[str, Any]:
    files = store.as_files()
    try:
        target = store_at(one.mirror, umask=umask_of(one.path, files))
        report = copy_to_mirror(one.path, one.save_id, one.mirror, source=store, target=target)
    except (AsyncCkptError, OSError) as error:
        return {"error": str(error)}
    return {"is_copied": True, "copied_nbytes": report.copied_nbytes}

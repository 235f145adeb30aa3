"""Show the disk usage of the checkpoints in a directory, the largest first: the size of their files, and the disk space
that they occupy. The disk space is larger if space was reserved, and smaller if files have holes or share blocks.
Unfinished saves are included; `asyncckpt gc` removes them.
"""

from __future__ import annotations

import argparse
import os
import stat
from collections import Counter
from typing import Any

from asyncckpt.basics.quantities import human
from asyncckpt.cli.output import EXIT_OK, add_root, existing_directory, nothing_found, print_rows, say
from asyncckpt.storage.catalog import COMMITTED, Found, scan
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over

EXAMPLES = ("asyncckpt du runs/a", "asyncckpt du -r runs --json")


def configure(parser: argparse.ArgumentParser) -> None:
    add_root(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 4 if there is no such directory."""
    root, files = existing_directory(args.root)
    rows = [_row(found, files) for found in scan(root, store_over(files), recursive=args.recursive)]
    rows.sort(key=lambda row: (-row["allocated_nbytes"], row["path"]))
    totals = {state: Counter[str]() for state in sorted({row["state"] for row in rows})}
    for row in rows:
        counts = {name: row[name] for name in ("files", "nbytes", "allocated_nbytes")}
        totals[row["state"]].update(counts, checkpoints=1)
    facts = {"root": root, "checkpoints": rows, "totals": totals}
    header = ("STATE", "STEP", "FILES", "SIZE", "ON DISK", "PATH")
    print_rows(args, facts, header, [_cells(row) for row in rows], nothing_found(args, "no checkpoints"))
    for state, total in totals.items() if not args.json else ():
        hint = "" if state == COMMITTED else "; asyncckpt gc can remove unfinished saves"
        say(f"{state}: {total['checkpoints']}, {human(total['allocated_nbytes'])} on disk{hint}")
    return EXIT_OK


def _cells(row: dict[str, Any]) -> list[Any]:
    return [row["state"], row["step"], row["files"], human(row["nbytes"]), human(row["allocated_nbytes"]), row["path"]]


def _row(found: Found, files: Files) -> dict[str, Any]:
    seen: list[os.stat_result] = []
    unreadable = 0
    try:
        names = files.listdir(found.path)
    except OSError:
        names, unreadable = [], 1
    for name in names:
        try:
            seen.append(files.lstat(os.path.join(found.path, name)))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            unreadable += 1
    regular = [one for one in seen if stat.S_ISREG(one.st_mode)]
    return {
        "path": found.path,
        "state": found.state,
        "step": found.manifest.step if found.manifest else None,
        "files": len(regular),
        "nbytes": sum(one.st_size for one in regular),
        "allocated_nbytes": sum(one.st_blocks * 512 for one in regular),
        "unreadable": unreadable,
    }

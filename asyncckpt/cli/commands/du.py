"""Show the disk usage of the checkpoints in a directory, the largest first: the size of their files, and the disk space
that they occupy. The disk space is larger if space was reserved, and smaller if files have holes or share blocks.
SHARED is the disk space of files that other checkpoints have too (`reuse="auto"`), so that removing this one alone does
not free it; the totals count it once. Unfinished saves are included; `asyncckpt gc` removes them.
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
    counted: set[tuple[int, int]] = set()
    rows = [_row(found, files, counted) for found in scan(root, store_over(files), recursive=args.recursive)]
    rows.sort(key=lambda row: (-row["allocated_nbytes"], row["path"]))
    totals = {state: Counter[str]() for state in sorted({row["state"] for row in rows})}
    for row in rows:
        counts = {name: row[name] for name in ("files", "nbytes", "shared_nbytes")}
        totals[row["state"]].update(counts, allocated_nbytes=row.pop("first_nbytes"), checkpoints=1)
    facts = {"root": root, "checkpoints": rows, "totals": totals}
    header = ("STATE", "STEP", "FILES", "SIZE", "ON DISK", "SHARED", "PATH")
    print_rows(args, facts, header, [_cells(row) for row in rows], nothing_found(args, "no checkpoints"))
    for state, total in totals.items() if not args.json else ():
        hint = "" if state == COMMITTED else "; asyncckpt gc can remove unfinished saves"
        say(f"{state}: {total['checkpoints']}, {human(total['allocated_nbytes'])} on disk{hint}")
    return EXIT_OK


def _cells(row: dict[str, Any]) -> list[Any]:
    sizes = [human(row[name]) for name in ("nbytes", "allocated_nbytes", "shared_nbytes")]
    return [row["state"], row["step"], row["files"], *sizes, row["path"]]


def _row(found: Found, files: Files, counted: set[tuple[int, int]]) -> dict[str, Any]:
    """Describe a checkpoint.

    Args:
        found: The checkpoint.
        files: The `Files` to read with.
        counted: Device and inode of the files of several names that other rows have; those of this one are added. Its
            `first_nbytes` is the disk space without them.
    """
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
    shared = {(one.st_dev, one.st_ino): one.st_blocks * 512 for one in regular if one.st_nlink > 1}
    allocated = sum(one.st_blocks * 512 for one in regular)
    elsewhere = sum(nbytes for key, nbytes in shared.items() if key in counted)
    counted.update(shared)
    return {
        "path": found.path,
        "state": found.state,
        "step": found.manifest.step if found.manifest else None,
        "files": len(regular),
        "nbytes": sum(one.st_size for one in regular),
        "allocated_nbytes": allocated,
        "shared_nbytes": sum(shared.values()),
        "first_nbytes": allocated - elsewhere,
        "unreadable": unreadable,
    }

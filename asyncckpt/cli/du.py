"""`asyncckpt du`: what checkpoints, and what is left of others, take on disk."""

from __future__ import annotations

import argparse
import os
import stat
from collections import Counter
from typing import Any

from asyncckpt.cli.output import EXIT_OK, print_json, print_table, say
from asyncckpt.cli.roots import configure_root, existing_root, no_checkpoints
from asyncckpt.format.steps import lineage_key
from asyncckpt.sizes import human
from asyncckpt.storage.catalog import COMMITTED, Found, scan
from asyncckpt.storage.files import Files

HELP = "show what checkpoints take on disk"
DESCRIPTION = (
    "Show what the checkpoints below a directory take: their length, and what they occupy on disk, which is more where "
    "room was reserved and less where files have holes or are shared. What was never committed is there too: `gc` "
    "removes it. The largest comes first."
)
EXAMPLES = ("asyncckpt du runs/a", "asyncckpt du -r runs --json")


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    configure_root(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 4 when there is no such directory."""
    files = Files()
    root = existing_root(args.root, files)
    rows = [_row(found, files) for found in sorted(scan(root, files, recursive=args.recursive), key=_order)]
    rows.sort(key=lambda row: -row["allocated_nbytes"])
    totals = {state: Counter[str]() for state in sorted({row["state"] for row in rows})}
    for row in rows:
        totals[row["state"]].update(
            {name: row[name] for name in ("files", "nbytes", "allocated_nbytes")}, checkpoints=1
        )
    if args.json:
        print_json({"root": root, "checkpoints": rows, "totals": totals})
        return EXIT_OK
    if not rows:
        say(no_checkpoints(args.root, recursive=args.recursive))
        return EXIT_OK
    print_table(
        ("STATE", "STEP", "FILES", "SIZE", "ON DISK", "PATH"),
        [
            [r["state"], _text(r["step"]), str(r["files"]), human(r["nbytes"]), human(r["allocated_nbytes"]), r["path"]]
            for r in rows
        ],
    )
    for state, total in totals.items():
        hint = "" if state == COMMITTED else "; asyncckpt gc looks at it"
        say(f"{state}: {total['checkpoints']}, {human(total['allocated_nbytes'])} on disk{hint}")
    return EXIT_OK


def _order(found: Found) -> tuple[bool, Any, str]:
    return found.manifest is None, lineage_key(found.manifest.save_id) if found.manifest else (), found.path


def _row(found: Found, files: Files) -> dict[str, Any]:
    row: dict[str, Any] = {
        "path": found.path,
        "state": found.state,
        "step": found.manifest.step if found.manifest else None,
        "files": 0,
        "nbytes": 0,
        "allocated_nbytes": 0,
        "unreadable": 0,
    }
    try:
        names = files.listdir(found.path)
    except OSError:
        names, row["unreadable"] = [], 1
    for name in names:
        try:
            seen = files.lstat(os.path.join(found.path, name))
        except FileNotFoundError:  # removed meanwhile
            continue
        except OSError:
            row["unreadable"] += 1
            continue
        if stat.S_ISREG(seen.st_mode):
            row["files"] += 1
            row["nbytes"] += seen.st_size
            row["allocated_nbytes"] += seen.st_blocks * 512
    return row


def _text(value: Any) -> str:
    return "-" if value is None else str(value)

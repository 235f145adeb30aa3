"""`asyncckpt ls`: the checkpoints below a directory, committed or not; then those of other libraries.

Directory by directory; in each the committed ones, oldest first by lineage, then what is none.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.cli.output import EXIT_OK, print_json, print_table, say
from asyncckpt.cli.roots import configure_root, existing_root, no_checkpoints
from asyncckpt.errors import AsyncCkptError
from asyncckpt.foreign.kinds import OURS, kind_at
from asyncckpt.format.steps import lineage_key
from asyncckpt.retention.pins import is_pinned
from asyncckpt.sizes import human
from asyncckpt.storage.catalog import Found, scan
from asyncckpt.storage.files import Files

HELP = "list the checkpoints below a directory, committed or not"
DESCRIPTION = (
    "List the checkpoints below a directory. The newest comes last: by run and save, not by step, so that after going "
    "back to an earlier step the new branch is the newest. What was never committed, was given up (abandoned), put "
    "aside (quarantined) or is damaged follows. With -r directory by directory, each in this order."
)
EXAMPLES = (
    "asyncckpt ls runs/a",
    "asyncckpt ls -r runs --json",
)
FOREIGN = "foreign"
_ANY_DEPTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    configure_root(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 4 when there is no such directory, 1 when it cannot be read."""
    files = Files()
    root = existing_root(args.root, files)
    found = sorted(scan(root, files, recursive=args.recursive), key=_order)
    rows = [_row(f) for f in found]
    others = _others(root, {f.path for f in found}, files, depth=_ANY_DEPTH if args.recursive else 1)
    rows += [
        {**dict.fromkeys(_row(Found(path=path, state=FOREIGN))), "path": path, "state": FOREIGN, "kind": kind}
        for path, kind in others
    ]
    if args.json:
        print_json(rows)
    elif not rows:
        say(no_checkpoints(args.root, recursive=args.recursive))
    else:
        print_table(
            ("STATE", "STEP", "SIZE", "RANKS", "CREATED", "PATH"),
            [[_state(r), _text(r["step"]), _size(r), _text(r["ranks"]), _text(r["created"]), _where(r)] for r in rows],
        )
    return EXIT_OK


def _others(root: str, ours: set[str], files: Files, *, depth: int) -> list[tuple[str, str]]:
    """Return (path, kind) of the checkpoints of other libraries that are directories; nothing inside of any."""
    if root in ours:
        return []
    try:
        kind = kind_at(root, files)
        names = files.listdir(root) if kind == OURS and depth else []
    except (AsyncCkptError, OSError):  # removed meanwhile, or not for us
        return []
    if kind != OURS:
        return [(root, kind)]
    found = []
    for child in (os.path.join(root, name) for name in sorted(names)):
        if os.path.isdir(child) and not os.path.islink(child):
            found += _others(child, ours, files, depth=depth - 1)
    return found


def _state(row: dict[str, Any]) -> str:
    return f"{FOREIGN}: {row['kind']}" if row["state"] == FOREIGN else str(row["state"])


def _order(found: Found) -> tuple[str, int, Any, str]:
    parent = os.path.dirname(found.path)
    if found.manifest is None:
        return parent, 1, (), found.path
    return parent, 0, lineage_key(found.manifest.save_id), found.path


def _row(found: Found) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "path": found.path,
        "state": found.state,
        "kind": OURS,
        "step": manifest.step if manifest else None,
        "save_id": str(manifest.save_id) if manifest else None,
        "nbytes": manifest.nbytes if manifest else None,
        "ranks": manifest.world_size if manifest else None,
        "created": manifest.created if manifest else None,
        "fsync": manifest.fsync if manifest else None,
        "metadata": dict(manifest.metadata) if manifest else None,
        "error": str(found.error) if found.error else None,
        "pinned": manifest is not None and _is_pinned(found.path),
    }


def _is_pinned(path: str) -> bool:
    try:
        return is_pinned(path, Files())
    except OSError:  # not for us to see
        return False


def _where(row: dict[str, Any]) -> str:
    return f"{row['path']} (pinned)" if row["pinned"] else str(row["path"])


def _text(value: Any) -> str:
    return "-" if value is None else str(value)


def _size(row: dict[str, Any]) -> str:
    return "-" if row["nbytes"] is None else human(row["nbytes"])

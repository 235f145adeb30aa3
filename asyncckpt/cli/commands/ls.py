"""List the checkpoints in a directory, committed ones first, the newest last.

The order is that of the saves, not of the steps: after a rollback to an earlier step, the checkpoints of the new branch
are the newest. Then follow unfinished saves, saves that were given up (abandoned), damaged checkpoints that
restore_latest has renamed (quarantined), and other damaged ones. With -r, each directory is listed in this order.
Symbolic links in the directory to checkpoints elsewhere are listed too, as restores take them.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.basics.quantities import human
from asyncckpt.cli.output import EXIT_OK, add_root, existing_directory, nothing_found, print_rows, with_note
from asyncckpt.errors import AsyncCkptError
from asyncckpt.interop.sources.detect import kind_at
from asyncckpt.storage.catalog import Found, scan
from asyncckpt.storage.checkpoint_dir import is_pinned
from asyncckpt.storage.contents import NATIVE
from asyncckpt.storage.files import Files
from asyncckpt.storage.local import store_over

EXAMPLES = (
    "asyncckpt ls runs/a",
    "asyncckpt ls -r runs --json",
)
FOREIGN = "foreign"
_ANY_DEPTH = 100


def configure(parser: argparse.ArgumentParser) -> None:
    add_root(parser)


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 4 there is no such directory, 1 it cannot be read."""
    root, files = existing_directory(args.root)
    found = sorted(scan(root, store_over(files), recursive=args.recursive, links=True), key=_order)
    others = _others(root, {f.path for f in found}, files, depth=_ANY_DEPTH if args.recursive else 1)
    rows = [_row(f, NATIVE, files) for f in found]
    rows += [_row(Found(path=path, state=FOREIGN), kind, files) for path, kind in others]
    header = ("STATE", "STEP", "SIZE", "RANKS", "CREATED", "PATH")
    print_rows(args, rows, header, [_cells(row) for row in rows], nothing_found(args, "no checkpoints"))
    return EXIT_OK


def _others(root: str, ours: set[str], files: Files, *, depth: int) -> list[tuple[str, str]]:
    """Return (path, kind) of directories that are checkpoints of other libraries. Does not search inside of them."""
    if root in ours:
        return []
    try:
        kind = kind_at(root, files)
        names = files.listdir(root) if kind == NATIVE and depth else []
    except (AsyncCkptError, OSError):  # removed meanwhile, or no permission
        return []
    if kind != NATIVE:
        return [(root, kind)]
    children = [os.path.join(root, name) for name in sorted(names)]
    directories = [child for child in children if os.path.isdir(child) and not os.path.islink(child)]
    return [other for child in directories for other in _others(child, ours, files, depth=depth - 1)]


def _order(found: Found) -> tuple[str, bool, str, str]:
    lineage = found.manifest.save_id if found.manifest else ""
    return os.path.dirname(found.path), found.manifest is None, lineage, found.path


def _row(found: Found, kind: str, files: Files) -> dict[str, Any]:
    manifest = found.manifest
    return {
        "path": found.path,
        "state": found.state,
        "kind": kind,
        "step": manifest.step if manifest else None,
        "save_id": str(manifest.save_id) if manifest else None,
        "nbytes": manifest.nbytes if manifest else None,
        "ranks": manifest.world_size if manifest else None,
        "created": manifest.created if manifest else None,
        "fsync": manifest.fsync if manifest else None,
        "metadata": dict(manifest.metadata) if manifest else None,
        "error": str(found.error) if found.error else None,
        "pinned": manifest is not None and _is_pinned(found.path, files),
    }


def _is_pinned(path: str, files: Files) -> bool:
    try:
        return is_pinned(path, store_over(files))
    except OSError:  # no permission
        return False


def _cells(row: dict[str, Any]) -> list[Any]:
    state = f"{FOREIGN}: {row['kind']}" if row["state"] == FOREIGN else row["state"]
    size = None if row["nbytes"] is None else human(row["nbytes"])
    return [state, row["step"], size, row["ranks"], row["created"], with_note(row["path"], row["pinned"] and "pinned")]

"""`asyncckpt verify`: every checksum, every size, coverage; names file, tensor and byte range."""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.cli.output import EXIT_CORRUPT, EXIT_NOT_FOUND, EXIT_OK, human, print_json
from asyncckpt.errors import AsyncCkptError
from asyncckpt.storage.block_reader import DEFAULT_THREADS
from asyncckpt.storage.files import Files
from asyncckpt.storage.verification import Verdict, leftovers, verify_checkpoint

HELP = "check every checksum, size and shape of checkpoints; names what is damaged"
EXAMPLE = "asyncckpt verify runs/a/step-300"
MAX_SHOWN = 20


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("paths", metavar="PATH", nargs="+", help="checkpoint directories")
    parser.add_argument("--fast", action="store_true", help="skip the data: manifest, indexes, sizes, coverage only")
    parser.add_argument("--threads", type=int, default=DEFAULT_THREADS, help="threads that read (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 3 when any is damaged or incomplete, 4 when one is not there."""
    files, code, rows = Files(), EXIT_OK, []
    for path in args.paths:
        verdict = verify_checkpoint(os.path.abspath(path), files, fast=args.fast, threads=max(1, args.threads))
        rows.append(_row(verdict, files))
        if not args.json:
            _print(rows[-1], args.fast)
        if verdict.faults:
            code = max(code, EXIT_NOT_FOUND) if verdict.is_absent else EXIT_CORRUPT if code == EXIT_OK else code
    if args.json:
        print_json(rows)
    return code


def _row(verdict: Verdict, files: Files) -> dict[str, Any]:
    sound = verdict.contents
    state = "ok" if not verdict.faults else "absent" if verdict.is_absent else "corrupt"
    return {
        "path": verdict.path,
        "state": "incomplete" if verdict.is_uncommitted else state,
        "step": sound.manifest.step if sound else None,
        "save_id": str(sound.manifest.save_id) if sound else None,
        "tensors": len(sound.tensors) if sound else None,
        "read_nbytes": verdict.read_nbytes,
        "faults": [_fault(f) for f in verdict.faults],
        "other_files": leftovers(verdict.path, files, sound) if sound else [],
    }


def _fault(fault: AsyncCkptError | OSError) -> dict[str, Any]:
    facts = {name: getattr(fault, name, None) for name in ("file", "fqn", "offset", "nbytes")}
    return {**facts, "message": str(fault)}


def _print(row: dict[str, Any], fast: bool) -> None:
    if row["state"] == "ok":
        depth = "sizes and indexes" if fast else f"{human(row['read_nbytes'])} compared"
        print(f"{row['path']}: ok, step {row['step']}, {row['tensors']} tensors, {depth}")
        return
    print(f"{row['path']}: {row['state'].upper()}")
    for fault in row["faults"][:MAX_SHOWN]:
        print(f"  {fault['message']}")
    if len(row["faults"]) > MAX_SHOWN:
        print(f"  and {len(row['faults']) - MAX_SHOWN} more")

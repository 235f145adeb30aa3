"""`asyncckpt diff`: what differs between two checkpoints of any kinds: leaves, types, shapes, values."""

from __future__ import annotations

import argparse
import os
from typing import Any

from asyncckpt.cli.output import EXIT_FAILED, EXIT_OK, print_json, print_table, say
from asyncckpt.cli.progress import expect, reading, said_nbytes
from asyncckpt.storage.files import Files

HELP = "compare two checkpoints: structure, every tensor, every object; exit code 1 when they differ"
EXAMPLES = (
    "asyncckpt diff runs/a/step-300 runs/b/step-300",
    "asyncckpt diff a b --keys model.layers.0 --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("first", metavar="A", help="a checkpoint of any kind")
    parser.add_argument("second", metavar="B", help="another one")
    parser.add_argument("--keys", metavar="FQN", nargs="+", help="only these names, or what is below them")
    parser.add_argument("--fast", action="store_true", help="names, dtypes, shapes and objects; skip the tensors' data")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(args: argparse.Namespace) -> int:
    """Run the command; exit code 0 when nothing differs, 1 when something does, 3 and 4 as `inspect`."""
    from asyncckpt.conversion.comparison import compare

    first, second = os.path.abspath(args.first), os.path.abspath(args.second)
    with reading(Files(), quiet=args.json or args.fast) as files:
        expect(files, lambda: 0 if args.keys else _both(first, second, files))
        found = compare(first, second, keys=args.keys, data=not args.fast, files=files)
    rows: list[dict[str, Any]] = [row.described() for row in found.differences]
    if args.json:
        print_json({"equal": not rows, "leaves": found.leaves, "differences": rows, "unread": found.unread})
    elif not rows:
        say(f"equal: {found.leaves} leaves" + (", data not compared" if args.fast else ""))
    else:
        say(f"{len(rows)} of {found.leaves} leaves differ")
        print_table(
            ("FQN", "WHAT", "A", "B", "MAX ABS DIFFERENCE"),
            [[r["fqn"], r["what"], r["a"] or "-", r["b"] or "-", _number(r["max_abs_difference"])] for r in rows],
        )
    if found.unread and not args.json:
        say(f"{len(found.unread)} leaves were read on neither side: of them the class alone was compared")
        print_table(("FQN", "CLASS"), [[fqn, kind] for fqn, kind in found.unread.items()])
    return EXIT_FAILED if rows else EXIT_OK


def _both(first: str, second: str, files: Files) -> int:
    """Return how much they hold together; 0 where one does not say it."""
    sizes = [said_nbytes(path, files) for path in (first, second)]
    return sum(sizes) if all(sizes) else 0


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.6g}"

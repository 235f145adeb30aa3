"""Compare two checkpoints, also of different formats: structure, all tensors, all objects. The exit code is 1 if they
differ.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

from asyncckpt.basics.urls import is_object_url, location_of
from asyncckpt.cli.output import (
    EXIT_FAILED,
    EXIT_OK,
    add_keys,
    add_storage_options,
    given_path,
    path_argument,
    print_rows,
    print_table,
    say,
)
from asyncckpt.cli.progress import recorded_nbytes, show_reads
from asyncckpt.errors import UnsupportedPathError
from asyncckpt.storage.files import Files
from asyncckpt.storage.locate import files_at

EXAMPLES = (
    "asyncckpt diff runs/a/step-300 runs/b/step-300",
    "asyncckpt diff a b --keys model.layers.0 --json",
)


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", metavar="A", type=path_argument, help="a checkpoint of any format")
    parser.add_argument("second", metavar="B", type=path_argument, help="the checkpoint to compare with")
    add_keys(parser)
    add_storage_options(parser)
    parser.add_argument(
        "--fast", action="store_true", help="compare names, dtypes, shapes and objects, not the tensors' data"
    )


def run(args: argparse.Namespace) -> int:
    """Run the command; exit codes: 0 equal, 1 different, 3 damaged or incomplete, 4 not found."""
    from asyncckpt.interop.diff import compare

    first, second = given_path(args.first), given_path(args.second)
    with show_reads(
        _files_of_both(first, second),
        lambda: 0 if args.keys else _total_nbytes(first, second),
        quiet=args.json or args.fast,
    ) as files:
        found = compare(first, second, keys=args.keys, data=not args.fast, files=files)
    rows: list[dict[str, Any]] = [asdict(row) for row in found.differences]
    if rows and not args.json:
        say(f"{len(rows)} of {found.leaves} leaves differ")
    print_rows(
        args,
        {"equal": not rows, "leaves": found.leaves, "differences": rows, "unread": found.unread},
        ("FQN", "WHAT", "A", "B", "MAX ABS DIFFERENCE"),
        [[r["fqn"], r["what"], r["a"] or None, r["b"] or None, _number(r["max_abs_difference"])] for r in rows],
        f"equal: {found.leaves} leaves" + (", data not compared" if args.fast else ""),
    )
    if found.unread and not args.json:
        say(f"{len(found.unread)} leaves cannot be read on either side; only their classes were compared")
        print_table(("FQN", "CLASS"), [[fqn, kind] for fqn, kind in found.unread.items()])
    return EXIT_FAILED if rows else EXIT_OK


def _files_of_both(first: str, second: str) -> Files:
    if any(map(is_object_url, (first, second))) and location_of(first).root != location_of(second).root:
        raise UnsupportedPathError(
            f"{first} and {second} lie in different storages: copy one of them to where the other is, with the store's "
            "own tools",
            path=second,
        )
    return files_at(first)


def _total_nbytes(first: str, second: str) -> int:
    """Return the total size of both; 0 if one is not known."""
    sizes = [recorded_nbytes(path, files_at(path)) for path in (first, second)]
    return sum(sizes) if all(sizes) else 0


def _number(value: float | None) -> str | None:
    return None if value is None else f"{value:.6g}"

"""Shared by the commands: exit codes, arguments, tables and JSON; the table of `gc` and `prune`."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TextIO

from asyncckpt.basics.paths import checkpoint_path, is_url
from asyncckpt.basics.quantities import human
from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    WorkerUnavailableError,
)
from asyncckpt.storage.files import Files
from asyncckpt.storage.locate import files_at

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_NOT_FOUND = 4
EXIT_UNREACHABLE = 5
EXIT_SIGNAL = 128
"""Added to the signal's number, as in POSIX shells."""

_CODES: dict[type[BaseException], int] = {
    CheckpointNotCommittedError: EXIT_CORRUPT,
    CorruptCheckpointError: EXIT_CORRUPT,
    WorkerUnavailableError: EXIT_UNREACHABLE,
    ConfigError: EXIT_USAGE,
    UnsupportedFormatError: EXIT_FAILED,
    CheckpointNotFoundError: EXIT_NOT_FOUND,
    FileNotFoundError: EXIT_NOT_FOUND,
}
"""Exit codes by the class of the error; the first that fits counts."""

_UNSAFE = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Control characters, characters that change the writing direction, and surrogates, which have no UTF-8 encoding."""


def path_argument(text: str) -> str:
    """Return a path, for argparse.

    IMPORTANT: refuses an empty path, which would mean the current directory: a shell variable may be unset.

    Raises:
        argparse.ArgumentTypeError: The path is empty.
    """
    if not text:
        raise argparse.ArgumentTypeError("expected a path, found an empty string")
    return text


def add_storage_options(parser: argparse.ArgumentParser) -> None:
    """Add --storage-option, for commands that take URLs."""
    parser.add_argument(
        "--storage-option",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        type=_option,
        help="option of the object store that a URL leads to, such as endpoint=URL; repeat for more. Others see it in "
        "the list of processes: give secrets by the environment",
    )


def _option(text: str) -> tuple[str, str]:
    name, given, value = text.partition("=")
    if not given or not name:
        raise argparse.ArgumentTypeError("expected KEY=VALUE")  # IMPORTANT: not the text, which may hold a secret
    return name, value


def add_root(parser: argparse.ArgumentParser) -> None:
    """Add ROOT and -r, for commands that search a directory for checkpoints."""
    text = "directory or URL that contains checkpoints, or a checkpoint"
    parser.add_argument("root", metavar="ROOT", type=path_argument, help=text)
    parser.add_argument("-r", "--recursive", action="store_true", help="search subdirectories at any depth")
    add_storage_options(parser)


def add_keys(parser: argparse.ArgumentParser) -> None:
    """Add --keys, which takes one name at a time, so that paths may follow it."""
    parser.add_argument(
        "--keys",
        metavar="FQN",
        action="append",
        help="only the leaf called FQN, or all leaves below it; repeat for more",
    )


def add_delete(parser: argparse.ArgumentParser) -> None:
    """Add --delete, for commands that otherwise only list what they would remove."""
    parser.add_argument("--delete", action="store_true", help="remove what is listed; without it nothing is changed")


def given_path(given: str) -> str:
    """Return the absolute path that was given, or the URL.

    Raises:
        UnsupportedPathError: A URL of something else than an object store.
    """
    return checkpoint_path(given) if is_url(given) else os.path.abspath(given)


def existing_directory(given: str) -> tuple[str, Files]:
    """Return the absolute path or URL of what holds checkpoints, and the calls by which it is read.

    Raises:
        CheckpointNotFoundError: There is no such directory, or nothing below the URL.
        UnsupportedPathError: A URL of something else than an object store.
        OSError: It cannot be read.
    """
    root = given_path(given)
    files = files_at(root)
    try:
        files.listdir(root)
    except (FileNotFoundError, NotADirectoryError) as error:
        text = f"nothing is below {given}" if is_url(given) else f"{given} is not a directory"
        raise CheckpointNotFoundError(text, path=root) from error
    return root, files


def nothing_found(args: argparse.Namespace, what: str) -> str:
    """Return the text to print if nothing was found in ROOT."""
    return f"{what} in {args.root}" + ("" if args.recursive else "; -r searches subdirectories")


def exit_code_of(error: BaseException) -> int:
    """Return the exit code for an error."""
    return next((code for kind, code in _CODES.items() if isinstance(error, kind)), EXIT_FAILED)


def printable(text: str) -> str:
    """Return text that is safe to print: names and metadata in a checkpoint may contain control characters."""
    return _UNSAFE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print text, made safe with `printable`, to stdout or `file`."""
    print(printable(text), file=file or sys.stdout)


def can_redraw(stream: TextIO) -> bool:
    """Return whether a stream is a terminal on which `rich` (extra `cli`) can redraw, and `rich` is installed."""
    if not stream.isatty() or os.environ.get("TERM", "").lower() in ("dumb", "unknown"):
        return False
    try:
        importlib.import_module("rich.live")
    except ImportError:
        return False
    return True


def print_json(value: Any, *, indent: int | None = 1) -> None:
    """Print `value` as JSON; None for `indent`: on one line."""
    print(json.dumps(_json_of(value), indent=indent, default=str, allow_nan=False), flush=indent is None)


def _json_of(value: Any) -> Any:
    """Return `value` with the numbers that JSON lacks as strings: "NaN", "Infinity" and "-Infinity"."""
    if isinstance(value, Mapping):
        return {key: _json_of(member) for key, member in value.items()}
    if isinstance(value, (list, tuple)):
        return [_json_of(member) for member in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)
    return value


def with_note(path: str, reason: object) -> str:
    """Return a path, followed by a note in brackets if there is one."""
    return f"{path} ({reason})" if reason else path


def print_rows(
    args: argparse.Namespace, facts: Any, header: Sequence[str], rows: Sequence[Sequence[Any]], nothing: str
) -> None:
    """Print `facts` with --json; else a table of `rows`, or `nothing` if there are no rows."""
    if args.json:
        print_json(facts)
    elif rows:
        print_table(header, rows)
    else:
        say(nothing)


def print_table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print rows in columns under `header`."""
    for line in columns(header, rows):
        print(line)


def columns(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """Return the lines of a table; None is shown as "-"."""
    table = [header, *([_cell(value) for value in row] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _cell(value: Any) -> str:
    return "-" if value is None else printable(str(value)).replace("\n", "\\n")


def action_of(args: argparse.Namespace, *, stays: bool, failed: bool) -> str:
    """Return what was done, or would be done, with an item, in a word or two."""
    return "failed" if failed else "kept" if stays else "removed" if args.delete else "would go"


def print_removals(
    args: argparse.Namespace,
    facts: dict[str, Any],
    columns: Sequence[tuple[str, Sequence[Any]]],
    summary: str,
    nothing: str,
) -> int:
    """Print the result of `gc` or `prune`, and return the exit code: 1 if an item could not be removed.

    Args:
        args: Arguments of the command.
        facts: Data for --json. `found` has a row for each item, with `path`, `action`, `why`, `error` and `nbytes`.
        columns: (heading, cells) of the columns between action and path.
        summary: Text that is printed below the table.
        nothing: Text that is printed if nothing was found.
    """
    rows = facts["found"]
    abandoned = "abandoned by a rollback"
    cells = [
        [
            row["action"],
            *between,
            with_note(row["path"], row["error"] or row["why"] or (row.get("abandoned_branch") and abandoned)),
        ]
        for row, *between in zip(rows, *(column for _, column in columns), strict=True)
    ]
    print_rows(args, facts, ("ACTION", *(heading for heading, _ in columns), "PATH"), cells, nothing)
    if rows and not args.json:
        worker = facts["worker"]
        asked = (
            f"saves in progress were reported by the worker at {worker}"
            if worker
            else ("saves in progress are not known: no worker answers")
        )
        say(f"{asked}; {summary}")
        if would := sum(row["nbytes"] for row in rows if row["action"] == "would go"):
            say(f"nothing was changed; --delete removes {human(would)}")
    return EXIT_FAILED if any(row["error"] for row in rows) else EXIT_OK

"""What the commands share: exit codes, sizes, tables and JSON."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any, TextIO

from asyncckpt.errors import (
    CheckpointNotCommittedError,
    CheckpointNotFoundError,
    ConfigError,
    CorruptCheckpointError,
    UnsupportedFormatError,
    WorkerUnavailableError,
)

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_CORRUPT = 3
EXIT_NOT_FOUND = 4
EXIT_UNREACHABLE = 5

_COMMANDS = re.compile("[\x00-\x09\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""What a terminal obeys, what turns the direction of writing, and what has no UTF-8 form."""


def exit_code_of(error: BaseException) -> int:
    """Return the exit code that says what `error` means."""
    if isinstance(error, (CheckpointNotCommittedError, CorruptCheckpointError)):
        return EXIT_CORRUPT
    if isinstance(error, WorkerUnavailableError):
        return EXIT_UNREACHABLE
    if isinstance(error, ConfigError):
        return EXIT_USAGE
    if isinstance(error, UnsupportedFormatError):
        return EXIT_FAILED
    return EXIT_NOT_FOUND if isinstance(error, (CheckpointNotFoundError, FileNotFoundError)) else EXIT_FAILED


def shown(text: str) -> str:
    """Return text for a terminal. Names and metadata are whatever somebody has put into a checkpoint."""
    return _COMMANDS.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def say(text: str, file: TextIO | None = None) -> None:
    """Print text as `shown`; to stdout unless told otherwise."""
    print(shown(text), file=file or sys.stdout)


def print_json(value: Any) -> None:
    """Print `value` as indented JSON."""
    print(json.dumps(value, indent=1, default=str))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns under `header`."""
    for line in columns(header, rows):
        print(line)


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines in columns under `header`."""
    rows = [[shown(cell).replace("\n", "\\n") for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    table = [header, *rows]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]

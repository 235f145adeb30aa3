"""What the commands share: exit codes, sizes, tables and JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

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


def print_json(value: Any) -> None:
    """Print `value` as indented JSON."""
    print(json.dumps(value, indent=1, default=str))


def print_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print rows in columns under `header`."""
    widths = [max(len(row[i]) for row in [header, *rows]) for i in range(len(header))]
    for row in [header, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())

"""Parses and formats sizes, durations and counts, for all commands and the worker."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable

MAX_NBYTES = 1 << 60
MAX_SECONDS = 1e9
"""31 years: longer than any wait, and small enough for every clock and every system call to add."""

_NBYTES = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+)\s*(?:([kmgtp])(i?))?b?\Z", re.IGNORECASE)
_SECONDS_OF = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def human(nbytes: float) -> str:
    """Format a size in decimal units, with three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError


def human_s(seconds: float) -> str:
    """Format a duration in one unit, with three digits."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    for unit, length, longest in (("s", 1, 120), ("min", 60, 7200), ("h", 3600, 172800)):
        if seconds < longest:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds / 86400:.3g} d"


def parse_nbytes(text: str) -> int:
    """Parse a number of bytes: `40GB` and `40G` in powers of 1000, `1.5TiB` in powers of 1024, or `1000000`.

    Raises:
        argparse.ArgumentTypeError: It is not a size, less than 1 byte, or more than `MAX_NBYTES`.
    """
    found = _NBYTES.match(text.strip())
    if found is not None:
        unit = (1024 if found[3] else 1000) ** " kmgtp".index((found[2] or " ").lower())
        nbytes = float(found[1]) * unit
        if 1 <= nbytes <= MAX_NBYTES:
            return int(found[1]) * unit if found[1].isdigit() else int(nbytes)
    raise argparse.ArgumentTypeError(f"{text!r}: expected a size from 1 byte to 1 EiB, such as 40GB, 1.5TiB, 1000000")


def parse_seconds(text: str) -> float:
    """Parse a duration in seconds: `90`, `90s`, `30m`, `12h`, `2d`.

    Raises:
        argparse.ArgumentTypeError: It is not a duration, less than 0, or more than `MAX_SECONDS`.
    """
    unit = _SECONDS_OF.get(text[-1:])
    try:
        seconds = float(text[:-1] if unit else text) * (unit or 1.0)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= MAX_SECONDS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: expected seconds from 0 to {MAX_SECONDS:g}, or with a unit: 90s, 30m, 12h, 2d"
        )
    return seconds


def count(low: int, high: int) -> Callable[[str], int]:
    """Return a parser of whole numbers from `low` to `high`, which raises argparse.ArgumentTypeError for others."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:  # also for more digits than the interpreter converts
            number = low - 1
        if not low <= number <= high:
            raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {low} to {high}")
        return number

    return parse

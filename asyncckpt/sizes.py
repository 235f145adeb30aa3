"""Sizes as people read them."""

from __future__ import annotations


def human(nbytes: float) -> str:
    """Return a size in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if abs(nbytes) < 1000 or unit == "TB":
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.3g} {unit}"
        nbytes /= 1000
    raise AssertionError

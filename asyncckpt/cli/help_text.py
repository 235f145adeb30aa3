"""How `--help` shows examples: one a line, behind everything else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

HEADING = "examples:"


class ExampleFormatter(argparse.HelpFormatter):
    """Breaks descriptions as usual, and keeps the lines of examples."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if text.startswith(HEADING) else super()._fill_text(text, width, indent)


def examples(lines: Sequence[str]) -> str:
    """Return an epilog."""
    return "\n".join([HEADING, *(f"  {line}" for line in lines)])

"""Reads tables out of SPEC.md files, so that tests can compare them with the code."""

from __future__ import annotations

import pathlib
import re

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]


def spec(contract: str) -> str:
    """Return the text of a contract's SPEC.md."""
    return (REPOSITORY / "asyncckpt" / contract / "SPEC.md").read_text()


def tables(text: str, *header: str) -> list[list[tuple[str, ...]]]:
    """Return the rows of every table with exactly this header; code marks are taken off a cell that is all code."""
    found = []
    blocks = re.findall(r"(?:^\|.*\|\n)+", text, re.MULTILINE)
    for block in blocks:
        rows = [tuple(_plain(cell) for cell in line.strip("|").split(" | ")) for line in block.splitlines()]
        if rows[0] == header:
            assert all(len(row) == len(header) for row in rows[2:]), f"a row of {header} has another number of cells"
            found.append(rows[2:])
    assert found, f"no table with the header {header}"
    return found


def table(text: str, *header: str) -> list[tuple[str, ...]]:
    """Return the rows of the only table with this header."""
    (rows,) = tables(text, *header)
    return rows


def _plain(cell: str) -> str:
    cell = cell.strip()
    return cell[1:-1] if re.fullmatch(r"`[^`]*`", cell) else cell

"""Check docs/parity.md: every capability has its row, and every test that a row names exists.

Run as `python docs/check_parity.py`. A test is named as pytest names it: `tests/unit/test_x.py::test_y`.
"""

from __future__ import annotations

import ast
import functools
import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NOT_YET = "not yet"


def _ids(group: str, count: int) -> list[str]:
    return [f"{group}{n}" for n in range(1, count + 1)]


PLANNED = ("F11", "F12", "F14")
REQUIRED = (
    *_ids("S0-", 7),
    *_ids("S1-", 9),
    *_ids("S2-", 7),
    *_ids("S3-", 7),
    *_ids("S4-", 6),
    *(i for i in _ids("F", 16) if i not in PLANNED),
)
_ROW = re.compile(r"^\| ([SF][0-9]+(?:-[0-9]+)?) \|.*\|$", re.MULTILINE)
_TEST = re.compile(r"`?(tests/[\w/]+\.py)((?:::\w+)+)(?:\[[^\]]*\])?`?")


def problems(text: str, root: pathlib.Path = REPOSITORY) -> list[str]:
    """Return what is wrong with the document, one line each."""
    body, _, planned = text.partition("\n## Planned\n")
    found = [f"{where}: {line}" for where, line in _wrong_ids(body, planned)]
    for match in _ROW.finditer(body):
        claim = re.split(r"(?<!\\)\|", match[0])[-2].strip()
        if claim != NOT_YET:
            found += [f"{match[1]}: {line}" for line in wrong_claims(claim, root)]
    return found


def _wrong_ids(body: str, planned: str) -> list[tuple[str, str]]:
    wrong = []
    for text, wanted, where in ((body, REQUIRED, "the tables"), (planned, PLANNED, "Planned")):
        have = [m[1] for m in _ROW.finditer(text)]
        wrong += [(i, f"has no row in {where}") for i in wanted if i not in have]
        wrong += [(i, f"does not belong into {where}") for i in have if i not in wanted]
        wrong += [(i, f"has two rows in {where}") for i in sorted(set(have)) if have.count(i) > 1]
    return wrong


def wrong_claims(claim: str, root: pathlib.Path) -> list[str]:
    """Return what is wrong with the names of tests, separated by commas, one line each."""
    wrong = []
    for name in claim.split(", "):
        parsed = _TEST.fullmatch(name)
        if not parsed:
            wrong.append(f"{name!r} is neither {NOT_YET!r} nor the name of a test")
        elif not (root / parsed[1]).is_file():
            wrong.append(f"there is no file {parsed[1]}")
        elif parsed[2] not in _tests_of(root / parsed[1]):
            wrong.append(f"there is no test {name}")
    return wrong


@functools.cache
def _tests_of(path: pathlib.Path) -> frozenset[str]:
    """Return what pytest collects in a file: functions, and methods of classes, whose names begin with `test`."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        members = node.body if isinstance(node, ast.ClassDef) else [node]
        prefix = f"::{node.name}" if isinstance(node, ast.ClassDef) else ""
        functions = (m for m in members if isinstance(m, (ast.FunctionDef, ast.AsyncFunctionDef)))
        found |= {f"{prefix}::{m.name}" for m in functions if m.name.startswith("test")}
    return frozenset(found)


def main() -> int:
    """Print what is wrong, or how many rows are held."""
    text = (REPOSITORY / "docs" / "parity.md").read_text()
    found = problems(text)
    for line in found:
        print(f"docs/parity.md: {line}", file=sys.stderr)
    if not found:
        print(
            f"docs/parity.md: {len(REQUIRED) - text.count(f'| {NOT_YET} |')} of {len(REQUIRED)} rows are held by tests"
        )
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

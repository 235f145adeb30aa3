"""Check docs/parity.md: every capability has its row, and every file of tests that a row links to exists.

Run as `python docs/check_parity.py`. A row links to files: [`tests/unit/test_x.py`](../tests/unit/test_x.py).
"""

from __future__ import annotations

import pathlib
import re
import sys

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]
NOT_YET = "not yet"


def _ids(group: str, count: int) -> list[str]:
    return [f"{group}{n}" for n in range(1, count + 1)]


PLANNED = ("F12",)
REQUIRED = (
    *_ids("S0-", 7),
    *_ids("S1-", 9),
    *_ids("S2-", 7),
    *_ids("S3-", 7),
    *_ids("S4-", 6),
    *(i for i in _ids("F", 16) if i not in PLANNED),
    "F18",
)
_ROW = re.compile(r"^\| ([SF][0-9]+(?:-[0-9]+)?) \|.*\|$", re.MULTILINE)
_LINK = re.compile(r"\[`(tests/[\w/]+\.py)`\]\(([^)]*)\)")


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
    """Return what is wrong with links to files of tests, separated by commas, one line each."""
    wrong = []
    for name in claim.split(", "):
        link = _LINK.fullmatch(name)
        if not link:
            wrong.append(f"{name!r} is no link to a file of tests")
        elif link[2] != f"../{link[1]}":
            wrong.append(f"{link[1]} links to {link[2]}")
        else:
            wrong += wrong_file(link[1], root)
    return wrong


def wrong_file(name: str, root: pathlib.Path) -> list[str]:
    """Return a line if there is no such file, or no test in it."""
    path = root / name
    if not path.is_file():
        return [f"there is no file {name}"]
    if not re.search(r"^ *(?:async )?def test_", path.read_text(), re.MULTILINE):
        return [f"{name} has no test"]
    return []


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

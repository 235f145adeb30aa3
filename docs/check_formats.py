"""Check docs/formats.md: every cell of its matrices has a mark of tests that exist, or says that there is nothing to
test; and no mark stands for two columns of a row.

Run as `python docs/check_formats.py`. A cell holds marks such as `w1`, or `-`. Below the matrices each mark has
its line: "- w1: `tests/unit/test_x.py`", with the case in brackets where one file has those of several cells.
"""

from __future__ import annotations

import functools
import pathlib
import re
import sys

from check_parity import REPOSITORY, wrong_file

NOTHING = "-"
MATRICES = ("## Files of other tools, read by asyncckpt", "## Files of asyncckpt, read by stock tools alone")
_MARK = re.compile(r"^- ([a-z][0-9]+): (.+)$", re.MULTILINE)
_TESTS = re.compile(r"`(tests/[\w/]+\.py)(?:\[([^\]]+)\])?`")


def problems(text: str, root: pathlib.Path = REPOSITORY) -> list[str]:
    """Return what is wrong with the document, one line each."""
    found, used = [], set()
    marks = {match[1]: match[2] for match in _MARK.finditer(text)}
    for title in MATRICES:
        rows = _rows(text, title)
        if len(rows) < 3:
            found.append(f"{title!r} has no matrix")
            continue
        header, _, *body = rows
        for name, *cells in body:
            if len(cells) != len(header) - 1:
                found.append(f"row {name!r} has {len(cells)} cells, the header {len(header) - 1}")
            marked = [mark for cell in cells for mark in cell.split(", ") if mark != NOTHING]
            twice = sorted({mark for mark in marked if marked.count(mark) > 1})
            found += [f"row {name!r} has {mark} in several columns: a test shows one thing" for mark in twice]
            for column, cell in zip(header[1:], cells, strict=False):
                names = cell.split(", ")
                used.update(names)
                unknown = [mark for mark in names if mark not in marks and mark != NOTHING]
                found += [f"{name!r}, {column!r}: {mark!r} is no mark of a test" for mark in unknown]
    found += [f"{mark} stands in no matrix" for mark in marks if mark not in used]
    for mark, claim in marks.items():
        found += [f"{mark}: {line}" for line in _wrong_tests(claim, root)]
    return found


def _rows(text: str, title: str) -> list[list[str]]:
    section = text.partition(f"{title}\n")[2].partition("\n## ")[0]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in section.splitlines() if line[:1] == "|"]


def _wrong_tests(claim: str, root: pathlib.Path) -> list[str]:
    """Return a line if there is no such file, or if the case in brackets is named nowhere in the tests."""
    named = _TESTS.fullmatch(claim)
    if named is None:
        return [f"{claim!r} is no file of tests"]
    wrong = wrong_file(named[1], root)
    if wrong or named[2] is None:
        return wrong
    word = re.compile(rf"\b{re.escape(named[2])}\b")
    if any(named[2] in source and word.search(source) for source in _sources(root)):
        return []
    return [f"no test has a case {named[2]!r}"]


@functools.cache
def _sources(root: pathlib.Path) -> tuple[str, ...]:
    return tuple(path.read_text() for path in sorted((root / "tests").rglob("*.py")))


def main() -> int:
    """Print what is wrong, or how many cells are held."""
    text = (REPOSITORY / "docs" / "formats.md").read_text()
    found = problems(text)
    for line in found:
        print(f"docs/formats.md: {line}", file=sys.stderr)
    if not found:
        cells = [cell for title in MATRICES for row in _rows(text, title)[2:] for cell in row[1:]]
        print(f"docs/formats.md: {len(cells) - cells.count(NOTHING)} cells are held by tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

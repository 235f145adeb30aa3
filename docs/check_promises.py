"""Check README.md's table of promises: each promise of the list has its row, its words, and tests that exist.

Run as `python docs/check_promises.py`. A test is named as pytest names it, in a link to its file:
`[`tests/unit/test_x.py::test_y`](tests/unit/test_x.py)`.
"""

from __future__ import annotations

import pathlib
import re
import sys

from check_parity import REPOSITORY, wrong_claims

TITLE = "\n## What it promises\n"

PROMISES: dict[str, tuple[str, ...]] = {
    "P1": ("atomic", "every byte", "before its manifest"),
    "P2": ("bit-exact or loud", "staged bytes", "raises", "tensor", "byte range"),
    "P3": ("sigkill", "power cut", "any instant", "committed", "incomplete"),
    "P4": ("`written`", "after p1", "never reports success"),
    "P5": ("trainer dies", "all ranks staged", "committed", "memory"),
    "P6": ("worker dies", "1 s", "10 s", "next save"),
    "P7": ("point in time", "`save()`", "fence"),
    "P8": ("fresh", "bit-identical", "step", "reported"),
    "P9": ("every failure is seen", "future", "log", "counter", "exit code", "one failed save costs one save"),
    "P10": ("last good", "sacred", "provably ours", "deleted"),
    "P11": ("bounded", "memory", "before anything is allocated"),
    "P12": ("no leaks", "memory", "sockets", "processes", "forked"),
    "P13": ("no hang", "deadline", "disk", "exit", "5 s"),
    "P14": ("all ranks or none", "path", "step", "world", "missing rank", "frozen worker"),
    "P15": ("runs no code", "outside the directory", "its own user", "any bytes"),
    "P16": ("versioned", "newer format", "self-contained", "partial copy"),
}
"""Number -> what the text must not leave out, in lower case."""

_ROW = re.compile(r"^\| (P[0-9]+) \| (.*) \| (.*) \|$", re.MULTILINE)
_LINK = re.compile(r"\[`(tests/[\w/]+\.py)((?:::\w+)+)`\]\(([^)]*)\)")


def problems(text: str, root: pathlib.Path = REPOSITORY) -> list[str]:
    """Return what is wrong with the table in `text`, one line each."""
    _, title, rest = text.partition(TITLE)
    if not title:
        return [f"there is no section {TITLE.strip()!r}"]
    table = rest.partition("\n## ")[0]
    rows = _ROW.findall(table)
    names = [name for name, _, _ in rows]
    found = [f"{name}: has no row" for name in PROMISES if name not in names]
    found += [f"{name}: has two rows" for name in PROMISES if names.count(name) > 1]
    found += [f"{name}: is no promise of the list" for name in names if name not in PROMISES]
    known = [name for name in names if name in PROMISES]
    if not found and known != list(PROMISES):
        found.append("the rows are not in the order of the list")
    for name, said, tests in rows:
        found += [f"{name}: does not say {word!r}" for word in PROMISES.get(name, ()) if word not in said.lower()]
        found += [f"{name}: {line}" for line in _wrong_tests(tests, root)]
    return found


def _wrong_tests(cell: str, root: pathlib.Path) -> list[str]:
    wrong = []
    for name in cell.split(", "):
        link = _LINK.fullmatch(name.strip())
        if not link:
            wrong.append(f"{name!r} is no link to a test" if name.strip() else "names no test")
        elif link[3] != link[1]:
            wrong.append(f"{link[1]}{link[2]} links to {link[3]}")
        else:
            wrong += wrong_claims(f"{link[1]}{link[2]}", root)
    return wrong


def main() -> int:
    """Print what is wrong, or how many promises are held."""
    text = (REPOSITORY / "README.md").read_text()
    found = problems(text)
    for line in found:
        print(f"README.md: {line}", file=sys.stderr)
    if not found:
        n_tests = sum(len(_LINK.findall(tests)) for _, _, tests in _ROW.findall(text))
        print(f"README.md: {len(PROMISES)} promises are held by {n_tests} tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

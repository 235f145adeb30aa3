"""Check docs/guarantees.md: each promise has its section, its words and tests that exist, and README links to it.

Run as `python docs/check_promises.py`. A section is headed `## P1: ...`; below its text, `Held by:` and a list of
links to files of tests: [`tests/unit/test_x.py`](../tests/unit/test_x.py).
"""

from __future__ import annotations

import pathlib
import re
import sys

from check_parity import REPOSITORY, wrong_claims

PAGE = "docs/guarantees.md"

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

_HEAD = re.compile(r"^## (P[0-9]+): (.+)$", re.MULTILINE)


def sections(text: str) -> list[tuple[str, str, str, list[str]]]:
    """Return each promise of the page: number, title, text, and the lines below `Held by:`."""
    heads = [*_HEAD.finditer(text)]
    found = []
    for head, after in zip(heads, [*heads[1:], None], strict=True):
        body = text[head.end() : after.start() if after else None]
        said, _, tests = body.partition("\nHeld by:\n")
        found.append((head[1], head[2], said, [line[2:].strip() for line in tests.splitlines() if line.strip()]))
    return found


def problems(text: str, readme: str, root: pathlib.Path = REPOSITORY) -> list[str]:
    """Return what is wrong with the page `text` and with README's list of it, one line each."""
    found_sections = sections(text)
    names = [name for name, _, _, _ in found_sections]
    found = [f"{name}: has no section" for name in PROMISES if name not in names]
    found += [f"{name}: has two sections" for name in PROMISES if names.count(name) > 1]
    found += [f"{name}: is no promise of the list" for name in names if name not in PROMISES]
    if not found and names != list(PROMISES):
        found.append("the sections are not in the order of the list")
    for name, title, said, tests in found_sections:
        text_of = f"{title} {said}".lower()
        found += [f"{name}: does not say {word!r}" for word in PROMISES.get(name, ()) if word not in text_of]
        wrong = [line for test in tests for line in wrong_claims(test, root)] if tests else ["names no test"]
        found += [f"{name}: {line}" for line in wrong]
        anchor = re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", f"{name} {title}".lower()).strip())
        if f"]({PAGE}#{anchor})" not in readme:
            found.append(f"{name}: README.md has no link to {PAGE}#{anchor}")
    return found


def main() -> int:
    """Print what is wrong, or how many promises are held."""
    text, readme = (REPOSITORY / PAGE).read_text(), (REPOSITORY / "README.md").read_text()
    found = problems(text, readme)
    for line in found:
        print(f"{PAGE}: {line}", file=sys.stderr)
    if not found:
        n_tests = sum(len(tests) for _, _, _, tests in sections(text))
        print(f"{PAGE}: {len(PROMISES)} promises are held by {n_tests} files of tests")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())

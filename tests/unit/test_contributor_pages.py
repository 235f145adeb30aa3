"""docs/architecture.md and CONTRIBUTING.md name what is there: every file, and every package."""

from __future__ import annotations

import pathlib
import re

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
ARCHITECTURE = (REPOSITORY / "docs/architecture.md").read_text()
PATH = re.compile(r"`((?:asyncckpt|worker|tests|docs|benchmarks|examples)(?:/[\w.*/-]+)?)`")


@pytest.mark.parametrize("page", ["docs/architecture.md", "CONTRIBUTING.md"])
def test_every_path_that_the_page_names_exists(page: str) -> None:
    named = PATH.findall((REPOSITORY / page).read_text())
    assert len(named) > 10
    assert [path for path in named if not any(REPOSITORY.glob(path))] == []


def test_every_name_of_code_and_every_target_in_the_how_tos_exists() -> None:
    page = (REPOSITORY / "CONTRIBUTING.md").read_text()
    sources = [file for root in ("asyncckpt", "tests") for file in (REPOSITORY / root).rglob("*.py")]
    words = set(re.findall(r"\w+", "\n".join(file.read_text() for file in sources)))
    named = set(re.findall(r"`(_\w{2,}|[A-Za-z]+_\w+|[A-Z]{3,})(?:\([\w, ]*\))?`", page))
    assert len(named) > 8 and named - words == set()
    targets = set(re.findall(r"^([\w./-]+):", (REPOSITORY / "Makefile").read_text(), re.MULTILINE))
    made = set(re.findall(r"^make ([\w./-]+)|`make ([\w-]+)`", page, re.MULTILINE))
    assert len(made) > 4 and {first or second for first, second in made} - targets == set()


def test_every_package_has_a_row_in_the_architecture() -> None:
    packages = {str(file.parent.relative_to(REPOSITORY)) for file in (REPOSITORY / "asyncckpt").glob("*/__init__.py")}
    rows = set(re.findall(r"^\| `([\w/]+)` \| ", ARCHITECTURE, re.MULTILINE))
    assert packages | {"worker"} <= rows


@pytest.mark.parametrize(
    "question",
    [
        "where is the commit?",
        "where are retries and deadlines of requests?",
        "what happens when a rank dies? when the worker dies?",
        "where do replicas get compared?",
        "how is a file written?",
        "how do I add an object store?",
        "how do I add a leaf type?",
        "a command?",
        "a field of the manifest?",
        "a setting, its default?",
        "a framework?",
        "where is the state machine?",
        "limits of bandwidth?",
        "how does the worker get credentials, `storage_options`?",
        "which checkpoint does `restore_latest` choose, which does it skip?",
        "metrics, `events.jsonl`?",
        "a failpoint, at which fault tests kill?",
    ],
)
def test_the_questions_of_a_newcomer_have_an_answer(question: str) -> None:
    assert re.search(rf"^\| {re.escape(question)} \| .+ \|$", ARCHITECTURE, re.MULTILINE)


CONTRIBUTOR_PAGES = {"architecture.md", "measurements.md", "parity.md", "guarantees.md"}
"""Pages that may name tests: those for contributors, and the promises, each of which links to its tests."""


def test_pages_for_users_name_no_tests_and_no_checks_of_the_repository() -> None:
    pages = [page for page in (REPOSITORY / "docs").rglob("*.md") if page.parent.name not in ("adr", "api")]
    addressed = [
        f"{page.relative_to(REPOSITORY)}: {found[0]}"
        for page in pages
        if page.name not in CONTRIBUTOR_PAGES
        for found in re.finditer(
            r"tests/|make (?:test|check)\b|docs/\w+\.py|Held by", page.read_text().partition("## For contributors")[0]
        )
    ]
    assert addressed == []

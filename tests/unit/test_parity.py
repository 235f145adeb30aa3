"""docs/parity.md links to no file of tests that does not exist and leaves no row out."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import pytest

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "docs" / "parity.md").read_text()
ROW = next(line for line in TEXT.splitlines() if line.startswith("| S3-5 |"))
THIS = "[`tests/unit/test_parity.py`](../tests/unit/test_parity.py)"
GONE = "[`tests/unit/test_gone.py`](../tests/unit/test_gone.py)"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_parity.py, loaded."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return importlib.import_module("check_parity")


def _claiming(claim: str) -> str:
    return TEXT.replace(ROW, f"{ROW.rsplit('|', 2)[0]}| {claim} |")


def test_document_is_right(check: ModuleType) -> None:
    assert check.problems(TEXT) == []
    assert check.main() == 0


@pytest.mark.parametrize("claim", ["not yet", THIS, f"{THIS}, {THIS}"])
def test_a_link_to_a_file_of_tests_passes(check: ModuleType, claim: str) -> None:
    assert check.problems(_claiming(claim)) == []


@pytest.mark.parametrize(
    "claim",
    ["", "yes", GONE, "tests/unit/test_parity.py", THIS.replace("../", ""), THIS.replace("unit/test_parity", "saving")],
)
def test_anything_else_fails(check: ModuleType, claim: str) -> None:
    (problem,) = check.problems(_claiming(claim))
    assert problem.startswith("S3-5: ")


def test_row_that_is_missing_doubled_or_misplaced_fails(check: ModuleType) -> None:
    assert check.problems(TEXT.replace(f"{ROW}\n", "")) == ["S3-5: has no row in the tables"]
    assert check.problems(TEXT.replace(ROW, f"{ROW}\n{ROW}")) == ["S3-5: has two rows in the tables"]
    assert check.problems(f"{TEXT}{ROW}\n") == ["S3-5: does not belong into Planned"]
    assert check.problems(TEXT.replace("| F12 |", "| F99 |")) == [
        "F12: has no row in Planned",
        "F99: does not belong into Planned",
    ]

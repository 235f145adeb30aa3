"""docs/formats.md: every cell of what reads what has a mark of tests that exist."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import pytest

DOCS = pathlib.Path(__file__).resolve().parents[3] / "docs"
TEXT = (DOCS / "formats.md").read_text()
ROW = next(line for line in TEXT.splitlines() if line.startswith("| `--to torch` |"))


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_formats.py, loaded as the command loads it."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("check_formats")


def test_document_is_right(check: ModuleType) -> None:
    assert check.problems(TEXT) == []
    assert check.main() == 0


@pytest.mark.parametrize(
    ("old", "new", "problem"),
    [
        (ROW, ROW.replace("x9, x10", "x9, zz"), "is no mark"),
        (ROW, ROW.replace("x9, x10", "x9"), "x10 stands in no matrix"),
        (ROW, ROW.replace("x9, x10", ""), "is no mark"),
        (ROW, ROW.removesuffix(" - |"), "cells"),
        ("| c2 | - |", "| v3 | - |", "has v3 in several columns"),
        ("test_loading_load.py", "test_that_is_gone.py", "there is no file"),
        ("tests/unit/loading/test_loading_load.py", "tests/saving.py", "has no test"),
        ("[torch_by_load]", "[torch_by" + "_magic]", "no test has a case"),
        ("## Files of other tools, read by asyncckpt", "## Else", "has no matrix"),
    ],
)
def test_what_is_wrong_is_named(check: ModuleType, old: str, new: str, problem: str) -> None:
    assert old in TEXT
    assert any(problem in line for line in check.problems(TEXT.replace(old, new)))

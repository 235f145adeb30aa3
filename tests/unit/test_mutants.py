"""The seeded bugs of `tests/mutants/`: each still applies, and the tests that should catch it are there.

Whether they do catch it is shown by `make mutants`, which takes minutes.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.mutants.run import RESULTS, ROOT, PatchError, diff_of, every_mutant, missing_tests, parsed

MUTANTS = every_mutant()


def test_there_are_enough_of_them_and_they_are_spread() -> None:
    rooms = {"/".join(path.split("/")[: 1 if path.startswith("worker") else 2]) for m in MUTANTS for path in m.changes}
    assert len(MUTANTS) >= 24
    assert {"worker", "asyncckpt/storage", "asyncckpt/staging", "asyncckpt/planning", "asyncckpt/loading"} <= rooms
    assert {"asyncckpt/memory", "asyncckpt/format", "asyncckpt/protocol", "asyncckpt/pending.py"} <= rooms


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_it_applies_and_the_tests_that_it_names_are_there(mutant: object) -> None:
    assert diff_of(mutant)  # type: ignore[arg-type]
    assert mutant.tests and not missing_tests(mutant)  # type: ignore[attr-defined,arg-type]


def test_the_table_names_each_and_none_survives() -> None:
    table = RESULTS.read_text()
    rows = {line.split(" | ")[0].removeprefix("| ") for line in table.splitlines() if line.startswith("| ")}
    assert {m.name for m in MUTANTS} <= rows
    assert "**nothing**" not in table


def test_a_patch_that_does_not_apply_is_an_error_that_says_what_is_missing(tmp_path: pathlib.Path) -> None:
    head = "what: x\npromise: P1\ntests: a::b\n\n--- asyncckpt/paths.py\n@@\n"
    for body in ("-no such line\n+another\n", "-\n+x\n"):
        (tmp_path / "a.patch").write_text(head + body)
        with pytest.raises(PatchError, match="expected once"):
            parsed(tmp_path / "a.patch").applied(ROOT)
    for text in ("what: x\n\n", head, head + " same\n"):
        (tmp_path / "a.patch").write_text(text)
        with pytest.raises(PatchError):
            parsed(tmp_path / "a.patch")

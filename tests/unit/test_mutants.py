"""The seeded bugs of `tests/mutants/`: each still applies, and the tests that should catch it are there.

Whether they do catch it is shown by `make mutants`, which takes minutes.
"""

from __future__ import annotations

import pathlib

import pytest

from tests.mutants import generated, run
from tests.mutants.run import RESULTS, ROOT, Mutant, PatchError, RunError, diff_of, every_mutant, missing_tests, parsed

MUTANTS = every_mutant()


def test_there_are_enough_of_them_and_they_are_spread() -> None:
    rooms = {"/".join(path.split("/")[: 1 if path.startswith("worker") else 2]) for m in MUTANTS for path in m.changes}
    assert len(MUTANTS) >= 24
    assert {"worker", "asyncckpt/storage", "asyncckpt/staging", "asyncckpt/planning", "asyncckpt/loading"} <= rooms
    assert {"asyncckpt/memory", "asyncckpt/format", "asyncckpt/protocol", "asyncckpt/client"} <= rooms


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
    head = "what: x\npromise: P1\ntests: a::b\n\n--- asyncckpt/basics/paths.py\n@@\n"
    for body in ("-no such line\n+another\n", "-\n+x\n"):
        (tmp_path / "a.patch").write_text(head + body)
        with pytest.raises(PatchError, match="expected once"):
            parsed(tmp_path / "a.patch").applied(ROOT)
    for text in ("what: x\n\n", head, head + " same\n"):
        (tmp_path / "a.patch").write_text(text)
        with pytest.raises(PatchError):
            parsed(tmp_path / "a.patch")


# ---- what counts as caught


@pytest.mark.parametrize(
    ("code", "said", "failed"),
    [
        (0, "2 passed", []),
        (1, "FAILED t/a.py::test_x[1] - assert 1\nERROR t/a.py::test_y\n", ["t/a.py::test_x[1]", "t/a.py::test_y"]),
        (2, "ERROR t/a.py - ImportError: no\n", ["(t/a.py cannot be imported)"]),
        (4, "ERROR t/a.py\nERROR: found no collectors for t/a.py::test_x\n", ["(t/a.py cannot be imported)"]),
        (-11, "", ["(pytest ended by SIGSEGV)"]),
    ],
)  # fmt: skip
def test_a_failure_an_import_that_fails_and_a_signal_catch_a_mutant(code: int, said: str, failed: list[str]) -> None:
    assert run.failures(code, said) == failed


@pytest.mark.parametrize(
    ("code", "said"),
    [
        (1, "1 failed"),
        (2, "Interrupted"),
        (3, "INTERNALERROR> x"),
        (4, "ERROR: not found: tests/a.py::test_x\n"),
        (4, "ERROR: usage: pytest [options]\n"),
        (5, "no tests ran"),
    ],
)
def test_an_end_of_pytest_that_shows_nothing_fails_the_run(code: int, said: str) -> None:
    with pytest.raises(RunError, match=f"{code}|not which"):
        run.failures(code, said)


class FakeCopy(run.Copy):
    """Says for each set of tests what it is told."""

    def __init__(self, sound: list[str], caught: dict[str, list[str] | RunError]) -> None:
        self.sound, self.by_name, self.ran = sound, caught, list[tuple[str, ...]]()

    def run(self, tests: tuple[str, ...]) -> tuple[list[str], float, str]:
        self.ran.append(tests)
        return self.sound, 1.0, "what pytest said"

    def caught(self, mutant: Mutant, *, everything: bool) -> tuple[list[str], float]:
        found = self.by_name[mutant.name]
        if isinstance(found, RunError):
            raise found
        return found, 2.0


def _mutant(name: str, *tests: str) -> Mutant:
    return Mutant(name, "a bug", "P1", tests, {})


def test_all_named_tests_run_once_without_a_mutant_before_any() -> None:
    mutants = [_mutant("one", "a::x", "a::y"), _mutant("two", "a::x")]
    copy = FakeCopy([], {"one": ["a::x"], "two": []})
    found = run.tried([copy], mutants, everything=False)
    assert copy.ran == [("a::x", "a::y")]
    assert {name: failed for name, (_, failed, _) in found.items()} == {"one": ["a::x"], "two": []}


def test_a_named_test_that_fails_without_a_mutant_fails_the_run_and_is_named() -> None:
    with pytest.raises(RunError, match="without any mutant:\na::y"):
        run.tried([FakeCopy(["a::y"], {})], [_mutant("one", "a::x", "a::y")], everything=False)


def test_a_mutant_whose_run_shows_nothing_is_named_when_the_others_have_been_tried(
    capsys: pytest.CaptureFixture[str],
) -> None:
    copy = FakeCopy([], {"one": RunError("pytest ended with 4"), "two": ["a::x"]})
    with pytest.raises(RunError, match="one: pytest ended with 4"):
        run.tried([copy], [_mutant("one", "a::x"), _mutant("two", "a::x")], everything=False)
    assert "caught   two" in capsys.readouterr().out


def test_the_folder_of_the_table_need_not_exist(tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copy = FakeCopy([], {"one": ["a::x"]})
    monkeypatch.setattr(run, "every_mutant", lambda: [_mutant("one", "a::x")])
    monkeypatch.setattr(run, "Copy", lambda _: copy)
    assert run.main(["one", "--jobs", "1", "--write", str(tmp_path / "build" / "row.md")]) == 0
    assert "| one | a bug | P1 |" in (tmp_path / "build" / "row.md").read_text()


def test_pytest_itself_is_understood(tmp_path: pathlib.Path) -> None:
    (tmp_path / ".typing").mkdir()
    (tmp_path / "test_good.py").write_text("def test_a(): pass\ndef test_b(): assert False\n")
    (tmp_path / "test_broken.py").write_text("import nothing_of_this_name\ndef test_a(): pass\n")
    copy = object.__new__(run.Copy)
    copy.root = tmp_path
    assert copy.run(("test_good.py::test_a",))[0] == []
    assert copy.run(("test_good.py::test_a", "test_good.py::test_b"))[0] == ["test_good.py::test_b"]
    assert copy.run(("test_good.py::test_a", "test_broken.py::test_a"))[0] == ["(test_broken.py cannot be imported)"]
    with pytest.raises(RunError, match="ended with 4"):
        copy.run(("test_good.py::test_gone",))


# ---- changes that nobody thought of

SOURCE = """\
LIMIT = 3
def f(a, b):
    if not a and b <= LIMIT:
        raise ValueError
    log.info(a + 1)
    g(a)
    return b - 2
"""


def test_generated_changes_are_within_functions_and_compile() -> None:
    changes = generated.changes_of("m.py", SOURCE)
    lines = [generated.changed(SOURCE, change).splitlines()[change.line - 1].strip() for change in changes]
    assert sorted(lines) == sorted(
        [
            *("if not a or b <= LIMIT:", "if a and b <= LIMIT:", "if not a and b < LIMIT:"),
            *("pass", "log.info(a - 1)", "log.info(a + 2)", "pass"),
            *("return b + 2", "return b - 3", "return None"),
        ]
    )


def test_the_same_seed_draws_the_same_changes() -> None:
    assert generated.drawn(20, 7, "asyncckpt/format") == generated.drawn(20, 7, "asyncckpt/format")
    assert generated.drawn(20, 7, "asyncckpt/format") != generated.drawn(20, 8, "asyncckpt/format")


def test_the_tests_that_run_the_fewest_lines_are_run_first() -> None:
    change = generated.Change("m.py", 2, 0, 1, "x")
    lines = {"m.py": {"1": ["broad"], "2": ["broad", "narrow"], "3": ["broad"]}}
    assert generated.tests_of([change], lines) == {change: ("narrow", "broad")}

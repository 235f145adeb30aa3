"""README's table of promises leaves none out, and names no test that does not exist."""

from __future__ import annotations

import importlib
import pathlib
import re
from types import ModuleType

import pytest

from asyncckpt import CheckpointerConfig, ends

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
TEXT = (REPOSITORY / "README.md").read_text()
ROWS = {name: line for line in TEXT.splitlines() if (name := line.partition("|")[2].partition("|")[0].strip())}
THIS = "tests/unit/test_promises.py"
LINK = f"[`{THIS}::test_the_table_is_right`]({THIS})"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_promises.py, loaded."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return importlib.import_module("check_promises")


def held_by(cell: str) -> str:
    """README, with `cell` as what holds P4."""
    return TEXT.replace(ROWS["P4"], f"{ROWS['P4'].rsplit('|', 2)[0]}| {cell} |")


def test_the_table_is_right(check: ModuleType) -> None:
    assert check.problems(TEXT) == []
    assert check.main() == 0


def test_the_bounds_that_the_table_names_are_the_defaults() -> None:
    assert CheckpointerConfig().worker_timeout_s == 10
    assert "10 s if it hangs" in ROWS["P6"]
    assert ends.EXIT_WAIT_S < 5
    assert "an interpreter's exit longer than 5 s" in ROWS["P13"]


EXCEPTION = (
    "writes that no counter sees (`.data`, raw pointers, fused kernels outside `step()`, CUDA graphs) between `save()` "
    "and the fence"
)
ABOUT_ATTACH = [
    "README.md",
    "docs/quickstart.md",
    "docs/concepts.md",
    "docs/performance.md",
    "docs/frameworks/accelerate.md",
    "docs/frameworks/lightning.md",
    "docs/frameworks/torchtitan.md",
    "docs/frameworks/transformers.md",
    "docs/migration/lightning.md",
    "asyncckpt/overlapping.py",
]


@pytest.mark.parametrize("name", ["P2", "P7"])
def test_what_is_not_promised_of_copies_behind_the_training_stands_beside_the_promise(name: str) -> None:
    assert f"Not promised: {EXCEPTION}." in ROWS[name]


@pytest.mark.parametrize("name", ABOUT_ATTACH)
def test_it_stands_in_the_same_words_wherever_optimizers_are_attached(name: str) -> None:
    assert EXCEPTION in " ".join((REPOSITORY / name).read_text().split())


def test_every_page_that_attaches_says_it() -> None:
    pages = [
        REPOSITORY / "README.md",
        *(REPOSITORY / "docs").glob("*.md"),
        *(REPOSITORY / "docs/migration").glob("*.md"),
        *(REPOSITORY / "docs/frameworks").glob("*.md"),
    ]
    found = {
        str(page.relative_to(REPOSITORY))
        for page in pages
        if re.search(r"attach\(|attach=|AttachOptimizers|are? attached:", page.read_text())
    }
    assert found <= set(ABOUT_ATTACH)


def test_no_first_example_attaches() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    first = {page: re.search(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL) for page in pages}
    assert [page for page, block in first.items() if block is not None and "attach" in block[1].lower()] == []
    examples = [*(REPOSITORY / "examples").glob("*.py"), REPOSITORY / "asyncckpt/__init__.py"]
    assert [path for path in examples if re.search(r"attach\(|attach=", path.read_text())] == []


def test_the_list_has_sixteen_promises(check: ModuleType) -> None:
    assert list(check.PROMISES) == [f"P{n}" for n in range(1, 17)]


@pytest.mark.parametrize("number", range(1, 17))
def test_a_promise_without_a_row_fails(check: ModuleType, number: int) -> None:
    assert check.problems(TEXT.replace(f"{ROWS[f'P{number}']}\n", "")) == [f"P{number}: has no row"]


@pytest.mark.parametrize("number", range(1, 17))
def test_a_promise_whose_text_leaves_something_out_fails(check: ModuleType, number: int) -> None:
    name = f"P{number}"
    row = ROWS[name]
    _, _, said, rest = row.split("|", 3)
    for word in check.PROMISES[name]:
        shorter = re.sub(re.escape(word), "...", said, flags=re.IGNORECASE)
        assert f"{name}: does not say {word!r}" in check.problems(TEXT.replace(row, f"| {name} |{shorter}|{rest}"))


@pytest.mark.parametrize("cell", [LINK, f"{LINK}, {LINK}"])
def test_a_test_that_exists_passes(check: ModuleType, cell: str) -> None:
    assert check.problems(held_by(cell)) == []


@pytest.mark.parametrize(
    ("cell", "problem"),
    [
        ("", "names no test"),
        ("not yet", "'not yet' is no link to a test"),
        (f"`{THIS}::test_the_table_is_right`", "is no link to a test"),
        (f"[`{THIS}`]({THIS})", "is no link to a test"),
        (f"{LINK}, soon", "'soon' is no link to a test"),
        (f"[`{THIS}::test_gone`]({THIS})", f"there is no test {THIS}::test_gone"),
        (f"[`{THIS}::held_by`]({THIS})", f"there is no test {THIS}::held_by"),
        ("[`tests/unit/test_gone.py::test_x`](tests/unit/test_gone.py)", "there is no file tests/unit/test_gone.py"),
        (f"[`{THIS}::test_the_table_is_right`](README.md)", "links to README.md"),
    ],
)
def test_a_promise_that_no_existing_test_holds_fails(check: ModuleType, cell: str, problem: str) -> None:
    (found,) = check.problems(held_by(cell))
    assert found.startswith("P4: ") and problem in found


def test_rows_that_are_doubled_unknown_or_out_of_order_fail(check: ModuleType) -> None:
    row, other = ROWS["P4"], ROWS["P5"]
    assert check.problems(TEXT.replace(row, f"{row}\n{row}")) == ["P4: has two rows"]
    assert check.problems(TEXT.replace(row, f"{row}\n{row.replace('P4', 'P17')}")) == ["P17: is no promise of the list"]
    swapped = TEXT.replace(row, "<>").replace(other, row).replace("<>", other)
    assert check.problems(swapped) == ["the rows are not in the order of the list"]


def test_a_missing_section_fails(check: ModuleType) -> None:
    assert check.problems(TEXT.replace(check.TITLE, "\n## Promises\n")) == ["there is no section '## What it promises'"]

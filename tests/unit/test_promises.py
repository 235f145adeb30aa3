"""docs/guarantees.md leaves no promise out and names no test that does not exist; README links to each promise."""

from __future__ import annotations

import importlib
import pathlib
import re
from types import ModuleType

import pytest

from asyncckpt import CheckpointerConfig
from asyncckpt.basics import process_lifecycle

REPOSITORY = pathlib.Path(__file__).resolve().parents[2]
README = (REPOSITORY / "README.md").read_text()
TEXT = (REPOSITORY / "docs/guarantees.md").read_text()
SECTIONS = {part.partition(":")[0]: f"## {part}" for part in TEXT.split("\n## ")[1:] if re.match(r"P\d+:", part)}
THIS = "tests/unit/test_promises.py"
LINK = f"[`{THIS}`](../{THIS})"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_promises.py, loaded."""
    monkeypatch.syspath_prepend(str(REPOSITORY / "docs"))
    return importlib.import_module("check_promises")


def held_by(*lines: str) -> str:
    """The page, with `lines` as what holds P4."""
    head = SECTIONS["P4"].partition("\nHeld by:\n")[0]
    listed = "".join(f"- {line}\n" for line in lines)
    return TEXT.replace(SECTIONS["P4"], f"{head}\nHeld by:\n\n{listed}")


def test_the_page_is_right(check: ModuleType) -> None:
    assert check.problems(TEXT, README) == []
    assert check.main() == 0


def test_the_bounds_that_the_page_names_are_the_defaults() -> None:
    assert CheckpointerConfig().worker_timeout_s == 10
    assert "10 s if it hangs" in SECTIONS["P6"]
    assert process_lifecycle.EXIT_WAIT_S < 5
    assert "an interpreter's exit longer than 5 s" in SECTIONS["P13"]


EXCEPTION = (
    "writes that no version counter records (`.data`, raw pointers, fused kernels outside `step()`, CUDA graphs) "
    "between `save()` and the fence"
)
ABOUT_ATTACH = [
    "README.md",
    "docs/guides/overlap.md",
    "docs/guides/manager.md",
    "docs/quickstart.md",
    "docs/concepts.md",
    "docs/performance.md",
    "docs/frameworks/accelerate.md",
    "docs/frameworks/lightning.md",
    "docs/frameworks/torchtitan.md",
    "docs/frameworks/ray.md",
    "docs/frameworks/transformers.md",
    "docs/migration/lightning.md",
    "asyncckpt/async_checkpointer.py",
]


@pytest.mark.parametrize("name", ["P2", "P7"])
def test_what_is_not_promised_of_copies_behind_the_training_stands_beside_the_promise(name: str) -> None:
    assert f"Not promised: {EXCEPTION}." in " ".join(SECTIONS[name].split())


@pytest.mark.parametrize("name", ABOUT_ATTACH)
def test_it_stands_in_the_same_words_wherever_optimizers_are_attached(name: str) -> None:
    assert EXCEPTION in " ".join((REPOSITORY / name).read_text().split())


def test_every_page_that_attaches_says_it() -> None:
    folders = ("docs", "docs/guides", "docs/migration", "docs/frameworks")
    pages = [REPOSITORY / "README.md", *(page for name in folders for page in (REPOSITORY / name).glob("*.md"))]
    found = {
        str(page.relative_to(REPOSITORY))
        for page in pages
        if re.search(r"attach\(|attach=|AttachOptimizers|are? attached:", page.read_text())
    }
    assert found <= set(ABOUT_ATTACH)


def test_no_first_example_attaches() -> None:
    pages = [REPOSITORY / "README.md", *(REPOSITORY / "docs").rglob("*.md")]
    first = {page: re.search(r"```python[^\n]*\n(.*?)```", page.read_text(), re.DOTALL) for page in pages}
    attaching = [page.name for page, block in first.items() if block is not None and "attach" in block[1].lower()]
    assert attaching == ["overlap.md"], "which is about it"
    examples = [*(REPOSITORY / "examples").glob("*.py"), REPOSITORY / "asyncckpt/__init__.py"]
    assert [path for path in examples if re.search(r"attach\(|attach=", path.read_text())] == []


def test_the_list_has_sixteen_promises(check: ModuleType) -> None:
    assert list(check.PROMISES) == [f"P{n}" for n in range(1, 17)]


@pytest.mark.parametrize("number", range(1, 17))
def test_a_promise_without_a_section_fails(check: ModuleType, number: int) -> None:
    assert check.problems(TEXT.replace(SECTIONS[f"P{number}"], ""), README) == [f"P{number}: has no section"]


@pytest.mark.parametrize("number", range(1, 17))
def test_a_promise_without_its_line_in_readme_fails(check: ModuleType, number: int) -> None:
    (found,) = check.problems(TEXT, re.sub(rf"\(docs/guarantees\.md#p{number}-[^)]*\)", "()", README))
    assert found.startswith(f"P{number}: README.md has no link to docs/guarantees.md#p{number}-")


@pytest.mark.parametrize("number", range(1, 17))
def test_a_promise_whose_text_leaves_something_out_fails(check: ModuleType, number: int) -> None:
    name = f"P{number}"
    said, _, tests = SECTIONS[name].partition("\nHeld by:\n")
    for word in check.PROMISES[name]:
        shorter = re.sub(re.escape(word), "...", said, flags=re.IGNORECASE)
        text = TEXT.replace(SECTIONS[name], f"{shorter}\nHeld by:\n{tests}")
        assert f"{name}: does not say {word!r}" in check.problems(text, README)


@pytest.mark.parametrize("lines", [(LINK,), (LINK, LINK)])
def test_a_test_that_exists_passes(check: ModuleType, lines: tuple[str, ...]) -> None:
    assert check.problems(held_by(*lines), README) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ((), "names no test"),
        (("not yet",), "'not yet' is no link to a file of tests"),
        ((f"`{THIS}`",), "is no link to a file of tests"),
        ((LINK, "soon"), "'soon' is no link to a file of tests"),
        (("[`tests/saving.py`](../tests/saving.py)",), "tests/saving.py has no test"),
        (("[`tests/unit/test_gone.py`](../tests/unit/test_gone.py)",), "there is no file tests/unit/test_gone.py"),
        ((f"[`{THIS}`](README.md)",), "links to README.md"),
    ],
)
def test_a_promise_that_no_existing_test_holds_fails(check: ModuleType, lines: tuple[str, ...], problem: str) -> None:
    (found,) = check.problems(held_by(*lines), README)
    assert found.startswith("P4: ") and problem in found


def test_sections_that_are_doubled_unknown_or_out_of_order_fail(check: ModuleType) -> None:
    one, other = SECTIONS["P4"], SECTIONS["P5"]
    assert check.problems(TEXT.replace(one, f"{one}\n{one}"), README) == ["P4: has two sections"]
    doubled = TEXT.replace(one, f"{one}\n{one.replace('P4', 'P17')}")
    assert "P17: is no promise of the list" in check.problems(doubled, README)
    swapped = TEXT.replace(one, "<>").replace(other, one).replace("<>", other)
    assert check.problems(swapped, README) == ["the sections are not in the order of the list"]

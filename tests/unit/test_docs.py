"""docs/check_docs.py: the site names every page and every public name, and takes nothing from the network."""

from __future__ import annotations

import importlib
import pathlib
from types import ModuleType

import pytest

import asyncckpt
import asyncckpt.dcp

DOCS = pathlib.Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """docs/check_docs.py, loaded as the command loads it."""
    monkeypatch.syspath_prepend(str(DOCS))
    return importlib.import_module("check_docs")


@pytest.fixture
def pages(check: ModuleType) -> ModuleType:
    """docs/site_pages.py, loaded."""
    return importlib.import_module("site_pages")


def page(folder: pathlib.Path, inside: str) -> list[str]:
    folder.mkdir(exist_ok=True)
    (folder / "index.html").write_text(f"<html><body>{inside}</body></html>")
    return [str(folder)]


def test_the_site_is_whole(check: ModuleType) -> None:
    assert check.problems() == []
    assert check.main([]) == 0


def test_every_public_name_is_wanted(check: ModuleType) -> None:
    names = {f"asyncckpt.{name}" for name in asyncckpt.__all__ if not name.startswith("__")}
    assert set(check.public_names()) == names | {f"asyncckpt.dcp.{name}" for name in asyncckpt.dcp.__all__}


def test_a_public_name_without_an_entry_is_named(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "WHOLE_MODULES", (*check.WHOLE_MODULES, "asyncckpt.newly"))
    assert check.problems() == ["asyncckpt.newly is not in docs/api"]
    monkeypatch.setattr(check, "WHOLE_MODULES", check.WHOLE_MODULES[1:-1])
    assert check.problems() == ["asyncckpt.errors is in docs/api and not public"]


@pytest.mark.parametrize(
    ("nav", "problem"),
    [
        (["gone.md"], "mkdocs.yml names gone.md, which does not exist"),
        (["index.md"], "mkdocs.yml names index.md twice"),
    ],
)
def test_a_page_that_is_not_there_or_named_twice_is_found(
    check: ModuleType, monkeypatch: pytest.MonkeyPatch, nav: list[str], problem: str
) -> None:
    all_pages = check.navigation()
    monkeypatch.setattr(check, "navigation", lambda: [*all_pages, *nav])
    assert check.problems() == [problem]


def test_a_page_that_no_navigation_names_is_found(check: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    all_pages = check.navigation()
    monkeypatch.setattr(check, "navigation", lambda: [name for name in all_pages if name != "cli.md"])
    assert check.problems() == ["cli.md is not in the navigation of mkdocs.yml"]


@pytest.mark.parametrize(
    "inside",
    [
        '<script src="https://cdn.invalid/a.js"></script>',
        '<script src="//cdn.invalid/a.js"></script>',
        '<link rel="stylesheet" href="https://cdn.invalid/a.css">',
        '<link rel="preconnect" href="HTTPS://cdn.invalid">',
        '<img src="http://cdn.invalid/a.png">',
        '<img src="data:," srcset="https://cdn.invalid/a.png 2x">',
        '<iframe src="https://cdn.invalid/"></iframe>',
        "<style>@import 'https://cdn.invalid/a.css';</style>",
        "<style>body { background: url(https://cdn.invalid/a.png) }</style>",
        '<p style="background: url(//cdn.invalid/a.png)">',
    ],
)
def test_a_page_that_takes_something_from_the_network_is_found(
    check: ModuleType, tmp_path: pathlib.Path, inside: str
) -> None:
    (found, *others) = check.built_problems(pathlib.Path(*page(tmp_path / "site", inside)))
    assert found.startswith("index.html takes ") and found.endswith(" from the network")
    assert all(other.endswith("has no place in the reference") for other in others)


def test_links_to_elsewhere_and_what_is_there_are_fine_and_what_is_missing_is_not(
    check: ModuleType, tmp_path: pathlib.Path
) -> None:
    inside = '<a href="https://elsewhere.invalid">there</a><script src="a.js?v=1"></script><img src="gone.svg">'
    site = pathlib.Path(*page(tmp_path / "site", inside))
    (site / "a.js").write_text("")
    assert check.built_problems(site)[0] == "index.html takes gone.svg, which does not exist"
    assert not any("a.js" in line or "elsewhere" in line for line in check.built_problems(site))


def test_a_style_sheet_is_looked_at_too(check: ModuleType, tmp_path: pathlib.Path) -> None:
    site = pathlib.Path(*page(tmp_path / "site", ""))
    (site / "a.css").write_text('@font-face { src: url("https://fonts.invalid/a.woff2") }')
    assert "a.css takes https://fonts.invalid/a.woff2 from the network" in check.built_problems(site)


def test_a_name_that_the_built_reference_lacks_is_found(check: ModuleType, tmp_path: pathlib.Path) -> None:
    site = pathlib.Path(*page(tmp_path / "site", '<h2 id="asyncckpt.load">load</h2>'))
    found = check.built_problems(site)
    assert "asyncckpt.load has no place in the reference" not in found
    assert {
        "asyncckpt.convert has no place in the reference",
        "asyncckpt.errors.StagingError has no place in the reference",
    } <= {*found}


@pytest.mark.parametrize(
    ("text", "page", "source", "result"),
    [
        ("[a](docs/cli.md#x)", "contributing.md", "CONTRIBUTING.md", "[a](cli.md#x)"),
        ("[a](../cli.md#x)", "guides/saving.md", "docs/guides/saving.md", "[a](../cli.md#x)"),
        ("[a](../README.md)", "cli.md", "docs/cli.md", "[a](index.md)"),
        ("[a](../examples/fsdp2.py)", "cli.md", "docs/cli.md", "[a](examples/fsdp2.md)"),
        ("[`x`](../tests/conftest.py)", "cli.md", "docs/cli.md", "`x`"),
        ("[a](../asyncckpt/format/SPEC.md)", "cli.md", "docs/cli.md", "[a](contracts/format.md)"),
        ("[a](https://a.invalid/b)", "cli.md", "docs/cli.md", "[a](https://a.invalid/b)"),
        ("![a](images/save-path.svg)", "index.md", "docs/index.md", "![a](images/save-path.svg)"),
        ("```\n[a](../README.md)\n```\n[a](cli.md)", "x.md", "docs/x.md", "```\n[a](../README.md)\n```\n[a](cli.md)"),
    ],
)
def test_links_into_the_repository_lead_into_the_site(
    pages: ModuleType, text: str, page: str, source: str, result: str
) -> None:
    wrong: list[str] = []
    assert pages.with_links(text, page, source, wrong.append) == result
    assert wrong == []


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ("A:\n- b\n- c\n", "A:\n\n- b\n- c\n"),
        ("A:\n1. b\n2. c\n", "A:\n\n1. b\n2. c\n"),
        ("A:\n\n- b\n  c\n- d\n", "A:\n\n- b\n  c\n- d\n"),
        ("```\na\n- b\n```\n", "```\na\n- b\n```\n"),
        ("| a |\n- b\n", "| a |\n- b\n"),
    ],
)
def test_a_list_after_a_paragraph_gets_its_empty_line(pages: ModuleType, text: str, result: str) -> None:
    assert pages.with_lists(text) == result


@pytest.mark.parametrize("target", ["gone.md", "../gone.py", "../../outside"])
def test_a_link_to_what_does_not_exist_is_told(pages: ModuleType, target: str) -> None:
    wrong: list[str] = []
    pages.with_links(f"[a]({target})", "cli.md", "docs/cli.md", wrong.append)
    assert wrong == [f"docs/cli.md links to {target}, which does not exist"]

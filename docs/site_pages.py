"""What the site consists of beside the files of docs/: contracts, sources of examples, the list of decisions, results.

Each text has one place in the repository; the site shows it from there. Nothing here imports mkdocs: the hooks
(docs/site_hooks.py) and the check (docs/check_docs.py) use it.
"""

from __future__ import annotations

import ast
import pathlib
import posixpath
import re
from collections.abc import Callable

REPOSITORY = pathlib.Path(__file__).resolve().parents[1]

CONTRACTS = {
    "asyncckpt/format/SPEC.md": "contracts/format.md",
    "asyncckpt/protocol/SPEC.md": "contracts/protocol.md",
    "asyncckpt/memory/SPEC.md": "contracts/memory.md",
    "asyncckpt/storage/COMMIT.md": "contracts/commit.md",
    "CHANGELOG.md": "changes.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
}
"""Files outside of docs/ that are pages as they are."""

_LINK = re.compile(r"(!?\[(?:[^\[\]]|\[[^\]]*\])*\])\(([^()\s]+)\)")
_LIST = re.compile(r"^((?![-*+] |\d+\. |[|#>\s]).+\n)(?=(?:[-*] |1\. ))", re.MULTILINE)
_FENCE = re.compile(r"^( *)(```+|~~~+)", re.MULTILINE)


def generated() -> dict[str, tuple[str, str]]:
    """Return the pages that are no files of docs/: page -> text, and the file of the repository that it comes from."""
    pages: dict[str, tuple[str, str]] = {}
    for source, page in CONTRACTS.items():
        pages[page] = ((REPOSITORY / source).read_text(), source)
    for file in sorted((REPOSITORY / "examples").glob("*.py")):
        if file.stem != "__init__":
            pages[f"examples/{file.stem}.md"] = (_example(file), f"examples/{file.name}")
    decisions = [_decision(file) for file in sorted((REPOSITORY / "docs/adr").glob("*.md"))]
    pages["adr/index.md"] = (
        "# Decisions\n\nWhat was costly to decide, and why.\n\n" + "".join(decisions),
        "docs/adr/index.md",
    )
    return pages


def results() -> list[str]:
    """Return the files of figures that pages may link to, as paths in the repository."""
    return [f"benchmarks/results/{file.name}" for file in sorted((REPOSITORY / "benchmarks/results").glob("*.json"))]


def expanded(entries: list[str]) -> list[str]:
    """Return `entries` of a navigation with each `folder/*` replaced by the folder's pages, the index first."""
    known = {str(f.relative_to(REPOSITORY / "docs")) for f in (REPOSITORY / "docs").rglob("*.md")} | set(generated())
    pages: list[str] = []
    for entry in entries:
        if not entry.endswith("/*"):
            pages.append(entry)
            continue
        inside = [page for page in known if posixpath.dirname(page) == entry[:-2]]
        pages += sorted(inside, key=lambda page: (not page.endswith("/index.md"), page))
    return pages


def with_links(text: str, page: str, source: str, wrong: Callable[[str], None]) -> str:
    """Return `text` with links into the repository changed to links into the site.

    What is no part of the site, a test say, stays as text without a link.

    Args:
        text: Markdown.
        page: Where the site shows it.
        source: The file of the repository that it comes from; its links are relative to that.
        wrong: Is told of links to what does not exist.
    """

    def changed(match: re.Match[str]) -> str:
        label, target = match.groups()
        if re.match(r"[a-z][a-z0-9+.-]*:", target) or target.startswith("#"):
            return match[0]
        path, _, anchor = target.partition("#")
        found = posixpath.normpath(posixpath.join(posixpath.dirname(source), path))
        if found.startswith("..") or not (REPOSITORY / found).exists():
            wrong(f"{source} links to {target}, which does not exist")
            return label
        return _to(label, f"{found}#{anchor}" if anchor else found)

    def _to(label: str, target: str) -> str:
        where = in_site(target)
        if where is None:
            return label.removeprefix("!")[1:-1]
        path, hash_, anchor = where.partition("#")
        return f"{label}({posixpath.relpath(path, posixpath.dirname(page) or '.')}{hash_}{anchor})"

    return "".join(part if code else _LINK.sub(changed, part) for part, code in _parts(text))


def with_lists(text: str) -> str:
    """Return `text` with an empty line before each list that follows a paragraph, without which it is none here."""
    return "".join(part if code else _LIST.sub(r"\1\n", part) for part, code in _parts(text))


def in_site(target: str) -> str | None:
    """Return where the site has what is `target` in the repository; None: nowhere."""
    path, _, anchor = target.partition("#")
    if path == "README.md":
        return "index.md"
    if path == "docs/adr":
        return "adr/index.md"
    if path.startswith("examples/") and path.endswith(".py"):
        return path.removesuffix(".py") + ".md"
    if path.startswith("docs/") and (REPOSITORY / path).is_file() and not path.endswith(".py"):
        return path.removeprefix("docs/") + (f"#{anchor}" if anchor else "")
    if path in results():
        return path.removeprefix("benchmarks/")
    return CONTRACTS.get(path)


def _parts(text: str) -> list[tuple[str, bool]]:
    """Cut `text` at its fences: pieces, and whether each is code."""
    pieces, begin, fence = [], 0, None
    for match in _FENCE.finditer(text):
        if fence is None:
            pieces.append((text[begin : match.start()], False))
            begin, fence = match.start(), match[2]
        elif match[2].startswith(fence):
            pieces.append((text[begin : match.end()], True))
            begin, fence = match.end(), None
    return [*pieces, (text[begin:], fence is not None)]


def _example(file: pathlib.Path) -> str:
    text = file.read_text()
    first = (ast.get_docstring(ast.parse(text)) or file.stem).splitlines()[0]
    return f'# {file.stem}\n\n{first}\n\n```python title="{file.name}"\n{text}```\n'


def _decision(file: pathlib.Path) -> str:
    title = file.read_text().partition("\n")[0].removeprefix("# ")
    return f"- [{title}]({file.name})\n"

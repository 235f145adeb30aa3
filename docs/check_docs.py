"""Check the site: every page of its navigation exists, every page is in it, every public name is in the reference.

Run as `python docs/check_docs.py` it reads the sources; `python docs/check_docs.py build/site` looks at what was built
too: that no page takes a script, a style, a font or a picture from the network, that what it takes is there, and that
every public name has its place in it.
"""

from __future__ import annotations

import ast
import pathlib
import re
import sys
from html.parser import HTMLParser

from site_pages import REPOSITORY, expanded, generated

PUBLIC_MODULES = ("asyncckpt", "asyncckpt.dcp")
"""Those with an `__all__`, of which every name has an entry of its own."""

WHOLE_MODULES = (
    "asyncckpt.errors",
    "asyncckpt.integrations.accelerate",
    "asyncckpt.integrations.lightning",
    "asyncckpt.integrations.ray",
    "asyncckpt.integrations.torchdata",
    "asyncckpt.integrations.torchtitan",
    "asyncckpt.integrations.transformers",
)
"""Those of which one entry shows all that is public."""

_ENTRY = re.compile(r"^::: ([\w.]+)$", re.MULTILINE)
_PAGE = re.compile(r"^ +- ([\w./*-]+)$", re.MULTILINE)
_NETWORK = re.compile(r"^(?:https?:)?//", re.IGNORECASE)
_URL = re.compile(r"url\(\s*['\"]?([^'\")\s]+)|@import\s+['\"]([^'\"]+)", re.IGNORECASE)
_ASSETS = {"script": "src", "img": "src", "iframe": "src", "source": "src", "video": "src", "embed": "src"}
_LOADED = {"stylesheet", "icon", "preload", "prefetch", "preconnect", "dns-prefetch", "manifest", "modulepreload"}


def navigation() -> list[str]:
    """Return the pages that mkdocs.yml names, in order, with `folder/*` expanded."""
    _, _, nav = (REPOSITORY / "mkdocs.yml").read_text().partition("\nnav:\n")
    return expanded(_PAGE.findall(nav))


def public_names(modules: tuple[str, ...] = PUBLIC_MODULES) -> list[str]:
    """Return the full names in the `__all__` of each module, read and not imported; no dunders."""
    names = []
    for module in modules:
        file = REPOSITORY / module.replace(".", "/") / "__init__.py"
        for node in ast.parse(file.read_text()).body:
            if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["__all__"]:
                names += [f"{module}.{name}" for name in ast.literal_eval(node.value) if not name.startswith("__")]
    return names


def problems() -> list[str]:
    """Return what is wrong with the sources of the site, one line each."""
    pages = navigation()
    there = {str(f.relative_to(REPOSITORY / "docs")) for f in (REPOSITORY / "docs").rglob("*.md")}
    known = there | set(generated())
    found = [f"mkdocs.yml names {page}, which does not exist" for page in pages if page not in known]
    found += [f"mkdocs.yml names {page} twice" for page in sorted({p for p in pages if pages.count(p) > 1})]
    found += [f"{page} is not in the navigation of mkdocs.yml" for page in sorted(known - set(pages))]
    found += [f"{page} is in docs/ and made of the repository's files too" for page in sorted(there & set(generated()))]
    entries = [e for f in sorted((REPOSITORY / "docs/api").glob("*.md")) for e in _ENTRY.findall(f.read_text())]
    wanted = [*public_names(), *WHOLE_MODULES]
    found += [f"{name} is not in docs/api" for name in wanted if name not in entries]
    found += [f"{name} is in docs/api and not public" for name in entries if name not in (*wanted, "asyncckpt.dcp")]
    return found


class _Assets(HTMLParser):
    """Collects what a page loads, and the ids that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.ids: set[str] = set()
        self._in_style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self._in_style = tag == "style"
        self.ids.add(given.get("id", ""))
        self.loaded += [given[_ASSETS[tag]]] if _ASSETS.get(tag, "") in given else []
        self.loaded += [part.split()[0] for part in given.get("srcset", "").split(",") if part.strip()]
        self.loaded += styled(given.get("style", ""))
        if tag == "link" and _LOADED & set(given.get("rel", "").lower().split()):
            self.loaded.append(given.get("href", ""))

    def handle_data(self, data: str) -> None:
        if self._in_style:
            self.loaded += styled(data)


def styled(text: str) -> list[str]:
    """Return what a style sheet loads."""
    return [a or b for a, b in _URL.findall(text)]


def built_problems(site: pathlib.Path) -> list[str]:
    """Return what is wrong with the built site, one line each."""
    found, ids = [], set()
    files = sorted(f for f in site.rglob("*") if f.suffix in (".html", ".css", ".svg"))
    for file in files:
        if file.suffix == ".css":
            loaded = styled(file.read_text())
        else:
            page = _Assets()
            page.feed(file.read_text())
            loaded, ids = page.loaded, ids | page.ids
        name = file.relative_to(site)
        for target in loaded:
            if _NETWORK.match(target):
                found.append(f"{name} takes {target} from the network")
            elif not re.match(r"data:|#", target) and not _inside(site, file, target).exists():
                found.append(f"{name} takes {target}, which does not exist")
    wanted = [*public_names(), *WHOLE_MODULES, *_error_names()]
    return found + [f"{name} has no place in the reference" for name in wanted if name not in ids]


def _inside(site: pathlib.Path, file: pathlib.Path, target: str) -> pathlib.Path:
    path = re.split(r"[?#]", target)[0]
    return site / path.lstrip("/") if path.startswith("/") else file.parent / path


def _error_names() -> list[str]:
    body = ast.parse((REPOSITORY / "asyncckpt/errors/__init__.py").read_text()).body
    classes = [node.name for node in body if isinstance(node, ast.ClassDef) and not node.name.startswith("_")]
    return [f"asyncckpt.errors.{name}" for name in classes]


def main(arguments: list[str]) -> int:
    """Print what is wrong, or what was looked at."""
    found = problems()
    for site in arguments:
        found += built_problems(pathlib.Path(site))
    for line in found:
        print(line, file=sys.stderr)
    if not found:
        print(f"the site: {len(navigation())} pages, {len(public_names())} public names")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

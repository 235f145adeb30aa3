"""What mkdocs calls while it builds the site: adds the pages of docs/site_pages.py and leads links to them."""

from __future__ import annotations

import logging
from typing import Any

import site_pages
from mkdocs.structure.files import File

_log = logging.getLogger("mkdocs.hooks.site")
_sources: dict[str, str] = {}


def on_config(config: Any) -> Any:
    """Replace `folder/*` in the navigation by the folder's pages."""
    config.nav = [{title: site_pages.expanded(pages) for title, pages in entry.items()} for entry in config.nav]
    config.watch += [str(site_pages.REPOSITORY / name) for name in (*site_pages.CONTRACTS, "examples")]
    return config


def on_files(files: Any, config: Any) -> Any:
    """Add what is no file of docs/."""
    for page, (text, source) in site_pages.generated().items():
        files.append(File.generated(config, page, content=text))
        _sources[page] = source
    for name in site_pages.results():
        there = str(site_pages.REPOSITORY / name)
        files.append(File.generated(config, name.removeprefix("benchmarks/"), abs_src_path=there))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """Lead links to where the site has what they mean."""
    name = page.file.src_uri
    return site_pages.with_links(
        site_pages.with_lists(markdown), name, _sources.get(name, f"docs/{name}"), _log.warning
    )

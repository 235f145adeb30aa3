"""Which code a result was measured with: digests of the sources that can matter to it, and the commit.

Of our package the parts count that the benchmark can run: every one but those of `UNUSED`, and of those the ones that
`USED` names for it. The whole worker counts, and of `benchmarks` the module that measures and whatever it imports, or
starts in a process of its own, directly or by others. Documents, tests, and what only keeps results or makes tables
and pictures of them (`KEEPING`, `SHOWING`) do not count: to mend them voids no result.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import importlib.util
import json
import re
import subprocess
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
UNUSED = ("cli", "conversion", "dcp", "doctor", "foreign", "integrations", "managing", "reporting")
"""Parts of the package that no save and no load of our own checkpoints needs."""

USED = {
    "adapters": ("dcp", "integrations", "managing"),
    "convert": ("conversion", "dcp", "foreign"),
    "stock_saves": ("dcp",),
}
"""Those of `UNUSED` that a benchmark is about."""

SHOWING = (
    "__main__",
    "chart",
    "contest_results",
    "contest_tables",
    "figures",
    "quick",
    "spread",
    "svg",
    "table",
    "targets",
)
KEEPING = ("kept", "sources")
"""Modules that show what was measured, and that keep it in files."""


@functools.cache
def code_of(benchmark: str) -> dict[str, str]:
    """Return the code of this checkout that makes the result of a benchmark, for the result's `code`.

    Args:
        benchmark: Name of the module that measures, without `benchmarks.`.
    """
    package, worker = _package("asyncckpt"), _package("asyncckpt_worker")
    skipped = [package / name for name in UNUSED if name not in USED.get(benchmark, ())]
    ours = [file for file in sorted(package.rglob("*.py")) if not any(map(file.is_relative_to, skipped))]
    asked = ["git", "rev-parse", "--short=12", "HEAD"]
    told = subprocess.run(asked, cwd=HERE, capture_output=True, text=True, check=False)
    return {
        "asyncckpt": _digest(package, ours),
        "asyncckpt_worker": _digest(worker, sorted(worker.rglob("*.py"))),
        "benchmarks": _digest(HERE, [HERE / f"{name}.py" for name in modules_of(benchmark)]),
        "commit": told.stdout.strip() or "unknown",
    }


def modules_of(benchmark: str) -> list[str]:
    """Return the modules of `benchmarks` that make a benchmark's figures, by name, in order."""
    found: set[str] = set()
    left = [benchmark]
    while left:
        name = left.pop()
        if name not in found and name not in (*SHOWING, *KEEPING) and (HERE / f"{name}.py").is_file():
            found.add(name)
            left += _named((HERE / f"{name}.py").read_text())
    return sorted(found)


def other_code(results: Path) -> dict[str, str]:
    """Return the result files that were made with other code than this checkout's, and which part of it is another.

    Args:
        results: Where they are, and in its folders those of other machines.
    """
    found = {}
    for file in sorted(results.rglob("*.json")):
        result: dict[str, Any] = json.loads(file.read_text())
        now, then = code_of(file.stem.partition("-")[0]), result.get("code")
        parts = [name for name in now if name != "commit" and now[name] != (then or {}).get(name)]
        if parts:
            found[str(file.relative_to(results).with_suffix(""))] = ", ".join(parts) if then else "not told"
    return found


def footer(results: Path) -> list[str]:
    """Return lines that say which of the result files were made with other code; none if there are none."""
    found = other_code(results)
    return ["other code: " + "; ".join(f"{file} ({parts})" for file, parts in found.items())] if found else []


def _named(source: str) -> list[str]:
    """Return the modules of `benchmarks` that a source imports, or names in a command."""
    found = []
    tree = ast.parse(source)
    said = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}  # docstrings
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [alias.name.removeprefix("benchmarks.") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module == "benchmarks":
            found += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("benchmarks."):
            found.append(str(node.module).removeprefix("benchmarks."))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in said:
            found += re.findall(r"\bbenchmarks\.(\w+)", node.value)
    return found


def _package(name: str) -> Path:
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise RuntimeError(f"{name} is not installed")
    return Path(spec.origin).parent


def _digest(root: Path, files: list[Path]) -> str:
    found = hashlib.sha256()
    for file in files:
        found.update(str(file.relative_to(root)).encode() + b"\0" + file.read_bytes() + b"\0")
    return found.hexdigest()[:16]

"""A table of what the fault tests did: kind, how often, violations, seconds, and the seed that replays all of it.

A plugin of pytest that `conftest.py` registers where `ASYNCCKPT_TEST_RESULTS` is set to a directory, as `make
test-fault` and `make test-nodes` do. The table of all tests of that run, simulations and fuzzing among them, is printed
and written there, as JSON and as text, with date and machine in words. Runs of one day that each name themselves, in
`ASYNCCKPT_TEST_RESULTS_NAME`, keep tables of their own. A test says how often it did something with
`record_property("count", n)`, and what else it has to say, for the JSON only, with `record_property("figures", ...)`.
"""

from __future__ import annotations

import json
import os
import pathlib
import platform
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import psutil
import pytest

RESULTS_VARIABLE = "ASYNCCKPT_TEST_RESULTS"
NAME_VARIABLE = "ASYNCCKPT_TEST_RESULTS_NAME"

MIN_KILLS = 10
"""Of so many kills at random instants, one at least must meet what the test is for."""


@dataclass
class Row:
    """One test function, all its cases together."""

    kind: str
    what: str
    cases: int = 0
    count: int = 0
    violations: int = 0
    skipped: int = 0
    seconds: float = 0.0
    figures: list[Any] = field(default_factory=list)


_rows: dict[str, Row] = {}


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Add a phase of a test to its row."""
    file, _, function = report.nodeid.partition("::")
    kind = pathlib.PurePath(file).stem.removeprefix("test_").replace("_", " ")
    what = function.partition("[")[0].removeprefix("test_").replace("_", " ")
    row = _rows.setdefault(f"{file}::{what}", Row(kind, what))
    row.seconds += report.duration
    row.violations += report.failed
    row.skipped += report.skipped
    if report.when == "call":
        properties = dict(report.user_properties)
        row.cases += 1
        row.count += int(properties.get("count", 1))
        if "figures" in properties:
            row.figures.append(properties["figures"])


def record_kills(record: Callable[[str, object], None], what: str, kills: int, before_manifest: int) -> None:
    """Record how many kills at random instants a test has made, and fail if all have missed what it is for.

    Args:
        record: The fixture `record_property`.
        what: What was killed while it did what.
        kills: How many.
        before_manifest: How many of them were between the first file of a checkpoint and its manifest.
    """
    record("count", kills)
    record("figures", {"what": what, "kills": kills, "before_manifest": before_manifest})
    assert before_manifest or kills < MIN_KILLS, f"none of {kills} kills was between a first file and its manifest"


def machine() -> str:
    """Describe this machine in words that name nobody."""
    gigabytes = round(psutil.virtual_memory().total / 1e9)
    kernel = ".".join(platform.release().split("-")[0].split(".")[:2])
    return f"{os.cpu_count()} cores, {gigabytes} GB, Linux {kernel}, Python {platform.python_version()}"


def file_name(date: str) -> str:
    """Return the name of this run's table, without what kind of file it is."""
    name = f"{date}-{os.cpu_count()}-cores-{round(psutil.virtual_memory().total / 1e9)}-gb"
    run = os.environ.get(NAME_VARIABLE, "")
    return f"{name}-{run}" if run else name


def total_of(rows: list[Row]) -> Row:
    """Return the sum of all rows."""
    total = Row("all", "")
    for name in ("cases", "count", "violations", "skipped", "seconds"):
        setattr(total, name, sum(getattr(row, name) for row in rows))
    return total


def table(rows: list[Row], seed: str) -> list[str]:
    """Return the lines of the summary."""
    width = max(len(row.what) for row in rows)
    lines = [f"{'kind':22} {'what':{width}} {'cases':>6} {'count':>7} {'violations':>10} {'skipped':>7} {'seconds':>8}"]
    lines += [
        f"{r.kind:22} {r.what:{width}} {r.cases:6} {r.count:7} {r.violations:10} {r.skipped:7} {r.seconds:8.1f}"
        for r in [*rows, total_of(rows)]
    ]
    lines.append(f"seed {seed}; {machine()}; {time.strftime('%Y-%m-%d')}")
    return lines


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table, and write it where it was asked for."""
    directory = os.environ.get(RESULTS_VARIABLE)
    rows = sorted(_rows.values(), key=lambda row: (row.kind, row.what))
    if not directory or not rows:
        return
    plugins = terminalreporter.config.pluginmanager.get_plugins()
    header = next(p.pytest_report_header(terminalreporter.config) for p in plugins if hasattr(p, "SEED_VARIABLE"))
    seed = header.partition(": ")[2]
    lines = table(rows, seed)
    terminalreporter.section("fault tests")
    terminalreporter.write_line("\n".join(lines))
    date = time.strftime("%Y-%m-%d")
    where = pathlib.Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    name = file_name(date)
    found = {
        "date": date,
        "machine": machine(),
        "seed": seed,
        "violations": sum(row.violations for row in rows),
        "seconds": round(sum(row.seconds for row in rows), 1),
        "settings": {
            name: value
            for name, value in sorted(os.environ.items())
            if name.startswith("ASYNCCKPT_TEST_") and name not in (RESULTS_VARIABLE, NAME_VARIABLE)
        },
        "rows": [{**asdict(row), "seconds": round(row.seconds, 2)} for row in rows],
    }
    (where / f"{name}.json").write_text(json.dumps(found, indent=1) + "\n")
    (where / f"{name}.txt").write_text("\n".join(line.rstrip() for line in lines) + "\n")

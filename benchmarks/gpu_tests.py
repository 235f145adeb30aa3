"""The tests that need a GPU, run before what is measured there, and their outcome for the result file."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ROOT = Path(__file__).parent.parent
DEADLINE_S = 3600.0
COMMAND = ("-m", "pytest", "-m", "gpu or not gpu", "tests/gpu")


def run() -> dict[str, Any]:
    """Run them, showing what they print; returns their outcome, whatever it is.

    Blocks:
        For an hour at most.
    """
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-") as directory:
        told = Path(directory, "tests.xml")
        try:
            command = [sys.executable, *COMMAND, f"--junitxml={told}"]
            code: int | None = subprocess.run(command, cwd=ROOT, check=False, timeout=DEADLINE_S).returncode
        except subprocess.TimeoutExpired:
            code = None
        return outcome(code, told.read_text() if told.exists() else "")


def outcome(code: int | None, told: str) -> dict[str, Any]:
    """Return what the result file says of the tests.

    Args:
        code: pytest's exit code; None if it has not ended.
        told: Its report as JUnit XML; empty if there is none.

    Returns:
        "exit_code"; the names of tests by what became of them, and how many "passed".
    """
    found: dict[str, Any] = {"exit_code": code, "passed": 0, "failed": [], "skipped": []}
    for case in ElementTree.fromstring(told).iter("testcase") if told else ():
        name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            found["failed"].append(name)
        elif "skipped" in kinds:
            found["skipped"].append(name)
        else:
            found["passed"] += 1
    return found


def text_of(found: dict[str, Any]) -> str:
    """Return the outcome in a line."""
    counts = f"{found['passed']} passed, {len(found['failed'])} failed, {len(found['skipped'])} skipped"
    return counts if found["exit_code"] is not None else f"{counts}, not ended after {DEADLINE_S:g} s"

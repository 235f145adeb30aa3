"""Memory of a trainer, its children and our worker, pages that several of them have counted once."""

from __future__ import annotations

import os
from pathlib import Path

import psutil


def pss() -> int:
    """Return what this process, its children and our worker hold: memory that is shared counts once."""
    me = psutil.Process()
    others = [*me.children(recursive=True), *workers()]
    total = 0
    for process in {p.pid: p for p in (me, *others)}.values():
        try:
            total += _of(process.pid)
        except (OSError, psutil.NoSuchProcess):
            continue
    return total


def _of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def workers() -> list[psutil.Process]:
    """Return the workers of this run."""
    job = os.environ.get("ASYNCCKPT_JOB", "")
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if any("asyncckpt_worker" in part for part in line):
            try:
                if process.environ().get("ASYNCCKPT_JOB") == job:
                    found.append(process)
            except psutil.Error:
                continue
    return found

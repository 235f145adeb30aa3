"""The main ratios now, beside those of the last result file: information, never a pass or a fail.

    python -m benchmarks.quick [--dir D]

One round of `benchmarks.save_load`: a minute, and at most another one until the machine is idle. On a machine that is
busy, or another one than the file's, the ratios mean less than they seem to: each is against limits that were measured
in the same minute.
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks import kept, machine, quiet, states
from benchmarks.save_load import RESULTS, SAVES_PER_ROUND, measure, summary

SHOWN = (
    "stall / warm copy",
    "written / write limit",
    "memory over the state",
    "load cold / read limit",
    "worker ready s",
    "worker rss MB",
)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, help="where to write (default: below the temporary directory)")
    directory = Path(tempfile.mkdtemp(prefix="asyncckpt-bench-", dir=parser.parse_args().dir))
    os.environ["ASYNCCKPT_JOB"] = f"bench-{secrets.token_hex(4)}"
    try:
        head = {"machine": machine.describe(directory), "rounds_asked": 1, "saves": SAVES_PER_ROUND}
        file = kept.Kept(directory / "quick.json", head)  # nothing is kept of it
        measure(states.gpt(), directory, file, kept.Budget(0.0))
    finally:
        subprocess.run([sys.executable, "-m", "asyncckpt", "worker", "stop"], capture_output=True, check=False)
        shutil.rmtree(directory)
    print("\n".join(lines(file.result, json.loads((RESULTS / "save_load-gpt.json").read_text()))))


def lines(result: dict[str, Any], last: dict[str, Any]) -> list[str]:
    """Return a table: each ratio now, in the last result, and how much larger it is now."""
    now, then = summary(result), summary(last)
    found = [f"{'':26s}{'now':>9s}{'last':>9s}{'change':>9s}   (last: {last['machine']['date'][:10]})"]
    for name in SHOWN:
        found.append(f"{name:26s}{now[name]:9.3f}{then[name]:9.3f}{100 * (now[name] / then[name] - 1):8.0f}%")
    shares = quiet.busy_shares(result)
    if shares and max(shares) >= quiet.IDLE_SHARE:
        found.append(f"The machine was busy before: {100 * max(shares):.0f} % of its processors' time.")
    return found


if __name__ == "__main__":
    main()

"""`python -m benchmarks`: every measurement of the suite, one after the other; those beside peers see `compare`."""

from __future__ import annotations

import runpy
import sys

COMMANDS = (
    ("limits",),
    ("save_load", "--state", "gpt"),
    ("load", "--state", "gpt"),
    ("small_tensors",),
    ("save_load", "--state", "large"),
    ("load", "--state", "large"),
    *(
        ("overlap",),
        ("overlap", "--state", "large"),
        ("ring",),
        ("ranks",),
        ("cpu",),
        ("trace",),
        ("reshard",),
        ("scale",),
        ("convert",),
        ("recall",),
        ("bare_load",),
        ("load_parts",),
        ("stock_saves",),
    ),
    ("pace",),
)

if __name__ == "__main__":
    for name, *options in COMMANDS:
        sys.argv = [f"benchmarks.{name}", *options]
        runpy.run_module(f"benchmarks.{name}", run_name="__main__")

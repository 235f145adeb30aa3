"""`python -m benchmarks`: every measurement of the suite, one after the other."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    for state in ("gpt", "small", "large"):
        sys.argv = ["benchmarks.save_load", "--state", state]
        runpy.run_module("benchmarks.save_load", run_name="__main__")
    for name in (
        "benchmarks.overlap",
        "benchmarks.ring",
        "benchmarks.pace",
        "benchmarks.ranks",
        "benchmarks.cpu",
        "benchmarks.trace",
        "benchmarks.reshard",
        "benchmarks.scale",
        "benchmarks.convert",
        "benchmarks.recall",
    ):
        sys.argv = [name]
        runpy.run_module(name, run_name="__main__")

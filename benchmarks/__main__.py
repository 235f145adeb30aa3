"""`python -m benchmarks`: every measurement of the suite, one after the other."""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    for state in ("gpt", "small"):
        sys.argv = ["benchmarks.save_load", "--state", state]
        runpy.run_module("benchmarks.save_load", run_name="__main__")
    sys.argv = ["benchmarks.reshard"]
    runpy.run_module("benchmarks.reshard", run_name="__main__")

"""Everything that is measured of 20,000 tensors of 16 KiB: saves, and loads beside `safetensors`.

    python -m benchmarks.small_tensors [--rounds 5] [--dir D]

The same as `benchmarks.save_load --state small` and `benchmarks.load --state small`, with their result files.
"""

from __future__ import annotations

import runpy
import sys

if __name__ == "__main__":
    given = sys.argv[1:]
    for name in ("benchmarks.save_load", "benchmarks.load"):
        sys.argv = [name, "--state", "small", *given]
        runpy.run_module(name, run_name="__main__")

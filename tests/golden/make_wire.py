"""Writes `wire.json`, what the protocol's version stands for: `python tests/golden/make_wire.py`, after raising it."""

from __future__ import annotations

import runpy
from pathlib import Path

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).parent.parent / "unit" / "wire_schema.py"), run_name="__main__")

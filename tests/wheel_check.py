"""Check an installed wheel: `python wheel_check.py DIR` with DIR on PYTHONPATH, from outside the checkout."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import pathlib
import sys

PACKAGES = ("asyncckpt", "asyncckpt.cli", "asyncckpt.examples", "asyncckpt_worker")
SCRIPTS = {"asyncckpt": "asyncckpt.cli:main", "asyncckpt-worker": "asyncckpt_worker.cli:main"}
DATA = (
    "asyncckpt/py.typed",
    "asyncckpt_worker/py.typed",
    "asyncckpt/format/SPEC.md",
    "asyncckpt/memory/SPEC.md",
    "asyncckpt/protocol/SPEC.md",
    "asyncckpt/storage/COMMIT.md",
)


def main(target: pathlib.Path) -> int:
    """Return 0 when everything is as it must be, and print what is not."""
    wrong = []
    for name in PACKAGES:
        origin = importlib.import_module(name).__file__ or ""
        if not pathlib.Path(origin).resolve().is_relative_to(target):
            wrong.append(f"{name} comes from {origin}, not from the wheel")
    if "torch" in sys.modules:
        wrong.append("importing the packages imported torch")
    for name in ("worker", "examples", "tests", "benchmarks"):
        if (target / name).exists() or importlib.util.find_spec(name) is not None:
            wrong.append(f"a top-level {name!r} is importable")
    wrong += [f"{name} is missing" for name in DATA if not (target / name).is_file()]
    (dist,) = importlib.metadata.distributions(name="asyncckpt", path=[str(target)])
    licence = dist.metadata.get("License-Expression"), dist.metadata.get_all("License-File")
    if licence != ("Apache-2.0", ["LICENSE"]):
        wrong.append(f"the metadata names the licence {licence}")
    if not any(str(file).endswith("licenses/LICENSE") for file in dist.files or ()):
        wrong.append("the text of the licence is missing")
    found = {e.name: e.value for e in dist.entry_points if e.group == "console_scripts"}
    if found != SCRIPTS:
        wrong.append(f"console scripts are {found}")
    for script in found.values():
        module, _, function = script.partition(":")
        if not callable(getattr(importlib.import_module(module), function, None)):
            wrong.append(f"{script} is not callable")
    for line in wrong:
        print(f"wheel: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(pathlib.Path(sys.argv[1]).resolve()))

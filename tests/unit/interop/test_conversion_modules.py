"""How much of the package a conversion enters: whoever debugs one has to read no more than this."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from conversions import KINDS

MOST = 43
"""The goal was 40. The others: `basics.urls` and `storage.locate`, since the source may be a URL, and `storage.store`,
since the indexes of several ranks are read at the same time."""

DEADLINE_S = 120

# In a process of its own: what other tests have registered with torch, or left to be finalized, is called as well.
CONVERSIONS = """
import json, pathlib, sys, threading
import torch
import asyncckpt

root, kinds = pathlib.Path(sys.argv[1]), sys.argv[2:]
torch.save({"model": {f"w{n}": torch.ones(30, 100) for n in range(8)}, "step": 3, "lr": [0.1, 2]}, root / "torch")
for kind in kinds:
    if kind != "torch":
        asyncckpt.convert(root / "torch", root / kind, to=kind, partial=True)
found = {}
for source in kinds:
    for to in kinds:
        entered = set()

        def called(frame, event, _):
            if event == "call" and frame.f_code.co_name != "<module>":
                entered.add(str(frame.f_globals.get("__name__")))

        threading.setprofile(called)
        sys.setprofile(called)
        asyncckpt.convert(root / source, root / f"{source}-{to}", to=to, keys=["model"])
        sys.setprofile(None)
        threading.setprofile(None)
        found[f"{source}-{to}"] = sorted(name for name in entered if name.startswith("asyncckpt."))
print(json.dumps(found))
"""


def test_a_conversion_enters_few_modules_of_whatever_kind(tmp_path: Path) -> None:
    command = [sys.executable, "-c", CONVERSIONS, str(tmp_path), *KINDS]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    found: dict[str, list[str]] = json.loads(done.stdout)
    assert len(found) == len(KINDS) ** 2
    assert all("asyncckpt.interop.copy_pipeline" in entered for entered in found.values())
    assert {conversion: entered for conversion, entered in found.items() if len(entered) > MOST} == {}

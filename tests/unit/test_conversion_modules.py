"""How much of the package a conversion enters: whoever debugs one has to read no more than this."""

from __future__ import annotations

import gc
import pathlib
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import pytest
import torch

import asyncckpt

KINDS = ("asyncckpt", "dcp", "torch", "safetensors", "hf")
MOST = 40


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    root = tmp_path_factory.mktemp("sources")
    torch.save({"model": {f"w{n}": torch.ones(300, 1000) for n in range(8)}, "step": 3, "lr": [0.1, 2]}, root / "torch")
    for kind in KINDS:
        if kind != "torch":
            asyncckpt.convert(root / "torch", root / kind, to=kind, partial=True)
    return {kind: root / kind for kind in KINDS}


def modules_entered(run: Callable[[], Any]) -> set[str]:
    """Return the modules of ours of which a function is called meanwhile, in any thread."""
    entered: set[str] = set()

    def called(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name != "<module>":
            entered.add(str(frame.f_globals.get("__name__")))

    gc.collect()  # what other tests have left is not finalized meanwhile
    before = sys.getprofile(), threading.getprofile()
    gc.disable()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        run()
    finally:
        sys.setprofile(before[0])
        threading.setprofile(before[1])
        gc.enable()
    return {name for name in entered if name.startswith("asyncckpt.")}


@pytest.mark.parametrize("to", KINDS)
@pytest.mark.parametrize("source", KINDS)
def test_a_conversion_enters_few_modules(
    source: str, to: str, sources: dict[str, pathlib.Path], tmp_path: pathlib.Path
) -> None:
    # What only one of two enters is other work of this process: of the tests before, or made once.
    found = set.intersection(
        *(
            modules_entered(lambda: asyncckpt.convert(sources[source], tmp_path / name, to=to, keys=["model"]))  # noqa: B023
            for name in ("x", "y")
        )
    )
    assert "asyncckpt.interop.copy_pipeline" in found
    assert len(found) <= MOST, sorted(found)

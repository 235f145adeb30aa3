"""What a load costs a training loop: its call, and what it leaves for the first step. Part of `benchmarks.contest`."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from benchmarks import states
from benchmarks.training import Loop


def measure(loop: Loop, load: Callable[[Path], None], path: Path) -> dict[str, float]:
    """Return the seconds of a load with nothing of it in the page cache, and of one with all of it there.

    `cold_s` and `warm_s` are of the call; `cold_late_s` and `warm_late_s` see `late_s`.
    """
    seconds: dict[str, float] = {}
    for heat, make_so in (("cold", _forget), ("warm", _read)):
        make_so(path)
        began = time.perf_counter()
        load(path)
        seconds[f"{heat}_s"] = time.perf_counter() - began
        seconds[f"{heat}_late_s"] = late_s(states.tensors(loop.state()))
    return seconds


def late_s(tensors: Sequence[torch.Tensor]) -> float:
    """Return how much longer the first write to all tensors takes than a later one; an optimizer writes to all.

    Who maps a file and hands that out has not read it: each page is looked up, and copied since it is private, when the
    training first changes it.
    """
    numbers = [tensor for tensor in tensors if tensor.is_floating_point()]
    seconds = []
    with torch.no_grad():
        for _ in range(3):
            began = time.perf_counter()
            torch._foreach_mul_(numbers, 1.0)
            seconds.append(time.perf_counter() - began)
    return seconds[0] - min(seconds[1:])


def _forget(path: Path) -> None:
    for place, _, files in os.walk(path):
        for name in files:
            with open(os.path.join(place, name), "rb") as opened:
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _read(path: Path) -> None:
    for place, _, files in os.walk(path):
        for name in files:
            with open(os.path.join(place, name), "rb") as opened:
                while opened.read(16 << 20):
                    pass

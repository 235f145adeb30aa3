"""What does `overlap_check="sample"` cost: for each tensor that it looks at, and of the stall of a save?

Each round looks at tensors of every layout, none of which is in a cache, as at a save and again as after its copy; then
it saves every state with samples and without, in turn. Looks are measured in CPU time of the thread, so that other load
counts only as far as it takes the caches; stalls in seconds, with the CPU time beside them.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

import asyncckpt
from asyncckpt.format.names import SaveId
from asyncckpt.planning.state_dict import flatten
from asyncckpt.staging.torn import MOST, Source, SourceWatch, Turns, sampled
from benchmarks import machine, workloads
from benchmarks.figures import Row
from benchmarks.runner import Context, Question

SAVE_S = 300.0
CACHES_NBYTES = 128 << 20
"""Four times the caches of the machine that the figures in `results/` are of."""

WARM = 100
"""Looks at other tensors before those that are timed, so that the code is in a cache, as in a save."""

LOOKS: dict[str, tuple[int, Callable[[], torch.Tensor]]] = {
    "64 KiB": (1000, lambda: torch.rand(128, 128)),
    "64 KiB, transposed": (1000, lambda: torch.rand(128, 128).t()),
    "1 MiB": (400, lambda: torch.rand(512, 512)),
    "4 MiB": (400, lambda: torch.rand(1024, 1024)),
    "4 MiB, transposed": (400, lambda: torch.rand(1024, 1024).t()),
    "9 MiB, channels_last": (200, lambda: torch.rand(512, 512, 3, 3).to(memory_format=torch.channels_last)),
    "16 MiB": (120, lambda: torch.rand(2048, 2048)),
    "16 MiB, transposed": (120, lambda: torch.rand(2048, 2048).t()),
    "16 MiB, rows with gaps": (120, lambda: torch.rand(2048, 2056)[:, 3:2051]),
    "4 MiB, every second element": (400, lambda: torch.rand(1024, 2048)[:, ::2]),
}
"""How many tensors, and one of them."""

STATES: dict[str, Callable[[], Any]] = {
    "gpt": lambda: workloads.state("gpt"),
    "1,000 tensors of 720 KB": lambda: {str(n): torch.rand(180_000) for n in range(1000)},
    "one tensor of 720 MB": lambda: {"w": torch.rand(180_000_000)},
}


class Looks:
    """Tensors of one layout, and their copies.

    Args:
        n: How many.
        make: Makes one.
    """

    def __init__(self, n: int, make: Callable[[], torch.Tensor]) -> None:
        tensors = {str(number): make() for number in range(n)}
        self._flat = flatten(tensors)
        self._copies = [tensor.contiguous().clone() for tensor in self._flat.tensors]
        self._turns, self._plan = Turns(), object()

    def begin(self) -> SourceWatch:
        """Return a watch on them; it touches the tensors' objects, as that of a save."""
        numbers = frozenset(range(len(self._flat.tensors)))
        return SourceWatch(self._flat, numbers, [], save_id=SaveId(1, 1, "0" * 12), step=1, path="/x")

    def look(self, watch: SourceWatch, n: int) -> None:
        """Digest windows of the first `n`."""
        watch.sample(sampled(range(n), self._turns.next(self._plan), MOST, self._sources))

    def _sources(self, some: Sequence[int]) -> list[Source]:
        return [Source(n, self._flat.tensors[n], self._copies[n]) for n in some]

    def row(self, warm: Looks, times: int) -> dict[str, list[float]]:
        """Return the microseconds of a tensor: at a save, and again as after its copy."""
        n = len(self._copies)
        self.look(self.begin(), n)  # the first save of a structure finds out how its tensors lie
        found: dict[str, list[float]] = {"look_us": [], "check_us": []}
        for _ in range(times):
            _evict()
            watch, other = self.begin(), warm.begin()
            warm.look(other, WARM)
            found["look_us"].append(_us(partial(self.look, watch, n)) / n)
            _evict()
            other.check()
            found["check_us"].append(_us(watch.check) / n)
        return found


_other = torch.zeros(CACHES_NBYTES, dtype=torch.uint8)


def _evict() -> None:
    _other.add_(1)


def _us(call: Callable[[], object]) -> float:
    began = time.thread_time()
    call()
    return 1e6 * (time.thread_time() - began)


def run(context: Context) -> Row:
    """Look at every layout, and save every state."""
    torch.set_num_threads(1)
    options = context.options
    layouts = itertools.cycle([torch.rand(64, 64), torch.rand(64, 64).t()])
    warm = Looks(WARM, lambda: next(layouts).clone())
    row: Row = {"looks": {}}
    for name, (n, tensor) in LOOKS.items():
        row["looks"][name] = Looks(max(1, n // options.divisor), tensor).row(warm, options.times)
    states = STATES if options.divisor == 1 else {"tiny": partial(workloads.state, "tiny")}
    row["stalls"] = {name: _stalls(context, state()) for name, state in states.items()}
    return row


def _stalls(context: Context, state: Any) -> dict[str, dict[str, list[float]]]:
    """Return how long saves held up the training, and its CPU time, by `overlap_check`.

    The first save of each does not count: it takes fresh pages.
    """
    found: dict[str, dict[str, list[float]]] = {check: {"s": [], "cpu_s": []} for check in ("off", "sample")}
    path = context.directory / "save"
    with ExitStack() as stack:
        ways = {
            check: stack.enter_context(asyncckpt.AsyncCheckpointer(staging="overlap", overlap_check=check, slots=1))
            for check in context.in_turn(found)
        }
        for number in range(context.options.saves + 1):
            for check, checkpointer in ways.items():
                _evict()
                began, cpu = time.perf_counter(), time.thread_time()
                handle = checkpointer.save(state, path)
                stall_s, cpu_s = time.perf_counter() - began, time.thread_time() - cpu
                handle.written.result(SAVE_S)
                machine.remove(path)
                if number:
                    found[check]["s"].append(stall_s)
                    found[check]["cpu_s"].append(cpu_s)
    return found


QUESTION = Question(
    run,
    {
        "a look, us": "looks/*/look_us",
        "a check after the copy, us": "looks/*/check_us",
        "stall, off, s": "stalls/*/off/s",
        "stall, sample, s": "stalls/*/sample/s",
        "stall in CPU time, sample / off": "stalls/*/sample/cpu_s / stalls/*/off/cpu_s",
    },
    options={
        "--times": {"type": int, "default": 9, "help": "looks at each layout in a round"},
        "--saves": {"type": int, "default": 5, "help": "of each state, with samples and without, in a round"},
        "--divisor": {"type": int, "default": 1, "help": "measure one in so many tensors, and a tiny state"},
    },
    smallest=("--times", "1", "--saves", "1", "--divisor", "1000"),
    rounds=6,
    budget_s=1200.0,
)

"""What does a load of one process take, beside the disk's limits and `safetensors`: cold, and from the page cache?

All ways load into the same tensors, in another order in each round. Ours verify. `safetensors` does not, and its
tensors are copied into the state, as a training that continues has to. Cold: the page cache was told to drop the files,
which the host of a virtual machine may still have in its memory. Cold, fresh: a checkpoint that was saved for this load
and was never read. The limits are O_DIRECT reads of shard files of the same kind, the best of several block sizes and
thread counts. CPU seconds mean more than seconds on a busy machine.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

import asyncckpt
from benchmarks import machine, training_cost, workloads
from benchmarks.figures import Row
from benchmarks.limits import BUFFER_NBYTES, CHOICES, memory, move_s
from benchmarks.machine import timed
from benchmarks.runner import Context, Question


def run(context: Context) -> Row:
    """Load in every way once."""
    state = workloads.state(context.options.state)
    context.facts["nbytes"] = workloads.nbytes_of(state)
    tensors = {str(n): tensor for n, tensor in enumerate(workloads.tensors(state))}
    digests = training_cost.digests_of(tensors.values())
    ours, other, fresh = (context.directory / name for name in ("ours", "other.safetensors", "fresh"))
    save(state, ours)
    save_file(tensors, other)
    buffer = memory(BUFFER_NBYTES)

    def load(path: Path) -> None:
        asyncckpt.load(path, state, strict=True, source="disk")

    def safetensors(path: Path) -> None:
        found = load_file(path)
        for name, tensor in tensors.items():
            tensor.copy_(found[name])

    def first(work: Callable[[Path], Any]) -> Row:
        save(state, fresh)
        found = timed(partial(work, fresh))
        machine.remove(fresh)
        return found

    def cached(prepare: Callable[[Path], None], work: Callable[[Path], Any], path: Path) -> Row:
        prepare(path)
        return timed(partial(work, path))

    def read(choice: tuple[int, int], path: Path) -> float:
        return move_s(buffer, *choice, source=machine.largest_file(path))

    reads = [partial(read, choice) for choice in CHOICES]
    ways: dict[str, Callable[[], Row]] = {
        "read limit": lambda: min((timed(partial(read, ours)) for read in reads), key=itemgetter("s")),
        "read limit fresh": lambda: min(map(first, reads), key=itemgetter("s")),
        "cold fresh": lambda: first(load),
        "cold": lambda: cached(machine.drop_cache, load, ours),
        "warm": lambda: cached(machine.fill_cache, load, ours),
        "safetensors cold": lambda: cached(machine.drop_cache, safetensors, other),
        "safetensors warm": lambda: cached(machine.fill_cache, safetensors, other),
    }
    ways["warm"]()  # imports, and what is made once
    row: Row = {name: ways[name]() for name in context.in_turn(ways)}
    for tensor in tensors.values():
        tensor.zero_()
    load(ours)
    if training_cost.digests_of(tensors.values()) != digests:
        raise AssertionError("what was loaded differs from what was saved")
    return row


def save(state: Any, path: Path) -> None:
    """Save a state, flushed to the disk."""
    shutil.rmtree(path, ignore_errors=True)
    with asyncckpt.SyncCheckpointer(rank_info=asyncckpt.RankInfo(0, 1)) as checkpointer:
        checkpointer.save(state, path)


QUESTION = Question(
    run,
    ["*/s", "*/cpu_s", "cold/s / safetensors cold/s"],
    options={"state": ("gpt", "small", "large", "tiny")},
    smallest="--state tiny",
    suite=("gpt", "small", "large"),
    rounds=7,
)

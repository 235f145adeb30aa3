"""How much of our code does one operation run: calls, modules entered, and switches from one module to another?

Counted with `sys.setprofile` in every thread of the trainer and, apart from it, of the worker, during one operation of
each kind with a tiny state, after three that are not counted. A switch is a call from a function of one of our modules
to a function of another one, whatever other code calls in between. The result file names the modules.
"""

from __future__ import annotations

import mmap
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

import asyncckpt
from asyncckpt.dcp import StorageWriter
from benchmarks import workloads
from benchmarks.call_counts import Counts, counting_worker
from benchmarks.figures import Row
from benchmarks.questions.convert import write_source
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S

WARM, N_OPERATIONS = 3, 5
"""Operations of a kind before the one that is counted, and kinds."""


def run(context: Context) -> Row:
    """Count each operation once."""
    warnings.simplefilter("ignore")
    switch = context.directory / "switch"
    switch.write_bytes(bytes(mmap.PAGESIZE))
    counts, row = Counts(switch), {}
    with counting_worker(context.directory / "worker", switch, N_OPERATIONS) as (endpoint, in_worker):
        for number, (name, work) in enumerate(_operations(context.directory, endpoint).items(), 1):
            for turn in range(WARM + 1):
                path = context.directory / f"{name}-{turn}"
                counts.operation[0] = number if turn == WARM else 0
                work(path)
                counts.operation[0] = 0
                time.sleep(context.options.settle_s)
                if path.is_dir():
                    shutil.rmtree(path)
            row[name] = {"caller": counts.found(number, first=True), "trainer": counts.found(number)}
        sys.setprofile(None)
    for name, found in zip(row, in_worker, strict=True):
        row[name]["worker"] = found
    return row


def _operations(directory: Path, endpoint: str) -> dict[str, Callable[[Path], Any]]:
    state = workloads.loop("tiny").state()
    checkpointer = asyncckpt.AsyncCheckpointer(endpoint=endpoint)
    saved, source = directory / "run" / "step-1", directory / "source.pt"
    saved.parent.mkdir()
    checkpointer.save(state, saved).written.result(SAVE_S)
    write_source("torch", source, 4, 1 << 20)
    writer = StorageWriter(directory / "none", endpoint=endpoint)
    return {
        "save": lambda path: checkpointer.save(state, path).written.result(SAVE_S),
        "dcp.save": lambda path: dcp_save(state, checkpoint_id=str(path), storage_writer=writer),
        "restore_latest": lambda path: checkpointer.restore_latest(saved.parent, state),
        "load": lambda path: asyncckpt.load(saved, state, strict=True, source="disk"),
        "convert": lambda path: asyncckpt.convert(source, path, to="asyncckpt"),
    }


QUESTION = Question(
    run,
    [f"*/{of}/{figure}" for of in ("caller", "trainer", "worker") for figure in ("calls", "modules", "switches")],
    options={"settle_s": 0.5},
    smallest="--settle-s 0.1",
    rounds=3,
)

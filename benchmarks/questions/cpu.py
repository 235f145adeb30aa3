"""What CPU time does one save take: in `save()`, in the trainer beyond the copy itself, and in the worker?

`many` has 100,000 tensors of 1 KiB. Nothing trains, so that whatever CPU the trainer's process uses between `save()`
and `written` is the save's. On a machine that is not quiet, CPU time varies less than seconds do.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch

import asyncckpt
from asyncckpt.staging import cpu_copy, memcopy
from benchmarks import machine, workloads
from benchmarks.figures import Row
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S

STAGINGS = ("overlap", "blocking")


class CopyClock:
    """CPU time that threads spend in moving bytes, as opposed to finding out which."""

    def __init__(self) -> None:
        self.seconds: list[float] = []
        memcopy.fault_safe_copy = self._timed(memcopy.fault_safe_copy)
        memcopy.ctypes.memmove = self._timed(memcopy.ctypes.memmove)  # type: ignore[attr-defined]
        cpu_copy._copy_batch = self._timed(cpu_copy._copy_batch)

    def _timed(self, move: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            began = time.thread_time()
            try:
                return move(*arguments)
            finally:
                self.seconds.append(time.thread_time() - began)

        return run


def run(context: Context) -> Row:
    """Save each state with each staging a few times; the first save of each does not count."""
    torch.set_num_threads(1)  # no thread of torch's spins while CPU time is measured
    clock = CopyClock()
    row: Row = {}
    for state in context.options.state_names:
        loop = workloads.loop(state)
        loop.step()
        tensors = workloads.tensors(loop.state())
        row[state] = {"nbytes": workloads.nbytes_of(tensors), "tensors": len(tensors)}
        for staging in context.in_turn(STAGINGS):
            row[state][staging] = _saves(context, loop, staging, clock)
    return row


def _saves(context: Context, loop: workloads.Loop, staging: str, clock: CopyClock) -> list[Row]:
    found = []
    with asyncckpt.AsyncCheckpointer(staging=staging) as checkpointer:
        loop.attach(checkpointer.attach)
        checkpointer.prepare(loop.state())
        worker = psutil.Process(machine.worker_status()["pid"])
        for number in range(context.options.saves + 1):
            state, path = loop.state(), context.directory / f"{staging}-{number}"
            clock.seconds.clear()
            before, thread_s, worker_s = time.process_time(), time.thread_time(), sum(worker.cpu_times()[:2])
            handle = checkpointer.save(state, path)
            row = {"save_s": time.thread_time() - thread_s}
            handle.written.result(SAVE_S)
            row |= {"trainer_s": time.process_time() - before, "copy_s": sum(clock.seconds)}
            row |= {"beyond_s": row["trainer_s"] - row["copy_s"], "worker_s": sum(worker.cpu_times()[:2]) - worker_s}
            found.append(row)
            shutil.rmtree(path)
    return found[1:]


QUESTION = Question(
    run,
    [f"*/{staging}/{figure}" for staging in STAGINGS for figure in ("save_s", "copy_s", "beyond_s", "worker_s")],
    options={"state_names": ["gpt", "small", "many"], "saves": 8},
    smallest="--state-names tiny --saves 1",
    rounds=1,
)

"""What does saving cost a training on a GPU: stall, step time during a save, and how fast is the copy to the host?

A GPT-2 of 124 M parameters trains with AdamW: 1.49 GB of state. Copies behind the training, a copy on the GPU first,
copies in front of the training, and `dcp.async_save` with pinned memory take turns. Each save begins behind a step that
the GPU has not finished, and steps continue until it is written. The speed of the copy is measured apart, with an idle
GPU: a save, and beside it one `Tensor.copy_` of as many bytes into pinned memory. `--device cpu` measures nothing and
shows that everything runs.
"""

from __future__ import annotations

import logging
import logging.handlers
import time
from functools import partial

import torch

import asyncckpt
from benchmarks import machine, workloads
from benchmarks.contenders import dcp_async, ours
from benchmarks.figures import Row
from benchmarks.questions.overlap import Kinds, alternate
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S, Loop

KINDS: Kinds = {kind: partial(ours, prepared=True, staging=kind) for kind in ("overlap", "device", "blocking")} | {
    "dcp_async": dcp_async
}
PINNED_TRIES = 3


def run(context: Context) -> Row:
    """Save with all kinds in turn; `warnings` are ours: a copy that was not pinned, say, is another figure."""
    options, warned = context.options, logging.handlers.MemoryHandler(1000, logging.CRITICAL)
    gpu = options.device == "cuda"
    if gpu and not torch.cuda.is_available():
        raise RuntimeError("torch finds no GPU here; --device cpu shows that everything runs")
    logging.getLogger("asyncckpt").addHandler(warned)
    if gpu:
        context.facts |= {"gpu": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    loop = workloads.loop("gpt" if gpu else "tiny", options.device)
    row = alternate(context, loop, KINDS, options.quiet_steps)
    with asyncckpt.AsyncCheckpointer(staging="overlap") as checkpointer:
        checkpointer.prepare(loop.state())
        row["alone"] = [_copy_alone(context, loop, checkpointer) for _ in range(options.saves)]
    return row | {"warnings": [one.getMessage() for one in warned.buffer if one.levelno >= logging.WARNING]}


def _copy_alone(context: Context, loop: Loop, checkpointer: asyncckpt.AsyncCheckpointer) -> Row:
    """Save with an idle GPU, and copy as many bytes into pinned memory.

    Returns:
        `copy_s` is from where the save has its plan and its slot until the whole state is there, without the seal. The
        copying thread's own clock would start when the first copies have been running for a while.
    """
    nbytes, path = context.facts["nbytes"], context.directory / "save"
    source = torch.empty(nbytes, dtype=torch.uint8, device=loop.device)
    pinned = torch.empty(nbytes, dtype=torch.uint8, pin_memory=loop.device.type == "cuda")
    tries = []
    for _ in range(PINNED_TRIES):
        loop.settle()
        began = time.perf_counter()
        pinned.copy_(source, non_blocking=True)
        loop.settle()
        tries.append(time.perf_counter() - began)
    state = loop.state()
    called = time.perf_counter()
    handle = checkpointer.save(state, path)
    handle.staged.result(SAVE_S)
    staged_s = time.perf_counter() - called
    phases = handle.written.result(SAVE_S).seconds
    machine.remove(path)
    copy_s = staged_s - sum(phases[name] for name in ("plan", "acquire", "seal"))
    return {"pinned_s": min(tries), "copy_s": copy_s, "staged_s": staged_s, "phases_s": dict(phases)}


QUESTION = Question(
    run,
    ["quiet_step_s", *(f"{kind}/*" for kind in KINDS), "first_save/*/stall_s", "alone/copy_s / alone/pinned_s"],
    options={"device": ("cuda", "cpu"), "saves": 4, "quiet_steps": 10},
    smallest="--device cpu --saves 1 --quiet-steps 1",
    suite=(),
    label=lambda: "-".join(torch.cuda.get_device_name().lower().split()) if torch.cuda.is_available() else "none",
)

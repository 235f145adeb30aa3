"""What does a mirror that is gone for an hour cost a training, and does it get everything once it is back?

Two checkpointers save in turn, one with a mirror and one without, each with a worker of its own. The mirror is a
directory in whose place there is a file. After `seconds` the file is removed: `caught_up_s` is how long it then took to
complete all copies, `mirrored` of them; `mirrored_before` had been completed before. `in_order` is whether the oldest
always came first. `save_s` is the median of the calls, and `extra_s` the median of how much more a save with a mirror
cost the training than the one beside it, as in `mirror`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import torch

import asyncckpt
from asyncckpt.client import launcher
from benchmarks import machine, processes
from benchmarks.figures import Row
from benchmarks.questions.mirror import STEPS, in_turn, steps
from benchmarks.runner import Context, Question
from benchmarks.workloads import SAVE_S

PERIOD_S = 5.0
"""Of saves; fewer than `asyncckpt.client.awaited_mirrors.MAX_AWAITED` in an hour, whose futures are all waited for."""


def run(context: Context) -> Row:
    """Let a training save for so long, then bring the mirror back."""
    seconds = context.options.seconds
    deadline_s = seconds + 2 * SAVE_S
    row: Row = processes.call(train, str(context.directory), seconds, own_worker=True, deadline_s=deadline_s)
    return row


def train(directory: str, seconds: int) -> Row:
    """Save in turn without and with a mirror, every `PERIOD_S`."""
    mirror, state = Path(directory, "copies"), {"w": torch.zeros(1 << 16)}
    mirror.write_text("a file where a directory is wanted")
    costs: dict[str, list[tuple[float, float]]] = {"none": [], "mirror": []}
    handles: list[asyncckpt.SaveHandle] = []
    with tempfile.TemporaryDirectory(prefix="asyncckpt-bench-") as sockets:
        endpoint = f"ipc://{sockets}/second.sock"
        launcher.start_worker(endpoint)
        try:
            with asyncckpt.AsyncCheckpointer() as plain, asyncckpt.AsyncCheckpointer(endpoint=endpoint) as mirrored:
                began = time.monotonic()
                while time.monotonic() - began < seconds or not handles:
                    step, next_at = len(handles), time.monotonic() + PERIOD_S
                    for way, checkpointer in in_turn(step, ("none", plain), ("mirror", mirrored)):
                        quiet_s, at = steps(STEPS), time.perf_counter()
                        copy = mirror / f"step-{step}" if way == "mirror" else None
                        handle = checkpointer.save(state, Path(directory, way, f"step-{step}"), step=step, mirror=copy)
                        save_s = time.perf_counter() - at
                        costs[way].append((save_s, save_s + steps(STEPS) - quiet_s))
                        handle.written.result(SAVE_S)
                        if way == "mirror":
                            handles.append(handle)
                    time.sleep(max(0.0, min(next_at, began + seconds) - time.monotonic()))
                early = sum(one.mirrored.done() for one in handles if one.mirrored is not None)
                mirror.unlink()
                back = time.monotonic()
                for handle in handles:
                    assert handle.mirrored is not None
                    handle.mirrored.result(SAVE_S)
                caught_up_s = time.monotonic() - back
        finally:
            machine.stop_worker("--endpoint", endpoint)
    ends = [(mirror / f"step-{step}" / "manifest.json").stat().st_mtime_ns for step in range(len(handles))]
    found: Row = {way: {"save_s": statistics.median(s for s, _ in ours)} for way, ours in costs.items()}
    pairs = list(zip(costs["mirror"], costs["none"], strict=True))
    found["extra_s"] = statistics.median(ours[1] - theirs[1] for ours, theirs in pairs)
    found |= {"written": len(handles), "mirrored": len(ends), "mirrored_before": early, "caught_up_s": caught_up_s}
    return found | {"in_order": int(ends == sorted(ends)), "seconds": seconds}


QUESTION = Question(
    run,
    ["none/save_s", "mirror/save_s", "extra_s", "written", "mirrored", "mirrored_before", "in_order", "caught_up_s"],
    options={"seconds": 3600},
    smallest="--seconds 2",
    suite=(),
    rounds=1,
)

"""A process that forks a trainer for each order, whose saves are written while they are staged. For tests.

Each line of stdin is a JSON object: `endpoint`, `root`, `log`, `first` and `saves` (the steps, each saved below `root`
under its number), `rows` (of each tensor), `fields` of the checkpointer, `seed`. It is answered by the trainer's pid,
and at its end by its exit code. The trainer appends to `log` what becomes of its saves: `S` staged, `W` written, or `F`
and the error; at last `end`.
"""

from __future__ import annotations

import json
import os
import random
import sys
import traceback
from typing import Any

import overlapping
import torch

from asyncckpt import AsyncCheckpointer
from asyncckpt.client import slot_stream

DEADLINE_S = 60.0


def state_of(step: int, rows: int) -> dict[str, Any]:
    """Return what is saved as `step`."""
    generator = torch.Generator().manual_seed(step)
    return {
        **{f"w{n}": torch.randn(rows, generator=generator) for n in range(4)},
        "columns": torch.randn(300, 500, generator=generator).t(),
        "small": [torch.randn(5, generator=generator) for _ in range(9)],
        "step": step,
    }


def train(order: dict[str, Any]) -> None:
    """Be the trainer."""
    log = os.open(order["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    dice = random.Random(order["seed"])

    def say(*words: object) -> None:
        os.write(log, f"{' '.join(map(str, words))}\n".encode())

    def staged(step: int, found: Any) -> None:
        if found.exception() is None:
            say("S", step)

    def written(step: int, found: Any) -> None:
        error = found.exception()
        say("W", step) if error is None else say(
            "F", step, getattr(error, "code", "-"), repr(error).replace("\n", " "), getattr(error, "detail", "")
        )

    waits = {"commit_timeout_s": DEADLINE_S, "worker_start_timeout_s": DEADLINE_S}
    steps = range(order["first"], order["first"] + order["saves"])
    states = [state_of(step, order["rows"]) for step in steps]
    with AsyncCheckpointer(endpoint=order["endpoint"], staging="overlap", **waits, **order["fields"]) as checkpointer:
        say("ready")
        handles = []
        for state in states:
            step = state["step"]
            handle = checkpointer.save(state, os.path.join(order["root"], str(step)), step=step)
            handle.staged.add_done_callback(lambda found, step=step: staged(step, found))
            handle.written.add_done_callback(lambda found, step=step: written(step, found))
            handles.append(handle)
            if dice.random() < 0.3:
                checkpointer.fence()
        for handle in handles:
            handle.written.exception(2 * DEADLINE_S)
    say("end")


def main() -> None:
    """Obey."""
    slot_stream.MIN_STREAMED_NBYTES = 1
    overlapping.copy_all_behind()
    torch.set_num_threads(1)
    for line in sys.stdin:
        pid = os.fork()
        if pid == 0:
            try:
                train(json.loads(line))
            except BaseException:
                traceback.print_exc()
            finally:
                os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

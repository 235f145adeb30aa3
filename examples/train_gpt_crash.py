"""Train as `train_gpt` does, and kill one rank when a save is staged on all ranks and written by none.

`asyncckpt demo` runs it. So that nothing depends on who is faster, the last rank freezes the worker before that save
(staging does not need it), and kills itself after the next optimizer step: its all-reduce proves that every rank has
left `save()`. Whoever started this has to let the worker go on, by SIGCONT.
"""

from __future__ import annotations

import os
import pathlib
import signal
import sys
import time
from typing import Any

import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

import asyncckpt
from asyncckpt.cli.worker_requests import status_of
from asyncckpt.examples import train_gpt
from asyncckpt.examples.train_gpt import say

DEADLINE_S = 60.0


class CrashingCheckpointer(asyncckpt.AsyncCheckpointer):
    """Kills the last rank right after the save of step `crash_at`; below 0: never."""

    crash_at = -1

    def save(self, state_dict: Any, path: Any, **kw: Any) -> asyncckpt.SaveHandle:
        """As the original."""
        if state_dict["step"] != self.crash_at:
            return super().save(state_dict, path, **kw)
        self.wait(DEADLINE_S)  # a slot is free: this save needs nothing of the worker
        dist.barrier()
        dies = dist.get_rank() == dist.get_world_size() - 1
        if dies:
            freeze_worker()
        dist.barrier()
        handle = super().save(state_dict, path, **kw)
        if dies:
            register_optimizer_step_post_hook(lambda *_: die(handle))
        return handle


def freeze_worker() -> None:
    """Stop the worker, and wait until no thread of it runs."""
    worker = int(status_of(os.environ["ASYNCCKPT_ENDPOINT"])["pid"])
    say(f"rank {dist.get_rank()}: freezes worker {worker}")
    os.kill(worker, signal.SIGSTOP)
    deadline = time.monotonic() + DEADLINE_S
    while any(state != "T" for state in thread_states(worker)) and time.monotonic() < deadline:
        time.sleep(0.001)


def thread_states(pid: int) -> list[str]:
    """Return the state of each thread (proc(5), stat, third field)."""
    return [p.read_text().rpartition(")")[2].split()[0] for p in pathlib.Path(f"/proc/{pid}/task").glob("*/stat")]


def die(handle: asyncckpt.SaveHandle) -> None:
    """End this process as if the machine's owner had pulled the plug."""
    done = f"staged={handle.staged.done()} written={handle.written.done()}"
    say(f"rank {dist.get_rank()}: crash after step {handle.step + 1}, save of step {handle.step} {done}")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """Take the step to crash at, then the arguments of `train_gpt`. A restarted rank crashes no more."""
    crash_at, args = int(sys.argv[1]), train_gpt.arguments(sys.argv[2:])
    dist.init_process_group("gloo")
    say(f"rank {dist.get_rank()}: process {os.getpid()}")
    with CrashingCheckpointer() as checkpointer:
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            checkpointer.crash_at = crash_at
        train_gpt.train(args, checkpointer)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
